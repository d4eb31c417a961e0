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

// siocUnixFile opens the file to which a socket is bound (SIOCUNIXFILE, linux/un.h), which golang.org/x/sys does not
// have.
const siocUnixFile = 0x89E0

// listenKept is like listenPrivate, with a socket that systemd keeps open until the next daemon: clients that connect
// while no daemon runs wait for it. It takes over such a socket if it is the one at the path.
func listenKept(ctx context.Context, path string, systemd *notifier, log *slog.Logger) (*privateListener, error) {
	l, err := keptListener(path, systemd, log)
	if l != nil || err != nil {
		return l, err
	}
	if l, err = listenPrivate(ctx, path, log); err != nil {
		return nil, err
	}
	stored, err := systemd.store(l)
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	if stored {
		l.SetUnlinkOnClose(false)
	}
	return l, nil
}

// keptListener returns the socket at the path if systemd has kept it, otherwise nil.
func keptListener(path string, systemd *notifier, log *slog.Logger) (*privateListener, error) {
	file := systemd.take(func(f *os.File) bool { return isBound(f, path) })
	if file == nil {
		return nil, nil
	}
	defer file.Close()
	l, err := net.FileListener(file)
	if err != nil {
		return nil, fmt.Errorf("the socket %s that systemd kept: %w; stop the service instead of restarting it, and start it", path, err)
	}
	log.Info("taking over the socket that systemd kept", "socket", path)
	kept := &privateListener{l.(*net.UnixListener), log}
	kept.SetUnlinkOnClose(false)
	return kept, nil
}

// isBound reports whether a file is a socket that is bound to the path, and not to a file that was there before.
func isBound(socket *os.File, path string) bool {
	fd, err := unix.IoctlRetInt(int(socket.Fd()), siocUnixFile)
	if err != nil {
		return false
	}
	file := os.NewFile(uintptr(fd), path)
	defer file.Close()
	bound, err1 := file.Stat()
	there, err2 := os.Lstat(path)
	return errors.Join(err1, err2) == nil && os.SameFile(bound, there)
}

// listenPrivate listens on a unix socket that only root and our own user may use. The file has mode 0600. Each peer's
// credentials are checked as well, because a descriptor can be passed to another process. The caller must hold the
// daemon's lock, so an existing socket is a leftover and is removed. If a program still answers on that socket,
// listenPrivate fails.
func listenPrivate(ctx context.Context, path string, log *slog.Logger) (*privateListener, error) {
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
