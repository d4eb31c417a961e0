package guestinit

import (
	"errors"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	program  = "/usr/bin/tripod-guest"
	hostname = "tripod" // until tripod-guest sets the pod's

	// A program that ends is started again after a pause, which doubles from firstPause to lastPause. A program that ran
	// for longer than lastPause begins at firstPause again.
	firstPause = 100 * time.Millisecond
	lastPause  = 5 * time.Second
)

// Run boots the guest. It does not return: the kernel panics if its first process ends.
func Run() {
	report("root", enterRoot())
	for _, m := range mounts {
		report("mount "+m.target, m.mount())
	}
	for _, l := range links {
		report("link "+l.name, os.Symlink(l.target, l.name))
	}
	loadModules()
	report("cgroups", enableControllers(cgroupRoot))
	report("lo", loopbackUp())
	report("limits", raiseLimits())
	report("host name", unix.Sethostname([]byte(hostname)))
	supervise()
}

// raiseLimits sets the limits that tripod-guest's containers inherit to those of dist/tripod.service. The kernel's own are for
// a machine with little memory.
func raiseLimits() error {
	return errors.Join(
		syscall.Setrlimit(unix.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 1024, Max: 1 << 20}),
		syscall.Setrlimit(unix.RLIMIT_NPROC, &syscall.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY}),
	)
}

// supervise keeps the program running and reaps every process that ends.
//
// All children are reaped by the one loop below, so nothing here may use os.Process.Wait or os/exec.
func supervise() {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, unix.SIGCHLD)
	pid, started, pause := 0, time.Time{}, time.Duration(0)
	start := time.NewTimer(0)
	for {
		select {
		case <-start.C:
			started = time.Now()
			var err error
			if pid, err = startProgram(); err != nil {
				pid, pause = 0, nextPause(pause, 0)
				report("start "+program, err)
				start.Reset(pause)
				break
			}
			say("started tripod-guest at " + uptime() + " s")
		case <-signals:
			if status, ended := reap(pid); ended {
				pid, pause = 0, nextPause(pause, time.Since(started))
				say("tripod-guest " + describe(status))
				start.Reset(pause)
			}
		}
	}
}

// startProgram starts the program with this process's standard files, which are the console, in a session of its own.
func startProgram() (int, error) {
	return syscall.ForkExec(program, []string{program}, &syscall.ProcAttr{
		Dir: "/", Env: []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"},
		Files: []uintptr{0, 1, 2}, Sys: &syscall.SysProcAttr{Setsid: true},
	})
}

// reap collects all processes that have ended. It returns the status of the process pid if that was one of them.
func reap(pid int) (status unix.WaitStatus, ended bool) {
	for {
		var s unix.WaitStatus
		switch got, err := unix.Wait4(-1, &s, unix.WNOHANG, nil); {
		case err == unix.EINTR:
		case err != nil || got == 0:
			return status, ended
		case got == pid:
			status, ended = s, true
		}
	}
}

func nextPause(last, ran time.Duration) time.Duration {
	if last == 0 || ran > lastPause {
		return firstPause
	}
	return min(2*last, lastPause)
}

func describe(s unix.WaitStatus) string {
	if s.Signaled() {
		return "was killed by signal " + strconv.Itoa(int(s.Signal()))
	}
	return "exited with code " + strconv.Itoa(s.ExitStatus())
}

// uptime returns the seconds since the kernel started, with three decimals.
func uptime() string {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &t) // cannot fail for this clock
	return strconv.FormatFloat(time.Duration(t.Nano()).Seconds(), 'f', 3, 64)
}

// report writes an error to the console.
func report(what string, err error) {
	if err != nil {
		say(what + ": " + err.Error())
	}
}

func say(text string) { os.Stderr.WriteString("tripod-init: " + text + "\n") }
