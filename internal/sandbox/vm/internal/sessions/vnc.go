package sessions

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/fdpass"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/unixsocket"
)

// vncPort is the port of the guest's localhost at which port-forward finds the VNC server of a machine that has one.
const vncPort = 5900

// Screen is the VNC server of a machine. The zero value means that the machine has none.
type Screen struct {
	// Socket is the path of the server's socket, and User its process's user.
	Socket string `json:"socket,omitempty"`
	User   int    `json:"user,omitempty"`
}

// ScreenOf returns the VNC server of a machine with the given definition.
func ScreenOf(d machine.Definition) Screen {
	if !d.VNC {
		return Screen{}
	}
	return Screen{Socket: filepath.Join(d.Dir, machine.VNCSocket), User: d.UID}
}

// Serves reports whether a connection to the given address of the guest's localhost leads to the VNC server.
func (s Screen) Serves(network string, at netip.AddrPort) bool {
	return s.Socket != "" && network == "tcp" && at.Port() == vncPort
}

// Dial connects to the VNC server. The hypervisor's user could put a link to another program's socket in the socket's
// place, so dial refuses a server that runs as a different user.
func (s Screen) Dial(ctx context.Context) (net.Conn, error) {
	conn, err := unixsocket.Dial(ctx, s.Socket)
	if err != nil {
		return nil, fmt.Errorf("VNC: %w", err)
	}
	peer, err := fdpass.PeerOf(conn)
	if err == nil && peer.UID != s.User {
		err = fmt.Errorf("the server at %s runs as user %d, not as the machine's user %d: %w", s.Socket, peer.UID, s.User,
			errdefs.ErrPermissionDenied)
	}
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("VNC: %w", err)
	}
	return conn, nil
}
