package code

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/stats"
)

// priority is the urgency of a compilation.
type priority int

const (
	// PriorityBackground is for images that were already stored when the daemon started.
	PriorityBackground priority = iota
	// PriorityPull is for images that were pulled since.
	PriorityPull
	// priorityPod is for components that a pod waits for.
	priorityPod
)

// priorities are the labels of the priorities in metrics.
var priorities = [...]string{PriorityBackground: "background", PriorityPull: "pull", priorityPod: "pod"}

// niceness holds the nice value of compilers (setpriority(2)) by priority. Only compilations that a pod waits for
// compete with the guests as equals. The others still get 3 % of a busy processor, so that they end.
var niceness = [...]int{PriorityBackground: 15, PriorityPull: 15, priorityPod: 0}

// queue admits compilations: the most urgent first, and those of equal priority in order of arrival. At most limit run at
// a time. Compilations for pods do not count the less urgent ones, so no pod waits for these; then at most 2*limit run.
type queue struct {
	limit int

	mu      sync.Mutex
	queued  []*ticket // in order of arrival
	running map[*ticket]bool
}

// ticket is the place of one compilation in the queue. Its methods are safe for concurrent use.
type ticket struct {
	queue    *queue
	admitted chan struct{} // closed when the compilation may begin

	// The queue's mutex guards these fields.
	priority priority
	pid      int // of the compiler; 0 unless it runs
	urgent   func()
}

func newQueue(limit int) *queue { return &queue{limit: limit, running: map[*ticket]bool{}} }

// compilerMemory is the memory, in bytes, that one compilation of a large component needs.
const compilerMemory = 640 << 20

// defaultParallel returns the default number of concurrent compilations. Each uses all processors for most of its time,
// and together they may need a quarter of the memory.
func defaultParallel() int {
	return max(1, min(runtime.NumCPU()/2, int(stats.NodeMemory()/4/compilerMemory)))
}

// enter adds a compilation to the queue. The caller must call leave.
func (q *queue) enter(p priority) *ticket {
	t := &ticket{queue: q, priority: p, admitted: make(chan struct{})}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.queued = append(q.queued, t)
	q.admit()
	return t
}

// admit starts the compilations that may run. The caller holds q.mu.
func (q *queue) admit() {
	for {
		next := -1
		for i, t := range q.queued {
			if next < 0 || t.priority > q.queued[next].priority {
				next = i
			}
		}
		if next < 0 || !q.hasRoom(q.queued[next].priority) {
			return
		}
		t := q.queued[next]
		q.queued = slices.Delete(q.queued, next, next+1)
		q.running[t] = true
		close(t.admitted)
	}
}

// hasRoom reports whether one more compilation of this priority may run. The caller holds q.mu.
func (q *queue) hasRoom(p priority) bool {
	count := len(q.running)
	if p == priorityPod {
		count = 0
		for t := range q.running {
			if t.priority == priorityPod {
				count++
			}
		}
	}
	return count < q.limit
}

// wait returns once the compilation may begin. It returns the cause if ctx ends before.
func (t *ticket) wait(ctx context.Context) error {
	select {
	case <-t.admitted:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for other compilations: %w", context.Cause(ctx))
	}
}

// raise makes a compilation more urgent, also one that runs already.
func (t *ticket) raise(p priority) {
	t.queue.mu.Lock()
	defer t.queue.mu.Unlock()
	if p <= t.priority {
		return
	}
	t.priority = p
	if t.pid != 0 {
		renice(t.pid, niceness[p])
	}
	if t.urgent != nil && p == priorityPod {
		t.urgent()
	}
	t.queue.admit()
}

// whenUrgent calls f when a pod waits for the compilation, which can be at once.
func (t *ticket) whenUrgent(f func()) {
	t.queue.mu.Lock()
	defer t.queue.mu.Unlock()
	if t.urgent = f; t.priority == priorityPod {
		f()
	}
}

// start starts the compiler with the nice value of the compilation, which the process inherits from the calling thread.
// The caller has locked its goroutine to the thread, and ends without unlocking it, so that the thread ends, too.
func (t *ticket) start(cmd *exec.Cmd) error {
	t.queue.mu.Lock()
	nice := niceness[t.priority]
	t.queue.mu.Unlock()
	if err := unix.Setpriority(unix.PRIO_PROCESS, 0, nice); err != nil {
		return fmt.Errorf("set the nice value %d: %w", nice, err)
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	t.queue.mu.Lock()
	defer t.queue.mu.Unlock()
	t.pid = cmd.Process.Pid
	if now := niceness[t.priority]; now != nice {
		renice(t.pid, now)
	} else {
		reniceSession(t.pid, nice)
	}
	return nil
}

// ended says that the compiler's process has ended.
func (t *ticket) ended() {
	t.queue.mu.Lock()
	defer t.queue.mu.Unlock()
	t.pid = 0
}

// leave removes the compilation from the queue.
func (t *ticket) leave() {
	q := t.queue
	q.mu.Lock()
	defer q.mu.Unlock()
	delete(q.running, t)
	if i := slices.Index(q.queued, t); i >= 0 {
		q.queued = slices.Delete(q.queued, i, i+1)
	}
	q.admit()
}

// lengths returns the number of waiting and of running compilations by priority.
func (q *queue) lengths() (queued, running [len(priorities)]int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, t := range q.queued {
		queued[t.priority]++
	}
	for t := range q.running {
		running[t.priority]++
	}
	return queued, running
}

// renice sets the nice value of all threads of a process, because setpriority(2) applies to one thread. New threads
// inherit the value. A thread that is just being made can still get the old one, so renice repeats until it twice finds
// no thread with another value.
func renice(pid, nice int) {
	reniceSession(pid, nice)
	const kernelOffset = 20 // getpriority(2): the system call returns 20 minus the nice value
	for quiet := 0; quiet < 2; quiet++ {
		threads, _ := filepath.Glob(filepath.Join("/proc", strconv.Itoa(pid), "task", "[0-9]*"))
		for _, thread := range threads {
			tid, _ := strconv.Atoi(filepath.Base(thread))
			if now, err := unix.Getpriority(unix.PRIO_PROCESS, tid); err != nil || kernelOffset-now == nice {
				continue
			}
			if unix.Setpriority(unix.PRIO_PROCESS, tid, nice) == nil { // otherwise it has ended
				quiet = -1
			}
		}
	}
}

// reniceSession sets the nice value of the session that a compiler leads. If the kernel groups processes by session
// (sched(7), "The autogroup feature"), the values of threads count only within a session. Other kernels have no such file.
func reniceSession(pid, nice int) {
	file := filepath.Join("/proc", strconv.Itoa(pid), "autogroup")
	_ = os.WriteFile(file, []byte(strconv.Itoa(nice)), 0)
}
