package process

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

// ID identifies a process permanently: the kernel reuses PIDs, but not with the same start time.
type ID struct {
	Pid int `json:"pid"`
	// Start is the 22nd field of /proc/PID/stat: clock ticks since boot.
	Start uint64 `json:"start"`
}

// Process is a process that is watched through a pidfd.
type Process struct {
	ID
	fd *os.File
	// Dead is closed when the process has ended. The process may then still be a zombie.
	Dead chan struct{}
}

// Open watches the process that currently has this PID. It returns errdefs.ErrNotFound if no process has this PID.
func Open(pid int) (*Process, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) {
		return nil, fmt.Errorf("process %d has ended: %w", pid, errdefs.ErrNotFound)
	}
	if err != nil {
		return nil, fmt.Errorf("open pidfd of process %d: %w", pid, err)
	}
	// While we hold the descriptor, /proc/PID is this process or does not exist.
	start, err := StartTime(pid)
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	p := &Process{ID: ID{pid, start}, fd: os.NewFile(uintptr(fd), "pidfd"), Dead: make(chan struct{})}
	go p.watch()
	return p, nil
}

// Adopt is like Open, but for a process whose ID was recorded earlier. If another process has the PID now, it returns
// errdefs.ErrNotFound.
func Adopt(id ID) (*Process, error) {
	if id.Pid <= 0 {
		return nil, fmt.Errorf("no process is recorded: %w", errdefs.ErrNotFound)
	}
	p, err := Open(id.Pid)
	if err != nil {
		return nil, err
	}
	if p.Start != id.Start {
		p.Close()
		return nil, fmt.Errorf("process %d has ended, and another one has its PID: %w", id.Pid, errdefs.ErrNotFound)
	}
	return p, nil
}

// Ended returns a Process that has already ended.
func Ended(id ID) *Process {
	p := &Process{ID: id, Dead: make(chan struct{})}
	close(p.Dead)
	return p
}

func (p *Process) watch() {
	defer p.fd.Close()
	conn, err := p.fd.SyscallConn()
	if err != nil {
		return
	}
	ended := false
	// Read waits in the Go runtime's poller, without a thread. It fails when the file is closed.
	_ = conn.Read(func(fd uintptr) bool {
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(poll, 0)
		ended = err == nil && n == 1
		return ended
	})
	if ended {
		close(p.Dead)
	}
}

// Close stops watching. It is not needed after the process has ended.
func (p *Process) Close() {
	if p != nil && p.fd != nil {
		_ = p.fd.Close()
	}
}

// Alive reports whether the process has not ended.
func (p *Process) Alive() bool {
	select {
	case <-p.Dead:
		return false
	default:
		return true
	}
}

// Ending reports whether the process has ended or is exiting. In both cases its program no longer runs.
func (p *Process) Ending() bool {
	if !p.Alive() {
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

// Signal sends sig to the process, never to another process that reuses its PID. It does nothing if the process has
// ended.
func (p *Process) Signal(sig unix.Signal) error {
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
		return nil // the descriptor is closed, because the process has ended
	}
	return sendErr
}

// KillGroup kills the process and, if the process leads a process group, the whole group: for example a monitor and the
// OCI runtime that it runs, or a program and its children.
func (p *Process) KillGroup() error {
	if group, err := unix.Getpgid(p.Pid); err == nil && group == p.Pid && p.Alive() {
		_ = unix.Kill(-p.Pid, unix.SIGKILL)
	}
	return p.Signal(unix.SIGKILL)
}

// Wait waits until the process has ended. If ctx ends first, it returns ctx.Err(), wrapped.
func (p *Process) Wait(ctx context.Context) error {
	select {
	case <-p.Dead:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for the end of process %d: %w", p.Pid, ctx.Err())
	}
}

// WaitFor waits at most d for the end of the process, and reports whether the process has ended.
func (p *Process) WaitFor(d time.Duration) bool {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	return p.Wait(ctx) == nil
}

// StartTime returns the start time of a process: field 22 of /proc/PID/stat, in clock ticks since boot.
func StartTime(pid int) (uint64, error) {
	fields, err := statFields(pid)
	if err != nil {
		return 0, err
	}
	return strconv.ParseUint(string(fields[22-3]), 10, 64)
}

// ParentOf returns the PID of a process's parent.
func ParentOf(pid int) (int, error) {
	fields, err := statFields(pid)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(string(fields[4-3]))
}

// statFields returns the fields of /proc/PID/stat, beginning with the third. The second field, the name, can contain
// blanks and ")", so the fields are counted from the last ")". It returns errdefs.ErrNotFound if the process has ended.
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

// StartedAt converts a start time in clock ticks since boot to wall-clock time.
func StartedAt(ticks uint64) time.Time {
	const hertz = 100 // USER_HZ, the same on all architectures that Linux runs on today
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil {
		return time.Now()
	}
	age := time.Duration(now.Nano()) - time.Duration(ticks)*(time.Second/hertz)
	return time.Now().Add(-max(age, 0))
}
