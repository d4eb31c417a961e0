package process

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// OnOwnThread runs do on a thread that ends with it, so that what do changes of the thread (its cgroup, no_new_privs) is inherited
// by the children that do starts and by nobody else. The thread is never the main one, which cannot end and whose cgroup is shown
// as the process's. Call it in a goroutine of its own.
func OnOwnThread(do func()) {
	runtime.LockOSThread()
	if unix.Gettid() != unix.Getpid() {
		do()
		return
	}
	done := make(chan struct{})
	go func() { defer close(done); OnOwnThread(do) }()
	<-done // the main thread is ours until another one has done it
	runtime.UnlockOSThread()
}
