package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// startPod runs a pod, which is removed at the end of the test.
func startPod(t *testing.T, d *harness.Daemon, opts ...harness.PodOption) *harness.Pod {
	t.Helper()
	p := d.RunPod(t, harness.PodConfig(t, "p", opts...))
	t.Cleanup(p.Remove)
	return p
}

// sleeper runs a pod with one container that only sleeps.
func sleeper(t *testing.T, d *harness.Daemon, opts ...harness.ContainerOption) *harness.Container {
	t.Helper()
	return startPod(t, d).Run(harness.ContainerConfig("c", harness.Busybox, append([]harness.ContainerOption{harness.Sleep()}, opts...)...))
}

// mounts adds mounts to a container.
func mounts(m ...*runtimeapi.Mount) harness.ContainerOption {
	return func(c *runtimeapi.ContainerConfig) { c.Mounts = append(c.Mounts, m...) }
}

// resources limits a container.
func resources(r *runtimeapi.LinuxContainerResources) harness.ContainerOption {
	return func(c *runtimeapi.ContainerConfig) { c.Linux.Resources = r }
}

// create creates a container and returns the error.
func create(d *harness.Daemon, p *harness.Pod, config *runtimeapi.ContainerConfig) (string, error) {
	resp, err := d.CRI().CreateContainer(context.Background(),
		&runtimeapi.CreateContainerRequest{PodSandboxId: p.ID, Config: config, SandboxConfig: p.Config})
	return resp.GetContainerId(), err
}

// wantCode fails the test unless err has the gRPC code.
func wantCode(t *testing.T, err error, want codes.Code) {
	t.Helper()
	if status.Code(err) != want {
		t.Errorf("got code %s (error %v), want %s", status.Code(err), err, want)
	}
}

// get returns the body of a URL. It repeats the request until the status is 200.
func get(t *testing.T, url string) string {
	t.Helper()
	var body string
	harness.Eventually(t, 30*time.Second, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		var err error
		body, err = harness.Fetch(ctx, harness.Reconnecting, url)
		return err
	})
	return body
}

// waitLimit is the timeout for conditions of other processes.
const waitLimit = 30 * time.Second

// lines returns the lines of a text without surrounding white space.
func lines(text string) []string { return strings.Split(strings.TrimSpace(text), "\n") }

// killByCommand sends SIGKILL to a process in the test's PID namespace with this command line, whose arguments end with
// NUL. It waits for the process: a container that was just started may not have executed its program yet.
func killByCommand(t *testing.T, cmdline string) {
	t.Helper()
	harness.Eventually(t, waitLimit, func() error {
		files, err := filepath.Glob("/proc/[0-9]*/cmdline")
		if err != nil {
			return err
		}
		for _, file := range files {
			if data, err := os.ReadFile(file); err != nil || string(data) != cmdline {
				continue
			}
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
			if err != nil {
				return err
			}
			return syscall.Kill(pid, syscall.SIGKILL)
		}
		return fmt.Errorf("found no process with the command line %q", cmdline)
	})
}
