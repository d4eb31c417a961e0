package builtin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/containernetworking/plugins/plugins/ipam/host-local/backend"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/guard"
)

// leases is a locked directory of host-local's leases (README of host-local, "Files"):
//
//	lock                   flock'ed while the other files are read or written
//	10.88.0.7              a lease: the container ID on one line, the interface on the next
//	last_reserved_ip.N     the last address leased from range N
//
// We do not use host-local's own store, because that store waits for the lock without limit, and because programs that
// start while it holds the lock inherit the lock's descriptor.
type leases struct {
	dir  string
	lock int
}

var _ backend.Store = (*leases)(nil)

const (
	leaseLine  = "\r\n" // between the lines of a lease
	lastPrefix = "last_reserved_ip."
	// lockPause is the pause between attempts to lock: about the time that another holder needs to write two files.
	lockPause = time.Millisecond
)

// openLeases makes the directory if it is missing, and locks it. It fails if ctx ends before the lock is free.
func openLeases(ctx context.Context, dir string) (*leases, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	lock, err := unix.Open(filepath.Join(dir, "lock"), unix.O_CREAT|unix.O_RDONLY|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock of leases in %s: %w", dir, err)
	}
	for {
		err = unix.Flock(lock, unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return &leases{dir: dir, lock: lock}, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			break
		}
		if err = guard.Sleep(ctx, lockPause); err != nil {
			break
		}
	}
	_ = unix.Close(lock)
	return nil, fmt.Errorf("lock leases in %s: %w", dir, err)
}

// release unlocks the directory, by closing the lock's descriptor.
func (l *leases) release() { _ = unix.Close(l.lock) }

// Lock, Unlock and Close do nothing, because the lock is held from openLeases to release.
func (l *leases) Lock() error   { return nil }
func (l *leases) Unlock() error { return nil }
func (l *leases) Close() error  { return nil }

func leaseOf(id, ifName string) string { return id + leaseLine + ifName }

// Reserve takes a lease on an address, and reports whether the address was free.
func (l *leases) Reserve(id, ifName string, ip net.IP, rangeID string) (bool, error) {
	path := filepath.Join(l.dir, ip.String())
	err := writeNew(path, leaseOf(id, ifName))
	if errors.Is(err, fs.ErrExist) {
		return false, nil
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(l.dir, lastPrefix+rangeID), []byte(ip.String()), 0o600)
		if err != nil {
			err = errors.Join(err, os.Remove(path))
		}
	}
	return err == nil, err
}

// writeNew creates a file. If it fails, it leaves no file behind.
func writeNew(path, content string) error {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_EXCL|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	_, err = file.WriteString(content)
	if err = errors.Join(err, file.Close()); err != nil {
		return errors.Join(err, os.Remove(path))
	}
	return nil
}

// LastReservedIP returns the last address leased from a range; the search for a free address continues after that
// address.
func (l *leases) LastReservedIP(rangeID string) (net.IP, error) {
	data, err := os.ReadFile(filepath.Join(l.dir, lastPrefix+rangeID))
	if err != nil {
		return nil, err
	}
	return net.ParseIP(string(data)), nil
}

// GetByID returns the addresses that the container's interface has leased.
func (l *leases) GetByID(id, ifName string) []net.IP {
	found, _ := l.find(id, ifName)
	return found
}

// ReleaseByID removes the leases of the container's interface.
func (l *leases) ReleaseByID(id, ifName string) error {
	found, err := l.find(id, ifName)
	return errors.Join(err, l.remove(found))
}

// remove removes the leases of addresses. A missing lease is not an error.
func (l *leases) remove(addresses []net.IP) (err error) {
	for _, ip := range addresses {
		if failed := os.Remove(filepath.Join(l.dir, ip.String())); !errors.Is(failed, fs.ErrNotExist) {
			err = errors.Join(err, failed)
		}
	}
	return err
}

// find returns the addresses that the container's interface has leased. Leases without an interface, written by plugin
// releases before 0.7, count for every interface of the container.
func (l *leases) find(id, ifName string) ([]net.IP, error) {
	dir, err := os.Open(l.dir)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	var found []net.IP
	for _, name := range names {
		ip := net.ParseIP(name)
		if ip == nil {
			continue
		}
		data, failed := readAt(dir, name)
		if failed != nil {
			err = errors.Join(err, fmt.Errorf("lease %s: %w", name, failed))
			continue
		}
		if lease := strings.TrimSpace(data); lease == leaseOf(id, ifName) || lease == id {
			found = append(found, ip)
		}
	}
	return found, err
}

// readAt reads the first 512 bytes of a file in dir. It avoids os.ReadFile for speed, because a node has a lease for
// every pod, and each ADD and DEL reads all leases.
func readAt(dir *os.File, name string) (string, error) {
	fd, err := unix.Openat(int(dir.Fd()), name, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)
	var data [512]byte
	n, err := unix.Read(fd, data[:])
	return string(data[:max(n, 0)]), err
}
