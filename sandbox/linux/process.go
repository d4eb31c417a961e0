package linux

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// procID names a process for good: a PID is used again, the time at which its process began is not.
type procID struct {
	Pid int `json:"pid"`
	// Start is the 22nd field of /proc/PID/stat: clock ticks since boot.
	Start uint64 `json:"start"`
}

// process is a process that is watched through a pidfd, ours or not.
type process struct {
	procID
	fd *os.File
	// dead is closed when the process has ended (it may still be a zombie).
	dead chan struct{}
}

// openProcess watches the process that has this PID now. One that has ended is an errdefs.ErrNotFound.
func openProcess(pid int) (*process, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) {
		return nil, fmt.Errorf("process %d has ended: %w", pid, errdefs.ErrNotFound)
	}
	if err != nil {
		return nil, fmt.Errorf("pidfd of process %d: %w", pid, err)
	}
	// The descriptor is held, so what is read of this PID until the process is seen alive again is of this process.
	start, err := startTime(pid)
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	p := &process{procID: procID{pid, start}, fd: os.NewFile(uintptr(fd), "pidfd"), dead: make(chan struct{})}
	go p.watch()
	return p, nil
}

// adoptProcess is openProcess for a process that was known before; another one of the same PID does not count.
func adoptProcess(id procID) (*process, error) {
	if id.Pid <= 0 {
		return nil, fmt.Errorf("no process is recorded: %w", errdefs.ErrNotFound)
	}
	p, err := openProcess(id.Pid)
	if err != nil {
		return nil, err
	}
	if p.Start != id.Start {
		p.close()
		return nil, fmt.Errorf("process %d is another one now: %w", id.Pid, errdefs.ErrNotFound)
	}
	return p, nil
}

// deadProcess stands for a process that has ended already.
func deadProcess(id procID) *process {
	p := &process{procID: id, dead: make(chan struct{})}
	close(p.dead)
	return p
}

func (p *process) watch() {
	defer p.fd.Close()
	conn, err := p.fd.SyscallConn()
	if err != nil {
		return
	}
	ended := false
	// Read waits on the poller of the Go runtime: no thread is held. It fails when the file is closed.
	_ = conn.Read(func(fd uintptr) bool {
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(poll, 0)
		ended = err == nil && n == 1
		return ended
	})
	if ended {
		close(p.dead)
	}
}

// close stops watching. A process that has ended needs none.
func (p *process) close() {
	if p != nil && p.fd != nil {
		_ = p.fd.Close()
	}
}

func (p *process) alive() bool {
	select {
	case <-p.dead:
		return false
	default:
		return true
	}
}

// ending tells whether the process has ended or is on its way: it executes nothing of its own any more.
func (p *process) ending() bool {
	if !p.alive() {
		return true
	}
	fields, err := statFields(p.Pid)
	if err != nil {
		return true
	}
	flags, err := strconv.ParseUint(string(fields[9-3]), 10, 64)
	const exiting = 0x4 // PF_EXITING
	return err == nil && flags&exiting != 0
}

// signal sends sig to the process, and to no other that has its PID by now. To one that has ended it does nothing.
func (p *process) signal(sig unix.Signal) error {
	if p.fd == nil {
		return nil
	}
	conn, err := p.fd.SyscallConn()
	if err != nil {
		return nil
	}
	var sendErr error
	err = conn.Control(func(fd uintptr) { sendErr = unix.PidfdSendSignal(int(fd), sig, nil, 0) })
	if err != nil || errors.Is(sendErr, unix.ESRCH) {
		return nil // closed, as it is once the process has ended
	}
	return sendErr
}

// killGroup kills the process and, when it leads a process group, all of that: a monitor with the OCI runtime that it
// has at work and what that has started, a program with its children.
func (p *process) killGroup() error {
	if group, err := unix.Getpgid(p.Pid); err == nil && group == p.Pid && p.alive() {
		_ = unix.Kill(-p.Pid, unix.SIGKILL)
	}
	return p.signal(unix.SIGKILL)
}

// wait returns when the process has ended, or with the context's error.
func (p *process) wait(ctx context.Context) error {
	select {
	case <-p.dead:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for the end of process %d: %w", p.Pid, ctx.Err())
	}
}

// waitFor is wait with a time instead of a context; it tells whether the process has ended.
func (p *process) waitFor(d time.Duration) bool {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	return p.wait(ctx) == nil
}

// startTime reads field 22 of /proc/PID/stat.
func startTime(pid int) (uint64, error) {
	fields, err := statFields(pid)
	if err != nil {
		return 0, err
	}
	return strconv.ParseUint(string(fields[22-3]), 10, 64)
}

// parentOf reads the parent's PID.
func parentOf(pid int) (int, error) {
	fields, err := statFields(pid)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(string(fields[4-3]))
}

// statFields reads the fields 3 to 22 and later of /proc/PID/stat. The second, the name, may contain anything, blanks and
// ")" too. A process that has ended is an errdefs.ErrNotFound.
func statFields(pid int) ([][]byte, error) {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return nil, fmt.Errorf("process %d has ended: %w", pid, errdefs.ErrNotFound)
	}
	if err != nil {
		return nil, err
	}
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) <= 22-3 {
		return nil, fmt.Errorf("/proc/%d/stat has too few fields: %q", pid, stat)
	}
	return fields, nil
}

// startedAt turns a start time in clock ticks into wall-clock time.
func startedAt(ticks uint64) time.Time {
	const hertz = 100 // USER_HZ, the same on all architectures that Linux runs on today
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil {
		return time.Now()
	}
	age := time.Duration(now.Nano()) - time.Duration(ticks)*(time.Second/hertz)
	return time.Now().Add(-max(age, 0))
}
