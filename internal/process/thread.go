package process

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// OnOwnThread runs fn on a thread that ends afterwards. Only the children that fn starts inherit what fn changes in the
// thread (its cgroup, no_new_privs). The thread is never the main thread, because the main thread cannot end, and its
// cgroup counts as the cgroup of the process. Call OnOwnThread in a new goroutine. fn must not panic (see guard.Part).
func OnOwnThread(fn func()) {
	runtime.LockOSThread()
	if unix.Gettid() != unix.Getpid() {
		fn()
		return
	}
	done := make(chan struct{})
	go func() { defer close(done); OnOwnThread(fn) }()
	<-done // until fn has ended, hold the main thread, so that the goroutine runs on another one
	runtime.UnlockOSThread()
}
