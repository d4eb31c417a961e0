package node_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/node"
	"github.com/tripod-run/tripod/internal/node/store"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/test/fake"
	"github.com/tripod-run/tripod/test/until"
)

// bench is a node on fake services whose state is below dir.
type bench struct {
	*node.Node
	dir     string
	store   *store.Store
	backend map[string]*fake.Backend
	network *fake.Network
}

// open starts a node on dir: handler "linux" has pods with many containers, "wasm" has unit pods that run components, and
// foreign containers in the pods of "linux".
func open(t testing.TB, dir string) *bench {
	t.Helper()
	b, err := tryOpen(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.close)
	return b
}

func tryOpen(dir string) (*bench, error) {
	return openChanged(dir, func(map[string]sandbox.Backend, map[string]*fake.Backend) {})
}

// openChanged opens a node with modified backends.
func openChanged(dir string, change func(backends map[string]sandbox.Backend, fakes map[string]*fake.Backend)) (*bench, error) {
	return openConfig(dir, func(c *node.Config, fakes map[string]*fake.Backend) { change(c.Backends, fakes) })
}

// openConfig opens a node with a modified configuration.
func openConfig(dir string, change func(c *node.Config, fakes map[string]*fake.Backend)) (*bench, error) {
	b := &bench{dir: dir, backend: map[string]*fake.Backend{}, network: &fake.Network{Dir: filepath.Join(dir, "network")}}
	if err := os.MkdirAll(b.network.Dir, 0o700); err != nil {
		return nil, err
	}
	var err error
	if b.store, err = store.Open(filepath.Join(dir, "node.db")); err != nil {
		return nil, err
	}
	if err := b.store.KeepDrafts(filepath.Join(dir, "drafts")); err != nil {
		return nil, err
	}
	backends := map[string]sandbox.Backend{}
	for handler, caps := range map[string]sandbox.Capabilities{"linux": {HostNetwork: true},
		"wasm": {MaxContainers: 1, Components: true, ForeignPods: true}, "vm": {MaxContainers: 1}} {
		f, err := fake.New(fake.Config{Dir: filepath.Join(dir, handler), Capabilities: caps})
		if err != nil {
			return nil, err
		}
		b.backend[handler], backends[handler] = f, f
	}
	backends["vm"] = dialed{b.backend["vm"]}
	config := node.Config{
		Store: b.store, Backends: backends, DefaultHandler: "linux", Network: b.network, Images: fake.Images{},
		ComponentHandler: "wasm", Claims: func(_ *runtimeapi.ContainerConfig, img image.Image) bool { return img.Component != nil },
		Routes: []node.Route{
			{Annotation: "kubernetes.io/target-runtime", Value: "virtlet.cloud", ImagePrefix: "virtlet.cloud/", Handler: "vm"},
			{Annotation: "kubernetes.io/target-runtime", Value: "nowhere", Handler: "nowhere"},
		},
		OperationTimeout: 10 * time.Second,
	}
	change(&config, b.backend)
	b.Node, err = node.Open(context.Background(), config)
	if err != nil {
		return nil, errors.Join(err, b.store.Close())
	}
	return b, nil
}

func (b *bench) close() {
	_ = b.Close()
	_ = b.store.Close()
}

// reopen closes the node and starts another on the same state.
func (b *bench) reopen(t testing.TB) *bench {
	t.Helper()
	b.close()
	return open(t, b.dir)
}

// residue lists traces of pods outside the record.
func (b *bench) residue(t testing.TB) []string {
	t.Helper()
	left, err := b.network.Leases()
	for _, f := range b.backend {
		ids, podsErr := f.Pods()
		left, err = append(left, ids...), errors.Join(err, podsErr)
	}
	if err != nil {
		t.Fatal(err)
	}
	return left
}

func podConfig(name string, annotations ...string) *runtimeapi.PodSandboxConfig {
	return &runtimeapi.PodSandboxConfig{
		Metadata:    &runtimeapi.PodSandboxMetadata{Name: name, Namespace: "default", Uid: name + "-uid"},
		Annotations: pairs(annotations),
	}
}

func containerConfig(name string, annotations ...string) *runtimeapi.ContainerConfig {
	return &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: name}, Image: &runtimeapi.ImageSpec{Image: "busybox"},
		Annotations: pairs(annotations),
	}
}

func pairs(kv []string) map[string]string {
	m := map[string]string{}
	for i := 0; i+1 < len(kv); i += 2 {
		m["fake.tripod.dev/"+kv[i]] = kv[i+1]
	}
	return m
}

func (b *bench) run(t testing.TB, handler string, config *runtimeapi.PodSandboxConfig) string {
	t.Helper()
	id, err := b.RunSandbox(t.Context(), config, handler)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func (b *bench) create(t testing.TB, pod string, config *runtimeapi.ContainerConfig) string {
	t.Helper()
	id, err := b.CreateContainer(t.Context(), pod, config)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

func (b *bench) state(t testing.TB, id string) node.State {
	t.Helper()
	c, _, err := b.Container(id)
	if errdefs.IsNotFound(err) {
		return ""
	}
	must(t, err)
	return c.State
}

// eventually polls until a condition is met.
var eventually = until.Holds

// openWith starts a node with one backend, which wraps the fake one.
func openWith(t *testing.T, dir, handler string, caps sandbox.Capabilities, wrap func(*fake.Backend) sandbox.Backend) *bench {
	t.Helper()
	records, err := store.Open(filepath.Join(dir, "node.db"))
	must(t, err)
	must(t, records.KeepDrafts(filepath.Join(dir, "drafts")))
	f, err := fake.New(fake.Config{Dir: filepath.Join(dir, handler), Capabilities: caps})
	must(t, err)
	b := &bench{dir: dir, store: records, network: &fake.Network{Dir: filepath.Join(dir, "network")}}
	must(t, os.MkdirAll(b.network.Dir, 0o700))
	b.Node, err = node.Open(t.Context(), node.Config{
		Store: records, Backends: map[string]sandbox.Backend{handler: wrap(f)}, DefaultHandler: handler, Network: b.network,
		Images: fake.Images{},
	})
	must(t, err)
	t.Cleanup(b.close)
	return b
}
