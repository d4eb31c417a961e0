package workers

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

// RetryPause is the pause before an order to a worker is repeated after the connection to the worker has broken.
const RetryPause = 20 * time.Millisecond

const (
	// redialTime is how long the daemon tries to reconnect to a worker before it kills the worker.
	redialTime = 15 * time.Second
	// helloTime bounds the wait for a connection to a worker of the previous daemon.
	helloTime = 20 * time.Second
)

// workerFile is the record in a worker's directory, beside the files of package launch.
const workerFile = "worker.json"

// workerState is the record needed to end a worker that does not respond: worker.json in the worker's directory.
type workerState struct {
	Process process.ID `json:"process"`
	Cgroup  string     `json:"cgroup,omitempty"`
}

// Worker is one tripod-wasm process, started by this daemon or a previous one.
type Worker struct {
	// Name has the form scope.N. Dir holds the files of the process.
	Name, Scope, Dir string
	// Cgroup is "" for a worker without one of its own.
	Cgroup string
	Proc   *process.Process
	// child is set if this daemon has started the process and so must reap it.
	child *exec.Cmd
	log   *slog.Logger
	// Retired says that another version of the program is installed now. A retired worker keeps its pods but gets no
	// new ones.
	Retired bool
	// Died is closed once the process has ended and its containers are recorded as exited. From then on, Why
	// says how the process ended.
	Died chan struct{}
	Why  string
	// Ending is set when the daemon sends SIGTERM.
	Ending atomic.Bool
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

func newWorker(name, scope, dir string, log *slog.Logger) *Worker {
	return &Worker{
		Name: name, Scope: scope, Dir: dir, log: log.With("worker", name),
		Died: make(chan struct{}), detached: make(chan struct{}), loading: map[string]*loading{},
	}
}

// Dial connects to one of the worker's sockets.
func (w *Worker) Dial(ctx context.Context, socket string) (*net.UnixConn, error) {
	conn, err := unixsocket.Dial(ctx, filepath.Join(w.Dir, socket))
	if err != nil {
		return nil, fmt.Errorf("wasm worker %s: %w: %w", w.Name, err, errdefs.ErrUnavailable)
	}
	return conn, nil
}

// connect opens the connection for orders and events.
func (w *Worker) connect(ctx context.Context) error {
	conn, err := w.Dial(ctx, launch.ControlSocket)
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

// Conn returns the current connection. If the connection has ended, calls on it fail with errdefs.ErrUnavailable.
func (w *Worker) Conn() *workerapi.Client {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.client
}

func (w *Worker) alive() bool {
	select {
	case <-w.Died:
		return false
	default:
		return w.Proc.Alive()
	}
}

// watch handles the worker's events until the process ends or the daemon stops, and reconnects when a connection
// breaks.
func (w *Worker) watch(happened func(workerapi.Event), reconnected func(context.Context, *Worker) error) {
	for {
		w.serve(w.Conn(), happened)
		if !w.Proc.Alive() || w.isDetached() {
			return
		}
		if w.Ending.Load() {
			<-w.Proc.Dead
			return
		}
		if err := w.reconnect(reconnected); err != nil {
			if w.Proc.Alive() {
				w.log.Error("worker does not respond; killing it", "pid", w.Proc.Pid, "err", err)
				_ = w.Proc.Signal(unix.SIGKILL)
				<-w.Proc.Dead
			}
			return
		}
	}
}

// serve passes on the events of one connection until the connection or the process ends, or the daemon stops.
func (w *Worker) serve(client *workerapi.Client, happened func(workerapi.Event)) {
	defer client.Close()
	for {
		select {
		case e, ok := <-client.Events():
			if !ok {
				return
			}
			happened(e)
		case <-w.Proc.Dead:
			return
		case <-w.detached:
			return
		}
	}
}

func (w *Worker) isDetached() bool {
	select {
	case <-w.detached:
		return true
	default:
		return false
	}
}

// reconnect opens a new connection to a running worker and updates the state of its pods. It retries for redialTime.
func (w *Worker) reconnect(reconnected func(context.Context, *Worker) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), redialTime)
	defer cancel()
	for {
		if w.Proc.WaitFor(RetryPause) { // usually the process has ended
			return fmt.Errorf("wasm worker %s has ended: %w", w.Name, errdefs.ErrUnavailable)
		}
		err := w.connect(ctx)
		if err == nil {
			if err = reconnected(ctx, w); err == nil {
				w.log.Warn("reconnected to worker")
				return nil
			}
			w.Conn().Close()
		}
		if ctx.Err() != nil || w.isDetached() {
			return err
		}
	}
}

// reap waits until the process has ended and returns a description of its end.
func (w *Worker) reap() string {
	<-w.Proc.Dead
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

// End ends the worker with SIGTERM or, after endTime, with SIGKILL, and waits until the worker's end is recorded.
func (w *Worker) End(ctx context.Context) error {
	w.Ending.Store(true)
	if err := w.Proc.Signal(unix.SIGTERM); err != nil {
		return err
	}
	if !w.Proc.WaitFor(endTime) {
		_ = w.Proc.Signal(unix.SIGKILL)
	}
	select {
	case <-w.Died:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for the end of worker %s: %w", w.Name, context.Cause(ctx))
	}
}

// endTime is how long a worker can take to end before it is killed.
const endTime = 5 * time.Second

// Load loads the code of a component into the worker, unless the code is already loaded. It calls the given function to
// Get the code.
func (w *Worker) Load(ctx context.Context, digest string, code func(context.Context) (workerapi.Code, error)) (workerapi.Loaded, error) {
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

func (w *Worker) loadNow(ctx context.Context, digest string, code func(context.Context) (workerapi.Code, error)) (workerapi.Loaded, error) {
	what, err := code(ctx)
	if err != nil {
		return workerapi.Loaded{}, err
	}
	defer what.Image.Close()
	return w.Conn().Load(ctx, what)
}

// ForgetCode removes code from w.loading after the worker has reported that the code is not loaded.
func (w *Worker) ForgetCode(digest string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.loading, digest)
}

// UnloadIdle unloads components that no container needs, the least recently used first, until at most the given number
// of them are left.
func (w *Worker) UnloadIdle(ctx context.Context, needed map[string]bool, keep int) {
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
		if err := w.Conn().Unload(ctx, oldest); err != nil {
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

// LogFile returns the path of the worker's log.
func (w *Worker) LogFile() string { return filepath.Join(w.Dir, launch.LogFile) }

// OutOfMemory reports whether the OOM killer has killed a process in the worker's cgroup.
func (w *Worker) OutOfMemory() bool {
	if w.Cgroup == "" {
		return false
	}
	kills, err := stats.OOMKills(w.Cgroup)
	return err == nil && kills > 0
}

// Session opens another connection to the worker in a directory, for one session with a pod. It returns errdefs.ErrUnavailable
// if the worker does not answer.
func Session(ctx context.Context, dir string) (*workerapi.Client, error) {
	ctx, cancel := context.WithTimeout(ctx, helloTime)
	defer cancel()
	conn, err := unixsocket.Dial(ctx, filepath.Join(dir, launch.ControlSocket))
	if err != nil {
		return nil, fmt.Errorf("the worker does not answer: %w: %w", err, errdefs.ErrUnavailable)
	}
	return workerapi.NewSessionClient(ctx, conn)
}
