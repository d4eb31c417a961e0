package attack

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/klog/v2"

	"github.com/tripod-run/tripod/test/harness"
)

const (
	waitLimit = time.Minute
	// caseTime is the duration of a case, and of a measurement of the neighbours without an attack.
	caseTime = 2 * time.Second
	// pace is the interval between two calls to a neighbour. callLimit is the timeout of one call.
	pace, callLimit = 4 * time.Millisecond, 10 * time.Second
)

// full also compares the neighbours' latencies, which requires an otherwise idle machine.
var full = os.Getenv("TRIPOD_TEST_FULL") != ""

func TestMain(m *testing.M) {
	// The streaming clients' libraries log every abandoned stream.
	klog.SetSlogLogger(slog.New(slog.DiscardHandler))
	harness.Main(m)
}

// ground is a test with a daemon and neighbours, for one attacker.
type ground struct {
	*testing.T
	d          *harness.Daemon
	neighbours []*neighbour
}

// open starts a daemon with every kind of pod, and the neighbours.
func open(t *testing.T, opts ...harness.Option) *ground {
	t.Helper()
	all := append([]harness.Option{harness.Wasm(t, "node"), harness.VM(t)}, opts...)
	g := &ground{T: t, d: harness.StartDaemon(t, all...)}
	for _, image := range []string{harness.Busybox, harness.Nginx, harness.HelloHTTP, harness.TinyGuest} {
		g.d.Pull(t, image)
	}
	web := g.d.RunPod(t, harness.PodConfig(t, "neighbour"))
	t.Cleanup(web.Remove)
	web.Run(harness.ContainerConfig("c", harness.Nginx))
	component := g.d.RunWasm(t, &harness.PodSpec{Name: "neighbour-wasm", Image: harness.HelloHTTP})
	machine := g.d.RunVM(t, &harness.PodSpec{Name: "neighbour-vm", Image: harness.TinyGuest})
	canary := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "alive") }))
	t.Cleanup(canary.Close)
	g.neighbours = []*neighbour{
		{name: "canary", ask: getter(canary.URL)},
		{name: "container", ask: getter("http://" + net.JoinHostPort(web.IP(), "80"))},
		{name: "component", ask: getter("http://" + net.JoinHostPort(component.Pod.IP(), "80"))},
		{name: "kubelet", ask: func(ctx context.Context) error {
			resp, err := g.d.CRI().ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: machine.ID})
			if err == nil && resp.Status.State != runtimeapi.ContainerState_CONTAINER_RUNNING {
				err = fmt.Errorf("the machine is %v: %s", resp.Status.State, resp.Status.Message)
			}
			return err
		}},
	}
	for _, n := range g.neighbours {
		harness.Eventually(t, waitLimit, func() error { return n.ask(t.Context()) })
	}
	g.probe(t) // creates what is created only once, before the first snapshot
	return g
}

// getter returns a function that sends a GET request to a web server, over one connection.
func getter(url string) func(context.Context) error {
	client := &http.Client{Transport: &http.Transport{MaxIdleConns: 1}}
	return func(ctx context.Context) error {
		_, err := harness.Fetch(ctx, client, url)
		return err
	}
}

// neighbour is a service that an attack must not affect. The neighbour "canary" does not run on the node: it measures
// how busy the machine is.
type neighbour struct {
	name string
	ask  func(context.Context) error
}

// latencies maps a neighbour's name to the 99th percentile of its calls.
type latencies map[string]time.Duration

// watch calls the neighbours until stop, which returns their latencies.
func (g *ground) watch(t *testing.T) (stop func() latencies) {
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	var mu sync.Mutex
	f := latencies{}
	for _, n := range g.neighbours {
		wg.Go(func() {
			var took []time.Duration
			tick := time.NewTicker(pace)
			defer tick.Stop()
			for ctx.Err() == nil {
				begin := time.Now()
				call, done := context.WithTimeout(t.Context(), callLimit)
				if err := n.ask(call); err != nil {
					t.Errorf("the neighbour %s: %v", n.name, err)
				}
				done()
				took = append(took, time.Since(begin))
				select {
				case <-ctx.Done():
				case <-tick.C:
				}
			}
			slices.Sort(took)
			mu.Lock()
			f[n.name] = took[len(took)*99/100]
			mu.Unlock()
		})
	}
	return func() latencies { cancel(); wg.Wait(); return f }
}

// measure returns the latencies without an attack.
func (g *ground) measure(t *testing.T) latencies {
	stop := g.watch(t)
	time.Sleep(caseTime) // pacing: the length of the sample
	return stop()
}

// slower returns an error for each neighbour whose latency during an attack was higher than before and after it. It
// allows for the slowdown of the canary, and for 25 ms of scheduling delay, because all processes of the test share two
// CPUs.
func slower(before, during, after latencies) error {
	var errs []error
	usual := latencies{}
	for name := range before {
		usual[name] = max(before[name], after[name])
	}
	noise := 25*time.Millisecond + 4*max(0, during["canary"]-usual["canary"])
	for name, now := range during {
		if limit := usual[name]*3/2 + noise; name != "canary" && now > limit {
			errs = append(errs, fmt.Errorf("%s: got %v, want at most %v (usually %v)", name, now, limit, usual[name]))
		}
	}
	return errors.Join(errs...)
}

// attack runs one case: it calls try repeatedly for caseTime, at least once, and then makes the checks in the package
// comment.
func (g *ground) attack(name string, try func(t *testing.T)) {
	g.Run(name, func(t *testing.T) {
		before := g.resources()
		var usual, after latencies
		if full {
			usual = g.measure(t)
		}
		stop := g.watch(t)
		t.Run("it", func(t *testing.T) { // a subtest, so that the clean-up is part of the case
			for begin := time.Now(); ; {
				if try(t); t.Failed() || time.Since(begin) > caseTime {
					return
				}
			}
		})
		during := stop()
		if full {
			after = g.measure(t)
			t.Logf("99th percentiles before %v\nduring %v\nafter %v", usual, during, after)
			if err := slower(usual, during, after); err != nil {
				t.Errorf("slower neighbours: %v", err)
			}
		}
		g.probe(t)
		harness.Eventually(t, waitLimit, func() error { return before.leaks(g.resources()) })
	})
}

// probe runs a new pod of each kind with each image, and a session. The first container of an image leaves a snapshot
// that stays as long as the image, and the first session a carrier.
func (g *ground) probe(t *testing.T) {
	t.Helper()
	web := g.d.RunPod(t, harness.PodConfig(t, "probe"))
	web.Run(harness.ContainerConfig("c", harness.Nginx))
	if page := web.Get("/"); !strings.Contains(page, "nginx") {
		t.Errorf("page of a new container: got %q, want nginx's", page)
	}
	shell := web.Run(harness.ContainerConfig("shell", harness.Busybox, harness.Sleep()))
	if r := shell.Exec(harness.SPDY, nil, false, "true"); r.Code != 0 {
		t.Errorf("exec in a new container: got exit code %d: %s", r.Code, r.Stderr)
	}
	web.Remove()
	component := g.d.RunPodWith(t, harness.PodConfig(t, "probe-wasm"), "wasm")
	component.Run(harness.ContainerConfig("c", harness.HelloHTTP))
	component.Get("/")
	component.Remove()
	machine := g.d.RunPodWith(t, harness.PodConfig(t, "probe-vm"), "vm")
	machine.Run(harness.ContainerConfig("c", harness.TinyGuest)).WaitConsole("tick 00001")
	machine.Remove()
}

// resources are the resources of a node, and the number of open files of its component workers by kind.
type resources struct {
	harness.Resources
	workerFiles map[string]int
}

func (g *ground) resources() resources {
	r := resources{harness.Snapshot(g.d), map[string]int{}}
	for name := range r.Processes {
		pid, _, _ := strings.Cut(name, "@")
		if !strings.Contains(name, "tripod-wasm worker") {
			continue
		}
		maps.Copy(r.workerFiles, filesOf(pid))
	}
	return r
}

func filesOf(pid string) map[string]int {
	found := map[string]int{}
	links, err := filepath.Glob("/proc/" + pid + "/fd/*")
	if err != nil {
		panic(err) // the pattern is malformed
	}
	for _, link := range links {
		if target, err := os.Readlink(link); err == nil {
			kind, _, _ := strings.Cut(target, ":[")
			found[kind]++
		}
	}
	return found
}

func (r resources) leaks(after resources) error {
	errs := []error{r.Leaks(after.Resources)}
	for kind, n := range after.workerFiles {
		if had := r.workerFiles[kind]; n > had {
			errs = append(errs, fmt.Errorf("open files %q of the worker: got %d, want at most %d", kind, n, had))
		}
	}
	return errors.Join(errs...)
}

// listening returns the TCP ports on which the node listens.
func listening(t *testing.T) (ports []int) {
	t.Helper()
	for _, file := range []string{"/proc/self/net/tcp", "/proc/self/net/tcp6"} {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(data)) {
			f := strings.Fields(line) // number, local address, remote address, state; 0A is LISTEN
			if len(f) < 4 || f[3] != "0A" {
				continue
			}
			var port int
			if _, err := fmt.Sscanf(f[1][strings.LastIndexByte(f[1], ':')+1:], "%X", &port); err != nil {
				t.Fatal(err)
			}
			ports = append(ports, port)
		}
	}
	if len(ports) == 0 {
		t.Fatal("found no listening port on the node")
	}
	return ports
}
