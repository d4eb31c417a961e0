package cri

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/image/registry"
	"github.com/tripod-run/tripod/internal/node"
	"github.com/tripod-run/tripod/internal/node/store"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/stream"
	"github.com/tripod-run/tripod/test/fake"
)

// door is a CRI server on a real node with a real record and the fake backend, behind a real gRPC server on a unix
// socket.
type door struct {
	runtimeapi.RuntimeServiceClient
	runtimeapi.ImageServiceClient
	conn    *grpc.ClientConn
	server  *Server
	node    *node.Node
	images  *memoryImages
	network *testNetwork
	backend *fake.Backend
	socket  string
	log     *syncBuffer
	record  *store.Store
	// asked counts the questions whether the backend "unit" is ready.
	asked atomic.Int32
	// options are further options of the gRPC server.
	options []grpc.ServerOption
}

// open starts a server. The default handler "linux" has pods with many containers, "unit" has unit pods.
func open(t testing.TB) *door {
	t.Helper()
	d := &door{images: newMemoryImages(), log: &syncBuffer{}}
	d.server = d.newServer(t)
	d.serve(t)
	return d
}

func (d *door) newServer(t testing.TB) *Server {
	t.Helper()
	dir := t.TempDir()
	d.network = &testNetwork{Network: fake.Network{Dir: filepath.Join(dir, "network")}}
	must(t, os.Mkdir(d.network.Dir, 0o700))
	record, err := store.Open(filepath.Join(dir, "node.db"))
	must(t, err)
	t.Cleanup(func() { must(t, record.Close()) })
	d.record = record
	backends := map[string]sandbox.Backend{}
	for handler, can := range map[string]sandbox.Capabilities{
		"linux": {HostNetwork: true, RecursiveReadOnlyMounts: true, SupplementalGroupsPolicy: true},
		"unit":  {MaxContainers: 1, UserNamespaces: true},
	} {
		b, err := fake.New(fake.Config{Dir: filepath.Join(dir, handler), Capabilities: can})
		must(t, err)
		if handler == "linux" {
			d.backend, backends[handler] = b, b
		} else {
			backends[handler] = counted{b, &d.asked}
		}
	}
	d.node, err = node.Open(t.Context(), node.Config{
		Store: record, Backends: backends, DefaultHandler: "linux", Aliases: map[string]string{"runc": "linux", "kata": "unit"},
		Network: d.network, Images: d.images,
		Missing: map[string]error{"gone": errors.New("it is not installed")},
	})
	must(t, err)
	t.Cleanup(func() { must(t, d.node.Close()) })
	streams, err := stream.New(stream.Config{Runtime: StreamRuntime(d.node), Logger: slog.New(slog.DiscardHandler)})
	must(t, err)
	t.Cleanup(func() { must(t, streams.Close()) })
	return New(Config{
		Node: d.node, Images: d.images, Streams: streams, Version: "0.1.0-test", CgroupDriver: "systemd",
		Logger: slog.New(slog.NewTextHandler(d.log, &slog.HandlerOptions{Level: slog.LevelError})),
	})
}

// counted is a backend that counts the questions whether it is ready.
type counted struct {
	*fake.Backend
	asked *atomic.Int32
}

func (c counted) Ready() error { c.asked.Add(1); return nil }

func (d *door) serve(t testing.TB) {
	t.Helper()
	dir, err := os.MkdirTemp("", "cri") // t.TempDir is too long for a socket's name
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(dir)) })
	d.socket = filepath.Join(dir, "s")
	l, err := net.Listen("unix", d.socket)
	must(t, err)
	g := grpc.NewServer(slices.Concat(ServerOptions(), d.options, d.server.Interceptors())...)
	d.server.Register(g)
	var served sync.WaitGroup
	served.Go(func() { _ = g.Serve(l) })
	t.Cleanup(func() { g.Stop(); served.Wait() })
	c, err := grpc.NewClient("unix:"+d.socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxMessageSize), grpc.MaxCallSendMsgSize(2*MaxMessageSize)))
	must(t, err)
	t.Cleanup(func() { must(t, c.Close()) })
	d.conn = c
	d.RuntimeServiceClient, d.ImageServiceClient = runtimeapi.NewRuntimeServiceClient(c), runtimeapi.NewImageServiceClient(c)
}

// pod runs a pod with the default handler.
func (d *door) pod(t testing.TB, name string, change ...func(*runtimeapi.PodSandboxConfig)) string {
	t.Helper()
	c := podConfig(name)
	for _, f := range change {
		f(c)
	}
	r, err := d.RunPodSandbox(t.Context(), &runtimeapi.RunPodSandboxRequest{Config: c})
	must(t, err)
	return r.GetPodSandboxId()
}

func (d *door) container(t testing.TB, podID, name string, change ...func(*runtimeapi.ContainerConfig)) string {
	t.Helper()
	c := containerConfig(name)
	for _, f := range change {
		f(c)
	}
	r, err := d.CreateContainer(t.Context(), &runtimeapi.CreateContainerRequest{PodSandboxId: podID, Config: c})
	must(t, err)
	return r.GetContainerId()
}

func (d *door) running(t testing.TB, podID, name string, change ...func(*runtimeapi.ContainerConfig)) string {
	t.Helper()
	id := d.container(t, podID, name, change...)
	_, err := d.StartContainer(t.Context(), &runtimeapi.StartContainerRequest{ContainerId: id})
	must(t, err)
	return id
}

func (d *door) status(t testing.TB, containerID string) *runtimeapi.ContainerStatus {
	t.Helper()
	r, err := d.ContainerStatus(t.Context(), &runtimeapi.ContainerStatusRequest{ContainerId: containerID})
	must(t, err)
	return r.GetStatus()
}

// podConfig returns a configuration like a kubelet's.
func podConfig(name string) *runtimeapi.PodSandboxConfig {
	return &runtimeapi.PodSandboxConfig{
		Metadata:     &runtimeapi.PodSandboxMetadata{Name: name, Namespace: "default", Uid: name + "-uid"},
		Hostname:     name,
		LogDirectory: "/var/log/pods/default_" + name,
		DnsConfig:    &runtimeapi.DNSConfig{Servers: []string{"10.96.0.10"}, Searches: []string{"cluster.local"}, Options: []string{"ndots:5"}},
		Labels: map[string]string{"app": name, "io.kubernetes.pod.name": name, "io.kubernetes.pod.namespace": "default",
			"io.kubernetes.pod.uid": name + "-uid"},
		Annotations: map[string]string{"kubernetes.io/config.source": "api", "kubernetes.io/config.seen": "2026-01-01T00:00:00Z"},
		Linux: &runtimeapi.LinuxPodSandboxConfig{
			CgroupParent:    "/kubepods/burstable/pod" + name,
			SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{NamespaceOptions: &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_CONTAINER}},
		},
	}
}

func containerConfig(name string) *runtimeapi.ContainerConfig {
	return &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: name},
		Image:    &runtimeapi.ImageSpec{Image: "busybox"},
		Command:  []string{"sh"},
		Labels:   map[string]string{"app": name, "io.kubernetes.container.name": name},
		Annotations: map[string]string{"io.kubernetes.container.hash": "1f",
			"io.kubernetes.container.terminationMessagePath": "/dev/termination-log"},
		LogPath: name + "/0.log",
		Linux:   &runtimeapi.LinuxContainerConfig{Resources: &runtimeapi.LinuxContainerResources{CpuShares: 102, OomScoreAdj: 1000}},
	}
}

// testNetwork is the fake network with adjustable readiness and addresses.
type testNetwork struct {
	fake.Network
	notReady error
}

func (n *testNetwork) Status(context.Context) error { return n.notReady }

// memoryImages is an image store without registries: a pull invents an image with the name, which suffices for the fake
// backend.
type memoryImages struct {
	mu     sync.Mutex
	byName map[string]image.Image
	// pullError is the error of every pull.
	pullError error
	auth      *registry.Auth
}

func newMemoryImages() *memoryImages {
	m := &memoryImages{byName: map[string]image.Image{}}
	m.add("busybox", "")
	return m
}

func (m *memoryImages) add(name, user string) image.Image {
	m.mu.Lock()
	defer m.mu.Unlock()
	named, err := reference.ParseDockerRef(name)
	if err != nil {
		panic(err)
	}
	full := named.String()
	img := image.Image{ID: digest.FromString(full).String(), RepoTags: []string{full}, Size: 4096, User: user, Kind: image.KindRootfs}
	m.byName[full] = img
	return img
}

func (m *memoryImages) Get(_ context.Context, name string) (image.Image, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for full, img := range m.byName {
		if named, err := reference.ParseDockerRef(name); img.ID == name || err == nil && full == named.String() {
			return img, nil
		}
	}
	return image.Image{}, fmt.Errorf("image %q: %w", name, errdefs.ErrNotFound)
}

func (m *memoryImages) List(context.Context) ([]image.Image, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var all []image.Image
	for _, img := range m.byName {
		all = append(all, img)
	}
	slices.SortFunc(all, func(a, b image.Image) int { return strings.Compare(a.ID, b.ID) })
	return all, nil
}

func (m *memoryImages) Pull(ctx context.Context, name string, o image.PullOptions) (image.Image, error) {
	m.auth = o.Auth
	if m.pullError != nil {
		return image.Image{}, m.pullError
	}
	if _, err := reference.ParseDockerRef(name); err != nil {
		return image.Image{}, fmt.Errorf("image reference %q: %w: %w", name, err, errdefs.ErrInvalidArgument)
	}
	return m.add(name, ""), ctx.Err()
}

func (m *memoryImages) Remove(ctx context.Context, name string) error {
	img, err := m.Get(ctx, name)
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.byName, img.RepoTags[0])
	return nil
}

func (m *memoryImages) FsInfo(context.Context) (image.FsUsage, error) {
	return image.FsUsage{Mountpoint: "/var/lib/tripod/image", UsedBytes: 4096, InodesUsed: 3, Timestamp: time.Now()}, nil
}

func (m *memoryImages) Verify(context.Context, bool) ([]image.Damage, error) { return nil, nil }

func (m *memoryImages) ContainerFsInfo(context.Context) (image.FsUsage, error) {
	return image.FsUsage{Mountpoint: "/var/lib/tripod/image", UsedBytes: 1024, InodesUsed: 1, Timestamp: time.Now()}, nil
}

// syncBuffer is a log that is safe for concurrent use.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// wantCode checks the code of an error and that its text contains every one of words.
func wantCode(t testing.TB, err error, code codes.Code, words ...string) {
	t.Helper()
	if got := status.Code(err); got != code {
		t.Fatalf("got code %s, want %s: %v", got, code, err)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error %q does not contain %q", err, w)
		}
	}
}

func wantEqual[T comparable](t testing.TB, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s: got %v, want %v", what, got, want)
	}
}
