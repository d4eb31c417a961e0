package qemu

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/qmp"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/virtiofsd"
	"github.com/tripod-run/tripod/internal/unixsocket"
)

const killSignal = unix.SIGKILL

// run is one QEMU process of a machine, started by this daemon or by an earlier one.
type run struct {
	socket      string // of the monitor
	proc        *process.Process
	pidfd       *os.File      // for exitStatus, when QEMU is not a child of this daemon; can be nil
	reaped      chan struct{} // closed when the process has ended and, if it is a child, was reaped
	status      unix.WaitStatus
	statusKnown bool
	recorded    chan struct{} // closed when the end is recorded and reported
	shares      *virtiofsd.Servers

	mu        sync.Mutex
	mon       *qmp.Client   // nil while disconnected
	connected chan struct{} // closed while mon is set
}

// newChildRun returns the run of a child process.
func newChildRun(h *handle, cmd *exec.Cmd) (*run, error) {
	p, err := process.Open(cmd.Process.Pid)
	if err != nil {
		return nil, err
	}
	r := newRun(h, p)
	go func() {
		defer close(r.reaped)
		_ = cmd.Wait() // ProcessState has the result
		if cmd.ProcessState != nil {
			if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok {
				r.status, r.statusKnown = unix.WaitStatus(ws), true
			}
		}
	}()
	return r, nil
}

// newAdoptedRun returns the run of a process that an earlier daemon started.
func newAdoptedRun(h *handle, p *process.Process) *run {
	r := newRun(h, p)
	go func() {
		defer close(r.reaped)
		<-p.Dead
		r.status, r.statusKnown = exitStatus(r.pidfd)
	}()
	return r
}

func newRun(h *handle, p *process.Process) *run {
	r := &run{
		socket: filepath.Join(h.def.Dir, monitorSocket), proc: p,
		reaped: make(chan struct{}), recorded: make(chan struct{}), connected: make(chan struct{}),
	}
	if fd, err := unix.PidfdOpen(p.Pid, 0); err == nil {
		r.pidfd = os.NewFile(uintptr(fd), "pidfd")
	}
	return r
}

// exitStatus asks the kernel for the exit status of another process's child. It succeeds only on Linux 6.15 or later,
// and only after the child was reaped.
func exitStatus(pidfd *os.File) (unix.WaitStatus, bool) {
	if pidfd == nil {
		return 0, false
	}
	hangup := []unix.PollFd{{Fd: int32(pidfd.Fd())}} // POLLHUP, which is always reported, means that the process was reaped
	if n, err := unix.Poll(hangup, int(monitorTimeout/time.Millisecond)); err != nil || n == 0 {
		return 0, false
	}
	info := unix.PidfdInfo{Mask: unix.PIDFD_INFO_EXIT}
	if err := unix.IoctlPidfdInfo(int(pidfd.Fd()), &info); err != nil || info.Mask&unix.PIDFD_INFO_EXIT == 0 {
		return 0, false
	}
	return unix.WaitStatus(info.Exit_code), true
}

// close releases the process, its virtiofsd processes and the monitor. All of them continue to run.
func (r *run) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mon != nil {
		r.mon.Close()
	}
	r.proc.Close()
	r.shares.Close()
	if r.pidfd != nil {
		r.pidfd.Close()
	}
}

// await waits at most killTimeout for the process to end.
func (r *run) await(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, killTimeout)
	defer cancel()
	select {
	case <-r.reaped:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("QEMU (pid %d) was killed but has not ended: %w (%w)", r.proc.Pid, context.Cause(ctx), errdefs.ErrUnavailable)
	}
}

// whileAlive returns a context that is canceled when the process ends.
func (r *run) whileAlive(parent context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(parent)
	stopped := make(chan struct{})
	go func() {
		select {
		case <-r.proc.Dead:
			cancel(fmt.Errorf("QEMU (pid %d) ended: %w", r.proc.Pid, errdefs.ErrUnavailable))
		case <-stopped:
		}
	}()
	return ctx, sync.OnceFunc(func() { close(stopped); cancel(nil) })
}

// connect dials the monitor and negotiates capabilities.
func (r *run) connect(ctx context.Context) error {
	conn, err := unixsocket.Dial(ctx, r.socket)
	if err != nil {
		return err
	}
	m, err := qmp.NewClient(ctx, conn)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mon = m
	close(r.connected)
	return nil
}

// disconnected closes a monitor connection that has ended. The run is then without a monitor until connect succeeds
// again.
func (r *run) disconnected() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mon != nil {
		r.mon.Close()
		r.mon, r.connected = nil, make(chan struct{})
	}
}

// client returns the monitor, or nil while it is disconnected.
func (r *run) client() *qmp.Client {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.mon
}

// monitor returns the monitor, or errdefs.ErrUnavailable while it is disconnected.
func (r *run) monitor() (*qmp.Client, error) {
	if m := r.client(); m != nil {
		return m, nil
	}
	return nil, fmt.Errorf("not connected to QEMU's monitor: %w", errdefs.ErrUnavailable)
}

func (r *run) version() string {
	if m := r.client(); m != nil {
		return m.Version().String()
	}
	return ""
}

// execute runs a monitor command that has no arguments; see ask.
func (r *run) execute(ctx context.Context, command string, result any) error {
	return r.ask(ctx, command, nil, result)
}

// ask runs a monitor command. It waits at most monitorTimeout for the connection and the answer.
func (r *run) ask(ctx context.Context, command string, arguments, result any) error {
	return r.askFile(ctx, command, arguments, nil, result)
}

// askFile is like ask for a command that takes a file.
func (r *run) askFile(ctx context.Context, command string, arguments any, file *os.File, result any) error {
	ctx, cancel := context.WithTimeout(ctx, monitorTimeout)
	defer cancel()
	r.mu.Lock()
	connected := r.connected
	r.mu.Unlock()
	select {
	case <-connected:
	case <-r.proc.Dead:
	case <-ctx.Done():
	}
	m, err := r.monitor()
	if err != nil {
		return fmt.Errorf("%s: %w", command, err)
	}
	return m.ExecuteFile(ctx, command, arguments, file, result)
}

// stats returns the statistics that only QEMU has.
func (r *run) stats(ctx context.Context, def machine.Definition) (machine.Stats, error) {
	s := machine.Stats{Blocks: map[string]machine.BlockStats{}}
	var blocks []struct {
		Device string `json:"qdev"`
		Stats  struct {
			ReadBytes  uint64 `json:"rd_bytes"`
			WriteBytes uint64 `json:"wr_bytes"`
			ReadOps    uint64 `json:"rd_operations"`
			WriteOps   uint64 `json:"wr_operations"`
		} `json:"stats"`
	}
	if err := r.execute(ctx, "query-blockstats", &blocks); err != nil {
		return s, err
	}
	for _, disk := range def.Disks {
		for _, b := range blocks {
			// query-blockstats names a virtio disk by its path, such as .../disk-root/virtio-backend, and a SCSI disk
			// by its ID.
			if b.Device == "disk-"+disk.ID || filepath.Base(filepath.Dir(b.Device)) == "disk-"+disk.ID {
				s.Blocks[disk.ID] = machine.BlockStats(b.Stats)
			}
		}
	}
	if actual, err := r.memory(ctx, def); err == nil {
		s.Memory = actual
	}
	return s, nil
}
