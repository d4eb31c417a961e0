package wasm

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/artifact"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/test/workertest"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workers"
	"github.com/tripod-run/tripod/test/until"
)

// shelf is an image store whose components are lists of words.
type shelf struct {
	dir string

	mu     sync.Mutex
	images map[string]*shelved
	opened int
	held   map[string]string // image by key
	// gate is nil, or keeps readers of optional blobs waiting until it is closed. atGate counts them.
	gate   chan struct{}
	atGate int
	// changes is never closed; the backend receives from it.
	changes chan struct{}
}

func (s *shelf) Hold(_ context.Context, key, imageID string) error {
	if _, err := s.find(imageID); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held[key] = imageID
	return nil
}

func (s *shelf) Unhold(_ context.Context, key string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.held, key)
	return nil
}

func (s *shelf) Holds(context.Context) ([]string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.held)), nil
}

type shelved struct {
	image    image.Image
	artifact *artifact.Artifact
}

// put stores an image of a component, with annotations in its manifest, and returns its ID.
func (s *shelf) put(t testing.TB, words, ref string, annotations map[string]string) string {
	t.Helper()
	return s.putShipped(t, words, ref, annotations, ocispec.Descriptor{}, ocispec.Descriptor{})
}

// putShipped stores an image of a component with the layers of its compiled code.
func (s *shelf) putShipped(t testing.TB, words, ref string, annotations map[string]string, code, envelope ocispec.Descriptor) string {
	t.Helper()
	raw := workertest.Module(words)
	d := digest.FromBytes(raw)
	if err := ledger.ReplaceFile(filepath.Join(s.dir, d.Encoded()), raw, 0o644); err != nil {
		t.Fatal(err)
	}
	id := "sha256:" + hashOf(words+ref+fmt.Sprint(annotations))
	wasm := ocispec.Descriptor{Digest: d, Size: int64(len(raw))}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.images[id] = &shelved{
		image: image.Image{ID: id, RepoTags: []string{ref}, Annotations: annotations,
			Component: &image.Component{Layout: image.LayoutCNCF, Wasm: wasm}},
		artifact: &artifact.Artifact{ImageID: id, Layout: image.LayoutCNCF, Wasm: wasm, Annotations: annotations, Program: "main.wasm",
			Env: []string{"FROM=image", "A=0"}, Code: code, Envelope: envelope},
	}
	return id
}

func hashOf(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:])
}

func (s *shelf) remove(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.images, id)
}

func (s *shelf) find(id string) (*shelved, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if found := s.images[id]; found != nil {
		return found, nil
	}
	return nil, fmt.Errorf("image %s: %w", id, errdefs.ErrNotFound)
}

func (s *shelf) Component(_ context.Context, id string) (*artifact.Artifact, error) {
	found, err := s.find(id)
	if err != nil {
		return nil, err
	}
	return found.artifact, nil
}

func (s *shelf) Get(_ context.Context, id string) (image.Image, error) {
	found, err := s.find(id)
	if err != nil {
		return image.Image{}, err
	}
	return found.image, nil
}

func (s *shelf) List(context.Context) (list []image.Image, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, i := range s.images {
		list = append(list, i.image)
	}
	return list, nil
}

func (s *shelf) Changes() <-chan struct{} { return s.changes }

// announce says that the images have changed.
func (s *shelf) announce() { s.changes <- struct{}{} }

func (s *shelf) OpenBlob(_ context.Context, desc ocispec.Descriptor) (*os.File, error) {
	s.mu.Lock()
	s.opened++
	s.mu.Unlock()
	return os.Open(filepath.Join(s.dir, desc.Digest.Encoded()))
}

// holdBack keeps the readers of layers with code waiting until the returned function is called.
func (s *shelf) holdBack() (admit func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	gate := make(chan struct{})
	s.gate = gate
	return func() { close(gate) }
}

// heldBack returns how many readers have waited.
func (s *shelf) heldBack() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.atGate
}

func (s *shelf) OpenOptionalBlob(ctx context.Context, desc ocispec.Descriptor) (*os.File, error) {
	s.mu.Lock()
	gate := s.gate
	if gate != nil {
		s.atGate++
	}
	s.mu.Unlock()
	if gate != nil {
		select {
		case <-gate:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	raw, err := os.ReadFile(filepath.Join(s.dir, desc.Digest.Encoded()))
	if err != nil || digest.FromBytes(raw) != desc.Digest {
		return nil, errors.Join(err, fmt.Errorf("blob %s: %w", desc.Digest, errdefs.ErrDataLoss))
	}
	return s.OpenBlob(ctx, desc)
}

// ports is a network that opens all sockets on loopback, at a port that the kernel chooses.
type ports struct {
	mu   sync.Mutex
	at   map[string]string // "tcp 80" to the actual address
	fail error
}

func (n *ports) Listen(_ context.Context, _, network, addr string) (*os.File, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.fail != nil {
		return nil, n.fail
	}
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	if network == "udp" {
		conn, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
		if err != nil {
			return nil, err
		}
		defer conn.Close()
		n.at["udp "+port] = conn.LocalAddr().String()
		return conn.File()
	}
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		return nil, err
	}
	defer l.Close()
	n.at["tcp "+port] = l.Addr().String()
	return l.File()
}

func (n *ports) address(name string) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.at[name]
}

// rig is a backend under test with its dependencies. The daemon can be killed and restarted on the same files.
type rig struct {
	testing.TB
	*Backend
	config   Config
	services Services
	shelf    *shelf
	ports    *ports
	events   chan sandbox.Event
	known    map[string]sandbox.Known
}

func newRig(t testing.TB, change ...func(*Config)) *rig {
	t.Helper()
	dir := t.TempDir()
	r := &rig{
		TB: t, shelf: &shelf{dir: t.TempDir(), images: map[string]*shelved{}, held: map[string]string{}, changes: make(chan struct{}, 1)},
		ports:  &ports{at: map[string]string{}},
		events: make(chan sandbox.Event, 100_000), known: map[string]sandbox.Known{},
	}
	r.config = Config{
		Annotations: sandbox.AllowList{"*"},
		Root:        filepath.Join(dir, "root"), RunDir: filepath.Join(dir, "run"), Program: workertest.Program, UID: 65529, GID: 65529,
		CgroupParent: workertest.Cgroup,
	}
	r.services = Services{Images: r.shelf, Network: r.ports,
		Logger: slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))}
	for _, c := range change {
		c(&r.config)
	}
	r.open()
	t.Cleanup(func() {
		for _, k := range r.known {
			r.must(r.RemoveSandbox(r.ctx(), k.Pod))
		}
		r.must(r.Close())
		r.checkCleanedUp()
	})
	return r
}

// open opens the backend and recovers its state.
func (r *rig) open() sandbox.Found {
	r.Helper()
	b, err := Open(r.Context(), r.config, r.services)
	r.must(err)
	r.Backend = b
	found, err := b.Recover(r.ctx(), slices.Collect(maps.Values(r.known)), func(e sandbox.Event) { r.events <- e })
	r.must(err)
	return found
}

// restartDaemon kills the daemon and opens a new backend.
func (r *rig) restartDaemon() sandbox.Found {
	r.Helper()
	r.killDaemon()
	return r.open()
}

// killDaemon ends the backend as if its process were killed.
func (r *rig) killDaemon() {
	r.stop()
	r.must(r.keeper.Close(r.ctx(), func(*workers.Worker) bool { return true }))
	r.dialers.Close(func(string) bool { return true })
	r.sweeping.Wait()
	r.precompiler.Wait()
	r.watcher.Close()
}

func (r *rig) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), 30*time.Second)
	r.Cleanup(cancel)
	return ctx
}

func (r *rig) must(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

// checkCleanedUp checks that no workers and no files of pods are left.
func (r *rig) checkCleanedUp() {
	r.Helper()
	for _, dir := range []string{r.config.podsDir(), r.config.workersDir(), r.config.dialersDir()} {
		entries, err := os.ReadDir(dir)
		if err != nil || len(entries) > 0 {
			r.Errorf("ReadDir(%s) = %v, %v; want nothing", dir, entries, err)
		}
	}
	if pids := workertest.WorkerPids(r.config.Program); len(pids) > 0 {
		r.Errorf("workers %v are still running", pids)
	}
}

// pod creates a sandbox, whose ID is the hash of name.
func (r *rig) pod(name string, change ...func(*runtimeapi.PodSandboxConfig)) *sandbox.Pod {
	r.Helper()
	p := r.podConfig(name, change...)
	r.must(r.Validate(p, nil))
	r.known[p.ID] = sandbox.Known{Pod: p}
	r.must(r.CreateSandbox(r.ctx(), p))
	return p
}

func (r *rig) podConfig(name string, change ...func(*runtimeapi.PodSandboxConfig)) *sandbox.Pod {
	config := &runtimeapi.PodSandboxConfig{
		Metadata: &runtimeapi.PodSandboxMetadata{Name: name, Namespace: "test", Uid: name}, Labels: map[string]string{},
		Annotations:  map[string]string{},
		LogDirectory: filepath.Join(r.TempDir(), "logs"), Linux: &runtimeapi.LinuxPodSandboxConfig{},
	}
	for _, c := range change {
		c(config)
	}
	return &sandbox.Pod{ID: hashOf(name), Handler: "wasm", Config: config, Netns: "/somewhere"}
}

// container returns a container of the component words.
func (r *rig) container(p *sandbox.Pod, words string) *sandbox.Container {
	r.Helper()
	id := r.shelf.put(r.TB, words, "registry.example/demo/greeter:1.2", nil)
	return &sandbox.Container{ID: p.ID, ImageID: id, Config: &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: "c"},
		Image:    &runtimeapi.ImageSpec{Image: id, UserSpecifiedImage: "registry.example/demo/greeter:1.2"},
		LogPath:  "c.log", Linux: &runtimeapi.LinuxContainerConfig{},
	}}
}

func (r *rig) create(p *sandbox.Pod, words string) *sandbox.Container {
	r.Helper()
	c := r.container(p, words)
	r.must(r.Validate(p, c))
	_, err := r.CreateContainer(r.ctx(), p, c)
	r.must(err)
	r.known[p.ID] = sandbox.Known{Pod: p, Containers: []*sandbox.Container{c}}
	return c
}

// run creates a pod and starts its container.
func (r *rig) run(name, words string) (*sandbox.Pod, *sandbox.Container) {
	r.Helper()
	p := r.pod(name)
	c := r.create(p, words)
	r.must(r.StartContainer(r.ctx(), p, c))
	return p, c
}

func (r *rig) status(p *sandbox.Pod, c *sandbox.Container) sandbox.Status {
	r.Helper()
	s, err := r.Status(r.ctx(), p, c)
	r.must(err)
	return s
}

// wantState checks the state of a container and returns its status.
func (r *rig) wantState(p *sandbox.Pod, c *sandbox.Container, want sandbox.State) sandbox.Status {
	r.Helper()
	s := r.status(p, c)
	if s.State != want {
		r.Fatalf("status of %s's container = %+v, want state %d", p.Config.Metadata.Name, s, want)
	}
	return s
}

// waitExit waits for the event that a container has exited.
func (r *rig) waitExit(c *sandbox.Container) sandbox.Status {
	r.Helper()
	timeout := time.After(20 * time.Second)
	for {
		select {
		case e := <-r.events:
			if e.ContainerID == c.ID && e.Fallback == "" {
				return e.Status
			}
		case <-timeout:
			r.Fatal("the container's exit was not reported within 20s")
		}
	}
}

// eventually polls until a condition holds.
func (r *rig) eventually(what string, holds func() bool) {
	r.Helper()
	until.Holds(r, what, holds)
}

// greeting returns what the pod's cleartext port sends.
func (r *rig) greeting() string {
	conn, err := net.Dial("tcp", r.ports.address("tcp 80"))
	if err != nil {
		return err.Error()
	}
	defer conn.Close()
	raw, _ := io.ReadAll(conn)
	return strings.TrimSpace(string(raw))
}
