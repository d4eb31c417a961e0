package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// listenPrivate listens on a unix socket that only root and our own user may use. The file has mode 0600. Each peer's
// credentials are checked as well, because a descriptor can be passed to another process. The caller must hold the
// daemon's lock, so an existing socket is a leftover and is removed. If a program still answers on that socket,
// listenPrivate fails.
func listenPrivate(ctx context.Context, path string, log *slog.Logger) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	if err := removeLeftover(ctx, path); err != nil {
		return nil, err
	}
	// Between bind and chmod, two things protect the socket: its directory (mode 0700, unless configured otherwise) and
	// the check of peer credentials.
	l, err := (&net.ListenConfig{}).Listen(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return &privateListener{l.(*net.UnixListener), log}, nil
}

func removeLeftover(ctx context.Context, path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Mode().Type() != fs.ModeSocket {
		return fmt.Errorf("%s exists and is not a socket; remove it or choose another path", path)
	}
	dialer := net.Dialer{Timeout: time.Second}
	if c, err := dialer.DialContext(ctx, "unix", path); err == nil {
		_ = c.Close()
		return fmt.Errorf("another program listens on %s; stop it or choose another path", path)
	}
	return os.Remove(path)
}

type privateListener struct {
	*net.UnixListener
	log *slog.Logger
}

// Accept returns only connections from permitted peers.
func (l *privateListener) Accept() (net.Conn, error) {
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			return nil, err
		}
		peer, err := peerOf(c)
		if err == nil && (peer.Uid == 0 || int(peer.Uid) == os.Geteuid()) {
			return c, nil
		}
		_ = c.Close()
		if err != nil {
			l.log.Warn("connection refused: no peer credentials", "err", err)
		} else {
			l.log.Warn("connection refused: only root may connect", "uid", peer.Uid, "pid", peer.Pid)
		}
	}
}

// peerOf returns the peer's credentials (SO_PEERCRED, unix(7)).
func peerOf(c *net.UnixConn) (*unix.Ucred, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	var peer *unix.Ucred
	var optErr error
	if err := raw.Control(func(fd uintptr) {
		peer, optErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return nil, err
	}
	return peer, optErr
}
