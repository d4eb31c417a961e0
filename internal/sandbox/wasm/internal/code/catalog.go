package code

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/artifact"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// Component is a binary and the description of its services.
type Component struct {
	Artifact *artifact.Artifact
	// Description is the SHA-256 of the descriptors or of the metadata, whichever is set, or empty if neither is set.
	Description string

	// descriptors is a serialized FileDescriptorSet. Images in Vimana's layout have metadata instead.
	descriptors, metadata []byte
	used                  time.Time // last use for a container
}

// Name returns the name that workers use for a component (workerapi.Code.Digest). The same binary with different
// descriptors or services has a different name, and so has one whose compiled code other keys may have signed.
func Name(s Source, description string) string {
	name := strings.Join(append([]string{s.Wasm.Digest.String(), description}, s.Services...), "+")
	if keys := s.trust.name(); keys != "" {
		name += "+keys:" + keys
	}
	return name
}

// Code returns the argument for loading the component into a worker under a name, without the compiled code.
func (c *Component) Code(name string) workerapi.Code {
	return workerapi.Code{Digest: name, Descriptors: c.descriptors, Metadata: c.metadata, Services: c.Artifact.Services}
}

// read reads the descriptors or, if there are none, the metadata.
func (c *Component) read(ctx context.Context, blobs artifact.Blobs) (err error) {
	if c.descriptors, err = c.Artifact.Descriptors(ctx, blobs); err != nil {
		return fmt.Errorf("descriptors of image %s: %w", c.Artifact.ImageID, err)
	}
	if len(c.descriptors) == 0 {
		if c.metadata, err = c.Artifact.Metadata(ctx, blobs); err != nil {
			return fmt.Errorf("metadata of image %s: %w", c.Artifact.ImageID, err)
		}
	}
	if raw := append(c.descriptors, c.metadata...); len(raw) > 0 {
		sum := sha256.Sum256(raw)
		c.Description = hex.EncodeToString(sum[:])
	}
	return nil
}

// holdMark is the prefix of the keys of this backend's holds on images. There is one hold per image, not per container,
// because each hold costs a commit in the image store.
const holdMark = "wasm-"

func holdOf(imageID string) string { return holdMark + shortName(imageID) }

// Catalog caches the components of images. It holds an image's blobs while containers use them, even if the image is
// removed.
type Catalog struct {
	images Images

	mu      sync.Mutex
	known   map[string]*Component    // by image ID
	looking map[string]chan struct{} // lookups in progress, by image ID; closed when the lookup ends
}

// NewCatalog returns an empty catalogue of the components in an image store.
func NewCatalog(images Images) *Catalog {
	return &Catalog{images: images, known: map[string]*Component{}, looking: map[string]chan struct{}{}}
}

// Find returns the component in an image and holds the image. Concurrent callers share one lookup. Find returns
// errdefs.ErrInvalidArgument if the image has no component.
func (c *Catalog) Find(ctx context.Context, imageID string) (*Component, error) {
	return c.once(ctx, imageID, func() (*Component, error) {
		if err := c.images.Hold(ctx, holdOf(imageID), imageID); err != nil {
			return nil, err
		}
		a, err := c.images.Component(ctx, imageID)
		if err != nil {
			return nil, err
		}
		found := &Component{Artifact: a}
		return found, found.read(ctx, c.images)
	})
}

// Recall returns the component of an existing container, even if the image was removed.
func (c *Catalog) Recall(ctx context.Context, a *artifact.Artifact, description string) (*Component, error) {
	found, err := c.once(ctx, a.ImageID, func() (*Component, error) {
		found := &Component{Artifact: a}
		return found, found.read(ctx, c.images)
	})
	if err == nil && found.Description != description {
		err = fmt.Errorf("the descriptors of image %s have changed since the container was created: %w", a.ImageID, errdefs.ErrFailedPrecondition)
	}
	return found, err
}

// once returns the cached component of an image. If the component is not cached, one caller looks it up while the
// others wait.
func (c *Catalog) once(ctx context.Context, imageID string, look func() (*Component, error)) (*Component, error) {
	for {
		c.mu.Lock()
		known, looking := c.known[imageID], c.looking[imageID]
		switch {
		case known != nil:
			known.used = time.Now()
		case looking == nil:
			c.looking[imageID] = make(chan struct{})
		}
		c.mu.Unlock()
		switch {
		case known != nil:
			return known, nil
		case looking == nil:
			return c.lookUp(imageID, look)
		}
		select {
		case <-looking:
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for the lookup of image %s: %w", imageID, context.Cause(ctx))
		}
	}
}

// lookUp looks up the component of an image, caches it and wakes the callers that wait for it.
func (c *Catalog) lookUp(imageID string, look func() (*Component, error)) (*Component, error) {
	found, err := look()
	c.mu.Lock()
	defer c.mu.Unlock()
	close(c.looking[imageID])
	delete(c.looking, imageID)
	if err != nil {
		return nil, err
	}
	found.used = time.Now()
	c.known[imageID] = found
	return found, nil
}

// Release releases the holds on images without containers. If an image was requested after the given time, its hold is
// kept, because a container that uses the image may be about to be created.
func (c *Catalog) Release(ctx context.Context, inUse map[string]bool, since time.Time) error {
	held, err := c.images.Holds(ctx)
	if err != nil {
		return err
	}
	keep := map[string]bool{}
	c.mu.Lock()
	for id := range inUse {
		keep[holdOf(id)] = true
	}
	for id, known := range c.known {
		if inUse[id] || known.used.After(since) {
			keep[holdOf(id)] = true
		} else {
			delete(c.known, id)
		}
	}
	for id := range c.looking {
		keep[holdOf(id)] = true
	}
	c.mu.Unlock()
	var errs []error
	for _, key := range held {
		if strings.HasPrefix(key, holdMark) && !keep[key] {
			errs = append(errs, c.images.Unhold(ctx, key))
		}
	}
	return errors.Join(errs...)
}
