package node_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/keys"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/test/fake"
)

// channeling is a backend with channels.
type channeling struct{ *fake.Backend }

func (channeling) Channels(_ context.Context, _ *sandbox.Pod, c *sandbox.Container) (net.Conn, string, error) {
	here, there := net.Pipe()
	go func() {
		_, _ = fmt.Fprintf(there, "%s %v", c.ID, c.Channels)
		there.Close()
	}()
	return here, "group", nil
}

func TestChannels(t *testing.T) {
	dir := t.TempDir()
	start := func() *bench {
		return openWith(t, dir, "wasm", sandbox.Capabilities{MaxContainers: 1},
			func(f *fake.Backend) sandbox.Backend { return channeling{f} })
	}
	b, ctx := start(), t.Context()
	pod := b.run(t, "wasm", podConfig("p"))
	config := containerConfig("c")
	config.Annotations[keys.EdgeChannels] = "["
	if _, err := b.CreateContainer(ctx, pod, config); !errdefs.IsInvalidArgument(err) ||
		!strings.Contains(err.Error(), keys.EdgeChannels) {
		t.Errorf("CreateContainer with channels that are no JSON = %v, want invalid argument with the annotation", err)
	}
	config.Annotations[keys.EdgeChannels] = `[{"name":"in","topic":"a/#","flags":1}]`
	id := b.create(t, pod, config)
	if _, _, err := b.Channels(ctx, id); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("Channels before the start: got error %v, want failed precondition", err)
	}
	must(t, b.StartContainer(ctx, id))
	b.close()
	b = start()
	conn, group, err := b.Channels(ctx, id)
	must(t, err)
	defer conn.Close()
	want := fmt.Sprintf("%s %v", pod, []channel.Channel{{Name: "in", Topic: "a/#", Flags: channel.Read}})
	if said, err := io.ReadAll(conn); string(said) != want || group != "group" || err != nil {
		t.Errorf("channels: got %q, group %q, error %v; want %q and its group", said, group, err, want)
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
