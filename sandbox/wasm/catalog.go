package wasm

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/wasm/artifact"
)

// component is what a container runs: the binary and what describes its services.
type component struct {
	artifact *artifact.Artifact
	// descriptors is a serialized FileDescriptorSet, digest its SHA-256; both empty when there is none.
	descriptors []byte
	digest      string
}

// codeName is the name by which workers know the component: of the binary, the descriptors and the services, as one
// without the others is something else.
func codeName(a *artifact.Artifact, descriptors string) string {
	return strings.Join(append([]string{a.Wasm.Digest.String(), descriptors}, a.Services...), "+")
}

// catalog remembers the components of images, and keeps their descriptors for containers whose image is gone.
type catalog struct {
	cfg Config

	mu      sync.Mutex
	images  map[string]*component
	looking map[string]chan struct{} // closed when it has been looked at
}

func newCatalog(cfg Config) *catalog {
	return &catalog{cfg: cfg, images: map[string]*component{}, looking: map[string]chan struct{}{}}
}

// find gives the component of an image, which is looked at once, however many ask. An image that has none is an
// errdefs.ErrInvalidArgument.
func (c *catalog) find(ctx context.Context, imageID string) (*component, error) {
	for {
		c.mu.Lock()
		known, looking := c.images[imageID], c.looking[imageID]
		if known == nil && looking == nil {
			c.looking[imageID] = make(chan struct{})
		}
		c.mu.Unlock()
		switch {
		case known != nil:
			return known, nil
		case looking == nil:
			return c.look(ctx, imageID)
		}
		select {
		case <-looking:
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for image %s to be looked at: %w", imageID, context.Cause(ctx))
		}
	}
}

// look reads what the image says of its component, and lets those go on who wait for it.
func (c *catalog) look(ctx context.Context, imageID string) (found *component, err error) {
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if err == nil {
			c.images[imageID] = found
		}
		close(c.looking[imageID])
		delete(c.looking, imageID)
	}()
	a, err := c.cfg.Images.Component(ctx, imageID)
	if err != nil {
		return nil, err
	}
	found = &component{artifact: a}
	if found.descriptors, err = a.Descriptors(ctx, c.cfg.Images); err != nil {
		return nil, fmt.Errorf("descriptors of image %s: %w", imageID, err)
	}
	if len(found.descriptors) == 0 {
		return found, nil
	}
	sum := sha256.Sum256(found.descriptors)
	found.digest = hex.EncodeToString(sum[:])
	if err := c.keep(found); err != nil {
		c.cfg.Logger.Warn("descriptors cannot be kept; containers cannot start again once their image is gone", "image", imageID, "error", err)
	}
	return found, nil
}

func (c *catalog) file(digest string) string {
	return filepath.Join(c.cfg.descriptorDir(), shortName(digest))
}

func (c *catalog) keep(found *component) error {
	path := c.file(found.digest)
	if _, err := os.Lstat(path); err == nil {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	return replaceFile(path, found.descriptors, 0o600)
}

// describe gives the descriptors of a container that was created before, be it by an earlier daemon.
func (c *catalog) describe(ctx context.Context, a *artifact.Artifact, digest string) ([]byte, error) {
	if digest == "" {
		return nil, nil
	}
	c.mu.Lock()
	known := c.images[a.ImageID]
	c.mu.Unlock()
	if known != nil && known.digest == digest {
		return known.descriptors, nil
	}
	raw, err := os.ReadFile(c.file(digest))
	if err == nil {
		if sum := sha256.Sum256(raw); hex.EncodeToString(sum[:]) == digest {
			return raw, nil
		}
		c.cfg.Logger.Warn("kept descriptors are not what was written; looking in the image", "digest", digest)
	}
	again, err := c.find(ctx, a.ImageID)
	if err == nil && again.digest != digest {
		err = fmt.Errorf("the image has other descriptors now: %w", errdefs.ErrFailedPrecondition)
	}
	if err != nil {
		return nil, fmt.Errorf("descriptors of the component: %w", err)
	}
	return again.descriptors, nil
}

// evict forgets images that are gone, and removes the descriptors that no container needs.
func (c *catalog) evict(images, descriptors map[string]bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for id, known := range c.images {
		if images[id] {
			descriptors[known.digest] = true
		} else {
			delete(c.images, id)
		}
	}
	entries, err := os.ReadDir(c.cfg.descriptorDir())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	keep := map[string]bool{}
	for digest := range descriptors {
		keep[shortName(digest)] = true
	}
	for _, e := range entries {
		if !keep[e.Name()] {
			errs = append(errs, removeFile(filepath.Join(c.cfg.descriptorDir(), e.Name())))
		}
	}
	return errors.Join(errs...)
}
