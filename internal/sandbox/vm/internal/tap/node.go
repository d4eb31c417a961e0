package tap

import (
	"context"
	"io"
	"os"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// Node has the functions of this package as methods, for those who have an interface in their place. It implements
// machine.Opener.
type Node struct{}

var _ machine.Opener = Node{}

// Wire calls the function Wire.
func (Node) Wire(ctx context.Context, netns string, o Options) ([]Interface, error) {
	return Wire(ctx, netns, o)
}

// Read calls the function Read.
func (Node) Read(record string) ([]Interface, error) { return Read(record) }

// Unwire calls the function Unwire.
func (Node) Unwire(ctx context.Context, netns, record string) error {
	return Unwire(ctx, netns, record)
}

// Serve calls the function Serve.
func (Node) Serve(ctx context.Context, netns string, interfaces []Interface, c Config) (io.Closer, error) {
	return Serve(ctx, netns, interfaces, c)
}

// Tap implements machine.Opener.
func (Node) Tap(ctx context.Context, nic machine.NIC) (*os.File, error) {
	return Open(ctx, nic.Netns, nic.Tap)
}
