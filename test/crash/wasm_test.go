package crash

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/test/harness"
)

// wasmVictim returns the component pod with which the script makes its calls. Its namespace has its own worker, which
// starts and ends with the pod.
func wasmVictim(t *testing.T) (*runtimeapi.PodSandboxConfig, *runtimeapi.ContainerConfig) {
	pod := harness.PodConfig(t, "victim", func(c *runtimeapi.PodSandboxConfig) { c.Metadata.Namespace = "victims" })
	return pod, harness.ContainerConfig("c", harness.FetchC)
}

// sandboxPoints are the prefixes of fail points that only pods of the handler wasm pass.
var sandboxPoints = []string{"wasm.create-sandbox.", "wasm.remove-sandbox."}

// TestN1WasmKilledAtEveryFailPoint is TestN1KilledAtEveryFailPoint for components: a crash interrupts the handling of
// compilations, workers and pods in workers, while a bystander in another worker answers. With the handler linux, the
// components are containers in pods of Linux containers.
func TestN1WasmKilledAtEveryFailPoint(t *testing.T) {
	for _, handler := range []string{"wasm", "linux"} {
		t.Run(handler, func(t *testing.T) {
			names := points(t, "wasm.")
			if handler == "linux" {
				for _, prefix := range sandboxPoints {
					names = without(names, prefix)
				}
			}
			visitWasm(t, handler, names)
		})
	}
}

func visitWasm(t *testing.T, handler string, names []string) {
	d := harness.StartDaemon(t, harness.Wasm(t, "namespace"))
	for _, image := range []string{harness.FetchC, harness.HelloHTTP} {
		d.Pull(t, image)
	}
	bystander := d.RunPodWith(t, harness.PodConfig(t, "bystander"), handler)
	served := bystander.Run(harness.ContainerConfig("hello", harness.HelloHTTP))
	began, address := served.Status().StartedAt, bystander.Status().Network.Ip
	pod, container := wasmVictim(t)
	if err := script(d, handler, pod, container); err != nil {
		t.Fatalf("the script without a crash: %v", err)
	}
	before := resources(d)
	for _, point := range names {
		t.Run(point, func(t *testing.T) {
			removeMade(t, d, point)
			d.Start(failpoint.Variable + "=" + point + "=kill")
			pod, container := wasmVictim(t)
			err := pullAndScript(d, handler, pod, container)
			state := d.WaitExit(10 * time.Second)
			if status := state.Sys().(syscall.WaitStatus); status.Signal() != syscall.SIGKILL {
				t.Fatalf("the daemon ended with %v, the script with error %v; want SIGKILL at the fail point", state, err)
			}
			if err := greets(address); err != nil {
				t.Errorf("while the daemon is down: %v", err)
			}
			d.Start()
			if err := componentsAreTrue(d); err != nil {
				t.Error(err)
			}
			if s := served.Status(); s.State != runtimeapi.ContainerState_CONTAINER_RUNNING || s.StartedAt != began {
				t.Errorf("status of the bystander: got %v, want running since %d", s, began)
			}
			removeVictims(t, d, bystander.ID)
			// Long enough for a compiler in the background, which gets little of a busy processor.
			harness.Eventually(t, time.Minute, func() error { return before.Leaks(resources(d)) })
			if err := script(d, handler, pod, container); err != nil {
				t.Errorf("the same calls after the crash: %v", err)
			}
			if err := greets(address); err != nil {
				t.Error(err)
			}
		})
	}
	if len(names) < 15 {
		t.Errorf("fail points visited: got %d, want at least 15", len(names))
	}
}

// pullAndScript pulls the victim's image, and makes the calls of the script.
func pullAndScript(d *harness.Daemon, handler string, pod *runtimeapi.PodSandboxConfig, container *runtimeapi.ContainerConfig) error {
	if _, err := d.Images().PullImage(context.Background(), container.GetImage(), nil, nil); err != nil {
		return err
	}
	return script(d, handler, pod, container)
}

// removeMade stops the daemon. It removes the victim's image and compiled code, or the node's authority, so that the next
// pull or script creates them and passes the fail point.
func removeMade(t *testing.T, d *harness.Daemon, point string) {
	t.Helper()
	var names []string
	switch {
	case strings.HasPrefix(point, "wasm.cache."):
		cache := filepath.Join(d.Root, "wasm", "cache")
		_, container := wasmVictim(t)
		if err := d.Images().RemoveImage(context.Background(), container.GetImage()); err != nil {
			t.Fatal(err)
		}
		harness.Eventually(t, 10*time.Second, func() error {
			entries, err := os.ReadDir(cache)
			if err == nil && len(entries) > 1 {
				err = fmt.Errorf("code in %s: got %d components, want the bystander's", cache, len(entries))
			}
			return err
		})
	case strings.HasPrefix(point, "wasm.tls."):
		names = []string{"ca.crt", "ca.key"}
	}
	d.Stop()
	for _, name := range names {
		if err := os.RemoveAll(filepath.Join(d.Root, "wasm", name)); err != nil {
			t.Fatal(err)
		}
	}
}

// greets sends a request to the bystander's component.
func greets(address string) error {
	client := http.Client{Timeout: 10 * time.Second}
	defer client.CloseIdleConnections()
	resp, err := client.Get("http://" + address + "/")
	if err != nil {
		return fmt.Errorf("the bystander does not answer: %w", err)
	}
	defer resp.Body.Close()
	if body, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != http.StatusOK {
		return fmt.Errorf("answer of the bystander: got status %s, body %q, error %w; want 200 OK", resp.Status, body, err)
	}
	return nil
}

// componentsAreTrue compares the state that the daemon reports for each component with its port and its worker's
// process.
func componentsAreTrue(d *harness.Daemon) error {
	ctx := context.Background()
	list, err := d.CRI().ListContainers(ctx, &runtimeapi.ListContainersRequest{})
	if err != nil {
		return err
	}
	var errs []error
	for _, c := range list.Containers {
		pod, err := d.CRI().PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: c.PodSandboxId})
		if err != nil {
			return err
		}
		conn, err := net.DialTimeout("tcp", net.JoinHostPort(pod.Status.GetNetwork().GetIp(), "80"), 5*time.Second)
		if err == nil {
			conn.Close()
		}
		if says := c.State == runtimeapi.ContainerState_CONTAINER_RUNNING; says != (err == nil) {
			errs = append(errs, fmt.Errorf("container %s is reported as %s, but the error of a connection to its port is %v", c.Metadata.Name,
				c.State, err))
		}
		status, err := d.CRI().ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: c.Id})
		if err != nil {
			errs = append(errs, err)
		} else if s := status.Status; s.State == runtimeapi.ContainerState_CONTAINER_EXITED && (s.FinishedAt == 0 || s.Reason == "") {
			errs = append(errs, fmt.Errorf("status of container %s: got %v, want a time and a reason of its end", c.Metadata.Name, s))
		}
	}
	return errors.Join(errs...)
}
