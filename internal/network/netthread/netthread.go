package netthread

import (
	"errors"
	"fmt"
	"io/fs"
	"runtime"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Run runs fn on an OS thread that nobody else uses meanwhile. When fn reports that it left the thread as it found
// it, the thread is used again, else it ends.
//
// The main thread is never taken: it cannot end, so that it would hold a namespace for ever, and it is what
// /proc/PID/ns/net shows of the process.
func Run(fn func() (restored bool)) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			Run(fn) // on another thread, as this goroutine occupies the main one
			runtime.UnlockOSThread()
			return
		}
		if fn() {
			runtime.UnlockOSThread()
		}
	}()
	<-done
}

// Open opens the network namespace at path. ErrNotFound: there is none.
func Open(path string) (fd int, err error) {
	fd, err = unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return -1, fmt.Errorf("network namespace %s: %w", path, errdefs.ErrNotFound)
	}
	if err != nil {
		return -1, fmt.Errorf("open network namespace %s: %w", path, err)
	}
	return fd, nil
}

// In runs fn on a thread that is inside the network namespace of the descriptor. Sockets that fn opens stay in the
// namespace, and so does what it opens below /proc/sys/net; the thread does not. fn must not start goroutines that
// count on it.
func In(netns int, fn func() error) (err error) {
	Run(func() (restored bool) {
		restored, err = enter(netns, fn)
		return restored
	})
	return err
}

// enter runs fn with the calling thread in the network namespace of the descriptor, and brings the thread back.
func enter(netns int, fn func() error) (restored bool, err error) {
	home, err := Home()
	if err != nil {
		return true, err
	}
	defer unix.Close(home)
	if err := unix.Setns(netns, unix.CLONE_NEWNET); err != nil {
		return true, fmt.Errorf("enter it (is it still mounted?): %w: %w", err, errdefs.ErrFailedPrecondition)
	}
	err = fn()
	return unix.Setns(home, unix.CLONE_NEWNET) == nil, err
}

// Home opens the network namespace of the calling thread, which is the host's outside of In.
func Home() (fd int, err error) {
	fd, err = unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open own network namespace: %w", err)
	}
	return fd, nil
}
