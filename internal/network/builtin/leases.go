package builtin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
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
	seen *seenLeases
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
			return &leases{dir: dir, lock: lock, seen: seenIn(dir)}, nil
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
	if err == nil {
		l.seen.added(l.dir, ip.String(), leaseOf(id, ifName))
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
	found, err := l.findAll(id, ifName)
	return errors.Join(err, l.remove(found))
}

// remove removes the leases of addresses. A missing lease is not an error.
func (l *leases) remove(addresses []net.IP) (err error) {
	var removed []string
	for _, ip := range addresses {
		failed := os.Remove(filepath.Join(l.dir, ip.String()))
		if failed == nil || errors.Is(failed, fs.ErrNotExist) {
			removed = append(removed, ip.String())
			continue
		}
		err = errors.Join(err, failed)
	}
	l.seen.removed(l.dir, removed)
	return err
}

// find returns the addresses that the container's interface has leased, in no order. Leases without an interface, written by
// plugin releases before 0.7, count for every interface of the container.
func (l *leases) find(id, ifName string) (found []net.IP, err error) {
	dir, err := os.Open(l.dir)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	names, err := l.seen.find(dir, id, ifName)
	for _, name := range names {
		found = append(found, net.ParseIP(name))
	}
	return found, err
}

// findAll is find, but reads all leases before it returns none, because a lease that is not found now is never released.
func (l *leases) findAll(id, ifName string) ([]net.IP, error) {
	if found, err := l.find(id, ifName); len(found) > 0 {
		return found, err
	}
	l.seen.forget()
	return l.find(id, ifName)
}

// seenLeases are the leases of a directory as this process has seen them last. A node has a lease for each pod, and each ADD
// and DEL would read them all. They are read again when the directory has been changed by others. That can escape notice within one
// tick of the file system's clock, so a lease that is found is compared with its file.
type seenLeases struct {
	mu    sync.Mutex
	of    dirStamp          // the state of the directory that all is for; zero if there is none
	stale bool              // the leases must be read, whatever the state of the directory
	all   map[string]string // the leases by the names of their files

	// complete is set if used has all addresses whose leases were removed since the network's bridge was made: this process has
	// made the bridge, and no other has changed the leases since.
	complete bool
	used     map[string]bool
}

// begin notes that this process has made the network's bridge, so that nobody knows addresses of earlier pods.
func (s *seenLeases) begin() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.complete, s.used = true, map[string]bool{}
}

// fresh reports whether no pod has had one of the addresses since the bridge was made. It reports false if that is not known.
func (s *seenLeases) fresh(addresses []net.IP) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.complete && !slices.ContainsFunc(addresses, func(ip net.IP) bool { return s.used[ip.String()] })
}

// dirStamp changes when files of a directory are made or removed.
type dirStamp struct {
	dev, ino uint64
	changed  unix.Timespec
}

func stampOf(dir string) (dirStamp, error) {
	var s unix.Stat_t
	if err := unix.Stat(dir, &s); err != nil {
		return dirStamp{}, &os.PathError{Op: "stat", Path: dir, Err: err}
	}
	return dirStamp{uint64(s.Dev), s.Ino, s.Mtim}, nil
}

// directories has the seenLeases of each directory that was ever opened, by its path.
var directories sync.Map

func seenIn(dir string) *seenLeases {
	seen, _ := directories.LoadOrStore(dir, &seenLeases{})
	return seen.(*seenLeases)
}

// find returns the names of the leases that an interface of a container has. The error has the leases that cannot be read;
// they are read again next time.
func (s *seenLeases) find(dir *os.File, id, ifName string) (names []string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	stamp, err := stampOf(dir.Name())
	if err != nil {
		return nil, err
	}
	if s.of != stamp || s.stale {
		s.complete = s.complete && (s.of == stamp || s.of == (dirStamp{}))
		s.of, s.stale = stamp, false
		if s.all, err = readLeases(dir); err != nil {
			s.stale, s.complete = true, false
		}
	}
	for name, lease := range s.all {
		if lease != leaseOf(id, ifName) && lease != id {
			continue
		}
		if now, failed := readLease(dir, name); failed == nil && now == lease {
			names = append(names, name)
		} else {
			s.stale, s.complete = true, false // others have changed the directory without notice
		}
	}
	return names, err
}

// readLeases returns all leases of a directory by the names of their files. The error has those that cannot be read.
func readLeases(dir *os.File) (map[string]string, error) {
	names, err := dir.Readdirnames(-1)
	all := map[string]string{}
	for _, name := range names {
		if net.ParseIP(name) == nil {
			continue
		}
		lease, failed := readLease(dir, name)
		if failed != nil {
			err = errors.Join(err, fmt.Errorf("lease %s: %w", name, failed))
			continue
		}
		all[name] = lease
	}
	return all, err
}

// added notes a lease that the caller has added to the directory.
func (s *seenLeases) added(dir, name, lease string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.of != (dirStamp{}) {
		s.all[name] = lease
		s.stamp(dir)
	}
}

// removed notes leases that the caller has removed from the directory.
func (s *seenLeases) removed(dir string, names []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range names {
		delete(s.all, name)
		if s.complete {
			s.used[name] = true
		}
	}
	if s.of != (dirStamp{}) {
		s.stamp(dir)
	}
}

// stamp notes the state of the directory. The caller holds s.mu and has noted its changes.
func (s *seenLeases) stamp(dir string) {
	var err error
	if s.of, err = stampOf(dir); err != nil {
		s.complete = false
	}
}

// forget makes the next call of find read all leases.
func (s *seenLeases) forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stale = true
}

// readLease reads a file in dir, of which a lease needs less than 512 bytes. It avoids os.ReadFile for speed.
func readLease(dir *os.File, name string) (string, error) {
	fd, err := unix.Openat(int(dir.Fd()), name, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)
	var data [512]byte
	n, err := unix.Read(fd, data[:])
	return strings.TrimSpace(string(data[:max(n, 0)])), err
}
