package netthread

import (
	"errors"
	"fmt"
	"io/fs"
	"runtime"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/guard"
)

// Run runs fn on an OS thread that no other goroutine uses at the same time. If fn reports that it restored the
// thread's state, the thread is reused; otherwise the thread ends. If fn panics, the thread ends and Run panics.
//
// Run never uses the main thread. That thread cannot end, so it could hold a namespace forever, and /proc/PID/ns/net
// shows its namespace as the process's.
func Run(fn func() (restored bool)) {
	run, wait := guard.Part(func() error {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			defer runtime.UnlockOSThread()
			Run(fn) // runs fn on another thread, because this goroutine holds the main thread
			return nil
		}
		if fn() {
			runtime.UnlockOSThread()
		}
		return nil
	})
	go run()
	_ = wait()
}

// Open opens the network namespace at path. It returns ErrNotFound if path does not exist.
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

// In runs fn on a thread inside the network namespace that the descriptor refers to. Sockets and files under
// /proc/sys/net that fn opens keep referring to that namespace. Goroutines that fn starts run outside that namespace.
func In(netns int, fn func() error) (err error) {
	Run(func() (restored bool) {
		restored, err = enter(netns, fn)
		return restored
	})
	return err
}

// enter moves the calling thread to the network namespace of the descriptor, runs fn, and moves the thread back.
func enter(netns int, fn func() error) (restored bool, err error) {
	home, err := Home()
	if err != nil {
		return true, err
	}
	defer unix.Close(home)
	if err := unix.Setns(netns, unix.CLONE_NEWNET); err != nil {
		return true, fmt.Errorf("enter network namespace (is it still mounted?): %w: %w", err, errdefs.ErrFailedPrecondition)
	}
	err = fn()
	return unix.Setns(home, unix.CLONE_NEWNET) == nil, err
}

// Home opens the network namespace of the calling thread. That is the host's namespace, unless a
// function that was passed to In calls Home.
func Home() (fd int, err error) {
	fd, err = unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open own network namespace: %w", err)
	}
	return fd, nil
}
