package vm

import (
	"context"
	"io"
	"os"

	"github.com/vishvananda/netlink"

	"github.com/tripod-run/tripod/internal/network/tap"
	"github.com/tripod-run/tripod/internal/vm/machine"
)

// Taps is the Network of a node, and what opens its taps for a driver.
type Taps struct{}

var (
	_ Network        = Taps{}
	_ machine.Opener = Taps{}
)

// Wire implements Network.
func (Taps) Wire(ctx context.Context, netns string, o tap.Options) ([]tap.Interface, error) {
	return tap.Wire(ctx, netns, o)
}

// Read implements Network.
func (Taps) Read(record string) ([]tap.Interface, error) { return tap.Read(record) }

// Unwire implements Network.
func (Taps) Unwire(ctx context.Context, netns, record string) error {
	return tap.Unwire(ctx, netns, record)
}

// Serve implements Network.
func (Taps) Serve(ctx context.Context, netns string, interfaces []tap.Interface, c tap.Config) (io.Closer, error) {
	return tap.Serve(ctx, netns, interfaces, c)
}

// IsTap reports whether a link in a pod's namespace is a tap that the backend made.
func IsTap(link netlink.Link) bool { return tap.IsTap(link) }

// Tap implements machine.Opener.
func (Taps) Tap(ctx context.Context, nic machine.NIC) (*os.File, error) {
	return tap.Open(ctx, nic.Netns, nic.Tap)
}
