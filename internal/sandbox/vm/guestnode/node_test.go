package guestnode

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/guestagent"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent/wire"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/guestapi"
)

// stub is a Backend whose containers have the given statuses.
type stub struct {
	Backend
	mu       sync.Mutex
	statuses map[string]sandbox.Status
	refuse   error // makes updates fail
}

func (s *stub) UpdateContainer(context.Context, *sandbox.Pod, *sandbox.Container) error {
	return s.refuse
}

func (s *stub) Status(_ context.Context, _ *sandbox.Pod, c *sandbox.Container) (sandbox.Status, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.statuses[c.ID], nil
}

func (s *stub) set(id string, status sandbox.Status) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.statuses[id] = status
}

func (s *stub) Exec(_ context.Context, _ *sandbox.Pod, _ *sandbox.Container, req sandbox.ExecRequest) (int32, error) {
	if req.Cmd[0] == "missing" {
		return 0, fmt.Errorf("no such program: %w", errdefs.ErrInvalidArgument)
	}
	_, err := io.Copy(req.Stdout, req.Stdin)
	return 3, err
}

// newNode returns a node with the running container "c", which logs to c.log.
func newNode(t *testing.T) (*Node, *stub, string) {
	t.Helper()
	dir := t.TempDir()
	backend := &stub{statuses: map[string]sandbox.Status{"c": {State: sandbox.StateRunning}}}
	n := &Node{
		backend: backend, state: t.TempDir(), ready: make(chan struct{}), watchers: map[*watcher]bool{},
		pod:        &sandbox.Pod{ID: "p", Config: &runtimeapi.PodSandboxConfig{LogDirectory: dir}},
		containers: map[string]*sandbox.Container{"c": {ID: "c", Config: &runtimeapi.ContainerConfig{LogPath: "c.log"}}},
	}
	close(n.ready)
	return n, backend, filepath.Join(dir, "c.log")
}

// start begins a call, and returns what it sends, the end of its input, and its result.
func start(t *testing.T, n *Node, r guestapi.Request, in string) (out *io.PipeReader, done chan struct{}, result chan wire.Result) {
	t.Helper()
	request, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	out, writer := io.Pipe()
	done, result = make(chan struct{}), make(chan wire.Result, 1)
	go func() {
		result <- n.serve(guestagent.Call{
			Request: request, In: strings.NewReader(in), Out: writer, Err: io.Discard, Done: done, OnResize: func(func(uint16, uint16)) {},
		})
		writer.Close()
	}()
	return out, done, result
}

// TestLog: a log is sent from the offset on, as it grows, and the call ends when the container has ended and all is sent.
func TestLog(t *testing.T) {
	n, backend, file := newNode(t)
	out, _, result := start(t, n, guestapi.Request{Method: guestapi.MethodLog, Container: "c", Offset: 4}, "")
	var want strings.Builder
	log, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		for i := range 200 {
			line := fmt.Sprintf("line %d %s\n", i, strings.Repeat("x", i*10))
			want.WriteString(line)
			_, _ = log.WriteString(line)
		}
		log.Close()
		backend.set("c", sandbox.Status{State: sandbox.StateExited})
	}()
	got, err := io.ReadAll(out)
	if err != nil || string(got) != want.String()[4:] {
		t.Errorf("log: got %d bytes, error %v; want %d bytes", len(got), err, want.Len()-4)
	}
	if r := <-result; r.Class != wire.ClassNone {
		t.Errorf("result: got %+v, want success", r)
	}
}

// TestUpdate: an update counts once the backend has made it, and then also for the next tripod-guest.
func TestUpdate(t *testing.T) {
	n, backend, _ := newNode(t)
	create := guestapi.Create{Images: []guestapi.Image{{LUN: 3}}}
	create.Container.Container = *n.containers["c"]
	if err := n.setContainer(create); err != nil {
		t.Fatal(err)
	}
	update := func(shares int64) error {
		return n.update(t.Context(), n.pod, &sandbox.Container{ID: "c", Config: &runtimeapi.ContainerConfig{
			Linux: &runtimeapi.LinuxContainerConfig{Resources: &runtimeapi.LinuxContainerResources{CpuShares: shares}}}})
	}
	want := func(what string, shares int64) {
		t.Helper()
		var recorded guestapi.Create
		if err := readJSON(n.containerFile("c"), &recorded); err != nil {
			t.Fatal(err)
		}
		for where, c := range map[string]*sandbox.Container{"in memory": n.containers["c"], "on disk": &recorded.Container.Container} {
			if got := c.Config.GetLinux().GetResources().GetCpuShares(); got != shares || c.Config.LogPath != "c.log" {
				t.Errorf("%s, %s: got %d shares and log %q, want %d and c.log", what, where, got, c.Config.LogPath, shares)
			}
		}
		if len(recorded.Images) != 1 || recorded.Images[0].LUN != 3 {
			t.Errorf("%s: images: got %+v, want the container's", what, recorded.Images)
		}
	}
	backend.refuse = errdefs.ErrInternal
	if err := update(100); !errdefs.IsInternal(err) {
		t.Errorf("update that the backend refuses: got error %v, want the backend's", err)
	}
	want("after an update that failed", 0)
	backend.refuse = nil
	if err := update(200); err != nil {
		t.Error(err)
	}
	want("after an update", 200)
	delete(n.containers, "c")
	if err := n.replaceContainer(&create.Container.Container); !errdefs.IsNotFound(err) {
		t.Errorf("update of a container that is removed meanwhile: got error %v, want not found", err)
	}
}

// TestLogIsFreed: what the daemon has is freed, also when the call is about to end and the file is closed (with -race).
func TestLogIsFreed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	for range 50 {
		if err := os.WriteFile(path, bytes.Repeat([]byte("x"), 4*dropStep), 0o600); err != nil {
			t.Fatal(err)
		}
		f := &follower{path: path}
		if err := f.send(io.Discard); err != nil {
			t.Fatal(err)
		}
		acks, ack := io.Pipe()
		dropped := make(chan struct{})
		go func() { f.drop(acks); close(dropped) }()
		send := json.NewEncoder(ack)
		for n := range int64(3) { // when an ack is taken, the one before it is carried out
			if err := send.Encode(guestapi.Ack{Offset: (n + 1) * dropStep}); err != nil {
				t.Fatal(err)
			}
		}
		f.close()
		ack.Close()
		<-dropped
		raw, err := os.ReadFile(path)
		if err != nil || len(raw) != 4*dropStep || raw[0] != 0 || raw[len(raw)-1] != 'x' {
			t.Fatalf("log: got %d bytes, error %v; want %d, of which the first are freed and the last are not", len(raw), err, 4*dropStep)
		}
	}
}

// TestEvents: a call begins with the statuses that there are, so that a daemon that was away misses nothing. It ends when the
// daemon leaves.
func TestEvents(t *testing.T) {
	n, backend, _ := newNode(t)
	out, done, result := start(t, n, guestapi.Request{Method: guestapi.MethodEvents}, "")
	events := json.NewDecoder(out)
	next := func() (e guestapi.Event) {
		if err := events.Decode(&e); err != nil {
			t.Error(err)
		}
		return e
	}
	if e := next(); e.Container != "c" || e.Status.State != sandbox.StateRunning {
		t.Errorf("first event: got %+v, want a running container c", e)
	}
	ended := sandbox.Status{State: sandbox.StateExited, ExitCode: 7, FinishedAt: time.Now().Round(0)}
	backend.set("c", ended)
	n.report(sandbox.Event{PodID: "p", ContainerID: "c", Status: ended})
	if e := next(); e.Status.ExitCode != 7 || !e.Status.FinishedAt.Equal(ended.FinishedAt) {
		t.Errorf("event: got %+v, want exit code 7", e)
	}
	close(done)
	if r := <-result; r.Class != wire.ClassUnavailable {
		t.Errorf("result: got %+v, want unavailable", r)
	}
	if len(n.watchers) != 0 {
		t.Errorf("watchers left: got %d, want none", len(n.watchers))
	}
}

// TestCalls: exit codes, output and the classes of errors reach the daemon.
func TestCalls(t *testing.T) {
	n, _, _ := newNode(t)
	for _, c := range []struct {
		request guestapi.Request
		want    wire.Result
		out     string
	}{
		{guestapi.Request{Method: guestapi.MethodExec, Container: "c", Cmd: []string{"cat"}, Stdin: true, Stdout: true}, wire.Result{Exit: 3},
			"input"},
		{guestapi.Request{Method: guestapi.MethodExec, Container: "c", Cmd: []string{"missing"}}, wire.Result{Class: wire.ClassInvalidArgument},
			""},
		{guestapi.Request{Method: guestapi.MethodExec, Container: "other"}, wire.Result{Class: wire.ClassNotFound}, ""},
		// the body is not JSON
		{guestapi.Request{Method: guestapi.MethodStop, Container: "c"}, wire.Result{Class: wire.ClassInvalidArgument}, ""},
		{guestapi.Request{Method: "future", Container: "c"}, wire.Result{Class: wire.ClassUnimplemented}, ""},
	} {
		out, _, result := start(t, n, c.request, "input")
		got, err := io.ReadAll(out)
		if r := <-result; err != nil || r.Class != c.want.Class || r.Exit != c.want.Exit || string(got) != c.out {
			t.Errorf("%+v: got output %q and result %+v, want %q and %+v", c.request, got, r, c.out, c.want)
		}
	}
	n.pod = nil
	if r := n.serve(guestagent.Call{Request: []byte(`{"method":"events"}`),
		Done: make(chan struct{})}); r.Class != wire.ClassFailedPrecondition {
		t.Errorf("call without a pod: got %+v, want a failed precondition", r)
	}
	n.failure = errors.New("no cgroups")
	if r := n.serve(guestagent.Call{Request: []byte(`{"method":"setup"}`), In: &bytes.Buffer{},
		Done: make(chan struct{})}); !strings.Contains(r.Message, "no cgroups") {
		t.Errorf("call of a guest that cannot run containers: got %+v, want the reason", r)
	}
}
