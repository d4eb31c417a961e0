package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// startsAfter is the number of pods that are started after the first.
const startsAfter = 5

// first measures the start of the first pod of a component that the node has never seen: from the end of the pull, when
// its compilation has just begun, until the container runs with quick code, and until there is optimised code. Further pods
// have the code.
func (n *node) first(ctx context.Context) error {
	if err := n.client.Images.RemoveImage(ctx, &runtimeapi.ImageSpec{Image: n.image}); err != nil {
		return err
	}
	began := time.Now()
	if err := n.ensureImage(ctx); err != nil {
		return err
	}
	pulled := time.Now()
	fmt.Printf("| step | ms |\n|---|---:|\n| pull | %d |\n", pulled.Sub(began).Milliseconds())
	took, err := n.timedStart(ctx, "first")
	if err != nil {
		return err
	}
	fmt.Printf("| from the end of the pull until the first pod runs | %d |\n", time.Since(pulled).Milliseconds())
	fmt.Printf("| of that, CreateContainer and StartContainer | %d |\n", took.Milliseconds())
	for tick := time.Tick(50 * time.Millisecond); ; {
		code, err := n.client.CodeOf(ctx, n.image)
		if err != nil {
			return err
		}
		if code == string(sandbox.CompilationDone) {
			break
		}
		if code == string(sandbox.CompilationFailed) {
			return errors.New("the component cannot be compiled")
		}
		select {
		case <-tick:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	fmt.Printf("| from the end of the pull until there is optimised code | %d |\n", time.Since(pulled).Milliseconds())
	for i := range startsAfter {
		if took, err = n.timedStart(ctx, fmt.Sprintf("next-%d", i)); err != nil {
			return err
		}
		fmt.Printf("| CreateContainer and StartContainer of pod %d | %d |\n", i+2, took.Milliseconds())
	}
	return nil
}

// timedStart runs a pod, removes it, and returns how long its container took to create and start.
func (n *node) timedStart(ctx context.Context, name string) (time.Duration, error) {
	p, err := n.start(ctx, name)
	if p != nil {
		defer func() { _ = n.remove(ctx, p) }()
	}
	if err != nil {
		return 0, err
	}
	return p.took, nil
}
