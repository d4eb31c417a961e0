package soak

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/klog/v2"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/test/harness"
)

const (
	workers    = 4
	units      = 4
	sharedPods = 2
	phase      = 5 * time.Second
	// stopTime is more than any call of the workers takes.
	stopTime = 10 * time.Second
)

func TestMain(m *testing.M) {
	// The streaming clients' libraries write about every stream that was left.
	klog.SetSlogLogger(slog.New(slog.DiscardHandler))
	harness.Main(m)
}

// clock is the time of day as in the daemon's log.
func clock() string { return time.Now().UTC().Format("15:04:05.000") }

// soak is one daemon with those who trouble it.
type soak struct {
	t     *testing.T
	d     *harness.Daemon
	linux bool
	rng   *rand.Rand // the test's own; each worker has another

	conn  *grpc.ClientConn
	cri   runtimeapi.RuntimeServiceClient
	img   runtimeapi.ImageServiceClient
	debug string // the socket of the daemon's profiles

	points []string
	// armed is the fail point of this life of the daemon, empty when there is none.
	armed atomic.Pointer[string]
	// calls are those to the daemon, answers those of components.
	calls, answers atomic.Int64
	// cycles are the containers and pods that were made and removed.
	cycles atomic.Int64
	// deathCount goes up when a worker of components is about to be killed, and when it is dead.
	deathCount atomic.Int64
	// cells are those of the state table that unit pods have been in, each without any doubt.
	cells sync.Map

	workers []*worker
	shared  []*pod
	units   []*unit
	events  *listener
	// base is what there was without pods; basePid is the life of the daemon whose files, goroutines and memory count.
	base       harness.Resources
	basePid    int
	goroutines int
	resident   int
	workerBase map[process.ID]usage
	// first is what there was before the first pod, records how large the daemon's record files were when all pods had been removed
	// for the settled-th time.
	first   harness.Resources
	empty   int
	records map[string]int64

	mu sync.Mutex
	// harmed are the containers and pods whose helpers were killed: their logs may be torn, their ends unknown.
	harmed map[string]bool
}

// modes are who shares a worker of components, beside each OCI runtime.
var modes = map[string]string{"crun": "node", "runc": "pod"}

func TestSoak(t *testing.T) {
	for _, backend := range []string{"crun", "runc", "fake"} {
		t.Run(backend, func(t *testing.T) { run(t, backend) })
	}
}

func run(t *testing.T, backend string) {
	duration, cycles, seed := 30*time.Second, int64(0), rand.Uint64()
	var err error
	if text := os.Getenv("TRIPOD_SOAK"); text != "" {
		if number, ok := strings.CutSuffix(text, "x"); ok {
			cycles, err = strconv.ParseInt(number, 10, 64)
		} else {
			duration, err = time.ParseDuration(text)
		}
		if err != nil {
			t.Fatalf("TRIPOD_SOAK: %v", err)
		}
	}
	if text := os.Getenv("TRIPOD_SOAK_SEED"); text != "" {
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatalf("TRIPOD_SOAK_SEED: %v", err)
		}
	}
	t.Logf("TRIPOD_SOAK_SEED=%d TRIPOD_SOAK=%v", seed, duration)
	s := newSoak(t, backend, seed)
	end := time.Now().Add(duration)
	more := func() bool { return cycles == 0 && time.Now().Before(end) || s.cycles.Load() < cycles }
	for n := 1; more() && !t.Failed(); n++ {
		s.phase(n)
	}
	s.removeAll()
	cells := 0
	s.cells.Range(func(any, any) bool { cells++; return true })
	t.Logf("%d calls, %d cycles, %d cells of the state table, %d answers of components, %d of their workers killed",
		s.calls.Load(), s.cycles.Load(), cells, s.answers.Load(), s.deathCount.Load()/2)
}

func newSoak(t *testing.T, backend string, seed uint64) *soak {
	t.Helper()
	debug := fmt.Sprintf("/run/soak-%s/debug.sock", backend)
	opts := []harness.Option{harness.Set("debug.socket", debug)}
	if backend == "fake" {
		opts = append(opts, harness.Fake())
	} else {
		opts = append(opts, harness.Set("linux.runtime", backend), harness.Wasm(t, modes[backend]))
	}
	if err := os.MkdirAll("/run/soak-"+backend, 0o700); err != nil {
		t.Fatal(err)
	}
	s := &soak{t: t, linux: backend != "fake", rng: rand.New(rand.NewPCG(seed, 0)), debug: debug, harmed: map[string]bool{}}
	s.d = harness.StartDaemon(t, opts...)
	if file := os.Getenv("TRIPOD_SOAK_LOG"); file != "" {
		t.Cleanup(func() {
			if err := os.WriteFile(file, []byte(s.d.DaemonLog()), 0o600); err != nil {
				t.Error(err)
			}
		})
	}
	conn, err := harness.Dial(s.d.Socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	s.conn, s.cri, s.img = conn, runtimeapi.NewRuntimeServiceClient(conn), runtimeapi.NewImageServiceClient(conn)
	s.points = s.failpoints()
	s.d.Pull(t, harness.Busybox)
	for i := range sharedPods {
		s.shared = append(s.shared, s.newPod(fmt.Sprintf("shared-%d", i), true, s.rng))
	}
	for i := range workers {
		s.workers = append(s.workers, newWorker(s, seed, i))
	}
	if s.linux {
		for i := range units {
			s.units = append(s.units, newUnit(s, seed, i))
		}
	}
	s.useComponents()
	s.takeBase()
	s.first = s.base
	s.first.Files = nil // they are of one life of the daemon
	return s
}

// failpoints lists those that this backend can pass.
func (s *soak) failpoints() []string {
	var points []string
	for _, name := range harness.FailPoints(s.t) {
		of, _, _ := strings.Cut(name, ".")
		if of == "node" || of == "network" || of == "image" || (of == "linux" || of == "wasm") == s.linux {
			points = append(points, name)
		}
	}
	return points
}

// phase lets the workers run for a while under one kind of trouble, and then checks that everything is true.
func (s *soak) phase(n int) {
	trouble := s.trouble()
	s.t.Logf("%s phase %d: %s", clock(), n, trouble)
	s.events = s.listen()
	var wg sync.WaitGroup
	stop := make(chan struct{})
	for _, w := range s.workers {
		wg.Go(func() { w.work(stop) })
	}
	for _, u := range s.units {
		wg.Go(func() { u.work(stop) })
	}
	wg.Go(func() { s.watchLists(stop) })
	if s.linux {
		rng := rand.New(rand.NewPCG(s.rng.Uint64(), 1))
		wg.Go(func() { s.killHelpers(rng, stop) })
		if s.rng.IntN(2) == 0 {
			rng := rand.New(rand.NewPCG(s.rng.Uint64(), 2))
			wg.Go(func() { s.killWasmWorkers(rng, stop) })
		}
	}
	s.supervise(trouble)
	close(stop)
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	for ended := false; !ended; { // a fail point that kills may still be passed
		select {
		case <-done:
			ended = true
		case <-time.After(50 * time.Millisecond):
			s.restartIfDead()
		}
	}
	s.restartIfDead()
	s.t.Logf("%s phase %d: all calls have ended", clock(), n)
	s.check()
	s.events.close()
	if s.armed.Load() != nil {
		s.arm("")
		s.d.Restart()
	}
	if s.rng.IntN(3) == 0 {
		s.removeAll()
	}
}

// trouble draws what happens to the daemon in a phase. A fail point is armed at once.
func (s *soak) trouble() string {
	switch s.rng.IntN(8) {
	case 0, 1:
		return "none"
	case 2, 3:
		return "SIGKILL"
	case 4:
		return "SIGTERM"
	}
	point := s.points[s.rng.IntN(len(s.points))]
	actions := []string{"kill", "kill", "1*error(soaked)", "3*error(soaked)", "delay(300ms)", "delay(2s)"}
	s.arm(point + "=" + actions[s.rng.IntN(len(actions))])
	s.d.Stop()
	s.start(failpoint.Variable + "=" + *s.armed.Load())
	if armed := s.armed.Load(); armed != nil {
		return *armed
	}
	return "a fail point passed at the start"
}

func (s *soak) arm(point string) {
	if point == "" {
		s.armed.Store(nil)
		return
	}
	s.armed.Store(&point)
}

// start starts the daemon; one that dies of its fail point on the way is started without.
func (s *soak) start(env ...string) {
	if err := s.d.TryStart(env...); err == nil {
		return
	} else if s.armed.Load() == nil {
		s.t.Fatal(err)
	}
	s.arm("")
	s.d.Start()
}

// supervise makes the trouble and keeps the daemon running for the length of a phase.
func (s *soak) supervise(trouble string) {
	end := time.Now().Add(phase)
	at := time.Now().Add(time.Duration(s.rng.Int64N(int64(phase))))
	for time.Now().Before(end) {
		if time.Now().After(at) && s.d.Running() {
			at = end
			switch trouble {
			case "SIGKILL":
				s.d.Kill()
				if s.rng.IntN(2) == 0 {
					s.killWasmWorker(s.rng)
				}
				s.start()
			case "SIGTERM":
				began := time.Now()
				s.d.Stop()
				if took := time.Since(began); took > stopTime {
					s.t.Errorf("the daemon took %v to stop", took)
				}
				s.d.Start()
			}
		}
		s.restartIfDead()
		time.Sleep(10 * time.Millisecond) // between two looks
	}
}

// restartIfDead starts a daemon again that has passed its fail point, and fails the test when it died of anything else.
func (s *soak) restartIfDead() {
	if s.d.Running() {
		return
	}
	state := s.d.WaitExit(time.Second)
	if point := s.armed.Load(); point == nil || state.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		s.t.Errorf("the daemon died: %v", state)
	}
	s.arm("")
	s.d.Start()
}

// killHelpers kills, now and then, a container's monitor or a pod's init process.
func (s *soak) killHelpers(rng *rand.Rand, stop <-chan struct{}) {
	for {
		select {
		case <-stop:
			return
		case <-time.After(time.Duration(rng.Int64N(int64(4 * time.Second)))):
		}
		var helpers []helper
		for _, h := range helperProcesses() {
			if h.monitor || rng.IntN(2) == 0 {
				helpers = append(helpers, h)
			}
		}
		if len(helpers) == 0 {
			continue
		}
		h := helpers[rng.IntN(len(helpers))]
		s.harm(h.id)
		_ = syscall.Kill(h.pid, syscall.SIGKILL)
	}
}

func (s *soak) harm(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.harmed[id] = true
}

func (s *soak) isHarmed(ids ...string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, id := range ids {
		if s.harmed[id] {
			return true
		}
	}
	return false
}
