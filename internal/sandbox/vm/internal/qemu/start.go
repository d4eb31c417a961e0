package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/confine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/qmp"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/virtiofsd"
	"github.com/tripod-run/tripod/internal/stats"
)

var (
	fpIntent   = failpoint.New("qemu.start.intent")
	fpOpened   = failpoint.New("qemu.start.opened")
	fpSpawned  = failpoint.New("qemu.start.spawned")
	fpRecorded = failpoint.New("qemu.start.recorded")
	fpGreeted  = failpoint.New("qemu.start.greeted")
	fpRunning  = failpoint.New("qemu.start.running")
)

func (d *Driver) Start(ctx context.Context, name string) error {
	h, err := d.find(name)
	if err != nil {
		return err
	}
	verdict, err := d.Probe(ctx)
	if err != nil {
		return err
	}
	return h.start(ctx, verdict.Accel)
}

func (h *handle) start(ctx context.Context, accel string) error {
	h.op.Lock()
	defer h.op.Unlock()
	def, _, r := h.snapshot()
	if r != nil {
		return nil
	}
	kills, _ := stats.OOMKills(def.Cgroup) // if the cgroup is missing, launch will fail
	intent := record{Version: recordVersion, Step: stepStarting, Boot: machine.BootID(), OOMKills: kills}
	if err := h.set(func(rec *record) { *rec = intent }); err != nil {
		return errors.Join(err, h.set(func(rec *record) { *rec = record{Version: recordVersion} }))
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	r, err := h.launch(ctx, def, accel)
	if err == nil {
		h.d.bg.Go(func() { h.watch(r) })
		h.log.Info("machine started", "pid", r.proc.Pid, "accel", accel, "qemu", r.version())
		return nil
	}
	if r != nil {
		_ = r.proc.Signal(killSignal)
		if waitErr := r.await(context.WithoutCancel(ctx)); waitErr != nil {
			err = errors.Join(err, waitErr)
		}
		err = errors.Join(err, r.shares.End(ctx))
		r.close()
		close(r.recorded)
	}
	err = fmt.Errorf("start machine %.64s: %w", h.name, withClass(err))
	h.mu.Lock()
	h.run = nil
	h.mu.Unlock()
	h.mustSet(func(rec *record) {
		*rec = record{
			Version: recordVersion, Step: stepEnded, FinishedAt: time.Now(), Cause: machine.CauseStart, ExitCode: exitStart, Message: err.Error(),
		}
	})
	return err
}

// launch starts QEMU and waits until its guest runs. If launch returns both a run and an error, the caller must end the
// run.
func (h *handle) launch(ctx context.Context, def machine.Definition, accel string) (*run, error) {
	if err := errors.Join(fpIntent.Hit(ctx), h.killLeftovers(ctx, def), os.MkdirAll(def.Dir, 0o700)); err != nil {
		return nil, err
	}
	log, err := confine.OpenLog(logPath(def))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	var memory *os.File
	var memoryErr error
	filled := make(chan struct{})
	go func() { // beside virtiofsd's start, because both take most of 100 ms
		defer close(filled)
		memory, memoryErr = h.openMemory(ctx, def)
	}()
	shares, err := virtiofsd.Start(ctx, h.shareOptions(def), def.Shares)
	<-filled
	defer closeAll([]*os.File{memory})
	if err = errors.Join(err, memoryErr); err != nil {
		return nil, errors.Join(err, shares.End(ctx))
	}
	c := build(def, hostSetup{Accel: accel, VhostNet: fileExists(vhostNet), Block: blockDevice})
	r, err := h.spawn(ctx, def, accel, c, openers{taps: h.d.cfg.Opener, shares: shares, memory: memory}, log)
	if r == nil {
		return nil, errors.Join(err, shares.End(ctx))
	}
	if err != nil {
		return r, err
	}
	h.mu.Lock()
	h.run = r
	h.mu.Unlock()
	if err := h.set(func(rec *record) { rec.Process = r.proc.ID }); err != nil {
		return r, err
	}
	if err := fpRecorded.Hit(ctx); err != nil {
		return r, err
	}
	return r, h.awaitGuest(ctx, r, c.Late)
}

// shareOptions returns the options of the machine's virtiofsd processes.
func (h *handle) shareOptions(def machine.Definition) virtiofsd.Options {
	return virtiofsd.Options{
		Program: h.d.cfg.Virtiofsd, Dir: def.Dir, LogDir: h.dir, UID: def.UID, GID: def.GID, Tree: h.d.cfg.Cgroup, Cgroup: def.Cgroup,
	}
}

// spawn records the virtiofsd processes and starts a QEMU that is connected to them. If spawn returns no run, the
// caller must end the virtiofsd processes.
func (h *handle) spawn(ctx context.Context, def machine.Definition, accel string, c command, from openers, log *os.File) (*run, error) {
	files, err := openAll(ctx, def, slices.Concat(c.Standard[:], c.Files), from)
	if err != nil {
		return nil, err
	}
	err = fpOpened.Hit(ctx)
	if ids := from.shares.IDs(); err == nil && len(ids) > 0 {
		err = h.set(func(rec *record) { rec.Shares = ids })
	}
	if err != nil {
		closeAll(files)
		return nil, err
	}
	cmd, err := spawn{
		Program: h.d.cfg.Emulator, Args: c.Args, Stdin: files[0], Stdout: files[1], Log: log, Files: files[2:],
		UID: def.UID, GID: def.GID, KVM: accel == AccelKVM, Tree: h.d.cfg.Cgroup, Cgroup: def.Cgroup,
	}.start()
	closeAll(files)
	if err != nil {
		return nil, err
	}
	r, err := newChildRun(h, cmd)
	if err != nil {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		return nil, err
	}
	r.shares = from.shares
	return r, fpSpawned.Hit(ctx)
}

// spawn describes a QEMU process to start.
type spawn struct {
	Program  string
	Args     []string
	Stdin    *os.File
	Stdout   *os.File
	Log      *os.File   // standard error
	Files    []*os.File // as descriptors firstFD, firstFD+1, …
	UID, GID int
	KVM      bool // start QEMU with the group of /dev/kvm
	Tree     cgroup.Tree
	Cgroup   string // "" means the daemon's own cgroup
}

// start starts QEMU as an unprivileged user that cannot gain privileges. QEMU inherits only the given descriptors and
// runs in empty network, IPC and UTS namespaces.
func (s spawn) start() (*exec.Cmd, error) {
	cmd := exec.Command(s.Program, s.Args...) // no context, because QEMU outlives the daemon
	cmd.ExtraFiles = s.Files
	cmd.Stdin, cmd.Stdout, cmd.Stderr = s.Stdin, s.Stdout, s.Log
	cmd.Env, cmd.Dir = confine.Environment(), "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Credential: &syscall.Credential{Uid: uint32(s.UID), Gid: uint32(s.GID), Groups: kvmGroup(s.KVM)},
		Cloneflags: confine.Namespaces,
	}
	return cmd, confine.Start(cmd, confine.Place{Tree: s.Tree, Cgroup: s.Cgroup})
}

// kvmGroup returns the group of /dev/kvm. It returns nil if wanted is false, if the mode of /dev/kvm does not let the
// group read and write, or if the group is root's.
func kvmGroup(wanted bool) []uint32 {
	var st unix.Stat_t
	if !wanted || unix.Stat("/dev/kvm", &st) != nil || st.Mode&0o060 != 0o060 || st.Gid == 0 {
		return nil
	}
	return []uint32{st.Gid}
}

// awaitGuest waits until QEMU reports that the guest's CPUs run. late are the devices to add to a machine that continues.
func (h *handle) awaitGuest(ctx context.Context, r *run, late []map[string]any) error {
	ctx, cancel := r.whileAlive(ctx)
	defer cancel()
	err := r.connect(ctx)
	if err == nil {
		err = fpGreeted.Hit(ctx)
	}
	if err == nil && h.def.Saved != "" {
		if err = r.resume(ctx, h.def, late); err != nil {
			err = fmt.Errorf("%w: %w", machine.ErrSaved, err)
		}
	}
	if err == nil {
		err = r.awaitRunning(ctx)
	}
	if err != nil {
		r.settle()
		if words := lastWords(logPath(h.def)); !r.proc.Alive() {
			if served := r.shares.LastWords(); served != "" { // QEMU ends when a virtiofsd ends
				words += "; " + served
			}
			ended := fmt.Errorf("QEMU ended: %s: %w", words, errdefs.ErrFailedPrecondition)
			if errors.Is(err, machine.ErrSaved) {
				ended = fmt.Errorf("%w: %w", machine.ErrSaved, ended)
				killed := r.await(context.WithoutCancel(ctx)) != nil || r.status.Signal() == killSignal // for lack of memory, for example
				if errors.Is(err, errLoad) && !killed {
					ended = fmt.Errorf("%w: %w", machine.ErrRefused, ended)
				}
			}
			return ended
		} else if words != "" {
			return fmt.Errorf("%w; QEMU's last words: %s", err, words)
		}
		return err
	}
	if err := h.set(func(rec *record) { rec.Step, rec.StartedAt = stepRunning, time.Now() }); err != nil {
		return err
	}
	return fpRunning.Hit(ctx)
}

// settle waits for the end of a process that has just closed its monitor, so that the end is known as the cause.
func (r *run) settle() {
	if m := r.client(); m == nil || m.Err() == nil {
		return
	}
	select {
	case <-r.proc.Dead:
	case <-time.After(monitorTimeout):
	}
}

// awaitRunning returns once the guest runs or has already ended.
func (r *run) awaitRunning(ctx context.Context) error {
	m, err := r.monitor()
	if err != nil {
		return err
	}
	for {
		status, err := queryStatus(ctx, m)
		if err != nil {
			return err
		}
		if status != "prelaunch" && status != "inmigrate" {
			return nil
		}
		select {
		case _, ok := <-m.Events():
			if !ok {
				return fmt.Errorf("QEMU's monitor ended: %w (%w)", m.Err(), errdefs.ErrUnavailable)
			}
		case <-ctx.Done():
			return fmt.Errorf("the guest is not running; its status is %q: %w (%w)", status, context.Cause(ctx), errdefs.ErrUnavailable)
		}
	}
}

func queryStatus(ctx context.Context, m *qmp.Client) (string, error) {
	var answer struct {
		Status string `json:"status"`
	}
	err := m.Execute(ctx, "query-status", nil, &answer)
	return answer.Status, err
}

// killLeftovers kills this machine's QEMU processes that remain from an earlier, killed daemon.
func (h *handle) killLeftovers(ctx context.Context, def machine.Definition) error {
	for {
		p := h.findByCommand(def)
		if p == nil {
			return nil
		}
		err := errors.Join(p.Signal(killSignal), p.Wait(ctx))
		p.Close()
		if err != nil {
			return err
		}
	}
}

// findByCommand finds the machine's QEMU in the machine's cgroup, by QEMU's command line. It returns nil if no QEMU is
// there.
func (h *handle) findByCommand(def machine.Definition) *process.Process {
	if def.Cgroup == "" {
		return nil
	}
	for _, full := range h.d.cfg.Cgroup.Dirs(def.Cgroup) {
		for _, pid := range cgroup.Procs(full) {
			p, err := process.Open(pid)
			if err != nil {
				continue
			}
			if IsMachine(pid, h.name) && p.Alive() {
				return p
			}
			p.Close()
		}
	}
	return nil
}

func fileExists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
