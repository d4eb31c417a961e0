package qemu

import (
	"context"
	"encoding/json"
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
)

const killSignal = unix.SIGKILL

// run is one life of a machine's QEMU, started by us or found again.
type run struct {
	socket string // of the monitor
	proc   *process.Process
	pidfd  *os.File      // of our own: it tells how the process ended when we are not its parent
	reaped chan struct{} // closed when it has ended, and was reaped if it was our child
	status unix.WaitStatus
	known  bool          // status is
	over   chan struct{} // closed when its end is on record
	shares *virtiofsd.Servers

	mu  sync.Mutex
	mon *qmp.Client
	has chan struct{} // closed while there is a monitor
}

// newRun is for a child of ours.
func newRun(h *handle, cmd *exec.Cmd) (*run, error) {
	p, err := process.Open(cmd.Process.Pid)
	if err != nil {
		return nil, err
	}
	r := adopt(h, p)
	go func() {
		defer close(r.reaped)
		_ = cmd.Wait() // its state is what counts
		if cmd.ProcessState != nil {
			if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok {
				r.status, r.known = unix.WaitStatus(ws), true
			}
		}
	}()
	return r, nil
}

// adopted is for a process that another life of the daemon has started.
func adopted(h *handle, p *process.Process) *run {
	r := adopt(h, p)
	go func() {
		defer close(r.reaped)
		<-p.Dead
		r.status, r.known = exitStatus(r.pidfd)
	}()
	return r
}

func adopt(h *handle, p *process.Process) *run {
	r := &run{
		socket: filepath.Join(h.def.Dir, monitorSocket), proc: p,
		reaped: make(chan struct{}), over: make(chan struct{}), has: make(chan struct{}),
	}
	if fd, err := unix.PidfdOpen(p.Pid, 0); err == nil {
		r.pidfd = os.NewFile(uintptr(fd), "pidfd")
	}
	return r
}

// exitStatus asks the kernel how a process ended that was somebody else's child; it tells since Linux 6.15, once the
// process was reaped.
func exitStatus(pidfd *os.File) (unix.WaitStatus, bool) {
	if pidfd == nil {
		return 0, false
	}
	hangup := []unix.PollFd{{Fd: int32(pidfd.Fd())}} // POLLHUP, which is always told: it was reaped
	if n, err := unix.Poll(hangup, int(askTime/time.Millisecond)); err != nil || n == 0 {
		return 0, false
	}
	info := unix.PidfdInfo{Mask: unix.PIDFD_INFO_EXIT}
	if err := unix.IoctlPidfdInfo(int(pidfd.Fd()), &info); err != nil || info.Mask&unix.PIDFD_INFO_EXIT == 0 {
		return 0, false
	}
	return unix.WaitStatus(info.Exit_code), true
}

// close lets go of the process and its monitor.
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

// await waits until the process has ended.
func (r *run) await(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, endTime)
	defer cancel()
	select {
	case <-r.reaped:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("QEMU (pid %d) was killed and has not ended: %w (%w)", r.proc.Pid, context.Cause(ctx), errdefs.ErrUnavailable)
	}
}

// whileAlive is a context that ends with the process.
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

// connect dials the monitor and negotiates.
func (r *run) connect(ctx context.Context) error {
	conn, err := machine.Dial(ctx, r.socket)
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
	close(r.has)
	return nil
}

// disconnected forgets a monitor that has ended.
func (r *run) disconnected() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mon != nil {
		r.mon.Close()
		r.mon, r.has = nil, make(chan struct{})
	}
}

// client is the monitor, nil while there is none.
func (r *run) client() *qmp.Client {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.mon
}

func (r *run) version() string {
	if m := r.client(); m != nil {
		return m.Version().String()
	}
	return ""
}

// execute is ask for a command without arguments.
func (r *run) execute(ctx context.Context, command string, result any) error {
	return r.ask(ctx, command, nil, result)
}

// ask runs a command of the monitor, for which it waits no longer than askTime.
func (r *run) ask(ctx context.Context, command string, arguments, result any) error {
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	r.mu.Lock()
	has := r.has
	r.mu.Unlock()
	select {
	case <-has:
	case <-r.proc.Dead:
	case <-ctx.Done():
	}
	m := r.client()
	if m == nil {
		return fmt.Errorf("%s: QEMU's monitor is not there: %w", command, errdefs.ErrUnavailable)
	}
	return m.Execute(ctx, command, arguments, result)
}

// stats asks for what only QEMU knows.
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
			// A virtio disk is named by its path, .../disk-root/virtio-backend, a SCSI disk by its ID.
			if b.Device == "disk-"+disk.ID || filepath.Base(filepath.Dir(b.Device)) == "disk-"+disk.ID {
				s.Blocks[disk.ID] = machine.BlockStats(b.Stats)
			}
		}
	}
	var balloon struct {
		Actual json.Number `json:"actual"`
	}
	if err := r.execute(ctx, "query-balloon", &balloon); err == nil { // else the guest has no driver for it
		if n, err := balloon.Actual.Int64(); err == nil && n > 0 {
			s.BalloonActual = uint64(n)
		}
	}
	return s, nil
}
