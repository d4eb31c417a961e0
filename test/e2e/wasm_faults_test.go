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

// modes are the kinds of workers.
var modes = []string{"node", "namespace", "pod"}

// TestWasmStreamsOutliveTheDaemon: streams over HTTP/2 and HTTP/3, new calls and logs go on while the daemon is killed and
// when it is back, which then finds everything as it was.
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
					t.Errorf("before %v, after %v", before, after)
				}
			}
			if got := strings.Count(harness.Text(c.Logs(), "stdout"), "without a daemon"); got != 2 {
				t.Errorf("%d lines in the log of 2", got)
			}
			d.Restart() // and when SIGTERM ends it
			both(10)
			c.Stop(time.Second)
			<-overTCP.over
			<-overQUIC.over
		})
	}
}

// guestFaults is a served faults-c with another pod beside it, which must not notice anything.
func guestFaults(t *testing.T, opts ...harness.PodOption) (c *harness.Container, s, neighbour *served) {
	t.Helper()
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	limit := resources(&runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 64 << 20})
	c = d.RunWasm(t, &harness.PodSpec{Name: "faults", Image: harness.FaultsC, Pod: opts, Container: []harness.ContainerOption{limit}})
	n := d.RunWasm(t, &harness.PodSpec{Name: "neighbour", Image: harness.GreeterC})
	return c, dial(t, c.Pod.IP(), faults), dial(t, n.Pod.IP(), greeter)
}

// unmoved fails when the neighbour does not answer at once.
func (s *served) unmoved() {
	s.Helper()
	ctx, cancel := context.WithTimeout(s.Context(), 3*time.Second)
	defer cancel()
	if _, err := s.try(ctx, greeter+"/SayHello", `{"name":"Ada"}`); err != nil {
		s.Errorf("the neighbour: %v", err)
	}
}

// TestW1GuestsThatUseUpWhatTheyHave: endless loops, deep recursion, memory.
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
		if wantCode(t, err, try.code); time.Since(begin) > 10*time.Second {
			t.Errorf("%s took %s", what, time.Since(begin))
		}
		neighbour.unmoved()
		s.call(faults+"/Echo", `{"data":"aGk="}`)
	}
	// The client's deadline ends a guest as well, long before its own.
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err := s.try(ctx, faults+"/Spin", `{"milliseconds":60000}`)
	wantCode(t, err, codes.DeadlineExceeded)
	// Many at a time.
	spins := make(chan error, 20)
	for range cap(spins) {
		go func() {
			_, err := s.try(s.context(), faults+"/Spin", `{}`)
			spins <- err
		}()
	}
	for range 10 {
		neighbour.unmoved()
	}
	for range cap(spins) {
		wantCode(t, <-spins, codes.DeadlineExceeded)
	}
	s.call(faults+"/Echo", `{"data":"aGk="}`)
	if st := c.Status(); st.State != running {
		t.Errorf("the pod is %v", st)
	}
}

// TestW2TrapInOneRequest: that request is INTERNAL, its cause is in the log, and nobody else notices.
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
	neighbour.unmoved()
	c.WaitLog(faults + "/Trap")
	if log := harness.Text(c.Logs(), "stderr"); !strings.Contains(log, "unreachable") || !strings.Contains(log, "divide by zero") {
		t.Errorf("causes in the log:\n%s", log)
	}
	if st := c.Status(); st.State != running {
		t.Errorf("the pod is %v", st)
	}
}

// workers are the processes of this world that are Wasm workers.
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

// TestW5WorkerIsKilled: the node lives, the worker's pods are stopped with a reason, others are untouched, and the worker
// is back at once.
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
			t.Fatalf("%d workers were killed; untouched are %v", killed, untouched)
		}
		st := c.WaitState(exited)
		if st.ExitCode != 137 || st.Reason != "Error" || !strings.Contains(st.Message, "worker") {
			t.Errorf("after %v: %v", signal, st)
		}
		neighbour.unmoved()
		c.Start()
		s.until(faults+"/Echo", `{}`)
	}
	if st := n.Status(); st.State != running {
		t.Errorf("the neighbour is %v", st)
	}
}

// TestN2WorkerIsKilledWithoutADaemon: a worker that died while the daemon was away is found dead when it is back.
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
				t.Errorf("want an exit code other than 0 and a reason, got %v", st)
			}
			c.Start()
			s.until(faults+"/Echo", `{}`)
			if ip := c.Pod.IP(); ip != s.ip {
				t.Errorf("the address went from %s to %s", s.ip, ip)
			}
		})
	}
}

// TestI6BadComponents: what cannot run is refused, by name, before the pod is Running.
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
			t.Errorf("%s: %v, want %q in it", image, err, want)
		}
		if got := codeOf(err); got != codes.InvalidArgument && got != codes.FailedPrecondition {
			t.Errorf("%s: %v", image, err)
		}
		if st := p.Status(); st.State != ready {
			t.Errorf("%s: the pod is %v", image, st.State)
		}
	}
	// It may declare 4 GiB; it gets what its pod may have.
	p, _, err := createIn(t, d, harness.HugeMemoryWasm)
	if err == nil {
		limited := harness.ContainerConfig("c", harness.HugeMemoryWasm, resources(&runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 64 << 20}))
		limited.Metadata.Attempt = 1
		var id string
		if id, err = create(d, p, limited); err == nil {
			_, err = d.CRI().StartContainer(context.Background(), &runtimeapi.StartContainerRequest{ContainerId: id})
		}
		if err == nil {
			harness.Eventually(t, waitLimit, func() error {
				resp, err := d.Runtime().ContainerStatus(context.Background(), id, false)
				if err == nil && (resp.Status.State != exited || resp.Status.Reason != "OOMKilled") {
					err = fmt.Errorf("want the container exited with OOMKilled, got %v", resp.Status)
				}
				return err
			})
		}
	}
	dial(t, d.RunWasm(t, &harness.PodSpec{Image: harness.GreeterC}).Pod.IP(), greeter).unmoved()
}

// TestI7CacheThatWasTamperedWith: compiled code that is not what the daemon wrote is never loaded, but made again.
func TestI7CacheThatWasTamperedWith(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	_, s := startComponent(t, d, harness.GreeterC, greeter)
	s.unmoved()
	d.Stop()
	var files []string
	if err := filepath.WalkDir(filepath.Join(d.Root, "wasm", "cache"), func(path string, e os.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, ".code") {
			files = append(files, path)
		}
		return err
	}); err != nil || len(files) == 0 {
		t.Fatalf("compiled code %v, %v", files, err)
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
		for _, pid := range workers(t) { // a new one has to load it
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
		}
		d.Start()
		_, again := startComponent(t, d, harness.GreeterC, greeter)
		again.unmoved()
		d.Stop()
	}
	d.Start()
}

// TestWasmFloods: a guest that writes without end to its log, and one that sends without end, harm nobody.
func TestWasmFloods(t *testing.T) {
	_, s, neighbour := guestFaults(t)
	big := strings.Repeat("x", 1000)
	for range 20 {
		s.call(faults+"/Print", fmt.Sprintf(`{"stdout":"%s\n","times":1000}`, big))
		neighbour.unmoved()
	}
	// A client that does not read holds up nobody but itself.
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream, desc := s.stream(ctx, faults+"/Tick")
	if err := errors.Join(stream.SendMsg(s.message(desc.Input(), `{"bytes":100000}`)), stream.CloseSend()); err != nil {
		t.Fatal(err)
	}
	for range 10 {
		neighbour.unmoved()
		s.call(faults+"/Echo", `{"data":"aGk="}`)
	}
}
