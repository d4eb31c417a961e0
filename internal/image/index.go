package image

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
)

// index holds the images in memory, so that Get and List touch no file: the kubelet lists every second.
// It follows the metadata, which is written first.
type index struct {
	mu sync.RWMutex
	// names maps every full reference to the ID of its image.
	names map[string]string
	byID  map[string]*entry
	// sorted are the entries by ID.
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

// touch notes that the image is used.
func (e *entry) touch() {
	now := time.Now()
	e.used.Store(&now)
}

// reset forgets all images.
func (x *index) reset() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.names, x.byID, x.sorted = nil, nil, nil
}

// put adds an image with further names. A name that was another image's moves.
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

// drop takes an image away, and returns the names it had.
func (x *index) drop(id string) []string {
	x.mu.Lock()
	defer x.mu.Unlock()
	var names []string
	for name, of := range x.names {
		if of == id {
			names = append(names, name)
			delete(x.names, name)
		}
	}
	delete(x.byID, id)
	x.sort()
	return names
}

// namesOf lists the names of an image.
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

// rebuild makes a new Image of an entry; those handed out stay as they were.
func (x *index) rebuild(id string, pinned map[string]bool) {
	old := x.byID[id]
	if old == nil {
		return
	}
	d := old.details
	img := Image{
		ID: id, Size: uint64(d.size), Kind: d.kind, Config: d.image, User: d.image.Config.User,
		Manifest: d.manifest.Digest, Layers: d.layers, Annotations: d.notes, ChainID: d.chainID(), Component: d.component,
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

// entries are all images, sorted by ID.
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

// find resolves what a caller may call an image: a reference first, then an ID or the beginning of one.
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
		return nil, fmt.Errorf("image %q: more than one ID begins so: %w", prefix, errdefs.ErrInvalidArgument)
	}
	return x.sorted[at], nil
}

// Get finds an image by its ID (with or without "sha256:", or an unambiguous beginning), by a tag, or by a digest
// reference; short names are taken as docker does. An unknown image is errdefs.ErrNotFound.
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

// List returns all images, sorted by ID.
func (s *Store) List(context.Context) ([]Image, error) {
	if err := s.ready(); err != nil {
		return nil, err
	}
	return s.index.list(), nil
}
