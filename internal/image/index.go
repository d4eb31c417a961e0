package image

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
)

// index holds the images in memory, so that Get and List read no files. The kubelet lists all images every second.
// Changes are written to the metadata first.
type index struct {
	mu sync.RWMutex
	// names maps full references to image IDs.
	names map[string]string
	byID  map[string]*entry
	// sorted lists the entries in order of ID.
	sorted []*entry
}

type entry struct {
	details *details
	image   Image
	used    atomic.Pointer[time.Time]
}

func (e *entry) snapshot() Image {
	img := e.image
	if used := e.used.Load(); used != nil {
		img.LastUsed = *used
	}
	return img
}

// touch records a use of the image.
func (e *entry) touch() {
	now := time.Now()
	e.used.Store(&now)
}

func (x *index) reset() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.names, x.byID, x.sorted = nil, nil, nil
}

// put adds an image with the given names, and takes these names away from other images.
func (x *index) put(d *details, pinned map[string]bool, names ...string) Image {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.names == nil {
		x.names, x.byID = map[string]string{}, map[string]*entry{}
	}
	changed := map[string]bool{d.id: true}
	for _, name := range names {
		if old, ok := x.names[name]; ok {
			changed[old] = true
		}
		x.names[name] = d.id
	}
	fresh := &entry{details: d}
	if old := x.byID[d.id]; old != nil {
		fresh.used.Store(old.used.Load())
	}
	x.byID[d.id] = fresh
	for id := range changed {
		x.rebuild(id, pinned)
	}
	x.sort()
	return x.byID[d.id].snapshot()
}

// drop removes an image and its names.
func (x *index) drop(id string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	maps.DeleteFunc(x.names, func(_, of string) bool { return of == id })
	delete(x.byID, id)
	x.sort()
}

func (x *index) namesOf(id string) []string {
	x.mu.RLock()
	defer x.mu.RUnlock()
	var names []string
	for name, of := range x.names {
		if of == id {
			names = append(names, name)
		}
	}
	return names
}

// rebuild replaces the Image of an entry. Values of Image that were already returned do not change.
func (x *index) rebuild(id string, pinned map[string]bool) {
	old := x.byID[id]
	if old == nil {
		return
	}
	d := old.details
	img := Image{
		ID: id, Size: uint64(d.size), Kind: d.kind, Config: d.image, User: d.image.Config.User,
		Manifest: d.manifest.Digest, Layers: d.layers, Annotations: d.annotations, ChainID: d.chainID(), Component: d.component,
	}
	for name, of := range x.names {
		if of != id {
			continue
		}
		img.Pinned = img.Pinned || pinned[name]
		if strings.Contains(name, "@") {
			img.RepoDigests = append(img.RepoDigests, name)
		} else {
			img.RepoTags = append(img.RepoTags, name)
		}
	}
	slices.Sort(img.RepoTags)
	slices.Sort(img.RepoDigests)
	e := &entry{details: d, image: img}
	e.used.Store(old.used.Load())
	x.byID[id] = e
}

func (x *index) sort() {
	x.sorted = make([]*entry, 0, len(x.byID))
	for _, e := range x.byID {
		x.sorted = append(x.sorted, e)
	}
	slices.SortFunc(x.sorted, func(a, b *entry) int { return cmp.Compare(a.image.ID, b.image.ID) })
}

// entries lists all images in order of ID.
func (x *index) entries() []*entry {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return slices.Clone(x.sorted)
}

func (x *index) list() []Image {
	x.mu.RLock()
	defer x.mu.RUnlock()
	all := make([]Image, len(x.sorted))
	for i, e := range x.sorted {
		all[i] = e.snapshot()
	}
	return all
}

// find resolves a reference or, failing that, an ID or a prefix of an ID.
func (x *index) find(refOrID string) (*entry, error) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	if named, err := reference.ParseDockerRef(refOrID); err == nil {
		if id, ok := x.names[named.String()]; ok {
			return x.byID[id], nil
		}
	}
	return x.findID(refOrID)
}

func (x *index) findID(prefix string) (*entry, error) {
	full := prefix
	if !strings.HasPrefix(prefix, "sha256:") {
		full = "sha256:" + prefix
	}
	if e, ok := x.byID[full]; ok {
		return e, nil
	}
	at, _ := slices.BinarySearchFunc(x.sorted, full, func(e *entry, id string) int { return cmp.Compare(e.image.ID, id) })
	fits := func(i int) bool { return i < len(x.sorted) && strings.HasPrefix(x.sorted[i].image.ID, full) }
	if strings.TrimPrefix(full, "sha256:") == "" || !fits(at) {
		return nil, fmt.Errorf("image %q: %w", prefix, errdefs.ErrNotFound)
	}
	if fits(at + 1) {
		return nil, fmt.Errorf("image %q is a prefix of more than one ID: %w", prefix, errdefs.ErrInvalidArgument)
	}
	return x.sorted[at], nil
}

// Get finds an image by its ID (with or without "sha256:", or a unique prefix), by a tag, or by a digest reference;
// short names expand as in docker. The error is errdefs.ErrNotFound for an unknown image.
func (s *Store) Get(_ context.Context, refOrID string) (Image, error) {
	if err := s.ready(); err != nil {
		return Image{}, err
	}
	e, err := s.index.find(refOrID)
	if err != nil {
		return Image{}, err
	}
	return e.snapshot(), nil
}

// List returns all images in order of ID.
func (s *Store) List(context.Context) ([]Image, error) {
	if err := s.ready(); err != nil {
		return nil, err
	}
	return s.index.list(), nil
}

// in returns the names in a repository and their images.
func (x *index) in(repository string) map[string]*details {
	x.mu.RLock()
	defer x.mu.RUnlock()
	found := map[string]*details{}
	for name, id := range x.names {
		rest, ok := strings.CutPrefix(name, repository)
		if ok && rest != "" && (rest[0] == ':' || rest[0] == '@') {
			found[name] = x.byID[id].details
		}
	}
	return found
}
