package code

import (
	"context"
	"slices"
	"sync"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/artifact"
)

// Precompiler compiles the components of the stored images before pods need them. It follows the set of images, so it
// needs no message from a pull, and nothing is lost when the daemon stops: what has no code is compiled at the next
// start.
type Precompiler struct {
	cache   *Cache
	catalog *Catalog
	// report passes on the progress of an image's compilation.
	report func(sandbox.Compilation)

	waits sync.WaitGroup

	mu     sync.Mutex
	images map[string]*imageCode // by image ID
}

// Wait waits until no image waits for its compilation. The contexts of Follow have ended.
func (p *Precompiler) Wait() { p.waits.Wait() }

// imageCode is the component of a stored image. Cancelling it gives up the compilation for this image.
type imageCode struct {
	reference, digest string
	artifact          *artifact.Artifact
	cancel            context.CancelFunc
	// reported is the last state that was reported for this image.
	reported sandbox.CompilationState
}

// NewPrecompiler returns a precompiler of the components in a catalogue. It calls report for each change of the state of an
// image's code.
func NewPrecompiler(c *Cache, catalog *Catalog, report func(sandbox.Compilation)) *Precompiler {
	p := &Precompiler{cache: c, catalog: catalog, report: report, images: map[string]*imageCode{}}
	c.changed = p.changed
	return p
}

// Follow compares the stored images with those of the last call. It queues the compilation of new components without
// code, in the order of the list, and gives up those of removed images. It returns the digests of all components.
// Compilations end with ctx. Unless new images are only found (PriorityBackground), their progress is reported from the beginning.
func (p *Precompiler) Follow(ctx context.Context, list []image.Image, urgency priority) (map[string]bool, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	digests, seen := map[string]bool{}, map[string]bool{}
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
	return digests, nil
}

// add queues the compilation of an image's component if it has no code. The caller holds p.mu.
func (p *Precompiler) add(ctx context.Context, img image.Image, urgency priority) error {
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
	if urgency != PriorityBackground { // its compilation may have begun, or ended, before this image was known
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
func (p *Precompiler) changed(ctx context.Context, made codeID, c sandbox.Compilation) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for id, code := range p.images {
		if code.digest == made.digest && p.cache.layers.source(ctx, code.artifact).id() == made {
			p.tell(id, code, c)
		}
	}
}

// tell reports the state of an image's compilation if the state is new. The caller holds p.mu.
func (p *Precompiler) tell(id string, code *imageCode, c sandbox.Compilation) {
	if code.reported != c.State {
		code.reported = c.State
		p.report(code.describe(id, c))
	}
}

// Find returns the state of the code of an image's component, or false if the image has no component.
func (p *Precompiler) Find(ctx context.Context, imageID string) (sandbox.Compilation, bool) {
	p.mu.Lock()
	code := p.images[imageID]
	p.mu.Unlock()
	if code == nil {
		return sandbox.Compilation{}, false
	}
	return code.describe(imageID, p.cache.state(p.cache.layers.source(ctx, code.artifact))), true
}

func (c *imageCode) describe(id string, state sandbox.Compilation) sandbox.Compilation {
	state.ImageID, state.Image = id, c.reference
	return state
}

// referenceOf returns the name under which users know an image.
func referenceOf(img image.Image) string {
	return slices.Concat(img.RepoTags, img.RepoDigests, []string{img.ID})[0]
}
