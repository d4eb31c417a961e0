package unitpods

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/crilog"
	"github.com/tripod-run/tripod/internal/edge/wire"
	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/node"
	"github.com/tripod-run/tripod/internal/node/store"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/test/fake"
	"github.com/tripod-run/tripod/test/until"
)

// patience is for what other goroutines do on a busy machine.
const patience = 30 * time.Second

// emptyModule is the smallest binary.
var emptyModule = []byte("\x00asm\x01\x00\x00\x00")

// guests is a fake backend whose containers have channels, which end at the test, and logs, which the test writes.
type guests struct {
	*fake.Backend
	mu       sync.Mutex
	conns    chan net.Conn // the workers' ends
	reopened int
	deaf     bool // no connection for channels
}

func (g *guests) Channels(_ context.Context, _ *sandbox.Pod, c *sandbox.Container) (net.Conn, string, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.deaf {
		return nil, "", fmt.Errorf("no worker: %w", errdefs.ErrUnavailable)
	}
	here, there := net.Pipe()
	g.conns <- there
	return here, "group", nil
}

func (g *guests) ReopenLog(_ context.Context, p *sandbox.Pod, c *sandbox.Container) error {
	g.mu.Lock()
	g.reopened++
	g.mu.Unlock()
	f, err := os.OpenFile(filepath.Join(p.Config.LogDirectory, c.Config.LogPath), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o640)
	if err != nil {
		return err
	}
	return f.Close()
}

// shelf is an image store of files.
type shelf struct {
	mu      sync.Mutex
	images  map[string]image.Image // by ID
	imports int
	pulls   []string
}

func (s *shelf) ImportFile(_ context.Context, file *os.File) (image.Image, error) {
	raw, err := io.ReadAll(file)
	if err != nil || !bytes.HasPrefix(raw, emptyModule) {
		return image.Image{}, fmt.Errorf("%s is no module (%v): %w", file.Name(), err, errdefs.ErrInvalidArgument)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.imports++
	d := digest.FromBytes(raw)
	img := image.Image{ID: d.String(), RepoTags: []string{image.LocalPrefix + d.Encoded() + ":latest"}}
	s.images[img.ID] = img
	return img, nil
}

func (s *shelf) Get(_ context.Context, ref string) (image.Image, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, img := range s.images {
		if img.ID == ref || len(img.RepoDigests) > 0 && img.RepoDigests[0] == ref {
			return img, nil
		}
	}
	return image.Image{}, fmt.Errorf("image %s: %w", ref, errdefs.ErrNotFound)
}

func (s *shelf) List(context.Context) (all []image.Image, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, img := range s.images {
		all = append(all, img)
	}
	return all, nil
}

func (s *shelf) Pull(_ context.Context, ref string, _ image.PullOptions) (image.Image, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if strings.Contains(ref, "none") {
		return image.Image{}, fmt.Errorf("pull %s: %w", ref, errdefs.ErrNotFound)
	}
	s.pulls = append(s.pulls, ref)
	img := image.Image{ID: digest.FromString(ref).String(), RepoDigests: []string{ref}}
	s.images[img.ID] = img
	return img, nil
}

func (s *shelf) Remove(_ context.Context, id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.images, id)
	return nil
}

func (s *shelf) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.images)
}

// rig is a runtime over a real node with a fake backend.
type rig struct {
	testing.TB
	*Runtime
	dir     string
	config  Config
	store   *store.Store
	node    *node.Node
	guests  *guests
	shelf   *shelf
	modules string // the root of the modules' files
}

func newRig(t testing.TB, change ...func(*Config)) *rig {
	t.Helper()
	r := &rig{TB: t, dir: t.TempDir(), shelf: &shelf{images: map[string]image.Image{}}}
	r.modules = filepath.Join(r.dir, "modules")
	r.must(os.Mkdir(r.modules, 0o755))
	r.must(os.WriteFile(filepath.Join(r.modules, "m.wasm"), emptyModule, 0o644))
	r.config = Config{
		Name: "wasm", UUID: "11111111-0000-4000-8000-000000000001", Images: r.shelf, LogDir: filepath.Join(r.dir, "logs"),
		ModuleRoots: []string{r.modules}, DirRoots: []string{filepath.Join(r.dir, "data")}, Topics: wire.Topics{Realm: "realm"},
		Logger: slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
	for _, c := range change {
		c(&r.config)
	}
	r.open()
	t.Cleanup(r.close)
	return r
}

// open starts a daemon over the rig's files.
func (r *rig) open() {
	r.Helper()
	var err error
	r.store, err = store.Open(filepath.Join(r.dir, "node.db"))
	r.must(err)
	backend, err := fake.New(fake.Config{Dir: filepath.Join(r.dir, "pods"),
		Capabilities: sandbox.Capabilities{MaxContainers: 1, HostNetwork: true}})
	r.must(err)
	r.guests = &guests{Backend: backend, conns: make(chan net.Conn, 256)}
	network := &fake.Network{Dir: filepath.Join(r.dir, "network")}
	r.must(os.MkdirAll(network.Dir, 0o700))
	r.node, err = node.Open(context.Background(), node.Config{
		Store: r.store, Backends: map[string]sandbox.Backend{"wasm": r.guests}, DefaultHandler: "wasm", Network: network, Images: fake.Images{},
	})
	r.must(err)
	r.config.Node = r.node
	r.Runtime, err = New(r.config)
	r.must(err)
	r.lastWords, r.pollInterval = 20*time.Millisecond, 50*time.Millisecond // the test's workers do not hang up
	_, err = r.Start(r.Context())
	r.must(err)
}

func (r *rig) close() {
	if err := r.Runtime.Close(); err != nil {
		r.Error(err)
	}
	_ = r.node.Close()
	_ = r.store.Close()
}

// reopen is the next daemon's start.
func (r *rig) reopen() {
	r.Helper()
	r.close()
	r.open()
}

func (r *rig) must(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

func (r *rig) data(uuid string, more ...string) wire.ModuleData {
	r.Helper()
	fields := append([]string{`"type":"module"`, `"uuid":"` + uuid + `"`, `"name":"m"`, `"file":"m.wasm"`}, more...)
	data, err := wire.ParseModuleData([]byte("{" + strings.Join(fields, ",") + "}"))
	r.must(err)
	return data
}

// create creates a module and gives its pod.
func (r *rig) create(index int, uuid string, more ...string) *node.Pod {
	r.Helper()
	r.must(r.Create(r.Context(), index, r.data(uuid, more...)))
	return r.pod(uuid)
}

func (r *rig) pod(uuid string) *node.Pod {
	r.Helper()
	for _, p := range r.node.Pods() {
		if p.Config.GetMetadata().GetUid() == uuid {
			return p
		}
	}
	r.Fatalf("module %s has no pod", uuid)
	return nil
}

// print writes lines of output as the module's worker does.
func (r *rig) print(uuid string, lines ...string) {
	r.Helper()
	p := r.pod(uuid)
	r.guests.mu.Lock() // a worker does not change files while it writes
	defer r.guests.mu.Unlock()
	f, err := os.OpenFile(filepath.Join(p.Config.LogDirectory, logFile), os.O_APPEND|os.O_WRONLY|os.O_CREATE, 0o640)
	r.must(err)
	w := crilog.NewWriter(f, 0)
	out := w.Stream(crilog.Stdout)
	for _, l := range lines {
		_, err := out.Write([]byte(l + "\n"))
		r.must(err)
	}
	r.must(w.Close())
}

// receive gives the next message.
func (r *rig) receive() channel.Message {
	r.Helper()
	ctx, cancel := context.WithTimeout(r.Context(), patience)
	defer cancel()
	m, err := r.Receive(ctx)
	r.must(err)
	return m
}

// want checks the next message's text.
func (r *rig) want(index, kind int, text string) {
	r.Helper()
	m := r.receive()
	if !m.Control || m.Module != index || m.Arg != kind || string(m.Payload) != text {
		r.Fatalf("message %+v %q, want type %d of module %d: %q", m.Header, m.Payload, kind, index, text)
	}
}

// wantExited checks that the next message tells an end.
func (r *rig) wantExited(index int, code int32, reason string) ending {
	r.Helper()
	m := r.receive()
	var said struct{ Status ending }
	if !m.Control || m.Module != index || m.Arg != wire.Exited || json.Unmarshal(m.Payload, &said) != nil {
		r.Fatalf("message %+v %q, want the end of module %d", m.Header, m.Payload, index)
	}
	if said.Status.Code != code || said.Status.Reason != reason {
		r.Fatalf("the end is %+v, want code %d, %s", said.Status, code, reason)
	}
	return said.Status
}

// worker gives the next connection as a worker has it.
func (r *rig) worker() *channel.Conn {
	r.Helper()
	select {
	case conn := <-r.guests.conns:
		c := channel.NewConn(conn, channel.ConnOptions{})
		r.TB.Cleanup(func() { _ = c.Close() })
		r.settled(c, 0)
		return c
	case <-time.After(patience):
		r.Fatal("nobody connects to the channels")
		return nil
	}
}

// settled checks that the worker learns how many messages it need not keep.
func (r *rig) settled(w *channel.Conn, want uint64) {
	r.Helper()
	m, err := w.Read()
	r.must(err)
	if n, err := channel.ParseSettled(m.Payload); !m.Control || m.Arg != channel.Settled || n != want || err != nil {
		r.Errorf("the worker got %+v, want that %d are settled", m, want)
	}
}

// eventually waits for a condition that nothing announces.
func (r *rig) eventually(what string, holds func() bool) {
	r.Helper()
	until.Holds(r.TB, what, holds)
}

// cleanup does what the manager does after an end.
func (r *rig) cleanup(index int, uuid string) {
	r.Helper()
	r.must(r.Runtime.Cleanup(r.Context(), index, uuid))
}
