package vm

import (
	"context"
	"io"
	"os"

	"github.com/vishvananda/netlink"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/tap"
)

// taps implements the interfaces network and machine.Opener with the taps of package tap.
type taps struct{}

var (
	_ network        = taps{}
	_ machine.Opener = taps{}
)

func (taps) Wire(ctx context.Context, netns string, o tap.Options) ([]tap.Interface, error) {
	return tap.Wire(ctx, netns, o)
}

func (taps) Read(record string) ([]tap.Interface, error) { return tap.Read(record) }

func (taps) Unwire(ctx context.Context, netns, record string) error {
	return tap.Unwire(ctx, netns, record)
}

func (taps) Serve(ctx context.Context, netns string, interfaces []tap.Interface, c tap.Config) (io.Closer, error) {
	return tap.Serve(ctx, netns, interfaces, c)
}

// IsTap reports whether a link in a pod's namespace is a tap that the backend made.
func IsTap(link netlink.Link) bool { return tap.IsTap(link) }

func (taps) Tap(ctx context.Context, nic machine.NIC) (*os.File, error) {
	return tap.Open(ctx, nic.Netns, nic.Tap)
}
