package fdpass

import (
	"errors"
	"net"

	"golang.org/x/sys/unix"
)

// Peer identifies the process at the other end of a Unix connection, as the process was when it connected.
type Peer struct{ PID, UID, GID int }

// PeerOf returns the peer of a connection, as the kernel knows it (SO_PEERCRED, unix(7)).
func PeerOf(conn *net.UnixConn) (Peer, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return Peer{}, err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil || credErr != nil {
		return Peer{}, errors.Join(err, credErr)
	}
	return Peer{PID: int(cred.Pid), UID: int(cred.Uid), GID: int(cred.Gid)}, nil
}
