package node_test

import (
	"context"
	"net"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/test/fake"
)

// channeling is a backend with channels.
type channeling struct{ *fake.Backend }

func (channeling) Channels(_ context.Context, _ *sandbox.Pod, c *sandbox.Container) (net.Conn, string, error) {
	here, there := net.Pipe()
	go func() {
		_, _ = there.Write([]byte(c.ID))
		there.Close()
	}()
	return here, "group", nil
}

func TestChannels(t *testing.T) {
	b := openWith(t, t.TempDir(), "wasm", sandbox.Capabilities{MaxContainers: 1},
		func(f *fake.Backend) sandbox.Backend { return channeling{f} })
	ctx := t.Context()
	pod := b.run(t, "wasm", podConfig("p"))
	id := b.create(t, pod, containerConfig("c"))
	if _, _, err := b.Channels(ctx, id); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("Channels before the start: got error %v, want failed precondition", err)
	}
	must(t, b.StartContainer(ctx, id))
	conn, group, err := b.Channels(ctx, id)
	must(t, err)
	defer conn.Close()
	said := make([]byte, len(pod))
	if _, err := conn.Read(said); string(said) != pod || group != "group" || err != nil {
		t.Errorf("channels: got %q, group %q, error %v; want the pod's ID and its group", said, group, err)
	}
	if _, _, err := b.Channels(ctx, "none"); !errdefs.IsNotFound(err) {
		t.Errorf("Channels of an unknown container: got error %v, want not found", err)
	}
}

func TestBackendWithoutChannels(t *testing.T) {
	b := open(t, t.TempDir())
	pod := b.run(t, "vm", podConfig("p"))
	id := b.create(t, pod, containerConfig("c"))
	must(t, b.StartContainer(t.Context(), id))
	if _, _, err := b.Channels(t.Context(), id); !errdefs.IsNotImplemented(err) {
		t.Errorf("Channels without a Channeler: got %v, want an error that errdefs.IsNotImplemented accepts", err)
	}
}
