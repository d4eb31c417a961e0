package wasm

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/artifact"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
	"github.com/tripod-run/tripod/internal/spans"
)

var (
	fpPrepared = failpoint.New("wasm.create-container.prepared")
	fpCreated  = failpoint.New("wasm.create-container.created")
)

// CreateContainer implements sandbox.Backend. It finds the component, checks its name against the pod's labels, and
// compiles it. A shared worker also loads the component and checks it against the component's descriptors. So faulty
// components are detected here.
func (b *Backend) CreateContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) (sandbox.Resolved, error) {
	comp, err := b.catalog.find(ctx, c.ImageID)
	if err != nil {
		return sandbox.Resolved{}, err
	}
	name, derived, err := b.nameOf(ctx, p, c, comp.artifact)
	if err != nil {
		return sandbox.Resolved{}, err
	}
	mounts, err := checkMounts(c.Config)
	if err != nil {
		return sandbox.Resolved{}, err
	}
	if err := b.prepare(ctx, p, c, comp); err != nil {
		return sandbox.Resolved{}, err
	}
	if err := fpPrepared.Hit(ctx); err != nil {
		return sandbox.Resolved{}, err
	}
	if sandbox.IsForeign(p, c) { // no CreateSandbox has made the directory
		if err := os.MkdirAll(b.cfg.podDir(c.ID), 0o700); err != nil {
			return sandbox.Resolved{}, sandbox.DiskError(fmt.Errorf("wasm container: %w", err))
		}
	}
	err = b.ledger.Create(p.ID, c.ID, state{
		Record: ledger.Record{ID: c.ID, Phase: ledger.Created}, Artifact: comp.artifact, Component: name, Description: comp.digest,
	})
	if err != nil {
		return sandbox.Resolved{}, err
	}
	resolved := sandbox.Resolved{Mounts: mounts, StopSignal: runtimeapi.Signal_SIGNAL_SIGTERM}
	if derived {
		resolved.Component = name
	}
	return resolved, fpCreated.Hit(ctx)
}

// nameOf returns the component's name. It takes the name from the pod's labels, otherwise from the image's annotations,
// otherwise from an image reference. The second result is false if the name is from the labels. The labels of the pod
// do not name a foreign container.
func (b *Backend) nameOf(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, a *artifact.Artifact) (name string, derived bool, err error) {
	img, err := b.cfg.Images.Get(ctx, c.ImageID)
	if err != nil {
		return "", false, err
	}
	refs := references(c.Config.GetImage(), img.RepoTags, img.RepoDigests)
	if wanted := nameFrom(p.Config.GetLabels(), b.cfg.LabelPrefix); wanted != (componentName{}) && !sandbox.IsForeign(p, c) {
		return wanted.String(), false, checkImage(wanted, a.Annotations, b.cfg.LabelPrefix, refs)
	}
	if says := nameFrom(a.Annotations, b.cfg.LabelPrefix); says.domain != "" && says.server != "" && says.version != "" {
		return says.String(), true, nil
	}
	return derive(refs).String(), true, nil
}

// prepare compiles the component. If the pod's worker is shared, prepare also loads the component, without running a
// guest. If the component must not run in a shared worker, prepare gives the pod its own worker.
func (b *Backend) prepare(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, comp *component) error {
	o, err := b.optionsOf(p, c)
	if err != nil {
		return err
	}
	scope := b.scopeOf(p, c)
	if isOwn(scope) {
		code, _, err := b.cache.open(ctx, b.cache.layers.source(ctx, comp.artifact), o.code)
		if err != nil {
			return err
		}
		return code.Close()
	}
	w, err := b.keeper.get(ctx, scope, nil)
	if err != nil {
		return err
	}
	loaded, err := b.load(ctx, w, comp.artifact, comp.digest, o.code)
	if err == nil && loaded.OwnWorkerReason != "" {
		err = b.assignOwnWorker(p, loaded.OwnWorkerReason)
	}
	return err
}

// load loads a component into a worker, unless the component is already loaded. If the worker refuses the code because
// the code is damaged or was compiled for another engine, load compiles the component again, once.
func (b *Backend) load(ctx context.Context, w *worker, a *artifact.Artifact, description string, mode codeMode) (loaded workerapi.Loaded, err error) {
	from := b.cache.layers.source(ctx, a)
	ctx, end := spans.Start(ctx, "worker.load", spans.String("component", a.Wasm.Digest.String()))
	defer func() { end(err) }()
	loaded, err = b.loadOnce(ctx, w, from, description, mode)
	if errdefs.IsFailedPrecondition(err) {
		b.log.Warn("worker refused the code; compiling again", "component", a.Wasm.Digest, "worker", w.name, "err", err)
		b.cache.forget(from)
		loaded, err = b.loadOnce(ctx, w, from, description, mode)
	}
	if err != nil {
		return loaded, fmt.Errorf("component of image %s: %w", a.ImageID, err)
	}
	return loaded, nil
}

// loadOnce loads a component into a worker. Quick code that the worker has is replaced if optimised code is there or is to be
// waited for.
func (b *Backend) loadOnce(ctx context.Context, w *worker, from source, description string, mode codeMode) (workerapi.Loaded, error) {
	name := codeName(from, description)
	code := func(mode codeMode) func(context.Context) (workerapi.Code, error) {
		return func(ctx context.Context) (workerapi.Code, error) {
			comp, err := b.catalog.recall(ctx, from.Artifact, description)
			if err != nil {
				return workerapi.Code{}, err
			}
			code := comp.code(name)
			code.Image.File, code.Quick, err = b.cache.open(ctx, from, mode)
			return code, err
		}
	}
	loaded, err := w.load(ctx, name, code(mode))
	if err != nil || !loaded.Quick || !mode.waits(loaded.World) && !b.cache.has(from) {
		return loaded, err
	}
	w.forgetCode(name) // so that the worker is asked again
	return w.load(ctx, name, code(codeOptimised))
}

// improve gives optimised code, as far as there is some, to the workers of pods that began with quick code.
func (b *Backend) improve() {
	ctx, cancel := context.WithTimeout(b.background, improveTime)
	defer cancel()
	for _, h := range b.ledger.All() {
		s, l := h.Snapshot()
		if l == nil || !l.quick.Load() || s.Artifact == nil || !b.cache.has(b.cache.layers.source(ctx, s.Artifact)) {
			continue
		}
		loaded, err := b.load(ctx, l.worker, s.Artifact, s.Description, codeOptimised)
		if err != nil {
			b.log.Warn("a worker goes on with code that is not optimised", "container", h.ID, "worker", l.worker.name, "err", err)
			continue
		}
		l.quick.Store(loaded.Quick)
	}
}

// improveTime bounds how long workers take to load optimised code.
const improveTime = 5 * time.Minute
