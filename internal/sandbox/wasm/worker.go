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
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/launch"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
	"github.com/tripod-run/tripod/internal/stats"
	"github.com/tripod-run/tripod/internal/unixsocket"
)

const (
	// redialTime is how long the daemon tries to reconnect to a worker before it kills the worker.
	redialTime = 15 * time.Second
	// helloTime bounds the wait for a connection to a worker of the previous daemon.
	helloTime = 20 * time.Second
)

// workerFile is the record in a worker's directory, beside the files of package launch.
const workerFile = "worker.json"

// worker is one tripod-wasm process, started by this daemon or a previous one.
type worker struct {
	name, scope, dir string
	cgroup           string
	proc             *process.Process
	// child is set if this daemon has started the process and so must reap it.
	child *exec.Cmd
	log   *slog.Logger
	// retired says that another version of the program is installed now. A retired worker keeps its pods but gets no
	// new ones.
	retired bool
	// died is closed once the process has ended and its containers are recorded as exited. From then on, the field why
	// says how the process ended.
	died chan struct{}
	why  string
	// ending is set when the daemon sends SIGTERM.
	ending atomic.Bool
	// detached is closed when the daemon stops but the worker continues.
	detached chan struct{}

	mu     sync.Mutex
	client *workerapi.Client
	// loading holds the code that the worker has loaded or is loading, by workerapi.Code.Digest.
	loading map[string]*loading
}

// loading is a call to Load. The fields loaded and err are valid once done is closed.
type loading struct {
	done   chan struct{}
	loaded workerapi.Loaded
	err    error
	used   time.Time // last use for a container
}

func newWorker(name, scope, dir string, log *slog.Logger) *worker {
	return &worker{
		name: name, scope: scope, dir: dir, log: log.With("worker", name),
		died: make(chan struct{}), detached: make(chan struct{}), loading: map[string]*loading{},
	}
}

// dial connects to one of the worker's sockets.
func (w *worker) dial(ctx context.Context, socket string) (*net.UnixConn, error) {
	conn, err := unixsocket.Dial(ctx, filepath.Join(w.dir, socket))
	if err != nil {
		return nil, fmt.Errorf("wasm worker %s: %w: %w", w.name, err, errdefs.ErrUnavailable)
	}
	return conn, nil
}

// connect opens the connection for orders and events.
func (w *worker) connect(ctx context.Context) error {
	conn, err := w.dial(ctx, launch.ControlSocket)
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

// conn returns the current connection. If the connection has ended, calls on it fail with errdefs.ErrUnavailable.
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

// watch handles the worker's events until the process ends or the daemon stops, and reconnects when a connection
// breaks.
func (w *worker) watch(happened func(workerapi.Event), reconnected func(context.Context, *worker) error) {
	for {
		w.serve(w.conn(), happened)
		if !w.proc.Alive() || w.isDetached() {
			return
		}
		if w.ending.Load() {
			<-w.proc.Dead
			return
		}
		if err := w.reconnect(reconnected); err != nil {
			if w.proc.Alive() {
				w.log.Error("worker does not respond; killing it", "pid", w.proc.Pid, "err", err)
				_ = w.proc.Signal(unix.SIGKILL)
				<-w.proc.Dead
			}
			return
		}
	}
}

// serve passes on the events of one connection until the connection or the process ends, or the daemon stops.
func (w *worker) serve(client *workerapi.Client, happened func(workerapi.Event)) {
	defer client.Close()
	for {
		select {
		case e, ok := <-client.Events():
			if !ok {
				return
			}
			happened(e)
		case <-w.proc.Dead:
			return
		case <-w.detached:
			return
		}
	}
}

func (w *worker) isDetached() bool {
	select {
	case <-w.detached:
		return true
	default:
		return false
	}
}

// reconnect opens a new connection to a running worker and updates the state of its pods. It retries for redialTime.
func (w *worker) reconnect(reconnected func(context.Context, *worker) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), redialTime)
	defer cancel()
	for {
		if w.proc.WaitFor(retryPause) { // usually the process has ended
			return fmt.Errorf("wasm worker %s has ended: %w", w.name, errdefs.ErrUnavailable)
		}
		err := w.connect(ctx)
		if err == nil {
			if err = reconnected(ctx, w); err == nil {
				w.log.Warn("reconnected to worker")
				return nil
			}
			w.conn().Close()
		}
		if ctx.Err() != nil || w.isDetached() {
			return err
		}
	}
}

// reap waits until the process has ended and returns a description of its end.
func (w *worker) reap() string {
	<-w.proc.Dead
	if w.child == nil {
		return "its exit status is unknown" // only a parent gets the exit status
	}
	_ = w.child.Wait()
	state := w.child.ProcessState
	if status, ok := state.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return fmt.Sprintf("it was killed by signal %d (%s)", status.Signal(), status.Signal())
	}
	return "it ended with " + state.String()
}

// end ends the worker with SIGTERM or, after endTime, with SIGKILL, and waits until the worker's end is recorded.
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

// endTime is how long a worker can take to end before it is killed.
const endTime = 5 * time.Second

// load loads the code of a component into the worker, unless the code is already loaded. It calls the given function to
// get the code.
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
			w.mu.Lock()
			if l.err != nil && w.loading[digest] == l {
				delete(w.loading, digest)
			}
			w.mu.Unlock()
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
		// The context of the caller that loaded the code has ended, so try again.
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

// forgetCode removes code from w.loading after the worker has reported that the code is not loaded.
func (w *worker) forgetCode(digest string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.loading, digest)
}

// unloadIdle unloads components that no container needs, the least recently used first, until at most the given number
// of them are left.
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
			w.log.Debug("unload code failed", "digest", oldest, "err", err)
			return
		}
	}
}

// recordedProcess returns the record in a worker's directory, and the recorded process if that process is still
// running.
func recordedProcess(dir string) (*process.Process, workerState, error) {
	var s workerState
	if err := format.Read(filepath.Join(dir, workerFile), &s); err != nil {
		return nil, s, err
	}
	p, err := process.Adopt(s.Process)
	return p, s, err
}

func (w *worker) logFile() string { return filepath.Join(w.dir, launch.LogFile) }

// outOfMemory reports whether the OOM killer has killed a process in the worker's cgroup.
func (w *worker) outOfMemory() bool {
	if w.cgroup == "" {
		return false
	}
	kills, err := stats.OOMKills(w.cgroup)
	return err == nil && kills > 0
}
