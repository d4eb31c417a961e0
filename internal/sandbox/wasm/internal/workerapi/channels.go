package workerapi

import (
	"context"
	"net"
)

// Channels opens a connection that carries the messages of the pod's channels (PodSpec.Channels). The connection is a
// unix stream socket, whose other end is passed with the request. Both sides write frames of internal/channel with the
// narrow header and module 0: the worker writes OpenChannel, CloseChannel and the guest's messages, and the daemon
// writes messages for the guest. A later call for the same pod replaces the connection: the worker closes the old one,
// announces the guest's open channels on the new one, and sends the queued messages. The connection can end before the
// pod ends. It ends with the pod at the latest.
//
// Channels returns ErrNotFound if the pod does not exist, and ErrFailedPrecondition if the pod has exited or has no
// channels. The caller closes the connection.
func (c *Client) Channels(ctx context.Context, id string) (net.Conn, error) {
	conn, theirs, err := socketPair("channels")
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	if err := c.call(ctx, opChannels, &channelsRequest{ID: id, Conn: File{File: theirs}}, nil); err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

func channels(ctx context.Context, h Handler, r *channelsRequest) error {
	conn, err := passedConn(r.Conn)
	if err != nil {
		return err
	}
	if err := h.Channels(ctx, r.ID, conn); err != nil {
		conn.Close()
		return err
	}
	return nil
}
