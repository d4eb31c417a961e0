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
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/code"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workers"
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
	comp, err := b.catalog.Find(ctx, c.ImageID)
	if err != nil {
		return sandbox.Resolved{}, err
	}
	name, derived, err := b.nameOf(ctx, p, c, comp.Artifact)
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
		Record: ledger.Record{ID: c.ID, Phase: ledger.Created}, Artifact: comp.Artifact, Component: name, Description: comp.Description,
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
func (b *Backend) nameOf(ctx context.Context, p *sandbox.Pod, c *sandbox.Container,
	a *artifact.Artifact) (name string, derived bool, err error) {
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
func (b *Backend) prepare(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, comp *code.Component) error {
	o, err := b.optionsOf(p, c)
	if err != nil {
		return err
	}
	scope := b.scopeOf(p, c)
	if workers.IsOwn(scope) {
		made, _, err := b.cache.Open(ctx, b.cache.Source(ctx, comp.Artifact), o.Code)
		if err != nil {
			return err
		}
		return made.Close()
	}
	w, err := b.keeper.Get(ctx, scope, nil)
	if err != nil {
		return err
	}
	loaded, err := b.load(ctx, w, comp.Artifact, comp.Description, o.Code)
	if err == nil && loaded.OwnWorkerReason != "" {
		err = b.assignOwnWorker(p, loaded.OwnWorkerReason)
	}
	return err
}

// load loads a component into a worker, unless the component is already loaded. If the worker refuses the code because
// the code is damaged or was compiled for another engine, load compiles the component again, once.
func (b *Backend) load(ctx context.Context, w *workers.Worker, a *artifact.Artifact, description string,
	mode code.Mode) (loaded workerapi.Loaded, err error) {
	from := b.cache.Source(ctx, a)
	ctx, end := spans.Start(ctx, "worker.load", spans.String("component", a.Wasm.Digest.String()))
	defer func() { end(err) }()
	loaded, err = b.loadOnce(ctx, w, from, description, mode)
	if errdefs.IsFailedPrecondition(err) {
		b.log.Warn("worker refused the code; compiling again", "component", a.Wasm.Digest, "worker", w.Name, "err", err)
		b.cache.Forget(from)
		loaded, err = b.loadOnce(ctx, w, from, description, mode)
	}
	if err != nil {
		return loaded, fmt.Errorf("component of image %s: %w", a.ImageID, err)
	}
	return loaded, nil
}

// loadOnce loads a component into a worker. Quick code that the worker has is replaced if optimised code is there or is to be
// waited for.
func (b *Backend) loadOnce(ctx context.Context, w *workers.Worker, from code.Source, description string,
	mode code.Mode) (workerapi.Loaded, error) {
	name := code.Name(from, description)
	get := func(mode code.Mode) func(context.Context) (workerapi.Code, error) {
		return func(ctx context.Context) (workerapi.Code, error) {
			comp, err := b.catalog.Recall(ctx, from.Artifact, description)
			if err != nil {
				return workerapi.Code{}, err
			}
			made := comp.Code(name)
			made.Image.File, made.Quick, err = b.cache.Open(ctx, from, mode)
			return made, err
		}
	}
	loaded, err := w.Load(ctx, name, get(mode))
	if err != nil || !loaded.Quick || !mode.Waits(loaded.World) && !b.cache.Has(from) {
		return loaded, err
	}
	w.ForgetCode(name) // so that the worker is asked again
	return w.Load(ctx, name, get(code.ModeOptimised))
}

// improve gives optimised code, as far as there is some, to the workers of pods that began with quick code.
func (b *Backend) improve() {
	ctx, cancel := context.WithTimeout(b.background, improveTime)
	defer cancel()
	for _, h := range b.ledger.All() {
		s, l := h.Snapshot()
		if l == nil || !l.quick.Load() || s.Artifact == nil || !b.cache.Has(b.cache.Source(ctx, s.Artifact)) {
			continue
		}
		loaded, err := b.load(ctx, l.worker, s.Artifact, s.Description, code.ModeOptimised)
		if err != nil {
			b.log.Warn("a worker goes on with code that is not optimised", "container", h.ID, "worker", l.worker.Name, "err", err)
			continue
		}
		l.quick.Store(loaded.Quick)
	}
}

// improveTime bounds how long workers take to load optimised code.
const improveTime = 5 * time.Minute
