package lockdown

import (
	"fmt"
	"runtime"
	"slices"

	seccomp "github.com/elastic/go-seccomp-bpf"
	"golang.org/x/sys/unix"
)

// Restrict limits the process irrevocably to the system calls of a policy, and sets no_new_privs.
func Restrict(policy seccomp.Policy) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	filter := seccomp.Filter{NoNewPrivs: true, Flag: seccomp.FilterFlagTSync, Policy: policy}
	if err := seccomp.LoadFilter(filter); err != nil {
		return fmt.Errorf("restrict system calls: %w", err)
	}
	return nil
}

// WorkerPolicy returns the allow-list of a worker. Other system calls fail with EPERM, among them: execve, fork (clone makes only
// threads), ptrace, process_vm_*, the mount calls, socket and connect (the daemon passes sockets), bpf, keyctl,
// io_uring, userfaultfd, setns, unshare, kill, the setuid calls, chmod and chown.
func WorkerPolicy() seccomp.Policy {
	return policy(slices.Concat(sockets, scheduling, memory, files, signals, process), conditional())
}

// DialerPolicy returns the allow-list of the dialer: that of a worker, but without the calls that change files, and with
// those that open connections in the network namespaces of pods. setns can enter network namespaces only.
func DialerPolicy() seccomp.Policy {
	reading := []string{"openat", "fstat", "newfstatat", "readlinkat", "fcntl", "lseek", "pread64", "dup3"}
	setns := seccomp.NameWithConditions{Name: "setns", Conditions: seccomp.ArgumentConditions{
		{Argument: 1, Operation: seccomp.Equal, Value: unix.CLONE_NEWNET},
	}}
	names := slices.Concat(sockets, []string{"socket", "connect"}, scheduling, memory, reading, signals, process)
	return policy(names, append(conditional(), setns))
}

func policy(names []string, conditions []seccomp.NameWithConditions) seccomp.Policy {
	return seccomp.Policy{
		DefaultAction: seccomp.ActionErrno,
		Syscalls: []seccomp.SyscallGroup{
			{Action: seccomp.ActionAllow, Names: names},
			{Action: seccomp.ActionAllow, NamesWithCondtions: conditions},
			// clone3 fails with ENOSYS, so that glibc falls back to clone, whose flags are an integer argument that a
			// filter can check.
			{Action: seccomp.ActionErrno | seccomp.Action(unix.ENOSYS), Names: []string{"clone3"}},
		},
	}
}

// Frequent calls come first, because the kernel checks the list in this order unless it has cached the result.
var (
	// The data plane: the Go runtime's poller, TCP, and QUIC (batches of packets, and socket options for GSO and ECN).
	// The calls socket, connect and bind are not needed, because the daemon passes all sockets.
	sockets = []string{
		"epoll_pwait", "epoll_wait", "recvmsg", "sendmsg", "recvmmsg", "sendmmsg", "read", "write", "readv", "writev",
		"recvfrom", "sendto", "accept4", "accept", "setsockopt", "getsockopt", "getsockname", "getpeername", "shutdown", "listen",
		"epoll_ctl", "epoll_create1", "eventfd2", "poll", "ppoll", "select", "pselect6", "close",
	}
	// Threads of the Go runtime, the engine and guests. The engine lowers the priority of guests that compute for a
	// long time.
	scheduling = []string{
		"futex", "nanosleep", "clock_nanosleep", "sched_yield", "clock_gettime", "clock_getres", "gettimeofday", "time", "getcpu",
		"sched_getaffinity", "sched_setscheduler", "sched_getscheduler", "sched_setparam", "sched_getparam", "sched_setattr", "sched_getattr",
		"getpriority", "setpriority", "set_robust_list", "get_robust_list", "rseq", "membarrier", "restart_syscall",
		"timer_create", "timer_settime", "timer_gettime", "timer_delete", "setitimer", "getitimer",
		"timerfd_create", "timerfd_settime", "timerfd_gettime",
	}
	// Memory of Go, of compiled code (made executable by mprotect), and of guests (copy-on-write from memfds).
	memory = []string{
		"madvise", "mmap", "munmap", "mprotect", "mremap", "brk", "mincore", "msync", "memfd_create",
	}
	// Files: the guests' directories, and logs.
	files = []string{
		"pread64", "pwrite64", "preadv", "pwritev", "preadv2", "pwritev2", "lseek", "openat", "openat2", "open",
		"fstat", "newfstatat", "stat", "lstat", "statx", "fstatfs", "statfs", "access", "faccessat", "faccessat2", "getdents64", "readlink",
		"readlinkat",
		"mkdirat", "unlinkat", "renameat", "renameat2", "linkat", "symlinkat", "utimensat", "ftruncate", "fallocate",
		"fsync", "fdatasync", "sync_file_range", "fadvise64", "copy_file_range", "sendfile", "splice", "flock", "fcntl",
		"dup", "dup2", "dup3", "pipe2", "getcwd", "umask",
	}
	signals = []string{
		"rt_sigprocmask", "rt_sigaction", "rt_sigreturn", "sigaltstack", "tgkill", "rt_sigtimedwait", "rt_sigpending",
	}
	process = []string{
		"gettid", "getpid", "getppid", "getuid", "geteuid", "getgid", "getegid", "getrandom", "getrusage", "times",
		"getrlimit", "uname", "sysinfo", "exit", "exit_group", "getpgrp", "getpgid", "getsid",
	}
)

// fionbio makes a file non-blocking (ioctl_fionbio(2)). Rust's standard library uses this ioctl.
const fionbio = 0x5421

// pagemapScan finds the pages of a guest's memory that have changed (PAGEMAP_SCAN of Linux 6.7).
const pagemapScan = 0xc0606610

func conditional() []seccomp.NameWithConditions {
	var all []seccomp.NameWithConditions
	one := func(name string, argument uint32, is seccomp.Operation, values ...uint64) {
		for _, v := range values {
			all = append(all, seccomp.NameWithConditions{
				Name: name, Conditions: seccomp.ArgumentConditions{{Argument: argument, Operation: is, Value: v}},
			})
		}
	}
	one("clone", 0, seccomp.BitsSet, unix.CLONE_THREAD)
	one("prctl", 0, seccomp.Equal, unix.PR_SET_NAME, unix.PR_GET_NAME, unix.PR_SET_VMA, unix.PR_GET_DUMPABLE)
	one("prlimit64", 2, seccomp.Equal, 0) // read-only: new_limit is NULL
	one("ioctl", 1, seccomp.Equal, unix.TIOCINQ /* FIONREAD */, fionbio, unix.TCGETS, pagemapScan)
	return all
}
