package cri

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	internalapi "k8s.io/cri-api/pkg/apis"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	criclient "k8s.io/cri-client/pkg"

	"github.com/tripod-run/tripod/internal/cri/delegate"
	"github.com/tripod-run/tripod/test/until"
)

// gate can make a server answer nothing, or lack methods, like an endpoint that is stopped or old.
type gate struct {
	shut   atomic.Bool
	absent atomic.Pointer[[]string]
}

func (g *gate) pass(ctx context.Context, method string) error {
	if g.shut.Load() {
		<-ctx.Done()
		return ctx.Err()
	}
	if absent := g.absent.Load(); absent != nil &&
		slices.ContainsFunc(*absent, func(m string) bool { return strings.HasSuffix(method, "/"+m) }) {
		return status.Error(codes.Unimplemented, "unknown method")
	}
	return nil
}

func (g *gate) options() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.ChainUnaryInterceptor(func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
			if err := g.pass(ctx, info.FullMethod); err != nil {
				return nil, err
			}
			return handler(ctx, req)
		}),
		grpc.ChainStreamInterceptor(func(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
			if err := g.pass(stream.Context(), info.FullMethod); err != nil {
				return err
			}
			return handler(srv, stream)
		}),
	}
}

// pair is a node in front of another one, its delegate.
type pair struct {
	front, back *door
	gate        *gate
}

// openPair starts both. By default the delegate has the handler "runc" and never needs more than a second for a read.
func openPair(t *testing.T, change ...func(*Delegate)) *pair {
	t.Helper()
	p := &pair{front: &door{images: newMemoryImages(), log: &syncBuffer{}}, back: &door{images: newMemoryImages(), log: &syncBuffer{}},
		gate: &gate{}}
	p.back.options = p.gate.options()
	p.back.server = p.back.newServer(t)
	p.back.serve(t)
	p.front.server = p.front.newServer(t)
	p.delegate(t, p.config(change...))
	p.front.serve(t)
	return p
}

func (p *pair) config(change ...func(*Delegate)) Delegate {
	c := Delegate{Name: "back", Runtime: p.back.socket, Images: p.back.socket, Handlers: []string{"runc"}, Timeout: time.Second,
		SnapshotMaxAge: time.Hour}
	for _, f := range change {
		f(&c)
	}
	return c
}

func (p *pair) delegate(t *testing.T, c Delegate) (stop func()) {
	t.Helper()
	closed := false
	end, err := p.front.server.Delegate([]Delegate{c}, p.front.record)
	must(t, err)
	stop = func() {
		if !closed {
			must(t, end())
		}
		closed = true
	}
	t.Cleanup(stop)
	return stop
}

// reopen starts another server on the front's node and record, as after a restart of the daemon.
func (p *pair) reopen(t *testing.T, change ...func(*Delegate)) {
	t.Helper()
	p.front.server = New(Config{Node: p.front.node, Images: p.front.images, Streams: p.front.server.streams, Version: "0.1.0-test",
		CgroupDriver: "systemd"})
	p.delegate(t, p.config(change...))
	p.front.serve(t)
}

// run runs a pod with the delegate's handler.
func (p *pair) run(t *testing.T, name string) string {
	t.Helper()
	r, err := p.front.RunPodSandbox(t.Context(), &runtimeapi.RunPodSandboxRequest{Config: podConfig(name), RuntimeHandler: "runc"})
	must(t, err)
	return r.GetPodSandboxId()
}

func (p *pair) pods(t *testing.T) ([]string, error) {
	t.Helper()
	r, err := p.front.ListPodSandbox(t.Context(), &runtimeapi.ListPodSandboxRequest{})
	return ids(r.GetItems()), err
}

// settle waits until the front's lists answer although the delegate does not.
func (p *pair) settle(t *testing.T) {
	t.Helper()
	until.NoError(t, 10*time.Second, func() error { _, err := p.pods(t); return err })
}

func allDefault(d *Delegate) { d.Handlers = []string{""} }

// A kubelet's client finds a delegate's pods as it finds this node's.
func TestKubeletsClientAcceptsADelegatesAnswers(t *testing.T) {
	for name, streaming := range map[string]bool{"unary lists": false, "streamed lists": true} {
		t.Run(name, func(t *testing.T) {
			p := openPair(t, allDefault)
			runtime, err := criclient.NewRemoteRuntimeServiceBuilder().WithEndpoint("unix://" + p.front.socket).
				WithConnectionTimeout(time.Minute).WithTracerProvider(nil).WithUseStreaming(streaming).Build(t.Context())
			must(t, err)
			t.Cleanup(func() { _ = runtime.Close(t.Context()) })
			images, err := criclient.NewRemoteImageServiceBuilder().WithEndpoint("unix://" + p.front.socket).
				WithConnectionTimeout(time.Minute).WithTracerProvider(nil).WithUseStreaming(streaming).Build(t.Context())
			must(t, err)
			t.Cleanup(func() { _ = images.Close(t.Context()) })
			walkPod(t, runtime, walkImages(t, images))
			wantEqual(t, "pods of this node", len(p.front.node.Pods()), 0)
			wantNoImages(t, images)
		})
	}
}

func wantNoImages(t *testing.T, c internalapi.ImageManagerService) {
	t.Helper()
	must(t, c.RemoveImage(t.Context(), spec("nginx")))
	all, err := c.ListImages(t.Context(), nil)
	must(t, err)
	wantEqual(t, "images after they were removed at both", len(all), 0)
}

func TestDelegateRouting(t *testing.T) {
	p := openPair(t, func(d *Delegate) { d.Annotations = []string{"example.com/runtime=back", "example.com/old"} })
	for name, test := range map[string]struct {
		handler     string
		annotations map[string]string
		delegated   bool
	}{
		"delegated handler":             {handler: "runc", delegated: true},
		"default handler":               {},
		"handler of this node":          {handler: "unit"},
		"annotation":                    {annotations: map[string]string{"example.com/runtime": "back"}, delegated: true},
		"annotation with another value": {annotations: map[string]string{"example.com/runtime": "front"}},
		"annotation with any value":     {annotations: map[string]string{"example.com/old": ""}, delegated: true},
		"a handler beats an annotation": {handler: "linux", annotations: map[string]string{"example.com/old": ""}},
	} {
		t.Run(name, func(t *testing.T) {
			c := podConfig(strings.ReplaceAll(name, " ", "-"))
			c.Annotations = test.annotations
			r, err := p.front.RunPodSandbox(t.Context(), &runtimeapi.RunPodSandboxRequest{Config: c, RuntimeHandler: test.handler})
			must(t, err)
			_, err = p.back.node.Pod(r.GetPodSandboxId())
			wantEqual(t, "delegated", err == nil, test.delegated)
			s, err := p.front.PodSandboxStatus(t.Context(), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: r.GetPodSandboxId()[:12]})
			must(t, err)
			wantEqual(t, "status by a prefix", s.GetStatus().GetId(), r.GetPodSandboxId())
		})
	}
}

// The delegate's pods were there before the node: no restart, no other ID.
func TestDelegateAdoptsPods(t *testing.T) {
	p := openPair(t)
	old := p.back.pod(t, "old")
	c := p.back.running(t, old, "c")
	r, err := p.front.PodSandboxStatus(t.Context(), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: old})
	must(t, err)
	wantEqual(t, "status before any list", r.GetStatus().GetId(), old)
	all, err := p.pods(t)
	must(t, err)
	wantIDs(t, all, []string{old})
	out, err := p.front.ExecSync(t.Context(), &runtimeapi.ExecSyncRequest{ContainerId: c, Cmd: []string{"echo", "hello"}})
	must(t, err)
	wantEqual(t, "output", string(out.GetStdout()), "hello\n")
	_, err = p.front.RemovePodSandbox(t.Context(), &runtimeapi.RemovePodSandboxRequest{PodSandboxId: old})
	must(t, err)
	_, err = p.front.PodSandboxStatus(t.Context(), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: old})
	wantCode(t, err, codes.NotFound)
}

func TestDelegateAwayListsLastSnapshot(t *testing.T) {
	p := openPair(t)
	own, theirs := p.front.pod(t, "own"), p.run(t, "theirs")
	c := p.front.running(t, own, "own")
	p.settle(t)
	p.gate.shut.Store(true)
	all, err := p.pods(t)
	must(t, err)
	wantSameIDs(t, all, own, theirs)
	for name, f := range map[string]struct {
		filter *runtimeapi.PodSandboxFilter
		want   []string
	}{
		"ID":          {&runtimeapi.PodSandboxFilter{Id: theirs}, []string{theirs}},
		"ID prefix":   {&runtimeapi.PodSandboxFilter{Id: theirs[:10]}, []string{theirs}},
		"labels":      {&runtimeapi.PodSandboxFilter{LabelSelector: map[string]string{"app": "theirs"}}, []string{theirs}},
		"other label": {&runtimeapi.PodSandboxFilter{LabelSelector: map[string]string{"app": "none"}}, nil},
		"state": {&runtimeapi.PodSandboxFilter{State: &runtimeapi.PodSandboxStateValue{State: runtimeapi.PodSandboxState_SANDBOX_NOTREADY}},
			nil},
	} {
		r, err := p.front.ListPodSandbox(t.Context(), &runtimeapi.ListPodSandboxRequest{Filter: f.filter})
		must(t, err)
		if !slices.Equal(ids(r.GetItems()), f.want) {
			t.Errorf("filter by %s: got %v, want %v", name, ids(r.GetItems()), f.want)
		}
	}
	p.front.status(t, c)
	_, err = p.front.PodSandboxStatus(t.Context(), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: theirs})
	wantCode(t, err, codes.Unavailable, "delegate back", "no answer within 1s")
	_, err = p.front.RunPodSandbox(t.Context(), &runtimeapi.RunPodSandboxRequest{Config: podConfig("more"), RuntimeHandler: "runc"})
	wantCode(t, err, codes.Unavailable, "delegate back")
	_, err = p.front.StopPodSandbox(t.Context(), &runtimeapi.StopPodSandboxRequest{PodSandboxId: strings.Repeat("0", 64)})
	must(t, err) // nobody ever had it

	s, err := p.front.Status(t.Context(), &runtimeapi.StatusRequest{})
	must(t, err)
	wantCondition(t, s, runtimeapi.RuntimeReady, false, "delegate back")
	wantCondition(t, s, delegate.ConditionPrefix+"back", false, "delegate back")
	p.gate.shut.Store(false)
	until.NoError(t, 10*time.Second, func() error {
		s, err := p.front.Status(t.Context(), &runtimeapi.StatusRequest{})
		must(t, err)
		for _, c := range s.GetStatus().GetConditions() {
			if !c.GetStatus() {
				return fmt.Errorf("condition %v", c)
			}
		}
		return nil
	})
}

func wantCondition(t *testing.T, s *runtimeapi.StatusResponse, name string, want bool, words string) {
	t.Helper()
	for _, c := range s.GetStatus().GetConditions() {
		if c.GetType() == name {
			if c.GetStatus() != want || !strings.Contains(c.GetMessage(), words) {
				t.Errorf("condition %v, want %v with %q", c, want, words)
			}
			return
		}
	}
	t.Errorf("no condition %s", name)
}

func wantSameIDs(t *testing.T, got []string, want ...string) {
	t.Helper()
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestDelegateAwayListsFailRatherThanOmit(t *testing.T) {
	t.Run("without a snapshot", func(t *testing.T) {
		p := openPair(t)
		p.run(t, "p")
		p.gate.shut.Store(true)
		p.reopen(t)
		_, err := p.pods(t)
		wantCode(t, err, codes.Unavailable, "delegate back", "no earlier list")
		_, err = p.front.ListContainers(t.Context(), &runtimeapi.ListContainersRequest{})
		wantCode(t, err, codes.Unavailable, "delegate back")
		stream, err := p.front.StreamPodSandboxes(t.Context(), &runtimeapi.StreamPodSandboxesRequest{})
		must(t, err)
		_, err = stream.Recv()
		wantCode(t, err, codes.Unavailable, "delegate back")
	})
	t.Run("with an old snapshot", func(t *testing.T) {
		p := openPair(t, func(d *Delegate) { d.SnapshotMaxAge = time.Nanosecond })
		p.run(t, "p")
		p.settle(t)
		p.gate.shut.Store(true)
		_, err := p.pods(t)
		wantCode(t, err, codes.Unavailable, "snapshot_max_age")
	})
	t.Run("unless it has no pods", func(t *testing.T) {
		p := openPair(t)
		id := p.run(t, "p")
		_, err := p.front.RemovePodSandbox(t.Context(), &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id})
		must(t, err)
		_, err = p.pods(t)
		must(t, err)
		p.gate.shut.Store(true)
		p.reopen(t)
		own := p.front.pod(t, "own")
		all, err := p.pods(t)
		must(t, err)
		wantSameIDs(t, all, own)
	})
}

// The owner of a pod is known after a restart, although the delegate does not answer.
func TestDelegateOwnersSurviveARestart(t *testing.T) {
	p := openPair(t)
	id := p.run(t, "p")
	c, err := p.front.CreateContainer(t.Context(),
		&runtimeapi.CreateContainerRequest{PodSandboxId: id, Config: containerConfig("c"), SandboxConfig: podConfig("p")})
	must(t, err)
	p.gate.shut.Store(true)
	p.reopen(t)
	_, err = p.pods(t)
	wantCode(t, err, codes.Unavailable, "delegate back")
	for _, unknown := range []string{id, c.GetContainerId()} {
		_, err := p.front.StopContainer(t.Context(), &runtimeapi.StopContainerRequest{ContainerId: unknown})
		wantCode(t, err, codes.Unavailable, "delegate back")
	}
	p.gate.shut.Store(false)
	until.NoError(t, 10*time.Second, func() error {
		_, err := p.front.StartContainer(t.Context(), &runtimeapi.StartContainerRequest{ContainerId: c.GetContainerId()})
		return err
	})
	wantEqual(t, "state at the delegate", p.back.status(t, c.GetContainerId()).GetState(), runtimeapi.ContainerState_CONTAINER_RUNNING)
}
