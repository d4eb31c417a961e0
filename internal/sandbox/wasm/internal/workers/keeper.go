package workers

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// Keeper owns the workers. A scope is a set of pods that share a worker; a worker's name has the form scope.N. Each
// scope has at most one worker that accepts new pods. The scope's other workers run another version of the program
// (retired) or are ending.
//
//	scope   node | ns-<namespace> | pod-<key>
type Keeper struct {
	// These are called when a pod has exited, when a pod runs slower than it could, when a worker has died, and when there is a
	// new connection to a worker. They are set before the first worker starts.
	Exited      func(*Worker, workerapi.Status)
	FellBack    func(*Worker, workerapi.Fallback)
	Died        func(*Worker)
	Reconnected func(context.Context, *Worker) error
	// HasPods reports whether a scope has pods and so needs a worker.
	HasPods func(scope string) bool

	cfg Config
	log *slog.Logger

	mu       sync.Mutex
	workers  map[string]*Worker // by name
	starting map[string]*starting
	closed   bool
	tasks    sync.WaitGroup
}

// starting is the start of a worker. The fields w and err are valid once done is closed.
type starting struct {
	done chan struct{}
	w    *Worker
	err  error
}

// NewKeeper returns a keeper without workers. See Recover.
func NewKeeper(cfg Config) *Keeper {
	return &Keeper{cfg: cfg, log: cfg.Logger, workers: map[string]*Worker{}, starting: map[string]*starting{}}
}

// OwnScope returns the scope of the pod with a key.
func OwnScope(key string) string { return scopeOwn + key }

// scopeOwn is the prefix of a single pod's scope.
const scopeOwn = "pod-"

// IsOwn reports whether a scope belongs to a single pod.
func IsOwn(scope string) bool { return strings.HasPrefix(scope, scopeOwn) }

// scopeOfName returns the scope in a worker's name, and false if the name is invalid.
func scopeOfName(name string) (string, bool) {
	scope, n, ok := strings.Cut(name, ".")
	_, err := strconv.ParseUint(n, 10, 32)
	return scope, ok && err == nil
}

// Current returns the worker that accepts the new pods of a scope, or nil if there is none.
func (k *Keeper) Current(scope string) *Worker {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.currentLocked(scope)
}

func (k *Keeper) currentLocked(scope string) *Worker {
	for _, w := range k.workers {
		if w.Scope == scope && !w.Retired && !w.Ending.Load() && w.alive() {
			return w
		}
	}
	return nil
}

// Get returns the current worker of a scope. If there is none, get starts a worker. The parameter own describes the
// worker's cgroup; if it is nil, the worker starts in the cgroup of the shared workers. The start continues even if ctx ends.
func (k *Keeper) Get(ctx context.Context, scope string, own *place) (*Worker, error) {
	k.mu.Lock()
	if w := k.currentLocked(scope); w != nil {
		k.mu.Unlock()
		return w, nil
	}
	if k.closed {
		k.mu.Unlock()
		return nil, fmt.Errorf("the backend is closed: %w", errdefs.ErrUnavailable)
	}
	s := k.starting[scope]
	if s == nil {
		s = &starting{done: make(chan struct{})}
		k.starting[scope] = s
		name := k.freeName(scope)
		k.tasks.Go(guard.Func(k.log, "wasm worker", func() { k.start(context.WithoutCancel(ctx), name, scope, own, s) }))
	}
	k.mu.Unlock()
	select {
	case <-s.done:
		return s.w, s.err
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for wasm worker %s to start: %w", scope, context.Cause(ctx))
	}
}

// Prestart starts the worker of a scope in the background. If the start fails, the next call to get tries again and
// returns the error of that attempt.
func (k *Keeper) Prestart(scope string) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel() // get does not wait
	_, _ = k.Get(ctx, scope, nil)
}

// freeName returns the first unused worker name of a scope.
func (k *Keeper) freeName(scope string) string {
	for n := 1; ; n++ {
		name := scope + "." + strconv.Itoa(n)
		if k.workers[name] != nil {
			continue
		}
		if _, err := os.Lstat(filepath.Join(k.cfg.Dir, name)); errors.Is(err, fs.ErrNotExist) {
			return name
		}
	}
}

// start starts a worker in its own place, or in that of shared workers, adds it to the map and watches it.
func (k *Keeper) start(ctx context.Context, name, scope string, own *place, s *starting) {
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	w := newWorker(name, scope, filepath.Join(k.cfg.Dir, name), k.log)
	err := k.spawn(ctx, w, own)
	k.mu.Lock()
	delete(k.starting, scope)
	if err == nil && k.closed {
		err = errors.Join(fmt.Errorf("the backend is closed: %w", errdefs.ErrUnavailable), k.undoSpawn(w))
	}
	if err == nil {
		k.keepLocked(w)
		s.w = w
	} else {
		s.err = fmt.Errorf("start wasm worker %s: %w", name, err)
	}
	k.mu.Unlock()
	close(s.done)
}

// keepLocked adds a connected worker to the map and follows it in the background. The caller holds k.mu.
func (k *Keeper) keepLocked(w *Worker) {
	k.workers[w.Name] = w
	k.tasks.Go(guard.Func(k.log, "wasm worker", func() { k.follow(w) }))
}

// follow handles a worker's events until the worker ends. Then follow records the worker's pods as exited, and starts a
// new worker if the scope has pods.
func (k *Keeper) follow(w *Worker) {
	w.watch(func(e workerapi.Event) { k.happened(w, e) }, k.Reconnected)
	if w.isDetached() {
		return // the daemon is stopping, but the worker continues to run
	}
	w.Why = w.reap()
	k.Died(w)
	k.cleanUp(w)
	close(w.Died)
	if !IsOwn(w.Scope) && !w.Retired && !k.isClosed() && k.HasPods(w.Scope) {
		if _, err := k.Get(context.Background(), w.Scope, nil); err != nil {
			k.log.Error("restart worker failed; the next start of a pod tries again", "scope", w.Scope, "err", err)
		}
	}
}

// happened handles an event of a worker.
func (k *Keeper) happened(w *Worker, e workerapi.Event) {
	switch {
	case e.Exited != nil:
		k.Exited(w, *e.Exited)
	case e.Fallback != nil:
		k.FellBack(w, *e.Fallback)
	case e.Spans != nil && k.cfg.Spans != nil:
		k.cfg.Spans(e.Spans)
	}
}

func (k *Keeper) isClosed() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.closed
}

// cleanUp removes the files and the cgroup of a worker that has ended.
func (k *Keeper) cleanUp(w *Worker) {
	k.mu.Lock()
	delete(k.workers, w.Name)
	k.mu.Unlock()
	if err := errors.Join(k.removeCgroup(w.Cgroup), os.RemoveAll(w.Dir)); err != nil {
		k.log.Error("clean up worker failed", "worker", w.Name, "err", err)
	}
}

// Recover takes over the workers of the previous daemon, and removes workers that have ended or cannot be taken over.
func (k *Keeper) Recover(ctx context.Context) error {
	entries, err := os.ReadDir(k.cfg.Dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, e := range entries {
		scope, ok := scopeOfName(e.Name())
		if !ok || !e.IsDir() {
			continue
		}
		w := newWorker(e.Name(), scope, filepath.Join(k.cfg.Dir, e.Name()), k.log)
		if err := k.takeOver(ctx, w); err != nil {
			w.log.Warn("take over worker failed", "err", err)
			errs = append(errs, k.abandon(ctx, w))
			continue
		}
		w.log.Info("worker taken over", "pid", w.Proc.Pid, "retired", w.Retired)
		k.mu.Lock()
		k.workers[w.Name] = w
		k.mu.Unlock()
	}
	return errors.Join(errs...)
}

// takeOver connects to a worker of the previous daemon. It fails if the worker has another protocol version or does not
// respond.
func (k *Keeper) takeOver(ctx context.Context, w *Worker) error {
	ctx, cancel := context.WithTimeout(ctx, helloTime)
	defer cancel()
	if err := w.connect(ctx); err != nil {
		return err
	}
	proc, state, err := recordedProcess(w.Dir)
	w.Cgroup = state.Cgroup
	if err != nil {
		// The previous daemon died before it recorded the process.
		if proc, err = k.processFromHello(w); err != nil {
			w.Conn().Close()
			return err
		}
	}
	w.Proc = proc
	w.Retired = !k.cfg.Program.Runs(proc.Pid)
	return nil
}

// abandon kills a worker that cannot be taken over, and removes its files and cgroup.
func (k *Keeper) abandon(ctx context.Context, w *Worker) error {
	proc, state, err := recordedProcess(w.Dir)
	if err == nil {
		_ = proc.Signal(unix.SIGKILL)
		err = proc.Wait(ctx)
	} else if errdefs.IsNotFound(err) {
		err = nil
	}
	return errors.Join(err, k.removeCgroup(state.Cgroup), os.RemoveAll(w.Dir))
}

// FollowAll follows all workers taken over from the previous daemon. Call it once the workers' pods are recovered.
func (k *Keeper) FollowAll() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, w := range k.workers {
		k.keepLocked(w)
	}
}

// All returns all workers.
func (k *Keeper) All() []*Worker {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Collect(maps.Values(k.workers))
}

// EndRetired ends the retired workers.
func (k *Keeper) EndRetired(ctx context.Context) error {
	var errs []error
	for _, w := range k.All() {
		if w.Retired {
			errs = append(errs, w.End(ctx))
		}
	}
	return errors.Join(errs...)
}

// ByName returns the worker with the given name, or nil.
func (k *Keeper) ByName(name string) *Worker {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.workers[name]
}

// Close ends the workers that are not busy, and detaches from the others.
func (k *Keeper) Close(ctx context.Context, busy func(*Worker) bool) error {
	var errs []error
	for _, w := range k.All() {
		if !busy(w) {
			errs = append(errs, w.End(ctx))
		}
	}
	k.mu.Lock()
	k.closed = true
	k.mu.Unlock()
	for _, w := range k.All() {
		close(w.detached)
	}
	k.tasks.Wait()
	return errors.Join(errs...)
}
