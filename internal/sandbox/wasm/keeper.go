package wasm

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

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// WorkerMode says which pods share a worker process.
type WorkerMode string

// The modes.
const (
	WorkerPerNode      WorkerMode = "node"
	WorkerPerNamespace WorkerMode = "namespace"
	WorkerPerPod       WorkerMode = "pod"
)

// keeper owns the workers. A scope is a set of pods that share a worker; a worker's name has the form scope.N. Each
// scope has at most one worker that accepts new pods. The scope's other workers run another version of the program
// (retired) or are ending.
//
//	scope   node | ns-<namespace> | pod-<key>
type keeper struct {
	cfg     setup
	log     *slog.Logger
	cgroups cgroup.Tree
	// Callbacks for four events: a pod has exited, a pod runs slower than it could, a worker has died, a worker has a new
	// connection. They are set before the first worker starts.
	exited      func(*worker, workerapi.Status)
	fellBack    func(*worker, workerapi.Fallback)
	died        func(*worker)
	reconnected func(context.Context, *worker) error
	// hasPods reports whether a scope has pods and so needs a worker.
	hasPods func(scope string) bool

	mu       sync.Mutex
	workers  map[string]*worker // by name
	starting map[string]*starting
	closed   bool
	tasks    sync.WaitGroup
}

// starting is the start of a worker. The fields w and err are valid once done is closed.
type starting struct {
	done chan struct{}
	w    *worker
	err  error
}

func newKeeper(cfg setup) (*keeper, error) {
	tree, err := cgroup.Open(cfg.CgroupDriver, cfg.CgroupParent)
	if err != nil {
		return nil, err
	}
	return &keeper{cfg: cfg, log: cfg.Logger, cgroups: tree, workers: map[string]*worker{}, starting: map[string]*starting{}}, nil
}

// scopeOf returns the scope of a pod according to the worker mode.
func (k *keeper) scopeOf(p *sandbox.Pod) string {
	switch k.cfg.Workers {
	case WorkerPerNamespace:
		return "ns-" + keyOf(p.Config.GetMetadata().GetNamespace())[:32]
	case WorkerPerPod:
		return ownScope(p.ID)
	default:
		return scopeNode
	}
}

// scopeNode is the scope of all pods of the node; scopeOwn is the prefix of a single pod's scope.
const (
	scopeNode = "node"
	scopeOwn  = "pod-"
)

// ownScope returns the scope of a pod with its own worker.
func ownScope(id string) string { return scopeOwn + keyOf(id) }

// isOwn reports whether a scope belongs to a single pod.
func isOwn(scope string) bool { return strings.HasPrefix(scope, scopeOwn) }

// scopeOfName returns the scope in a worker's name, and false if the name is invalid.
func scopeOfName(name string) (string, bool) {
	scope, n, ok := strings.Cut(name, ".")
	_, err := strconv.ParseUint(n, 10, 32)
	return scope, ok && err == nil
}

// current returns the worker that accepts the new pods of a scope, or nil if there is none.
func (k *keeper) current(scope string) *worker {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.currentLocked(scope)
}

func (k *keeper) currentLocked(scope string) *worker {
	for _, w := range k.workers {
		if w.scope == scope && !w.retired && !w.ending.Load() && w.alive() {
			return w
		}
	}
	return nil
}

// get returns the current worker of a scope. If there is none, get starts a worker. The parameter own describes the
// worker's cgroup; if it is nil, the worker starts in the cgroup of the shared workers. The start continues even if ctx ends.
func (k *keeper) get(ctx context.Context, scope string, own *place) (*worker, error) {
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

// prestart starts the worker of a scope in the background. If the start fails, the next call to get tries again and
// returns the error of that attempt.
func (k *keeper) prestart(scope string) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel() // get does not wait
	_, _ = k.get(ctx, scope, nil)
}

// freeName returns the first unused worker name of a scope.
func (k *keeper) freeName(scope string) string {
	for n := 1; ; n++ {
		name := scope + "." + strconv.Itoa(n)
		if k.workers[name] != nil {
			continue
		}
		if _, err := os.Lstat(filepath.Join(k.cfg.workersDir(), name)); errors.Is(err, fs.ErrNotExist) {
			return name
		}
	}
}

// start starts a worker in its own place, or in that of shared workers, adds it to the map and watches it.
func (k *keeper) start(ctx context.Context, name, scope string, own *place, s *starting) {
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	w := newWorker(name, scope, filepath.Join(k.cfg.workersDir(), name), k.log)
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
func (k *keeper) keepLocked(w *worker) {
	k.workers[w.name] = w
	k.tasks.Go(guard.Func(k.log, "wasm worker", func() { k.follow(w) }))
}

// follow handles a worker's events until the worker ends. Then follow records the worker's pods as exited, and starts a
// new worker if the scope has pods.
func (k *keeper) follow(w *worker) {
	w.watch(func(e workerapi.Event) { k.happened(w, e) }, k.reconnected)
	if w.isDetached() {
		return // the daemon is stopping, but the worker continues to run
	}
	w.why = w.reap()
	k.died(w)
	k.cleanUp(w)
	close(w.died)
	if !isOwn(w.scope) && !w.retired && !k.isClosed() && k.hasPods(w.scope) {
		if _, err := k.get(context.Background(), w.scope, nil); err != nil {
			k.log.Error("restart worker failed; the next start of a pod tries again", "scope", w.scope, "err", err)
		}
	}
}

// happened handles an event of a worker.
func (k *keeper) happened(w *worker, e workerapi.Event) {
	switch {
	case e.Exited != nil:
		k.exited(w, *e.Exited)
	case e.Fallback != nil:
		k.fellBack(w, *e.Fallback)
	case e.Spans != nil && k.cfg.Spans != nil:
		k.cfg.Spans(e.Spans)
	}
}

func (k *keeper) isClosed() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.closed
}

// cleanUp removes the files and the cgroup of a worker that has ended.
func (k *keeper) cleanUp(w *worker) {
	k.mu.Lock()
	delete(k.workers, w.name)
	k.mu.Unlock()
	if err := errors.Join(k.removeCgroup(w.cgroup), os.RemoveAll(w.dir)); err != nil {
		k.log.Error("clean up worker failed", "worker", w.name, "err", err)
	}
}

// recover takes over the workers of the previous daemon, and removes workers that have ended or cannot be taken over.
func (k *keeper) recover(ctx context.Context) error {
	entries, err := os.ReadDir(k.cfg.workersDir())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, e := range entries {
		scope, ok := scopeOfName(e.Name())
		if !ok || !e.IsDir() {
			continue
		}
		w := newWorker(e.Name(), scope, filepath.Join(k.cfg.workersDir(), e.Name()), k.log)
		if err := k.takeOver(ctx, w); err != nil {
			w.log.Warn("take over worker failed", "err", err)
			errs = append(errs, k.abandon(ctx, w))
			continue
		}
		w.log.Info("worker taken over", "pid", w.proc.Pid, "retired", w.retired)
		k.mu.Lock()
		k.workers[w.name] = w
		k.mu.Unlock()
	}
	return errors.Join(errs...)
}

// takeOver connects to a worker of the previous daemon. It fails if the worker has another protocol version or does not
// respond.
func (k *keeper) takeOver(ctx context.Context, w *worker) error {
	ctx, cancel := context.WithTimeout(ctx, helloTime)
	defer cancel()
	if err := w.connect(ctx); err != nil {
		return err
	}
	proc, state, err := recordedProcess(w.dir)
	w.cgroup = state.Cgroup
	if err != nil {
		// The previous daemon died before it recorded the process.
		if proc, err = k.processFromHello(w); err != nil {
			w.conn().Close()
			return err
		}
	}
	w.proc = proc
	w.retired = !k.cfg.program().Runs(proc.Pid)
	return nil
}

// abandon kills a worker that cannot be taken over, and removes its files and cgroup.
func (k *keeper) abandon(ctx context.Context, w *worker) error {
	proc, state, err := recordedProcess(w.dir)
	if err == nil {
		_ = proc.Signal(unix.SIGKILL)
		err = proc.Wait(ctx)
	} else if errdefs.IsNotFound(err) {
		err = nil
	}
	return errors.Join(err, k.removeCgroup(state.Cgroup), os.RemoveAll(w.dir))
}

// followAll follows all workers taken over from the previous daemon. Call it once the workers' pods are recovered.
func (k *keeper) followAll() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, w := range k.workers {
		k.keepLocked(w)
	}
}

// all returns all workers.
func (k *keeper) all() []*worker {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Collect(maps.Values(k.workers))
}

// endRetired ends the retired workers.
func (k *keeper) endRetired(ctx context.Context) error {
	var errs []error
	for _, w := range k.all() {
		if w.retired {
			errs = append(errs, w.end(ctx))
		}
	}
	return errors.Join(errs...)
}

// byName returns the worker with the given name, or nil.
func (k *keeper) byName(name string) *worker {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.workers[name]
}

// close ends the workers that are not busy, and detaches from the others.
func (k *keeper) close(ctx context.Context, busy func(*worker) bool) error {
	var errs []error
	for _, w := range k.all() {
		if !busy(w) {
			errs = append(errs, w.end(ctx))
		}
	}
	k.mu.Lock()
	k.closed = true
	k.mu.Unlock()
	for _, w := range k.all() {
		close(w.detached)
	}
	k.tasks.Wait()
	return errors.Join(errs...)
}
