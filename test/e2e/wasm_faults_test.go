package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// modes are the ways to share workers.
var modes = []string{"node", "namespace", "pod"}

// TestWasmStreamsOutliveTheDaemon: streams over HTTP/2 and HTTP/3, new calls and logs work while the daemon is killed
// and after its restart, when it finds everything unchanged.
func TestWasmStreamsOutliveTheDaemon(t *testing.T) {
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			d := harness.StartDaemon(t, harness.Wasm(t, mode))
			c, s := startComponent(t, d, harness.FaultsC, faults)
			overTCP := s.followGRPC(t.Context(), faults+"/Tick", `{"intervalMs":10}`)
			overQUIC := s.followQUIC(t.Context(), faults+"/Tick", `{"intervalMs":10}`)
			both := func(n int) {
				t.Helper()
				tcp, quic := overTCP.more(n), overQUIC.more(n)
				harness.Eventually(t, waitLimit, func() error { return errors.Join(tcp(), quic()) })
			}
			both(3)
			before := c.Status()
			for range 2 {
				d.Kill()
				both(10)
				s.call(faults+"/Print", `{"stdout":"without a daemon\n"}`)
				d.Start()
				both(10)
				after := c.Status()
				if after.State != running || after.StartedAt != before.StartedAt || c.Pod.IP() != s.ip {
					t.Errorf("status after the restart: got %v, want %v", after, before)
				}
			}
			if got := strings.Count(harness.Text(c.Logs(), "stdout"), "without a daemon"); got != 2 {
				t.Errorf("lines in the log: got %d, want 2", got)
			}
			d.Restart() // ends the daemon with SIGTERM
			both(10)
			c.Stop(time.Second)
			<-overTCP.over
			<-overQUIC.over
		})
	}
}

// guestFaults runs faults-c and another pod, which must not be affected.
func guestFaults(t *testing.T, opts ...harness.PodOption) (c *harness.Container, s, neighbour *served) {
	t.Helper()
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	limit := resources(&runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 64 << 20})
	c = d.RunWasm(t, &harness.PodSpec{Name: "faults", Image: harness.FaultsC, Pod: opts, Container: []harness.ContainerOption{limit}})
	n := d.RunWasm(t, &harness.PodSpec{Name: "neighbour", Image: harness.GreeterC})
	return c, dial(t, c.Pod.IP(), faults), dial(t, n.Pod.IP(), greeter)
}

// unaffected fails the test unless the neighbour answers quickly.
func (s *served) unaffected() {
	s.Helper()
	ctx, cancel := context.WithTimeout(s.Context(), 3*time.Second)
	defer cancel()
	if _, err := s.try(ctx, greeter+"/SayHello", `{"name":"Ada"}`); err != nil {
		s.Errorf("call to the neighbour: %v", err)
	}
}

// TestW1GuestsThatUseUpWhatTheyHave: endless loops, deep recursion and allocations end only the guest's own calls.
func TestW1GuestsThatUseUpWhatTheyHave(t *testing.T) {
	c, s, neighbour := guestFaults(t, annotate("request-timeout", "500ms"))
	for what, try := range map[string]struct {
		method, request string
		code            codes.Code
	}{
		"endless loop":         {"Spin", `{}`, codes.DeadlineExceeded},
		"deep recursion":       {"Recurse", `{}`, codes.Internal},
		"more than its memory": {"Allocate", `{"value":"2000000000"}`, codes.ResourceExhausted},
	} {
		begin := time.Now()
		_, err := s.try(s.context(), faults+"/"+try.method, try.request)
		if wantCode(t, err, try.code); time.Since(begin) > 30*time.Second {
			t.Errorf("%s: took %s, want at most 30s", what, time.Since(begin))
		}
		neighbour.unaffected()
		s.call(faults+"/Echo", `{"data":"aGk="}`)
	}
	// The client's deadline also ends a guest, long before the guest's own deadline.
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err := s.try(ctx, faults+"/Spin", `{"milliseconds":60000}`)
	wantCode(t, err, codes.DeadlineExceeded)
	// Many guests at the same time.
	spins := make(chan error, 20)
	for range cap(spins) {
		go func() {
			_, err := s.try(s.context(), faults+"/Spin", `{}`)
			spins <- err
		}()
	}
	for range 10 {
		neighbour.unaffected()
	}
	for range cap(spins) {
		wantCode(t, <-spins, codes.DeadlineExceeded)
	}
	s.call(faults+"/Echo", `{"data":"aGk="}`)
	if st := c.Status(); st.State != running {
		t.Errorf("status of the pod: got %v, want running", st)
	}
}

// TestW2TrapInOneRequest: a trap ends only its own request, with INTERNAL, and its cause is in the log.
func TestW2TrapInOneRequest(t *testing.T) {
	c, s, neighbour := guestFaults(t)
	stream := s.followGRPC(t.Context(), faults+"/Tick", `{"intervalMs":10}`)
	for _, kind := range []string{"UNREACHABLE", "OUT_OF_BOUNDS", "DIVIDE_BY_ZERO", "INDIRECT_CALL"} {
		_, err := s.try(s.context(), faults+"/Trap", fmt.Sprintf(`{"kind":%q}`, kind))
		wantCode(t, err, codes.Internal)
	}
	_, err := s.try(s.context(), faults+"/Exit", `{"value":"3"}`)
	wantCode(t, err, codes.Internal)
	harness.Eventually(t, waitLimit, stream.more(5))
	neighbour.unaffected()
	c.WaitLog(faults + "/Trap")
	if log := harness.Text(c.Logs(), "stderr"); !strings.Contains(log, "unreachable") || !strings.Contains(log, "divide by zero") {
		t.Errorf("log: want both causes in\n%s", log)
	}
	if st := c.Status(); st.State != running {
		t.Errorf("status of the pod: got %v, want running", st)
	}
}

// workers returns the PIDs of the Wasm workers in the test's PID namespace.
func workers(t *testing.T) (pids []int) {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		argv := strings.Split(string(data), "\x00")
		if err != nil || len(argv) < 3 || filepath.Base(argv[0]) != "tripod-wasm" || argv[1] != "worker" {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err != nil {
			t.Fatal(err)
		}
		pids = append(pids, pid)
	}
	return pids
}

// TestW5WorkerIsKilled: if a worker is killed, its pods are stopped with a reason, other pods are unaffected, and the
// worker is restarted immediately.
func TestW5WorkerIsKilled(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "namespace"))
	otherNamespace := func(c *runtimeapi.PodSandboxConfig) { c.Metadata.Namespace = "other" }
	n := d.RunWasm(t, &harness.PodSpec{Name: "other", Image: harness.GreeterC, Pod: []harness.PodOption{otherNamespace}})
	neighbour, untouched := dial(t, n.Pod.IP(), greeter), workers(t)
	c, s := startComponent(t, d, harness.FaultsC, faults)
	for _, signal := range []syscall.Signal{syscall.SIGKILL, syscall.SIGSEGV} {
		killed := 0
		for _, pid := range workers(t) {
			if slices.Contains(untouched, pid) {
				continue
			}
			killed++
			if err := syscall.Kill(pid, signal); err != nil {
				t.Fatal(err)
			}
		}
		if killed != 1 {
			t.Fatalf("workers killed: got %d, want 1; untouched are %v", killed, untouched)
		}
		st := c.WaitState(exited)
		if st.ExitCode != 137 || st.Reason != "Error" || !strings.Contains(st.Message, "worker") {
			t.Errorf("status after %v: got %v, want exit code 137 because of the worker", signal, st)
		}
		neighbour.unaffected()
		c.Start()
		s.until(faults+"/Echo", `{}`)
	}
	if st := n.Status(); st.State != running {
		t.Errorf("status of the neighbour: got %v, want running", st)
	}
}

// TestN2WorkerIsKilledWithoutADaemon: after a restart, the daemon notices that a worker died while it was down.
func TestN2WorkerIsKilledWithoutADaemon(t *testing.T) {
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			d := harness.StartDaemon(t, harness.Wasm(t, mode))
			c, s := startComponent(t, d, harness.FaultsC, faults)
			d.Kill()
			for _, pid := range workers(t) {
				if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
					t.Fatal(err)
				}
			}
			d.Start()
			if st := c.WaitState(exited); st.ExitCode == 0 || st.Reason == "" {
				t.Errorf("status: got %v, want an exit code other than 0 and a reason", st)
			}
			c.Start()
			s.until(faults+"/Echo", `{}`)
			if ip := c.Pod.IP(); ip != s.ip {
				t.Errorf("address of the pod: got %s, want %s", ip, s.ip)
			}
		})
	}
}

// TestI6BadComponents: components that cannot run are refused with a reason before the pod is Running.
func TestI6BadComponents(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	for image, want := range map[string]string{
		harness.UnknownImportWasm: "missing", harness.MismatchWasm: "greet", harness.UndescribedWasm: "descriptor", harness.InvalidWasm: "",
	} {
		p, id, err := createIn(t, d, image)
		if err == nil {
			_, err = d.CRI().StartContainer(context.Background(), &runtimeapi.StartContainerRequest{ContainerId: id})
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got error %v, want %q in it", image, err, want)
		}
		if got := codeOf(err); got != codes.InvalidArgument && got != codes.FailedPrecondition {
			t.Errorf("%s: got error %v, want InvalidArgument or FailedPrecondition", image, err)
		}
		if st := p.Status(); st.State != ready {
			t.Errorf("%s: state of the pod: got %v, want ready", image, st.State)
		}
	}
	// A component can declare 4 GiB of memory, but its pod's limit applies.
	p, _, err := createIn(t, d, harness.HugeMemoryWasm)
	if err == nil {
		limited := harness.ContainerConfig("c", harness.HugeMemoryWasm,
			resources(&runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 64 << 20}))
		limited.Metadata.Attempt = 1
		var id string
		if id, err = create(d, p, limited); err == nil {
			_, err = d.CRI().StartContainer(context.Background(), &runtimeapi.StartContainerRequest{ContainerId: id})
		}
		if err == nil {
			harness.Eventually(t, waitLimit, func() error {
				resp, err := d.Runtime().ContainerStatus(context.Background(), id, false)
				if err == nil && (resp.Status.State != exited || resp.Status.Reason != "OOMKilled") {
					err = fmt.Errorf("status: got %v, want exited with OOMKilled", resp.Status)
				}
				return err
			})
		}
	}
	dial(t, d.RunWasm(t, &harness.PodSpec{Image: harness.GreeterC}).Pod.IP(), greeter).unaffected()
}

// TestI7CacheThatWasTamperedWith: compiled code that was modified is never loaded. The daemon compiles it again.
func TestI7CacheThatWasTamperedWith(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	_, s := startComponent(t, d, harness.GreeterC, greeter)
	s.unaffected()
	d.Stop()
	var files []string
	if err := filepath.WalkDir(filepath.Join(d.Root, "wasm", "cache"), func(path string, e os.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, ".code") {
			files = append(files, path)
		}
		return err
	}); err != nil || len(files) == 0 {
		t.Fatalf("files of compiled code: got %v, error %v; want at least one", files, err)
	}
	for _, change := range []func(f *os.File) error{
		func(f *os.File) error { _, err := f.WriteAt([]byte("tampered with"), 4096); return err },
		func(f *os.File) error { return f.Truncate(100) },
	} {
		for _, path := range files {
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(change(f), f.Close()); err != nil {
				t.Fatal(err)
			}
		}
		for _, pid := range workers(t) { // so that a new worker loads the code
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
		}
		d.Start()
		_, again := startComponent(t, d, harness.GreeterC, greeter)
		again.unaffected()
		d.Stop()
	}
	d.Start()
}

// TestWasmFloods: a guest that logs endlessly, and a guest that sends endlessly, do not affect others.
func TestWasmFloods(t *testing.T) {
	_, s, neighbour := guestFaults(t)
	big := strings.Repeat("x", 1000)
	for range 20 {
		s.call(faults+"/Print", fmt.Sprintf(`{"stdout":"%s\n","times":1000}`, big))
		neighbour.unaffected()
	}
	// A client that does not read blocks only itself.
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream, desc := s.stream(ctx, faults+"/Tick")
	if err := errors.Join(stream.SendMsg(s.message(desc.Input(), `{"bytes":100000}`)), stream.CloseSend()); err != nil {
		t.Fatal(err)
	}
	for range 10 {
		neighbour.unaffected()
		s.call(faults+"/Echo", `{"data":"aGk="}`)
	}
}
