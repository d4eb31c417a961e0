package network

import (
	"errors"
	"fmt"
	"io/fs"
	"runtime"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// onThread runs fn on an OS thread that nobody else uses meanwhile. When fn reports that it left the thread as it
// found it, the thread is used again, else it ends.
//
// The main thread is never taken: it cannot end, so that it would hold a namespace for ever, and it is what
// /proc/PID/ns/net shows of the process.
func onThread(fn func() (restored bool)) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			onThread(fn) // on another thread, as this goroutine occupies the main one
			runtime.UnlockOSThread()
			return
		}
		if fn() {
			runtime.UnlockOSThread()
		}
	}()
	<-done
}

// inNetns runs fn on a thread that is inside the network namespace at path; "" is the host's.
// fn should only open sockets: they stay in the namespace, the thread does not.
func (m *Manager) inNetns(path string, fn func() error) error {
	if path == "" {
		return fn()
	}
	target, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("network namespace %s: %w", path, errdefs.ErrNotFound)
	}
	if err != nil {
		return fmt.Errorf("open network namespace %s: %w", path, err)
	}
	defer unix.Close(target)

	onThread(func() (restored bool) {
		restored, err = enter(target, fn)
		return restored
	})
	if err != nil {
		return fmt.Errorf("in network namespace %s: %w", path, err)
	}
	return nil
}

// enter runs fn with the calling thread in the network namespace of the descriptor, and brings the thread back.
func enter(netns int, fn func() error) (restored bool, err error) {
	home, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return true, fmt.Errorf("open own namespace: %w", err)
	}
	defer unix.Close(home)
	if err := unix.Setns(netns, unix.CLONE_NEWNET); err != nil {
		return true, fmt.Errorf("enter it (is it still mounted?): %w: %w", err, errdefs.ErrFailedPrecondition)
	}
	err = fn()
	return unix.Setns(home, unix.CLONE_NEWNET) == nil, err
}
