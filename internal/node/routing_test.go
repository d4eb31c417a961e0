package node_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/test/fake"
)

// dialed is a backend with a Dialer.
type dialed struct{ *fake.Backend }

func (dialed) Dial(_ context.Context, p *sandbox.Pod, c *sandbox.Container, network, address string) (net.Conn, error) {
	return nil, fmt.Errorf("asked for %s %s of %s, container %v", network, address, p.ID, c != nil)
}

// target returns a pod whose annotation selects a runtime.
func target(name, runtime string) *runtimeapi.PodSandboxConfig {
	config := podConfig(name)
	config.Annotations["kubernetes.io/target-runtime"] = runtime
	return config
}

// TestRoutes: the annotation of a pod without a handler selects its handler; an image of another handler is rejected.
func TestRoutes(t *testing.T) {
	b := open(t, t.TempDir())
	marked := target("marked", "virtlet.cloud")
	for _, test := range []struct{ pod, handler, want string }{
		{b.run(t, "", marked), "", "vm"},
		{b.run(t, "", target("other", "containerd")), "", "linux"},
		{b.run(t, "wasm", target("named", "virtlet.cloud")), "wasm", "wasm"},
	} {
		if p, err := b.Pod(test.pod); err != nil || p.Handler != test.want {
			t.Errorf("handler %q: got pod %v, %v; want the handler %s", test.handler, p, err, test.want)
		}
	}
	if again := b.run(t, "", marked); again == "" {
		t.Error("RunSandbox again returned no ID")
	}
	if _, err := b.RunSandbox(t.Context(), target("lost", "nowhere"), ""); !errdefs.IsInvalidArgument(err) {
		t.Errorf("RunSandbox with a route to a missing handler: got error %v, want invalid argument", err)
	}
	pod := b.run(t, "", podConfig("plain"))
	for _, name := range []string{"virtlet.cloud/cirros", "sha256:0123"} {
		config := containerConfig("c")
		config.Image.Image, config.Image.UserSpecifiedImage = name, "virtlet.cloud/cirros"
		_, err := b.CreateContainer(t.Context(), pod, config)
		if !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), "kubernetes.io/target-runtime: virtlet.cloud") {
			t.Errorf("image %s with the handler linux: got error %v, want invalid argument with the annotation", name, err)
		}
	}
	vm := b.run(t, "vm", podConfig("vm"))
	config := containerConfig("c")
	config.Image.Image = "virtlet.cloud/cirros"
	b.create(t, vm, config)
}

// TestDialPod: DialPod passes the running container to a backend that is a Dialer.
func TestDialPod(t *testing.T) {
	b := open(t, t.TempDir())
	vm, plain := b.run(t, "vm", podConfig("vm")), b.run(t, "linux", podConfig("plain"))
	dial := func(pod string) string {
		_, err := b.DialPod(t.Context(), pod, "tcp", "127.0.0.1:80")
		return fmt.Sprint(errors.Unwrap(err), err)
	}
	if got := dial(vm); !strings.Contains(got, "asked for tcp 127.0.0.1:80 of "+vm+", container false") {
		t.Errorf("DialPod before the start: got %s, want the backend without a container", got)
	}
	b.create(t, vm, containerConfig("c"))
	must(t, b.StartContainer(t.Context(), vm))
	if got := dial(vm); !strings.Contains(got, "container true") {
		t.Errorf("DialPod after the start: got %s, want the backend with a container", got)
	}
	if got := dial(plain); !strings.Contains(got, "the fake network") {
		t.Errorf("DialPod with another backend: got %s, want the network", got)
	}
}

func (dialed) AttachDisk(_ context.Context, _ *sandbox.Pod, c *sandbox.Container, d sandbox.Disk) error {
	return fmt.Errorf("asked for %+v of %s", d, c.ID)
}

func (dialed) DetachDisk(_ context.Context, _ *sandbox.Pod, c *sandbox.Container, name string) error {
	return fmt.Errorf("asked to detach %s of %s", name, c.ID)
}
