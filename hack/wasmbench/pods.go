package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/cli"
	"github.com/tripod-run/tripod/internal/network/netthread"
)

// node is the node on which the pods run, and the settings of the pods.
type node struct {
	client *cli.Client
	image  string
	logs   string
	// annotations are those of the pods.
	annotations map[string]string
	// netns is the directory in which the node pins the network namespaces of pods. A file's name is the pod ID.
	netns string
}

// pod is a running pod of the component.
type pod struct {
	id, container, ip string
	// took is the duration of CreateContainer and StartContainer.
	took time.Duration
}

// start runs a pod and gets its address.
func (n *node) start(ctx context.Context, name string) (*pod, error) {
	sandbox := &runtimeapi.PodSandboxConfig{
		Metadata:     &runtimeapi.PodSandboxMetadata{Name: name, Namespace: "wasmbench", Uid: name},
		LogDirectory: filepath.Join(n.logs, "wasmbench_"+name), Linux: &runtimeapi.LinuxPodSandboxConfig{}, Annotations: n.annotations,
	}
	container := &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: "main"}, LogPath: "main/0.log",
		Image: &runtimeapi.ImageSpec{Image: n.image}, Linux: &runtimeapi.LinuxContainerConfig{},
	}
	p := &pod{}
	var err error
	if p.id, err = n.client.RunPodSandbox(ctx, sandbox, "wasm"); err != nil {
		return nil, fmt.Errorf("RunPodSandbox: %w", err)
	}
	began := time.Now()
	if p.container, err = n.client.CreateContainer(ctx, p.id, container, sandbox); err == nil {
		err = n.client.StartContainer(ctx, p.container)
	}
	if err != nil {
		return p, fmt.Errorf("container of pod %s: %w", p.id, err)
	}
	p.took = time.Since(began)
	status, err := n.client.PodSandboxStatus(ctx, p.id, false)
	if err != nil {
		return p, err
	}
	p.ip = status.GetStatus().GetNetwork().GetIp()
	return p, nil
}

// dial connects to the pod's HTTP/3 port.
func (p *pod) dial() *conn { return dial(p.ip + ":443") }

// remove removes pods, ten at a time. It ignores the end of ctx, and has a timeout of its own.
func (n *node) remove(ctx context.Context, pods ...*pod) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Minute)
	defer cancel()
	failures := make([]error, len(pods))
	each(10, len(pods), func(i int) {
		if p := pods[i]; p != nil && p.id != "" {
			failures[i] = n.client.StopPodSandbox(ctx, p.id)
			if failures[i] == nil {
				failures[i] = n.client.RemovePodSandbox(ctx, p.id)
			}
		}
	})
	return errors.Join(failures...)
}

// ensureImage pulls the image if the node does not have it.
func (n *node) ensureImage(ctx context.Context) error {
	if image, err := n.client.ImageStatus(ctx, n.image); err != nil || image != nil {
		return err
	}
	_, err := n.client.Images.PullImage(ctx, &runtimeapi.ImageSpec{Image: n.image}, nil, nil)
	return err
}

// each calls the given function for 0 to n-1, with limited concurrency.
func each(concurrency, n int, do func(i int)) {
	slots := make(chan struct{}, concurrency)
	var wg sync.WaitGroup
	for i := range n {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			do(i)
		})
	}
	wg.Wait()
}

// startIn starts a command in a network namespace. The returned function ends it.
func startIn(netns string, cmd *exec.Cmd) (stop func(), err error) {
	fd, err := netthread.Open(netns)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	if err := netthread.In(fd, cmd.Start); err != nil {
		return nil, fmt.Errorf("start %s: %w", cmd.Path, err)
	}
	return func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }, nil
}
