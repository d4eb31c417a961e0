package workers

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/launch"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

var (
	fpSpawned = failpoint.New("wasm.worker.spawned")
	fpReady   = failpoint.New("wasm.worker.ready")
)

// startTime bounds the time that a worker takes to become ready.
const startTime = time.Minute

// spawn starts the process of w and connects to it. If spawn fails, it removes what it has created.
func (k *Keeper) spawn(ctx context.Context, w *Worker, own *place) error {
	err := guard.Call(k.log, "wasm worker", func() error { return k.launch(ctx, w, own) })
	if err != nil {
		err = errors.Join(err, k.undoSpawn(w))
	}
	return err
}

// launch is spawn without the roll-back.
func (k *Keeper) launch(ctx context.Context, w *Worker, own *place) (err error) {
	if err := os.MkdirAll(w.Dir, 0o700); err != nil {
		return fmt.Errorf("wasm worker: %w", err)
	}
	if own == nil {
		shared, err := k.shared(ctx)
		if err != nil {
			return err
		}
		own = &shared
	}
	in := own.forWorker(w.Name)
	w.Cgroup = in.dir
	if err := w.writeState(); err != nil { // before the cgroup exists, so that recovery finds the cgroup
		return err
	}
	ready, cmd, err := k.prepare(ctx, w)
	if err != nil {
		return err
	}
	defer ready.Close()
	if err := in.run(cmd); err != nil {
		return err
	}
	w.child = cmd
	if w.Proc, err = process.Open(cmd.Process.Pid); err != nil {
		return err
	}
	if err := w.writeState(); err != nil {
		return err
	}
	if err := errors.Join(launch.Limit(w.Proc.Pid), in.setOOMScore(w.Proc.Pid), fpSpawned.Hit(ctx)); err != nil {
		return err
	}
	if err := launch.AwaitReady(ctx, ready); err != nil {
		return fmt.Errorf("%w: %s", err, launch.LastWords(w.Dir))
	}
	if err := w.connect(ctx); err != nil {
		return err
	}
	w.log.Info("worker started", "pid", w.Proc.Pid, "engine", w.Conn().Hello().Engine)
	return fpReady.Hit(ctx)
}

// prepare creates the worker's sockets, its log and the command that inherits them.
func (k *Keeper) prepare(ctx context.Context, w *Worker) (ready *os.File, cmd *exec.Cmd, err error) {
	config := workerapi.WorkerConfig{
		Name: w.Name, UID: k.cfg.Program.UID, GID: k.cfg.Program.GID, Instances: k.cfg.Instances, MaxMemory: k.cfg.MaxMemory,
		Connections: k.cfg.Connections,
		LogLevel:    k.cfg.LogLevel, LogSizeMax: k.cfg.LogSizeMax, Spans: k.cfg.Spans != nil, Isolated: true,
	}
	return k.cfg.Program.Lasting(ctx, w.Dir, []string{launch.ControlSocket, launch.DataSocket}, "worker", config)
}

// run starts a command of launch.Program.Lasting, and closes the files that it inherits.
func (p place) run(cmd *exec.Cmd) error {
	err := p.start(cmd)
	launch.Started(cmd)
	if err != nil {
		return fmt.Errorf("start %s: %w", cmd.Path, err)
	}
	return nil
}

// undoSpawn removes the process, the cgroup and the files of a failed start.
func (k *Keeper) undoSpawn(w *Worker) error {
	if w.child != nil {
		_ = w.child.Process.Kill()
		_ = w.child.Wait()
	}
	if c := w.Conn(); c != nil {
		c.Close()
	}
	return errors.Join(k.removeCgroup(w.Cgroup), os.RemoveAll(w.Dir))
}

// setOOMScore sets a worker's oom_score_adj. A value that the daemon may not set without CAP_SYS_RESOURCE is left out.
func (p place) setOOMScore(pid int) error {
	if p.oomScore == nil {
		return nil
	}
	err := os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid), []byte(strconv.FormatInt(*p.oomScore, 10)), 0)
	if err != nil && !errors.Is(err, unix.EACCES) {
		return fmt.Errorf("oom_score_adj of worker %d: %w", pid, err)
	}
	return nil
}

// processFromHello returns the process whose ID is in the worker's Hello, and records the process. It returns an error
// if the process's command line is not the worker's.
func (k *Keeper) processFromHello(w *Worker) (*process.Process, error) {
	pid := w.Conn().Hello().Pid
	p, err := process.Open(pid)
	if err != nil {
		return nil, err
	}
	cmdline, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	words := bytes.Split(cmdline, []byte{0})
	var config workerapi.WorkerConfig
	if err != nil || len(words) < 3 || string(words[1]) != "worker" || json.Unmarshal(words[2], &config) != nil || config.Name != w.Name {
		p.Close()
		return nil, fmt.Errorf("process %d is not worker %s: %w", pid, w.Name, errdefs.ErrFailedPrecondition)
	}
	w.Proc = p
	return p, w.writeState()
}

// writeState records the process and the cgroup, so that the next daemon can end the worker and remove its cgroup.
func (w *Worker) writeState() error {
	s := workerState{Cgroup: w.Cgroup}
	if w.Proc != nil {
		s.Process = w.Proc.ID
	}
	return format.Write(filepath.Join(w.Dir, workerFile), s)
}
