package lockdown

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// inside is set in a child process that locks itself down and reports what it can and cannot do.
const inside = "TRIPOD_TEST_LOCKDOWN"

// victim is set in the processes of TestOthersAreOutOfReach: to the victim's process ID in the test's namespace or, in
// the victim itself, to "none".
const victim = "TRIPOD_TEST_VICTIM"

const nobody = 65532

func TestMain(m *testing.M) {
	if os.Getenv(inside) == "" {
		os.Exit(m.Run())
	}
	run := lockedDown
	if os.Getenv(victim) != "" {
		run = reachOut
	}
	report, err := run()
	if err != nil {
		report = map[string]string{"error": err.Error()}
	}
	if err := json.NewEncoder(os.Stdout).Encode(report); err != nil {
		os.Exit(1)
	}
}

// lockedDown runs in a child process.
func lockedDown() (map[string]string, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0") // instead of one from the daemon
	if err != nil {
		return nil, err
	}
	// Restrict must also apply to existing threads.
	var before sync.WaitGroup
	before.Add(1)
	try := make(chan func())
	go func() {
		runtime.LockOSThread()
		before.Done()
		for f := range try {
			f()
		}
	}()
	before.Wait()
	if err := errors.Join(Isolate(), Drop(nobody, nobody), Restrict(WorkerPolicy())); err != nil {
		return nil, err
	}
	report := map[string]string{}
	var mu sync.Mutex
	check := func(name string, f func() error) {
		mu.Lock()
		defer mu.Unlock()
		report[name] = fmt.Sprint(f())
	}
	done := make(chan bool)
	try <- func() { forbidden("old thread: ", check); close(done) }
	<-done
	done = make(chan bool)
	go func() {
		runtime.LockOSThread()
		forbidden("new thread: ", check)
		close(done)
	}()
	<-done
	allowed(check, listener)
	check("root", func() error {
		entries, err := os.ReadDir("/")
		for _, e := range entries {
			err = errors.Join(err, errors.New(e.Name()))
		}
		return err
	})
	status, err := os.ReadFile("/proc/self/status")
	for line := range strings.Lines(string(status)) {
		if key, v, _ := strings.Cut(strings.TrimSpace(line), ":\t"); strings.HasPrefix(key, "Cap") || key == "NoNewPrivs" || key == "Seccomp" ||
			key == "Uid" || key == "Groups" {
			report[key] = v
		}
	}
	return report, err
}

func forbidden(thread string, check func(string, func() error)) {
	for name, f := range map[string]func() error{
		"execve": func() error { return syscall.Exec("/proc/self/exe", []string{"x"}, nil) }, //nolint:forbidigo // must fail
		"ptrace": func() error { return unix.PtraceAttach(1) },
		"mount":  func() error { return unix.Mount("x", "/proc", "tmpfs", 0, "") },
		"socket": func() error {
			_, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
			return err
		},
		"unix socket": func() error {
			_, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
			return err
		},
		"fork": func() error {
			_, _, errno := unix.RawSyscall(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0)
			return errno
		},
		"clone3": func() error {
			_, _, errno := unix.RawSyscall(unix.SYS_CLONE3, 0, 0, 0)
			return errno
		},
		"unshare":  func() error { return unix.Unshare(unix.CLONE_NEWUSER) },
		"setuid":   func() error { _, _, errno := unix.RawSyscall(unix.SYS_SETUID, 0, 0, 0); return errno },
		"kill":     func() error { return unix.Kill(1, 0) },
		"io_uring": func() error { _, _, errno := unix.RawSyscall(unix.SYS_IO_URING_SETUP, 1, 0, 0); return errno },
		"bpf":      func() error { _, _, errno := unix.RawSyscall(unix.SYS_BPF, 0, 0, 0); return errno },
		"dumpable": func() error { return unix.Prctl(unix.PR_SET_DUMPABLE, 1, 0, 0, 0) },
		"rlimit":   func() error { return unix.Prlimit(0, unix.RLIMIT_CORE, &unix.Rlimit{}, nil) },
		"tiocsti":  func() error { return unix.IoctlSetInt(0, unix.TIOCSTI, 0) },
		"chmod":    func() error { return unix.Fchmod(1, 0o777) },
	} {
		check(thread+name, f)
	}
}

func allowed(check func(string, func() error), listener net.Listener) {
	for name, f := range map[string]func() error{
		"threads": func() error {
			var all sync.WaitGroup
			for range 32 {
				all.Go(func() {
					runtime.LockOSThread()
					unix.Nanosleep(&unix.Timespec{Nsec: 1e6}, nil)
				})
			}
			all.Wait()
			return nil
		},
		"own directory": func() error {
			fd, err := os.Open("/proc/self/fd/1")
			if err == nil {
				fd.Close()
			}
			_, err = os.ReadDir("/proc/self/fd")
			return err
		},
		"executable memory": func() error {
			code, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
			if err != nil {
				return err
			}
			return unix.Mprotect(code, unix.PROT_READ|unix.PROT_EXEC)
		},
		"copy-on-write memory": func() error {
			fd, err := unix.MemfdCreate("x", unix.MFD_CLOEXEC)
			if err != nil {
				return err
			}
			return unix.Ftruncate(fd, 4096)
		},
		"demotion": func() error {
			param := struct{ priority int32 }{}
			_, _, errno := unix.RawSyscall(unix.SYS_SCHED_SETSCHEDULER, 0, 5 /* SCHED_IDLE */, uintptr(unsafe.Pointer(&param)))
			if errno != 0 {
				return errno
			}
			return nil
		},
		"accept": func() error {
			l := listener.(*net.TCPListener)
			_ = l.SetDeadline(time.Now())
			if _, err := l.Accept(); !errors.Is(err, os.ErrDeadlineExceeded) {
				return err
			}
			return nil
		},
	} {
		check(name, f)
	}
}

func TestLockdown(t *testing.T) {
	self, err := os.Executable()
	require.NoError(t, err)
	c := exec.Command(self)
	c.Env = append(os.Environ(), inside+"=1")
	c.Stderr = os.Stderr
	c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: workerapi.Namespaces, Pdeathsig: unix.SIGKILL}
	out, err := c.Output()
	require.NoError(t, err)
	report := map[string]string{}
	require.NoError(t, json.Unmarshal(out, &report), "%s", out)
	require.Empty(t, report["error"])
	for name, result := range report {
		switch {
		case strings.HasSuffix(name, "clone3"):
			require.Equal(t, unix.ENOSYS.Error(), result)
		case strings.Contains(name, " thread: "):
			require.Equal(t, unix.EPERM.Error(), result, name)
		}
	}
	for _, name := range []string{"threads", "own directory", "executable memory", "copy-on-write memory", "demotion", "accept"} {
		require.Equal(t, "<nil>", report[name], name)
	}
	require.Equal(t, "proc", report["root"])
	for _, set := range []string{"CapInh", "CapPrm", "CapEff", "CapAmb"} {
		require.Equal(t, "0000000000000000", report[set], set)
	}
	require.Equal(t, "1", report["NoNewPrivs"])
	require.Equal(t, "2", report["Seccomp"])
	require.Equal(t, strings.Repeat(fmt.Sprint(nobody, "\t"), 3)+fmt.Sprint(nobody), report["Uid"])
	require.Empty(t, strings.TrimSpace(report["Groups"]))
}

// reachOut reports what a locked-down process can do to the victim. The victim itself waits for the end of its standard
// input.
func reachOut() (map[string]string, error) {
	if err := errors.Join(Isolate(), Drop(nobody, nobody), Restrict(WorkerPolicy())); err != nil {
		return nil, err
	}
	report := map[string]string{}
	pid, err := strconv.Atoi(os.Getenv(victim))
	if err != nil { // this process is the victim
		fmt.Println("ready")
		_, err := io.Copy(io.Discard, os.Stdin)
		return report, err
	}
	signal := func(owner int) error { // makes the kernel send SIGKILL when the pipe is readable
		r, w, err := os.Pipe()
		if err != nil {
			return err
		}
		defer r.Close()
		defer w.Close()
		var errs []error
		for _, c := range [][2]int{{unix.F_SETOWN, owner}, {unix.F_SETSIG, int(unix.SIGKILL)}, {unix.F_SETFL, unix.O_ASYNC}} {
			_, err := unix.FcntlInt(r.Fd(), c[0], c[1])
			errs = append(errs, err)
		}
		_, err = w.Write([]byte{0})
		return errors.Join(append(errs, err)...)
	}
	priority := struct{ priority int32 }{}
	for name, f := range map[string]func() error{
		"tgkill":   func() error { return unix.Tgkill(pid, pid, unix.SIGKILL) },
		"kill":     func() error { return unix.Kill(pid, unix.SIGKILL) },
		"all":      func() error { return unix.Kill(-1, unix.SIGKILL) },
		"F_SETOWN": func() error { return signal(pid) },
		"group":    func() error { return signal(-pid) },
		"ptrace":   func() error { return unix.PtraceAttach(pid) },
		"pidfd":    func() error { _, err := unix.PidfdOpen(pid, 0); return err },
		"memory":   func() error { _, err := os.Open(fmt.Sprintf("/proc/%d/mem", pid)); return err },
		"status":   func() error { _, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid)); return err },
		"nice":     func() error { return unix.Setpriority(unix.PRIO_PROCESS, pid, 19) },
		"limits":   func() error { return unix.Prlimit(pid, unix.RLIMIT_NOFILE, nil, &unix.Rlimit{}) },
		"demotion": func() error {
			_, _, errno := unix.RawSyscall(unix.SYS_SCHED_SETSCHEDULER, uintptr(pid), 5 /* SCHED_IDLE */, uintptr(unsafe.Pointer(&priority)))
			return errno
		},
	} {
		report[name] = fmt.Sprint(f())
	}
	entries, err := os.ReadDir("/proc")
	for _, e := range entries {
		if n, notPID := strconv.Atoi(e.Name()); notPID == nil && n != os.Getpid() {
			report["seen"] += e.Name() + " "
		}
	}
	return report, err
}

// TestOthersAreOutOfReach checks that a worker cannot signal, trace, slow or see another worker of the same user.
func TestOthersAreOutOfReach(t *testing.T) {
	self, err := os.Executable()
	require.NoError(t, err)
	start := func(env ...string) *exec.Cmd {
		c := exec.Command(self)
		c.Env, c.Stderr = append(append(os.Environ(), inside+"=1"), env...), os.Stderr
		c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: workerapi.Namespaces, Pdeathsig: unix.SIGKILL}
		return c
	}
	other := start(victim + "=none")
	stdin, err := other.StdinPipe()
	require.NoError(t, err)
	stdout, err := other.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, other.Start())
	line, err := bufio.NewReader(stdout).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "ready\n", line)

	out, err := start(fmt.Sprintf("%s=%d", victim, other.Process.Pid)).Output()
	require.NoError(t, err)
	report := map[string]string{}
	require.NoError(t, json.Unmarshal(out, &report), "%s", out)
	require.Empty(t, report["seen"])
	delete(report, "seen")
	require.Len(t, report, 12)
	for name, result := range report {
		require.NotEqual(t, "<nil>", result, name)
	}
	for _, name := range []string{"tgkill", "F_SETOWN", "nice", "demotion"} { // allowed by the filter, so the PID namespace must prevent them
		require.Contains(t, report[name], unix.ESRCH.Error(), name)
	}
	require.NoError(t, stdin.Close())
	require.NoError(t, other.Wait(), "the victim was killed or has failed")
}

func TestIsolateNeedsAnOwnNamespace(t *testing.T) {
	require.True(t, errdefs.IsFailedPrecondition(Isolate()))
}

func TestDropNeedsAUser(t *testing.T) {
	require.True(t, errdefs.IsInvalidArgument(Drop(0, nobody)))
	require.True(t, errdefs.IsInvalidArgument(Drop(nobody, 0)))
}
