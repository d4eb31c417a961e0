package wasm

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/artifact"
)

// precompiler compiles the components of the stored images before pods need them. It follows the set of images, so it
// needs no message from a pull, and nothing is lost when the daemon stops: what has no code is compiled at the next
// start.
type precompiler struct {
	cache   *cache
	catalog *catalog
	// report passes on the progress of an image's compilation.
	report func(sandbox.Compilation)

	waits sync.WaitGroup

	mu     sync.Mutex
	images map[string]*imageCode // by image ID
	// initial is true until the first call of follow has succeeded.
	initial bool
}

// imageCode is the component of a stored image. Cancelling it gives up the compilation for this image.
type imageCode struct {
	reference, digest string
	artifact          *artifact.Artifact
	cancel            context.CancelFunc
	// reported is the last state that was reported for this image.
	reported sandbox.CompilationState
}

func newPrecompiler(c *cache, catalog *catalog, report func(sandbox.Compilation)) *precompiler {
	p := &precompiler{cache: c, catalog: catalog, report: report, images: map[string]*imageCode{}, initial: true}
	c.changed = p.changed
	return p
}

// follow compares the stored images with those of the last call. It queues the compilation of new components without
// code, in the order of the list, and gives up those of removed images. It returns the digests of all components.
// Compilations end with ctx.
func (p *precompiler) follow(ctx context.Context, list []image.Image) (map[string]bool, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	digests, seen, urgency := map[string]bool{}, map[string]bool{}, priorityPull
	if p.initial {
		urgency = priorityBackground
	}
	for _, img := range list {
		if img.Component == nil {
			continue
		}
		seen[img.ID] = true
		if p.images[img.ID] == nil {
			err := p.add(ctx, img, urgency)
			if errdefs.IsNotFound(err) || errdefs.IsInvalidArgument(err) {
				continue // removed in the meantime, or not a component
			}
			if err != nil {
				return nil, err
			}
		}
		digests[p.images[img.ID].digest] = true
	}
	for id, code := range p.images {
		if !seen[id] {
			code.cancel()
			delete(p.images, id)
		}
	}
	p.initial = false
	return digests, nil
}

// add queues the compilation of an image's component if it has no code. The caller holds p.mu.
func (p *precompiler) add(ctx context.Context, img image.Image, urgency priority) error {
	a, err := p.catalog.images.Component(ctx, img.ID)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	code := &imageCode{reference: referenceOf(img), digest: a.Wasm.Digest.String(), artifact: a, cancel: cancel}
	from := p.cache.layers.source(ctx, a)
	wait, err := p.cache.prepare(ctx, urgency, from)
	if err != nil {
		cancel()
		return err
	}
	p.images[img.ID] = code
	if !p.initial { // its compilation may have begun, or ended, before this image was known
		if c := p.cache.state(from); c.State != sandbox.CompilationQueued {
			p.tell(img.ID, code, c)
		}
	}
	if wait != nil {
		p.waits.Go(func() {
			defer cancel()
			_ = wait(ctx) // the cache reports and logs the result
		})
	}
	return nil
}

// changed reports the progress of a compilation for each image that can use its result.
func (p *precompiler) changed(ctx context.Context, made codeID, c sandbox.Compilation) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for id, code := range p.images {
		if code.digest == made.digest && p.cache.layers.source(ctx, code.artifact).id() == made {
			p.tell(id, code, c)
		}
	}
}

// tell reports the state of an image's compilation if the state is new. The caller holds p.mu.
func (p *precompiler) tell(id string, code *imageCode, c sandbox.Compilation) {
	if code.reported != c.State {
		code.reported = c.State
		p.report(code.describe(id, c))
	}
}

func (c *imageCode) describe(id string, state sandbox.Compilation) sandbox.Compilation {
	state.ImageID, state.Image = id, c.reference
	return state
}

// referenceOf returns the name under which users know an image.
func referenceOf(img image.Image) string {
	return slices.Concat(img.RepoTags, img.RepoDigests, []string{img.ID})[0]
}

// Compilation returns the state of the code of an image's component, or false if the image has no component.
func (b *Backend) Compilation(imageID string) (sandbox.Compilation, bool) {
	b.precompiler.mu.Lock()
	code := b.precompiler.images[imageID]
	b.precompiler.mu.Unlock()
	if code == nil {
		return sandbox.Compilation{}, false
	}
	return code.describe(imageID, b.cache.state(b.cache.layers.source(b.background, code.artifact))), true
}

// followImages compiles the components of images as they are stored, until ctx ends. It begins after Recover, because
// the components of running pods come first.
func (b *Backend) followImages(ctx context.Context) {
	changes := b.cfg.Images.Changes()
	select {
	case <-b.recovered:
	case <-ctx.Done():
		return
	}
	b.improve() // the previous daemon may have ended in between
	for {
		if err := b.collectCode(ctx); err != nil && ctx.Err() == nil && !errors.Is(err, image.ErrNotOpen) {
			b.log.Warn("cannot compile the components of stored images; the next attempt is in a minute", "err", err)
		}
		select {
		case <-changes:
		case <-ctx.Done():
			return
		}
	}
}

// collectCode queues the compilation of components that have no code, those of pods first, and deletes the code that no
// image or container needs.
func (b *Backend) collectCode(ctx context.Context) error {
	wanted, inUse := map[string]bool{}, map[string]bool{}
	for _, h := range b.ledger.All() {
		if s, _ := h.Snapshot(); s.Artifact != nil {
			wanted[s.Artifact.Wasm.Digest.String()] = true
			inUse[s.Artifact.ImageID] = true
		}
	}
	images, err := b.cfg.Images.List(ctx)
	if err != nil {
		return err
	}
	slices.SortStableFunc(images, func(x, y image.Image) int {
		switch {
		case inUse[x.ID] == inUse[y.ID]:
			return y.LastUsed.Compare(x.LastUsed)
		case inUse[x.ID]:
			return -1
		default:
			return 1
		}
	})
	stored, err := b.precompiler.follow(b.background, images) // compilations outlive this call
	if err != nil {
		return err // delete nothing without the complete list
	}
	for digest := range stored {
		wanted[digest] = true
	}
	return b.cache.evict(wanted)
}
