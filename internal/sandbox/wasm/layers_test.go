package wasm

import (
	"bytes"
	"crypto/ed25519"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/codelayer"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/code"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/test/workertest"
)

const (
	fleet    = "registry.example/demo"
	fakeCode = workertest.CodeMagic + "fake engine 1\nworld=grpc shipped"
)

// fleetKeys makes the files of a key, which the node of newFleetRig accepts for images of the repositories below fleet.
type fleetKeys struct {
	private ed25519.PrivateKey
	file    string
}

func newFleetKeys(t testing.TB, seed byte) fleetKeys {
	t.Helper()
	private := ed25519.NewKeyFromSeed(bytes.Repeat([]byte{seed}, ed25519.SeedSize))
	der, err := x509.MarshalPKIXPublicKey(private.Public())
	require.NoError(t, err)
	k := fleetKeys{private, filepath.Join(t.TempDir(), "fleet.pub")}
	require.NoError(t, os.WriteFile(k.file, pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}), 0o644))
	return k
}

func newFleetRig(t *testing.T) (*rig, fleetKeys) {
	keys := newFleetKeys(t, 1)
	return newRig(t, func(c *Config) {
		c.CompiledLayers = []code.Rule{{Repositories: []string{fleet}, Keys: []string{keys.file}}}
	}), keys
}

// shipped is an image with compiled code.
type shipped struct {
	words, ref      string
	component       string // words of the component that the code is for; by default those of the image
	key             fleetKeys
	engine          string
	features        []string
	code            string
	layer, envelope func([]byte) []byte // change what the registry has
	damaged         bool                // the layer, on this node's disk
}

// ship stores an image of a component with compiled code, as a pull does. The words "invalid" make a compiler fail, so code
// for them can only be that of the image.
func (r *rig) ship(s shipped) (imageID string) {
	r.Helper()
	r.eventually("the daemon knows the stored images", r.listed.Load)
	target := codelayer.Target{Component: digest.FromBytes(workertest.Module(s.words)), Engine: "fake engine 1",
		Features: codelayer.HostFeatures()}
	if s.component != "" {
		target.Component = digest.FromBytes(workertest.Module(s.component))
	}
	if s.engine != "" {
		target.Engine = s.engine
	}
	target.Features = append(target.Features, s.features...)
	if s.code == "" {
		s.code = fakeCode
	}
	layer, envelope, err := codelayer.Pack(r.ctx(), s.key.private, target, []byte(s.code))
	r.must(err)
	if s.layer != nil {
		layer = s.layer(layer)
	}
	if s.envelope != nil {
		envelope = s.envelope(envelope)
	}
	if s.ref == "" {
		s.ref = fleet + "/app:1"
	}
	signature := ocispec.Descriptor{}
	if envelope != nil {
		signature = r.blob(envelope)
	}
	code := r.blob(layer)
	if s.damaged {
		r.must(os.WriteFile(filepath.Join(r.shelf.dir, code.Digest.Encoded()), []byte("damaged"), 0o644))
	}
	id := r.shelf.putShipped(r.TB, s.words, s.ref, nil, code, signature)
	r.shelf.announce()
	return id
}

func (r *rig) blob(data []byte) ocispec.Descriptor {
	r.Helper()
	d := digest.FromBytes(data)
	r.must(os.WriteFile(filepath.Join(r.shelf.dir, d.Encoded()), data, 0o644))
	return ocispec.Descriptor{Digest: d, Size: int64(len(data))}
}

// runImage runs a pod of a stored image.
func (r *rig) runImage(name, imageID string) (*sandbox.Pod, *sandbox.Container) {
	r.Helper()
	p := r.pod(name)
	c := r.container(p, "another image")
	c.ImageID = imageID
	_, err := r.CreateContainer(r.ctx(), p, c)
	r.must(err)
	r.known[p.ID] = sandbox.Known{Pod: p, Containers: []*sandbox.Container{c}}
	r.must(r.StartContainer(r.ctx(), p, c))
	return p, c
}

// source returns where the code of a stored image can come from.
func (r *rig) source(imageID string) code.Source {
	r.Helper()
	image, err := r.shelf.find(imageID)
	r.must(err)
	return r.cache.Source(r.ctx(), image.artifact)
}

// storedCode returns the code in the cache that an image's pods use.
func (r *rig) storedCode(imageID string) string {
	r.Helper()
	file, _, err := r.cache.Open(r.ctx(), r.source(imageID), code.ModeOptimised) // it is stored already
	r.must(err)
	defer file.Close()
	code, err := io.ReadAll(file)
	r.must(err)
	return string(code)
}

// layerCount returns how many layers had a result.
func (r *rig) layerCount(result string) float64 {
	r.Helper()
	var m dto.Metric
	for _, c := range r.cache.Collectors() {
		if layers, ok := c.(*prometheus.CounterVec); ok {
			r.must(layers.WithLabelValues(result).Write(&m))
		}
	}
	return m.GetCounter().GetValue()
}

// TestShippedCodeIsUsed checks that a pod starts with the code of its image, which no compiler has made, also after a
// restart of the daemon.
func TestShippedCodeIsUsed(t *testing.T) {
	r, keys := newFleetRig(t)
	id := r.ship(shipped{words: "invalid", key: keys})
	done := r.wantCompilation(id, sandbox.CompilationDone) // and no event that it is being compiled
	if !strings.HasPrefix(done.Key, "SHA256:") || done.LayerRefused != "" {
		t.Errorf("event = %+v, want the fingerprint of the key", done)
	}
	r.runImage("p", id)
	if got := r.greeting(); got != "hello" {
		t.Errorf("greeting = %q, want hello", got)
	}
	if used := r.layerCount("used"); used != 1 {
		t.Errorf("%v layers were used, want 1", used)
	}
	r.restartDaemon()
	r.eventually("the stored images are known", func() bool { _, ok := r.Compilation(id); return ok })
	if c, _ := r.Compilation(id); c.State != sandbox.CompilationDone || c.Key != done.Key {
		t.Errorf("Compilation after a restart = %+v, want the same key", c)
	}
	if used := r.layerCount("used"); used != 0 {
		t.Errorf("after a restart %v layers were used, want the stored code", used)
	}
}

// TestRefusedCodeIsCompiledHere checks that a node compiles the component itself if it does not accept the code in the
// image, and says why.
func TestRefusedCodeIsCompiledHere(t *testing.T) {
	stranger := newFleetKeys(t, 2)
	for name, c := range map[string]struct {
		shipped
		want codelayer.Reason
	}{
		"wrong key":         {shipped{key: stranger}, codelayer.ReasonKey},
		"wrong engine":      {shipped{engine: "fake engine 2"}, codelayer.ReasonEngine},
		"swapped component": {shipped{component: "another component"}, codelayer.ReasonComponent},
		"wrong processor":   {shipped{features: []string{"none-has-this"}}, codelayer.ReasonCPU},
		"truncated code":    {shipped{layer: func(b []byte) []byte { return b[:len(b)-1] }}, codelayer.ReasonDamaged},
		"damaged on disk":   {shipped{damaged: true}, codelayer.ReasonDamaged},
		"no policy":         {shipped{ref: "registry.example/demonstration/app:1"}, codelayer.ReasonPolicy},
		"other registry":    {shipped{ref: "registry.example.org/demo/app:1"}, codelayer.ReasonPolicy},
		"no signature":      {shipped{envelope: func([]byte) []byte { return nil }}, codelayer.ReasonSignature},
		"wrong signature": {shipped{envelope: func(b []byte) []byte {
			return bytes.Replace(b, []byte(`"sig":"`), []byte(`"sig":"AAAA`), 1)
		}}, codelayer.ReasonSignature},
		"no statement": {shipped{envelope: func([]byte) []byte { return []byte("{}") }}, codelayer.ReasonStatement},
	} {
		t.Run(name, func(t *testing.T) {
			r, keys := newFleetRig(t)
			if c.key.private == nil {
				c.key = keys
			}
			c.words, c.code = "world=grpc compiled", workertest.CodeMagic+"fake engine 1\ninvalid code must not run"
			id := r.ship(c.shipped)
			running := r.wantCompilation(id, sandbox.CompilationRunning)
			done := r.wantCompilation(id, sandbox.CompilationDone)
			if running.LayerRefused == "" || done.LayerRefused != running.LayerRefused || done.Key != "" {
				t.Errorf("events = %+v and %+v, want why the layer was refused", running, done)
			}
			if state, _ := r.Compilation(id); state.LayerRefused != running.LayerRefused {
				t.Errorf("Compilation = %+v, want %q", state, running.LayerRefused)
			}
			if refused := r.layerCount(string(c.want)); refused != 1 {
				t.Errorf("%v layers were refused for %s, want 1; the reason was: %s", refused, c.want, running.LayerRefused)
			}
			if code := r.storedCode(id); !strings.HasSuffix(code, c.words) {
				t.Errorf("stored code = %q, want that of %q", code, c.words)
			}
		})
	}
}

// TestNoPolicyAcceptsNothing checks the default.
func TestNoPolicyAcceptsNothing(t *testing.T) {
	r := newRig(t)
	id := r.ship(shipped{words: "world=grpc default", key: newFleetKeys(t, 1)})
	r.compiled(id)
	if refused := r.layerCount(string(codelayer.ReasonPolicy)); refused != 1 {
		t.Errorf("%v layers were refused for the policy, want 1", refused)
	}
}

// TestRevokedKey checks that code in the cache is not used once its key is gone, and that another image without a layer
// does not get around this.
func TestRevokedKey(t *testing.T) {
	r, keys := newFleetRig(t)
	id := r.ship(shipped{words: "world=grpc revoked", key: keys})
	r.wantCompilation(id, sandbox.CompilationDone)
	r.must(os.Remove(keys.file))
	if c, _ := r.Compilation(id); c.State != sandbox.CompilationNone {
		t.Errorf("Compilation without the key = %+v, want none", c)
	}
	r.runImage("p", id)
	r.wantCompilation(id, sandbox.CompilationRunning)
	if c := r.wantCompilation(id, sandbox.CompilationDone); c.Key != "" {
		t.Errorf("event = %+v, want compiled here", c)
	}
}

// TestCodeOfAnotherRepository checks that code which was signed for images of one repository is never used for an image of
// the same component from another one: not that of the cache, not that of a flight in progress, and not that which a shared
// worker has loaded.
func TestCodeOfAnotherRepository(t *testing.T) {
	const words = "world=grpc greeting=here"
	const evil = workertest.CodeMagic + "fake engine 1\nworld=grpc greeting=evil"
	team, other := newFleetKeys(t, 1), newFleetKeys(t, 2)
	for name, ref := range map[string]string{"no rule": "registry.example/open/app:1",
		"rule with another key": "registry.example/other/app:1"} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, func(c *Config) {
				c.CompiledLayers = []code.Rule{
					{Repositories: []string{fleet}, Keys: []string{team.file}},
					{Repositories: []string{"registry.example/other"}, Keys: []string{other.file}},
				}
			})
			shipping := r.ship(shipped{words: words, key: team, code: evil})
			if done := r.wantCompilation(shipping, sandbox.CompilationDone); done.Key == "" {
				t.Fatalf("event = %+v, want the code of the image", done)
			}
			r.runImage("first", shipping)
			if got := r.greeting(); got != "evil" {
				t.Fatalf("greeting of the first pod = %q, want that of the image's code", got)
			}
			victim := r.shelf.put(t, words, ref, nil)
			r.shelf.announce()
			r.eventually("the component is compiled", func() bool { c, _ := r.Compilation(victim); return c.State == sandbox.CompilationDone })
			if code := r.storedCode(victim); !strings.HasSuffix(code, words) {
				t.Errorf("stored code = %q, want that of %q", code, words)
			}
			if c, _ := r.Compilation(victim); c.Key != "" {
				t.Errorf("Compilation = %+v, want compiled here", c)
			}
			r.runImage("second", victim)
			if got := r.greeting(); got != "here" {
				t.Errorf("greeting of the second pod = %q, want that of the code compiled here", got)
			}
		})
	}
	t.Run("flight", func(t *testing.T) {
		r := newRig(t, func(c *Config) {
			c.CompiledLayers = []code.Rule{{Repositories: []string{fleet}, Keys: []string{team.file}}}
			c.CompileParallel = 2
		})
		admit := r.shelf.holdBack()
		shipping := r.ship(shipped{words: words, key: team, code: evil})
		r.eventually("the layer waits", func() bool { c, ok := r.Compilation(shipping); return ok && c.State == sandbox.CompilationQueued })
		victim := r.shelf.put(t, words, "registry.example/open/app:1", nil)
		r.shelf.announce()
		r.compiled(victim) // does not join the flight that waits
		if code := r.storedCode(victim); !strings.HasSuffix(code, words) {
			t.Errorf("stored code = %q, want that of %q", code, words)
		}
		admit()
		r.wantCompilation(shipping, sandbox.CompilationDone)
		if code := r.storedCode(victim); !strings.HasSuffix(code, words) {
			t.Errorf("stored code after the other flight = %q, want that of %q", code, words)
		}
	})
}

// TestWorkerRefusesShippedCode checks that code which a worker refuses is not taken from the image again.
func TestWorkerRefusesShippedCode(t *testing.T) {
	r, keys := newFleetRig(t)
	// the statement lies
	id := r.ship(shipped{words: "world=grpc refused", key: keys, code: workertest.CodeMagic + "fake engine 2\nworld=grpc"})
	r.wantCompilation(id, sandbox.CompilationDone)
	r.runImage("p", id)
	if running := r.wantCompilation(id, sandbox.CompilationRunning); !strings.Contains(running.LayerRefused, "worker") {
		t.Errorf("event = %+v, want that a worker has refused the code", running)
	}
	r.wantCompilation(id, sandbox.CompilationDone)
	if refused := r.layerCount(string(codelayer.ReasonWorker)); refused != 1 {
		t.Errorf("%v layers were refused because of a worker, want 1", refused)
	}
}

// TestUnpackingIsBounded checks that only two layers are unpacked at a time, and that others wait as long as their images are
// there.
func TestUnpackingIsBounded(t *testing.T) {
	const atATime = 2
	r, keys := newFleetRig(t)
	admit := r.shelf.holdBack()
	var ids []string
	for i := range atATime + 2 {
		id := r.ship(shipped{words: fmt.Sprint("invalid ", i), key: keys})
		ids = append(ids, id)
		r.eventually("the layer is known", func() bool { _, ok := r.Compilation(id); return ok })
		if i < atATime {
			r.eventually("the layer is read", func() bool { return r.shelf.heldBack() == i+1 })
		}
	}
	r.shelf.remove(ids[atATime])
	r.shelf.announce()
	r.eventually("the image is forgotten", func() bool { _, ok := r.Compilation(ids[atATime]); return !ok })
	if n := r.shelf.heldBack(); n != atATime {
		t.Errorf("%d layers are unpacked at a time, want %d", n, atATime)
	}
	if c, _ := r.Compilation(ids[atATime+1]); c.State != sandbox.CompilationQueued {
		t.Errorf("Compilation of the last layer = %+v, want queued", c)
	}
	admit()
	for range atATime + 1 {
		if done := r.compilation(); done.State != sandbox.CompilationDone || done.ImageID == ids[atATime] {
			t.Errorf("event = %+v, want that a layer of the other images was used", done)
		}
	}
}

// TestCheckOfKeys checks what `tripod check` says about rules.
func TestCheckOfKeys(t *testing.T) {
	keys := newFleetKeys(t, 1)
	if f := layersFinding(Config{}); !f.OK || f.Detail != "not used" {
		t.Errorf("finding without rules = %+v, want not used", f)
	}
	rule := code.Rule{Repositories: []string{fleet}, Keys: []string{keys.file}}
	if f := layersFinding(Config{CompiledLayers: []code.Rule{rule}}); !f.OK ||
		!strings.Contains(f.Detail, "from "+fleet+" if signed by SHA256:") {
		t.Errorf("finding = %+v, want the repository and the key", f)
	}
	rule.Keys = append(rule.Keys, keys.file+".none")
	if f := layersFinding(Config{CompiledLayers: []code.Rule{rule}}); f.OK || !strings.Contains(f.Detail, ".none") {
		t.Errorf("finding = %+v, want the missing file", f)
	}
}
