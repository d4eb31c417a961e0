package linux

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// TestManyAtOnce: pods and containers that are created and removed concurrently do not affect each other and leave
// neither goroutines nor descriptors behind.
func TestManyAtOnce(t *testing.T) {
	r := newRig(t, "crun")
	p := r.pod()
	template := p.container("exit 0")
	cycle := func(n int) error {
		config := &runtimeapi.ContainerConfig{
			Metadata: template.Config.Metadata, Image: template.Config.Image, Linux: template.Config.Linux,
			Command: []string{"/bin/sh", "-c", fmt.Sprintf("echo %d; exit %d", n, n)}, LogPath: strconv.Itoa(n) + ".log",
		}
		pod := &sandbox.Pod{ID: newID(), Config: p.Config, Netns: p.Netns}
		c := &sandbox.Container{ID: newID(), Config: config, ImageID: busybox}
		if err := r.CreateSandbox(t.Context(), pod); err != nil {
			return err
		}
		if _, err := r.CreateContainer(t.Context(), pod, c); err != nil {
			return err
		}
		if err := r.StartContainer(t.Context(), pod, c); err != nil {
			return err
		}
		if s := r.waitEvent(pod.ID, c.ID).Status; s.ExitCode != int32(n) {
			return fmt.Errorf("status of container %d: got %+v, want exit code %d", n, s, n)
		}
		return errors.Join(r.RemoveContainer(t.Context(), pod, c), r.RemoveSandbox(t.Context(), pod))
	}
	if err := cycle(0); err != nil {
		t.Fatal(err)
	}
	goroutines, descriptors := runtime.NumGoroutine(), countDescriptors(t)
	var wg sync.WaitGroup
	for n := range 12 {
		wg.Go(func() {
			if err := cycle(n); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	settled := func() bool { return runtime.NumGoroutine() <= goroutines && countDescriptors(t) <= descriptors }
	for deadline := time.Now().Add(5 * time.Second); !settled() && time.Now().Before(deadline); {
		time.Sleep(10 * time.Millisecond) // pacing: the last watchers are ending
	}
	if !settled() {
		stacks := make([]byte, 64<<10)
		t.Errorf("got %d goroutines and %d descriptors, want at most %d and %d; stacks:\n%s", runtime.NumGoroutine(),
			countDescriptors(t), goroutines, descriptors, stacks[:runtime.Stack(stacks, true)])
	}
}

func countDescriptors(t *testing.T) (n int) {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if name, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && !strings.HasPrefix(name, "/proc/") {
			n++
		}
	}
	return n
}
