package code

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"sync"

	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tripod-run/tripod/internal/component/wasmbin"
	"github.com/tripod-run/tripod/internal/component/wit"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/artifact"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/codelayer"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/launch"
)

// Rule is a rule of the policy for compiled code in images: from which repositories a node accepts it, and which
// key must have signed it. Without a rule, a node accepts none.
type Rule struct {
	// Repositories are registries, or repositories with all that are below them: "registry.example",
	// "registry.example/team", "registry.example/team/app".
	Repositories []string
	// Keys are files with Ed25519 keys (codelayer.ReadPublicKey). They are read whenever a key is needed, so a file that
	// is deleted takes back what the node has accepted.
	Keys []string
}

// layers decides which code of images the node uses, and unpacks it.
type layers struct {
	Config
	features []string
	// unpacking bounds concurrent unpacking, because each needs memory for the code.
	unpacking chan struct{}
	results   *prometheus.CounterVec

	mu sync.Mutex
	// rejected holds the components whose code a worker has refused, and refusals the last refusals.
	rejected map[codeID]bool
	refusals map[codeID]string
}

// trust is what a node accepts for an image, besides code that it has compiled itself.
type trust struct {
	// covered is set if a rule is for the image's repository, and keys are those of all such rules.
	covered bool
	keys    []codelayer.PublicKey
	// err says why some keys are missing.
	err error
}

// codeID identifies code that images can share: the digest of their component, and the keys that they accept. Code that one
// of them may use may be used by all.
type codeID struct {
	digest, keys string
	// quick is code that is not optimised, with which pods begin.
	quick bool
}

// Source is where the code of a component can come from: its binary, or a signed layer of its image.
type Source struct {
	*artifact.Artifact
	images Images
	trust  trust
}

// world returns the world of the component as far as its exports show it, or "".
func (s Source) world(ctx context.Context) wit.World {
	binary, err := s.OpenWasm(ctx, s.images)
	if err != nil {
		return ""
	}
	defer binary.Close()
	outline, err := wasmbin.Read(binary, s.Wasm.Size)
	if err != nil {
		return ""
	}
	world, _ := artifact.Check(outline, nil) // the compiler judges
	return world
}

func (s Source) id() codeID { return codeID{digest: s.Wasm.Digest.String(), keys: s.trust.name()} }

// Source returns where the code of an image's component can come from. It reads the keys that the node accepts for the image, and
// a removed image has none.
func (c *Cache) Source(ctx context.Context, a *artifact.Artifact) Source {
	return c.layers.source(ctx, a)
}

// Source returns where the code of an image's component can come from. It reads the keys that the node accepts for the
// image. A removed image has no repository, so no keys.
func (l *layers) source(ctx context.Context, a *artifact.Artifact) Source {
	s := Source{Artifact: a, images: l.Images}
	if len(l.Rules) == 0 {
		return s
	}
	img, err := l.Images.Get(ctx, a.ImageID)
	if err != nil {
		s.trust.err = err
		return s
	}
	rules := l.rulesFor(slices.Concat(img.RepoTags, img.RepoDigests))
	s.trust.covered = len(rules) > 0
	s.trust.keys, s.trust.err = Keys(rules)
	return s
}

// name identifies the accepted keys; it is empty if there are none.
func (t trust) name() string {
	if len(t.keys) == 0 {
		return ""
	}
	sum := sha256.Sum256([]byte(strings.Join(slices.Sorted(slices.Values(t.signers())), " ")))
	return hex.EncodeToString(sum[:])
}

// signers returns the fingerprints of the accepted keys.
func (t trust) signers() []string {
	names := make([]string, len(t.keys))
	for i, k := range t.keys {
		names[i] = k.Fingerprint
	}
	return names
}

// maxUnpacking is the number of layers that are unpacked at a time.
const maxUnpacking = 2

func newLayers(cfg Config) *layers {
	return &layers{
		Config: cfg, features: codelayer.HostFeatures(), unpacking: make(chan struct{}, maxUnpacking),
		results: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "tripod_component_code_layers_total",
			Help: "Layers with compiled code that were considered, by result: used, or the reason why the component is compiled instead.",
		}, []string{"result"}),
		rejected: map[codeID]bool{}, refusals: map[codeID]string{},
	}
}

// usedLayer is the label of layers that were used.
const usedLayer = "used"

// install returns the code of a component from its image, with the fingerprint of the key that has signed it, and stores the
// code. Without a layer of code, it returns nothing. If the node does not use the layer, it returns the reason.
func (c *Cache) install(ctx context.Context, engine string, component Source) (code *os.File, key string, err error) {
	if component.Code.Digest == "" {
		return nil, "", nil
	}
	if code, key, err = c.layers.open(ctx, engine, component); err == nil {
		err = c.keep(ctx, entry{Digest: component.Wasm.Digest.String(), Engine: engine, Key: key}, code)
	}
	if errdefs.IsDataLoss(err) {
		err = &codelayer.Refusal{Reason: codelayer.ReasonDamaged, Detail: err.Error()}
	}
	if ctx.Err() == nil {
		c.layers.record(ctx, component, err)
	}
	if err != nil && code != nil {
		code.Close()
		code = nil
	}
	return code, key, err
}

// Open returns the code in an image as a memory file, and the fingerprint of the key that has signed it.
func (l *layers) open(ctx context.Context, engine string, component Source) (_ *os.File, key string, err error) {
	select {
	case l.unpacking <- struct{}{}:
		defer func() { <-l.unpacking }()
	case <-ctx.Done():
		return nil, "", fmt.Errorf("wait for other layers of code: %w", context.Cause(ctx))
	}
	layer, err := l.verify(ctx, engine, component)
	if err != nil {
		return nil, "", err
	}
	in, err := component.images.OpenOptionalBlob(ctx, component.Code) // compares it with its digest
	if err != nil {
		return nil, "", err
	}
	defer in.Close()
	code, err := launch.MemoryFile("code")
	if err != nil {
		return nil, "", err
	}
	if err := errors.Join(layer.Unpack(ctx, in, code), launch.Seal(code)); err != nil {
		code.Close()
		return nil, "", err
	}
	return code, layer.Key, nil
}

// verify checks the policy and the layer's signature.
func (l *layers) verify(ctx context.Context, engine string, component Source) (*codelayer.Layer, error) {
	if l.isRejected(component.id()) {
		return nil, &codelayer.Refusal{Reason: codelayer.ReasonWorker, Detail: "a worker has refused this code before"}
	}
	if component.Envelope.Digest == "" {
		return nil, &codelayer.Refusal{Reason: codelayer.ReasonSignature, Detail: "the layer with the code is not signed"}
	}
	if !component.trust.covered {
		if component.trust.err != nil {
			return nil, component.trust.err
		}
		return nil, &codelayer.Refusal{Reason: codelayer.ReasonPolicy,
			Detail: "the node accepts no code from the image's repository (wasm.compiled_layer)"}
	}
	envelope, err := component.ReadEnvelope(ctx, component.images)
	if err != nil {
		return nil, err
	}
	if component.trust.err != nil {
		l.Logger.Warn("compiled code signed by some keys is not accepted", "err", component.trust.err)
	}
	return codelayer.Verify(ctx, envelope, component.Code.Digest, component.trust.keys, codelayer.Target{
		Component: component.Wasm.Digest, Engine: engine, Features: l.features,
	})
}

// rulesFor returns the rules for an image with the given references.
func (l *layers) rulesFor(references []string) (rules []Rule) {
	for _, rule := range l.Rules {
		if slices.ContainsFunc(references, rule.covers) {
			rules = append(rules, rule)
		}
	}
	return rules
}

// covers reports whether the rule is for the repository of a reference.
func (r Rule) covers(ref string) bool {
	named, err := reference.ParseNormalizedNamed(ref)
	return err == nil && slices.ContainsFunc(r.Repositories, func(prefix string) bool {
		return strings.HasPrefix(named.Name()+"/", path.Clean(prefix)+"/")
	})
}

// Keys returns the keys of rules, each once, and an error about the files without a key, which accept nothing.
func Keys(rules []Rule) (keys []codelayer.PublicKey, err error) {
	for _, rule := range rules {
		for _, file := range rule.Keys {
			key, failed := codelayer.ReadPublicKey(file)
			if failed != nil {
				err = errors.Join(err, failed)
				continue
			}
			if !slices.ContainsFunc(keys, func(k codelayer.PublicKey) bool { return k.Fingerprint == key.Fingerprint }) {
				keys = append(keys, key)
			}
		}
	}
	return keys, err
}

// record counts and logs that the layer of an image was used, or was refused with an error.
func (l *layers) record(ctx context.Context, component Source, err error) {
	id, result, level := component.id(), usedLayer, slog.LevelWarn
	if err != nil {
		result = "error"
	}
	if refusal, ok := errors.AsType[*codelayer.Refusal](err); ok {
		result = string(refusal.Reason)
		if refusal.Reason == codelayer.ReasonPolicy { // the default
			level = slog.LevelInfo
		}
	}
	l.results.WithLabelValues(result).Inc()
	l.mu.Lock()
	defer l.mu.Unlock()
	if delete(l.refusals, id); err != nil {
		l.refusals[id] = err.Error()
		l.Logger.Log(ctx, level, "compiled code in the image is not used", "component", id.digest, "image", component.ImageID, "reason", result,
			"err", err)
	}
}

// refusal returns why the code in an image is not used, or "".
func (l *layers) refusal(id codeID) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.refusals[id]
}

// reject records that a worker has refused the code of a component.
func (l *layers) reject(id codeID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.rejected[id] = true
}

func (l *layers) isRejected(id codeID) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.rejected[id]
}

// Evict forgets components that are not in the given set, by the names of their directories.
func (l *layers) evict(keep map[string]bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	gone := func(id codeID) bool { return !keep[shortName(id.digest)] }
	maps.DeleteFunc(l.rejected, func(id codeID, _ bool) bool { return gone(id) })
	maps.DeleteFunc(l.refusals, func(id codeID, _ string) bool { return gone(id) })
}
