package workers

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/egress"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/launch"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
	"github.com/tripod-run/tripod/internal/stats"
	"github.com/tripod-run/tripod/internal/unixsocket"
)

var fpDialer = failpoint.New("wasm.dialer.spawned")

// dialerIdle is how long a dialer without pods runs.
const dialerIdle = 5 * time.Second

// Dialers starts and finds the node's dialers. Usually there is one. After tripod-wasm was replaced, the dialer of the
// previous version keeps its pods, and a new one gets the new pods. A dialer that has no pods ends by itself.
//
//	<DialersDir>/<name>/    control.sock  log  worker.json
type Dialers struct {
	// Died is called when a dialer has ended. It is set before the first call of Open or Recover.
	Died func()

	cfg    Config
	keeper *Keeper
	ctx    context.Context // ends with close
	stop   context.CancelFunc

	mu      sync.Mutex // also serializes starts
	running map[string]*dialerProcess
	tasks   sync.WaitGroup
}

// dialerProcess is a dialer, started by this daemon or a previous one.
type dialerProcess struct {
	name, dir, cgroup string
	proc              *process.Process
	child             *exec.Cmd // set if this daemon has started the process and so must reap it
	retired           bool      // another version of the program is installed now
}

// NewDialers returns the dialers that run in the place of a keeper's shared workers. See Recover.
func NewDialers(k *Keeper) *Dialers {
	d := &Dialers{cfg: k.cfg, keeper: k, running: map[string]*dialerProcess{}}
	d.ctx, d.stop = context.WithCancel(context.Background())
	return d
}

// Open passes an order to the current dialer, which Open starts if there is none. It returns the worker's end of the pod's
// connection, and the dialer's name.
func (d *Dialers) Open(ctx context.Context, o egress.Order, netns *os.File) (conn *os.File, name string, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, "", fmt.Errorf("socket pair for the dialer: %w", err)
	}
	workers, dialers := os.NewFile(uintptr(fds[0]), "dialer"), os.NewFile(uintptr(fds[1]), "dialer")
	defer dialers.Close()
	for range 2 { // a dialer can end when nobody needs it, just before the order
		var p *dialerProcess
		if p, err = d.current(ctx); err != nil {
			break
		}
		if err = d.order(ctx, p, o, netns, dialers); err == nil {
			return workers, p.name, nil
		}
		if !errdefs.IsUnavailable(err) || !p.proc.WaitFor(time.Second) {
			break
		}
		d.forget(p)
	}
	workers.Close()
	return nil, "", fmt.Errorf("egress of the pod: %w", err)
}

func (d *Dialers) order(ctx context.Context, p *dialerProcess, o egress.Order, netns, conn *os.File) error {
	ctx, cancel := context.WithTimeout(ctx, helloTime)
	defer cancel()
	control, err := unixsocket.Dial(ctx, filepath.Join(p.dir, launch.ControlSocket))
	if err != nil {
		return fmt.Errorf("dialer %s: %w: %w", p.name, err, errdefs.ErrUnavailable)
	}
	return o.Send(ctx, control, netns, conn)
}

// Current returns the dialer for new pods. If there is none, current starts one.
func (d *Dialers) current(ctx context.Context) (*dialerProcess, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, p := range d.running {
		if !p.retired && p.proc.Alive() {
			return p, nil
		}
	}
	if d.ctx.Err() != nil {
		return nil, fmt.Errorf("the backend is closed: %w", errdefs.ErrUnavailable)
	}
	name := "dialer-" + strconv.FormatInt(time.Now().UnixNano(), 36) // never used twice
	p := &dialerProcess{name: name, dir: filepath.Join(d.cfg.DialersDir, name)}
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	if err := d.spawn(ctx, p); err != nil {
		if p.child != nil {
			_ = p.child.Process.Kill()
			_ = p.child.Wait()
		}
		return nil, errors.Join(fmt.Errorf("start dialer: %w", err), d.cleanUp(p))
	}
	d.cfg.Logger.Info("dialer started", "dialer", p.name, "pid", p.proc.Pid)
	d.followLocked(p)
	return p, nil
}

// spawn starts a dialer.
func (d *Dialers) spawn(ctx context.Context, p *dialerProcess) error {
	if err := os.MkdirAll(p.dir, 0o700); err != nil {
		return err
	}
	shared, err := d.keeper.shared(ctx)
	if err != nil {
		return err
	}
	in := shared.forWorker(p.name)
	p.cgroup = in.dir
	if err := p.record(); err != nil { // before the cgroup exists, so that recovery finds the cgroup
		return err
	}
	config := workerapi.DialerConfig{Name: p.name, LogLevel: d.cfg.LogLevel, Isolated: true, Idle: dialerIdle}
	ready, cmd, err := d.cfg.Program.Lasting(ctx, p.dir, []string{launch.ControlSocket}, "dialer", config)
	if err != nil {
		return err
	}
	defer ready.Close()
	if d.cfg.Program.UID != 0 {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(d.cfg.Program.UID), Gid: uint32(d.cfg.Program.GID)}
		cmd.SysProcAttr.AmbientCaps = []uintptr{unix.CAP_SYS_ADMIN}
	}
	if err := in.run(cmd); err != nil {
		return err
	}
	p.child = cmd
	d.limitMemory(in)
	if p.proc, err = process.Open(cmd.Process.Pid); err != nil {
		return err
	}
	if err := p.record(); err != nil {
		return err
	}
	if err := errors.Join(launch.Limit(p.proc.Pid), fpDialer.Hit(ctx)); err != nil {
		return err
	}
	if err := launch.AwaitReady(ctx, ready); err != nil {
		return fmt.Errorf("%w: %s", err, launch.LastWords(p.dir))
	}
	return nil
}

// dialerShare is the part of the node's memory, one in so many, that a dialer may use. The buffers of the connections that
// it has opened count, too, even in the workers; the kernel keeps those of TCP below a tenth of the memory (tcp_mem in
// tcp(7)).
const dialerShare = 4

// limitMemory bounds the memory of a dialer that has its own cgroup. A kernel without the memory controller cannot do
// that, but pods can call out there, too.
func (d *Dialers) limitMemory(in place) {
	limit := &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: int64(stats.NodeMemory() / dialerShare)}
	if err := in.tree.Apply(in.dir, in.tree.Limits(limit, nil)); err != nil {
		d.cfg.Logger.Warn("the dialer runs without a memory limit", "err", err)
	}
}

// record writes the process and the cgroup to the dialer's directory, for the next daemon.
func (p *dialerProcess) record() error {
	s := workerState{Cgroup: p.cgroup}
	if p.proc != nil {
		s.Process = p.proc.ID
	}
	return format.Write(filepath.Join(p.dir, workerFile), s)
}

// Recover finds the dialers of previous daemons, and removes what ended ones have left.
func (d *Dialers) Recover() error {
	entries, err := os.ReadDir(d.cfg.DialersDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, e := range entries {
		p := &dialerProcess{name: e.Name(), dir: filepath.Join(d.cfg.DialersDir, e.Name())}
		proc, s, err := recordedProcess(p.dir)
		p.proc, p.cgroup = proc, s.Cgroup
		if err != nil {
			errs = append(errs, d.cleanUp(p))
			continue
		}
		p.retired = !d.cfg.Program.Runs(proc.Pid)
		d.followLocked(p)
	}
	return errors.Join(errs...)
}

// followLocked adds a dialer and waits for its end in the background. The caller holds d.mu.
func (d *Dialers) followLocked(p *dialerProcess) {
	d.running[p.name] = p
	d.tasks.Go(guard.Func(d.cfg.Logger, "wasm dialer", func() {
		select {
		case <-p.proc.Dead:
		case <-d.ctx.Done():
			if p.proc.Alive() {
				return
			}
		}
		if p.child != nil {
			_ = p.child.Wait()
		}
		d.forget(p)
		d.cfg.Logger.Info("dialer ended", "dialer", p.name)
		if err := d.cleanUp(p); err != nil {
			d.cfg.Logger.Error("clean up dialer failed", "dialer", p.name, "err", err)
		}
		if d.ctx.Err() == nil {
			d.Died()
		}
	}))
}

func (d *Dialers) forget(p *dialerProcess) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.running, p.name)
}

// Alive reports whether a dialer is running.
func (d *Dialers) Alive(name string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	p := d.running[name]
	return p != nil && p.proc.Alive()
}

func (d *Dialers) cleanUp(p *dialerProcess) error {
	return errors.Join(d.keeper.removeCgroup(p.cgroup), os.RemoveAll(p.dir))
}

// Close ends the dialers that are not busy, and leaves the others to the next daemon.
func (d *Dialers) Close(busy func(name string) bool) {
	d.mu.Lock()
	var idle []*dialerProcess
	for _, p := range d.running {
		if !busy(p.name) {
			idle = append(idle, p)
			_ = p.proc.Signal(unix.SIGTERM)
		}
	}
	d.mu.Unlock()
	for _, p := range idle {
		p.proc.WaitFor(endTime)
	}
	d.stop()
	d.tasks.Wait()
}
