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
	// stopTime limits the daemon's stop. It is longer than any call of the workers.
	stopTime = 10 * time.Second
)

func TestMain(m *testing.M) {
	// The streaming clients' libraries log every abandoned stream.
	klog.SetSlogLogger(slog.New(slog.DiscardHandler))
	harness.Main(m)
}

// clock returns the time of day in the format of the daemon's log.
func clock() string { return time.Now().UTC().Format("15:04:05.000") }

// soak is the state of one test: a daemon and its clients.
type soak struct {
	t     *testing.T
	d     *harness.Daemon
	linux bool
	rng   *rand.Rand // only for the test's goroutine; each worker has its own

	conn  *grpc.ClientConn
	cri   runtimeapi.RuntimeServiceClient
	img   runtimeapi.ImageServiceClient
	debug string // the socket of the daemon's profiles

	points []string
	// armed is the fail point of the running daemon process; nil for none.
	armed atomic.Pointer[string]
	// calls counts calls to the daemon, and answers counts calls to components.
	calls, answers atomic.Int64
	// cycles counts the containers and pods that were created and removed.
	cycles atomic.Int64
	// deathCount is incremented before a component worker is killed, and again when it is dead.
	deathCount atomic.Int64
	// cells are the cells of the state table that unit pods have certainly been in.
	cells sync.Map

	workers []*worker
	shared  []*pod
	units   []*unit
	events  *listener
	// base are the resources without pods. basePid is the daemon process to which files, goroutines and memory belong.
	base       harness.Resources
	basePid    int
	goroutines int
	resident   int
	workerBase map[process.ID]usage
	// first are the resources before the first pod. empty counts the times that all pods were removed. records maps the
	// daemon's record files to their size when empty was settled.
	first   harness.Resources
	empty   int
	records map[string]int64

	mu sync.Mutex
	// harmed are the containers and pods whose helpers were killed. Their logs may be torn and their exit codes unknown.
	harmed map[string]bool
}

// modes maps an OCI runtime to the sharing of component workers in its test.
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
	if s.linux { // the first container of an image leaves a snapshot as long as the image, and the first session a carrier
		pod := s.d.RunPod(t, harness.PodConfig(t, "first"))
		c := pod.Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep()))
		if r := c.Exec(harness.SPDY, nil, false, "true"); r.Code != 0 {
			t.Fatalf("exec in the first container: got exit code %d: %s", r.Code, r.Stderr)
		}
		pod.Remove()
	}
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
	s.first.Files = nil // valid only for one daemon process
	return s
}

// failpoints lists the fail points that the daemon can pass with this backend.
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

// phase runs the workers with one kind of trouble, and then makes all checks.
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
	for ended := false; !ended; { // the daemon can still reach a fail point that kills it
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

// trouble selects what happens to the daemon in a phase. If it is a fail point, trouble restarts the daemon with it.
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
	return "a fail point during the start"
}

func (s *soak) arm(point string) {
	if point == "" {
		s.armed.Store(nil)
		return
	}
	s.armed.Store(&point)
}

// start starts the daemon. If the start fails because of the fail point, it starts the daemon without the fail point.
func (s *soak) start(env ...string) {
	if err := s.d.TryStart(env...); err == nil {
		return
	} else if s.armed.Load() == nil {
		s.t.Fatal(err)
	}
	s.arm("")
	s.d.Start()
}

// supervise causes the trouble and keeps the daemon running for the duration of a phase.
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
					s.t.Errorf("stop of the daemon: took %v, want at most %v", took, stopTime)
				}
				s.d.Start()
			}
		}
		s.restartIfDead()
		time.Sleep(10 * time.Millisecond) // pacing of the poll
	}
}

// restartIfDead restarts a daemon that its fail point has killed. It fails the test if the daemon died for another
// reason.
func (s *soak) restartIfDead() {
	if s.d.Running() {
		return
	}
	state := s.d.WaitExit(time.Second)
	if point := s.armed.Load(); point == nil || state.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		s.t.Errorf("the daemon ended with %v, want it to run or SIGKILL at its fail point", state)
	}
	s.arm("")
	s.d.Start()
}

// killHelpers kills a container's monitor or a pod's init process, at random times.
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
