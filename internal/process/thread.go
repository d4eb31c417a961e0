package process

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// OnOwnThread runs do on a thread that ends afterwards. So only the children that do starts inherit what do changes in
// the thread (its cgroup, no_new_privs). The thread is never the main thread, which cannot end, and whose cgroup counts
// as the process's. Call OnOwnThread in a goroutine of its own.
func OnOwnThread(do func()) {
	runtime.LockOSThread()
	if unix.Gettid() != unix.Getpid() {
		do()
		return
	}
	done := make(chan struct{})
	go func() { defer close(done); OnOwnThread(do) }()
	<-done // hold the main thread meanwhile, so that the other goroutine runs on another thread
	runtime.UnlockOSThread()
}
