package workerapi

import (
	"context"
	"fmt"
	"net"
	"os"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Channels joins the pod's channels (PodSpec.Channels) to a connection of its own, a unix stream socket whose other end
// travels with the request. Both sides write frames of internal/channel with the narrow header and module 0: the worker
// OpenChannel, CloseChannel and what the guest publishes, the daemon messages for the guest. A later connection of the same
// pod replaces this one: the worker closes it, opens the guest's channels again on the new one, and sends what waited. The
// connection may end before the pod does, and always ends with it.
//
// ErrNotFound: no such pod. ErrFailedPrecondition: it has exited, or has no channels. The caller closes the connection.
func (c *Client) Channels(ctx context.Context, id string) (net.Conn, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("channels: %w", err)
	}
	theirs := os.NewFile(uintptr(fds[1]), "channels")
	defer theirs.Close()
	conn, err := fileConn(os.NewFile(uintptr(fds[0]), "channels"))
	if err != nil {
		return nil, err
	}
	if err := c.call(ctx, opChannels, &channelsRequest{ID: id, Conn: File{File: theirs}}, nil); err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

func channels(ctx context.Context, h Handler, r *channelsRequest) error {
	if r.Conn.File == nil {
		return fmt.Errorf("channels: no socket came along: %w", errdefs.ErrInvalidArgument)
	}
	conn, err := fileConn(r.Conn.File)
	if err != nil {
		return fmt.Errorf("%w: %w", err, errdefs.ErrInvalidArgument)
	}
	if err := h.Channels(ctx, r.ID, conn); err != nil {
		conn.Close()
		return err
	}
	return nil
}
