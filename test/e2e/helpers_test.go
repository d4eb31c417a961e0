package e2e

import (
	"context"
	"io"
	"net/http"
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

// startPod runs a pod that is removed when the test ends.
func startPod(t *testing.T, d *harness.Daemon, opts ...harness.PodOption) *harness.Pod {
	t.Helper()
	p := d.RunPod(t, harness.PodConfig(t, "p", opts...))
	t.Cleanup(p.Remove)
	return p
}

// sleeper runs a pod with one container that does nothing.
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

// create asks for a container without expecting to get it.
func create(d *harness.Daemon, p *harness.Pod, config *runtimeapi.ContainerConfig) (string, error) {
	resp, err := d.CRI().CreateContainer(context.Background(), &runtimeapi.CreateContainerRequest{PodSandboxId: p.ID, Config: config, SandboxConfig: p.Config})
	return resp.GetContainerId(), err
}

// wantCode fails the test unless err has the gRPC code.
func wantCode(t *testing.T, err error, want codes.Code) {
	t.Helper()
	if status.Code(err) != want {
		t.Errorf("code %s (%v), want %s", status.Code(err), err, want)
	}
}

// get is the body of a URL, which is asked for until it is answered with 200.
func get(t *testing.T, url string) string {
	t.Helper()
	client := &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	var body string
	harness.Eventually(t, 30*time.Second, func() error {
		resp, err := client.Get(url)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		data, err := io.ReadAll(resp.Body)
		body = string(data)
		return err
	})
	return body
}

// waitLimit is how long a condition of another process is waited for.
const waitLimit = 30 * time.Second

// lines are the lines of a text without what surrounds them.
func lines(text string) []string { return strings.Split(strings.TrimSpace(text), "\n") }

// killByCommand sends SIGKILL to the one process of this world with the command line, whose words end in zero bytes.
func killByCommand(t *testing.T, cmdline string) {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if data, err := os.ReadFile(file); err != nil || string(data) != cmdline {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		return
	}
	t.Fatalf("no process %q", cmdline)
}
