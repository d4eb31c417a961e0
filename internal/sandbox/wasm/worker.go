package wasm

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
	"github.com/tripod-run/tripod/internal/stats"
)

const (
	// redialTime is how long a worker may take to answer a new connection after one broke; then it is killed.
	redialTime = 15 * time.Second
	// helloTime is how long a worker of the previous daemon may take to answer.
	helloTime = 20 * time.Second
)

// The files in a worker's directory.
const (
	controlSocket = "control.sock"
	dataSocket    = "data.sock"
	workerLog     = "log"
	workerFile    = "worker.json"
)

// worker is one tripod-wasm process: ours or adopted.
type worker struct {
	name, scope, dir string
	cgroup           string
	proc             *process.Process
	// child is set when this daemon started it, and reaps it.
	child *exec.Cmd
	log   *slog.Logger
	// retired: another version of the program is installed now. The worker keeps its pods and gets no new ones.
	retired bool
	// died is closed once the process is gone and its containers are recorded as exited; why then says how it ended.
	died chan struct{}
	why  string
	// ending: we have sent SIGTERM.
	ending atomic.Bool
	// parted is closed when the daemon stops and leaves the worker running.
	parted chan struct{}

	mu     sync.Mutex
	client *workerapi.Client
	// loading has the outcome of Load by the digest of the component.
	loading map[string]*loading
}

// loading is code that a worker has, or is loading until done is closed.
type loading struct {
	done   chan struct{}
	loaded workerapi.Loaded
	err    error
	// used is when a container last asked for it.
	used time.Time
}

func newWorker(name, scope, dir string, log *slog.Logger) *worker {
	return &worker{
		name: name, scope: scope, dir: dir, log: log.With("worker", name),
		died: make(chan struct{}), parted: make(chan struct{}), loading: map[string]*loading{},
	}
}

// dial connects to one of the worker's sockets. The path can be too long for a socket address, so the address goes
// through an open directory.
func (w *worker) dial(ctx context.Context, socket string) (*net.UnixConn, error) {
	dir, err := unix.Open(w.dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("wasm worker %s: %w: %w", w.name, err, errdefs.ErrUnavailable)
	}
	defer unix.Close(dir)
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", fmt.Sprintf("/proc/self/fd/%d/%s", dir, socket))
	if err != nil {
		return nil, fmt.Errorf("wasm worker %s: %w: %w", w.name, err, errdefs.ErrUnavailable)
	}
	return conn.(*net.UnixConn), nil
}

// connect opens the connection for orders and events.
func (w *worker) connect(ctx context.Context) error {
	conn, err := w.dial(ctx, controlSocket)
	if err != nil {
		return err
	}
	client, err := workerapi.NewClient(ctx, conn)
	if err != nil {
		return err
	}
	w.mu.Lock()
	w.client = client
	w.mu.Unlock()
	return nil
}

// conn is the current connection. Calls on one that has ended fail with errdefs.ErrUnavailable.
func (w *worker) conn() *workerapi.Client {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.client
}

func (w *worker) alive() bool {
	select {
	case <-w.died:
		return false
	default:
		return w.proc.Alive()
	}
}

// identity is the process, as the state of its containers records it.
func (w *worker) identity() process.ID { return w.proc.ID }

// watch handles the worker's events until its process ends, and reconnects when a connection breaks.
func (w *worker) watch(exited func(workerapi.Status), spans func([]byte), adopt func(context.Context, *worker) error) {
	for {
		w.serve(w.conn(), exited, spans)
		if !w.proc.Alive() || w.isParted() {
			return
		}
		if w.ending.Load() {
			<-w.proc.Dead
			return
		}
		if err := w.reconnect(adopt); err != nil {
			if w.proc.Alive() {
				w.log.Error("the worker does not answer; ending it", "pid", w.proc.Pid, "err", err)
				_ = w.proc.Signal(unix.SIGKILL)
				<-w.proc.Dead
			}
			return
		}
	}
}

// serve handles the events of one connection until the connection or the process ends.
func (w *worker) serve(client *workerapi.Client, exited func(workerapi.Status), spans func([]byte)) {
	defer client.Close()
	for {
		select {
		case e, ok := <-client.Events():
			switch {
			case !ok:
				return
			case e.Exited != nil:
				exited(*e.Exited)
			case e.Spans != nil:
				spans(e.Spans)
			}
		case <-w.proc.Dead:
			return
		case <-w.parted:
			return
		}
	}
}

func (w *worker) isParted() bool {
	select {
	case <-w.parted:
		return true
	default:
		return false
	}
}

// reconnect opens a new connection to a live worker and updates the state of its pods. It tries for redialTime.
func (w *worker) reconnect(adopt func(context.Context, *worker) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), redialTime)
	defer cancel()
	for {
		if w.proc.WaitFor(retryPause) { // most connections break because the process ends
			return fmt.Errorf("wasm worker %s has ended: %w", w.name, errdefs.ErrUnavailable)
		}
		err := w.connect(ctx)
		if err == nil {
			if err = adopt(ctx, w); err == nil {
				w.log.Warn("reconnected to the worker")
				return nil
			}
			w.conn().Close()
		}
		if ctx.Err() != nil || w.isParted() {
			return err
		}
	}
}

// reap waits until the process has ended and says how it ended.
func (w *worker) reap() string {
	<-w.proc.Dead
	if w.child == nil {
		return "it has ended" // only the parent gets the exit status
	}
	_ = w.child.Wait()
	state := w.child.ProcessState
	if status, ok := state.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return fmt.Sprintf("it was killed by signal %d (%s)", status.Signal(), status.Signal())
	}
	return "it ended with " + state.String()
}

// end asks the worker to end, and kills it if it does not.
func (w *worker) end(ctx context.Context) error {
	w.ending.Store(true)
	if err := w.proc.Signal(unix.SIGTERM); err != nil {
		return err
	}
	if !w.proc.WaitFor(endTime) {
		_ = w.proc.Signal(unix.SIGKILL)
	}
	select {
	case <-w.died:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for the end of worker %s: %w", w.name, context.Cause(ctx))
	}
}

// endTime is how long a worker without pods may take to end.
const endTime = 5 * time.Second

// load makes sure that the worker has the code of a component. It calls code to open the code if the worker lacks it.
func (w *worker) load(ctx context.Context, digest string, code func(context.Context) (workerapi.Code, error)) (workerapi.Loaded, error) {
	for {
		w.mu.Lock()
		l, mine := w.loading[digest], false
		if l == nil {
			l, mine = &loading{done: make(chan struct{})}, true
			w.loading[digest] = l
		}
		l.used = time.Now()
		w.mu.Unlock()
		if mine {
			l.loaded, l.err = w.loadNow(ctx, digest, code)
			if l.err != nil {
				w.unlist(digest, l)
			}
			close(l.done)
			return l.loaded, l.err
		}
		select {
		case <-l.done:
		case <-ctx.Done():
			return workerapi.Loaded{}, fmt.Errorf("wait for the code of %s to be loaded: %w", digest, context.Cause(ctx))
		}
		if l.err == nil || !errors.Is(l.err, context.Canceled) && !errors.Is(l.err, context.DeadlineExceeded) {
			return l.loaded, l.err
		}
		// The caller that loaded it gave up; try ourselves.
	}
}

func (w *worker) loadNow(ctx context.Context, digest string, code func(context.Context) (workerapi.Code, error)) (workerapi.Loaded, error) {
	what, err := code(ctx)
	if err != nil {
		return workerapi.Loaded{}, err
	}
	defer what.Image.Close()
	return w.conn().Load(ctx, what)
}

// forgetCode drops code from the list after the worker said that it is not loaded.
func (w *worker) forgetCode(digest string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.loading, digest)
}

func (w *worker) unlist(digest string, l *loading) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.loading[digest] == l {
		delete(w.loading, digest)
	}
}

// unloadIdle unloads code that no container needs, except for the keep most recently used.
func (w *worker) unloadIdle(ctx context.Context, needed map[string]bool, keep int) {
	for {
		w.mu.Lock()
		oldest, idle := "", 0
		for digest, l := range w.loading {
			select {
			case <-l.done:
			default:
				continue // being loaded
			}
			if needed[digest] {
				continue
			}
			if idle++; oldest == "" || l.used.Before(w.loading[oldest].used) {
				oldest = digest
			}
		}
		if idle > keep {
			delete(w.loading, oldest)
		}
		w.mu.Unlock()
		if idle <= keep {
			return
		}
		if err := w.conn().Unload(ctx, oldest); err != nil {
			w.log.Debug("unload code", "digest", oldest, "err", err)
			return
		}
	}
}

// recordedProcess is the process that the worker's file names, if it lives.
func recordedProcess(dir string) (*process.Process, workerState, error) {
	var s workerState
	if err := format.Read(filepath.Join(dir, workerFile), &s); err != nil {
		return nil, s, err
	}
	p, err := process.Adopt(s.Process)
	return p, s, err
}

func (w *worker) logFile() string { return filepath.Join(w.dir, workerLog) }

// outOfMemory reports whether the OOM killer has killed in the worker's own cgroup.
func (w *worker) outOfMemory() bool {
	if w.cgroup == "" {
		return false
	}
	kills, err := stats.OOMKills(w.cgroup)
	return err == nil && kills > 0
}
