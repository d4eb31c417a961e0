package image

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
)

// Damage is something of an image that is not as it should be. A pull of one of the names mends it.
type Damage struct {
	// Image is its ID, Names what it can be pulled by. Both are empty for what belongs to a container alone.
	Image string   `json:"image,omitempty"`
	Names []string `json:"names,omitempty"`
	// Kind is what is damaged: "image" (it was taken from the list), "blob", "layer", "record" or "container".
	Kind string `json:"kind"`
	// ID is the digest of the blob, the chain ID of the layer, the name of the record or the key of the container's file system.
	ID string `json:"id"`
	// Detail says what is wrong.
	Detail string `json:"detail"`
	// Users are the keys of the containers' file systems that stand on it: they miss what is gone, and keep what they have open.
	Users []string `json:"users,omitempty"`
}

// Verify looks at all images: whether blobs, unpacked layers and records are there, and refer to each other. With contents it also
// reads every blob and every file of the layers, and holds them against the digests. It changes nothing, but remembers what it
// found wrong, so that the next pull of the image mends it.
func (s *Store) Verify(ctx context.Context, contents bool) ([]Damage, error) {
	if err := s.ready(); err != nil {
		return nil, err
	}
	v := &verifier{Store: s, contents: contents, blobsSeen: map[digest.Digest]string{}, layersSeen: map[string]string{}}
	ctx = s.with(ctx)
	var err error
	if v.dirs, err = s.snapshotDirs(ctx); err != nil {
		return nil, err
	}
	if v.users, err = s.standing(ctx); err != nil {
		return nil, err
	}
	for _, e := range s.index.entries() {
		if err := v.image(ctx, e); err != nil {
			return nil, fmt.Errorf("verify image %s: %w", e.image.ID, err)
		}
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("verify images: %w", context.Cause(ctx))
		}
	}
	if err := v.records(ctx); err != nil {
		return nil, err
	}
	if err := v.containers(ctx); err != nil {
		return nil, err
	}
	v.demoted()
	return v.found, nil
}

// verifier is one Verify. What several images share is looked at once.
type verifier struct {
	*Store
	contents bool
	dirs     snapshotDirs
	users    map[string][]string
	// What was found of blobs and layers: "" when they are whole.
	blobsSeen  map[digest.Digest]string
	layersSeen map[string]string
	found      []Damage
}

func (v *verifier) add(e *entry, kind, id, detail string) {
	v.found = append(v.found, Damage{
		Image: e.image.ID, Names: slices.Concat(e.image.RepoTags, e.image.RepoDigests), Kind: kind, ID: id, Detail: detail, Users: v.users[id],
	})
}

func (v *verifier) image(ctx context.Context, e *entry) error {
	d := e.details
	made, err := v.madeBlobs(ctx, d)
	if err != nil {
		return err
	}
	for i, desc := range slices.Concat([]ocispec.Descriptor{d.manifest, d.config}, d.layers, made) {
		layer := i > 1 && i < 2+len(d.layers)
		detail, err := v.blobDamage(ctx, desc, layer && d.kind == KindRootfs)
		if err != nil {
			return err
		}
		if detail != "" {
			v.add(e, "blob", desc.Digest.String(), detail)
		}
	}
	for i, chain := range d.chain {
		detail, err := v.layerDamage(ctx, d, i)
		if err != nil {
			return err
		}
		if detail != "" {
			v.add(e, "layer", chain.String(), detail)
		}
	}
	return nil
}

// madeBlobs are those that were made of an image here: an unpacked disk, a component that is a file of a root filesystem.
func (v *verifier) madeBlobs(ctx context.Context, d *details) ([]ocispec.Descriptor, error) {
	manifest, err := v.content.Info(ctx, d.manifest.Digest)
	if errdefs.IsNotFound(err) {
		return nil, nil // the manifest's own damage
	} else if err != nil {
		return nil, err
	}
	var made []ocispec.Descriptor
	for _, label := range []string{labelDisk, labelComponent} {
		dgst := digest.Digest(manifest.Labels[label])
		if dgst == "" {
			continue
		}
		info, err := v.content.Info(ctx, dgst)
		if err != nil && !errdefs.IsNotFound(err) {
			return nil, err
		}
		made = append(made, ocispec.Descriptor{Digest: dgst, Size: info.Size})
	}
	return made, nil
}

// blobDamage is "" for a blob that is whole. The layers of a root filesystem may be gone as blobs.
func (v *verifier) blobDamage(ctx context.Context, desc ocispec.Descriptor, mayBeGone bool) (detail string, err error) {
	if detail, seen := v.blobsSeen[desc.Digest]; seen {
		return detail, nil
	}
	defer func() { v.blobsSeen[desc.Digest] = detail }()
	_, recordErr := v.content.Info(ctx, desc.Digest)
	file, fileErr := v.blobs.Info(ctx, desc.Digest)
	switch {
	case errdefs.IsNotFound(recordErr) && errdefs.IsNotFound(fileErr):
		if mayBeGone {
			return "", nil
		}
		return "is missing", nil
	case errdefs.IsNotFound(fileErr):
		return "its file is missing", nil
	case errdefs.IsNotFound(recordErr):
		return "has a file but no record", nil
	case recordErr != nil || fileErr != nil:
		return "", errors.Join(recordErr, fileErr)
	case file.Size != desc.Size:
		return fmt.Sprintf("has %d of %d bytes", file.Size, desc.Size), nil
	}
	_, bad := v.badBlobs.Load(desc.Digest.String())
	if !bad && v.contents {
		sum, err := v.sum(ctx, desc)
		if err != nil {
			return "", err
		}
		if bad = sum != desc.Digest; bad {
			v.badBlobs.Store(desc.Digest.String(), true)
		}
	}
	if !bad {
		return "", nil
	}
	return "its content is not what its digest says", nil
}

func (v *verifier) sum(ctx context.Context, desc ocispec.Descriptor) (digest.Digest, error) {
	ra, err := v.content.ReaderAt(ctx, desc)
	if err != nil {
		return "", err
	}
	defer ra.Close()
	digester := desc.Digest.Algorithm().Digester()
	_, err = io.Copy(digester.Hash(), &untilDone{ctx, content.NewReader(ra)})
	return digester.Digest(), err
}

// untilDone ends a long reading with its context.
type untilDone struct {
	ctx context.Context
	r   io.Reader
}

func (u *untilDone) Read(p []byte) (int, error) {
	if err := u.ctx.Err(); err != nil {
		return 0, context.Cause(u.ctx)
	}
	return u.r.Read(p)
}

// layerDamage is "" for an unpacked layer that is as its blob says.
func (v *verifier) layerDamage(ctx context.Context, d *details, i int) (detail string, err error) {
	chain := d.chain[i].String()
	if detail, seen := v.layersSeen[chain]; seen {
		return detail, nil
	}
	defer func() { v.layersSeen[chain] = detail }()
	err = v.checkLayer(ctx, v.dirs, chain)
	if errors.Is(err, errLayer) || errdefs.IsNotFound(err) {
		return err.Error(), nil
	}
	if err != nil || !v.contents {
		return "", err
	}
	state, err := v.blob(ctx, d.layers[i])
	if err != nil || state != blobWhole {
		return "", err // there is nothing to hold it against
	}
	detail, err = v.compareLayer(ctx, d.layers[i], filepath.Join(v.dirs[chain], "fs"))
	if detail != "" {
		v.badLayers.Store(chain, true)
	}
	return detail, err
}

// compareLayer holds the files of an unpacked layer against its archive, and says what the first one has that differs.
func (v *verifier) compareLayer(ctx context.Context, layer ocispec.Descriptor, dir string) (string, error) {
	want, err := v.archived(ctx, layer)
	if err != nil {
		return "", err
	}
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)
	root := &imageRoot{fd, dir}
	names := make([]string, 0, len(want))
	for name := range want {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		file, err := root.open(name, unix.O_NOFOLLOW)
		if errdefs.IsInvalidArgument(err) { // it is not there, or not a file
			return fmt.Sprintf("%s is missing", name), nil
		} else if err != nil {
			return "", err
		}
		sum := sha256.New()
		_, err = io.Copy(sum, &untilDone{ctx, file})
		if err = errors.Join(err, file.Close()); err != nil {
			return "", err
		}
		if [sha256.Size]byte(sum.Sum(nil)) != want[name] {
			return fmt.Sprintf("%s has not the content that its blob has", name), nil
		}
	}
	return "", nil
}

// archived are the checksums of the regular files of a layer's archive, as they are once all of it is unpacked.
func (v *verifier) archived(ctx context.Context, layer ocispec.Descriptor) (map[string][sha256.Size]byte, error) {
	ra, err := v.content.ReaderAt(ctx, layer)
	if err != nil {
		return nil, err
	}
	defer ra.Close()
	plain, err := decompress(layer.MediaType, &untilDone{ctx, content.NewReader(ra)})
	if err != nil {
		return nil, err
	}
	defer plain.Close()
	files := map[string][sha256.Size]byte{}
	for archive := tar.NewReader(plain); ; {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return files, nil
		}
		if err != nil {
			return nil, err
		}
		name := strings.TrimPrefix(filepath.Clean("/"+h.Name), "/")
		delete(files, name) // a later entry takes an earlier one's place
		if hidden, ok := strings.CutPrefix(filepath.Base(name), ".wh."); ok {
			delete(files, filepath.Join(filepath.Dir(name), hidden))
			continue
		}
		if h.Typeflag != tar.TypeReg {
			continue
		}
		sum := sha256.New()
		if _, err := io.Copy(sum, archive); err != nil {
			return nil, err
		}
		files[name] = [sha256.Size]byte(sum.Sum(nil))
	}
}

// records holds the records of images against the list.
func (v *verifier) records(ctx context.Context) error {
	all, err := v.Store.records.List(ctx)
	if err != nil {
		return fmt.Errorf("list image records: %w", err)
	}
	recorded := map[string]bool{}
	for _, r := range all {
		recorded[r.Name] = true
		if _, err := v.index.find(r.Name); errdefs.IsNotFound(err) {
			v.found = append(v.found, Damage{Kind: "record", ID: r.Name, Names: []string{r.Name}, Detail: "is of an image that is not there"})
		}
	}
	for _, e := range v.index.entries() {
		for _, name := range append(v.index.namesOf(e.image.ID), e.image.ID) {
			if !recorded[name] {
				v.add(e, "record", name, "is missing")
			}
		}
	}
	return nil
}

// containers looks whether the writable parts of containers are there.
func (v *verifier) containers(ctx context.Context) error {
	err := v.snaps.Walk(ctx, func(_ context.Context, info snapshots.Info) error {
		if info.Labels[labelOwner] == "" {
			return nil
		}
		dir := v.dirs[info.Name]
		if dir != "" {
			if _, err := os.Lstat(filepath.Join(dir, "fs")); !isGone(err) {
				return err
			}
		}
		v.found = append(v.found, Damage{Kind: "container", ID: info.Name, Detail: "the directory of its file system is missing; remove the container"})
		return nil
	})
	if err != nil {
		return fmt.Errorf("walk snapshots: %w", err)
	}
	return nil
}

// demoted are the images that the start took from the list, and that nobody has pulled again.
func (v *verifier) demoted() {
	v.Store.demoted.Range(func(name, why any) bool {
		if _, err := v.index.find(name.(string)); errdefs.IsNotFound(err) {
			v.found = append(v.found, Damage{Names: []string{name.(string)}, Kind: "image", ID: name.(string), Detail: why.(string)})
		}
		return true
	})
}

// verifyAtStart looks at what can be seen without reading files, once, beside the store that is in use.
func (s *Store) verifyAtStart() {
	damages, err := s.Verify(s.base, false)
	if err != nil && s.base.Err() == nil {
		s.cfg.Logger.Warn("images could not be verified", "err", err)
	}
	for _, d := range damages {
		s.cfg.Logger.Warn("an image is damaged; a pull mends it", "image", d.Image, "names", d.Names, "kind", d.Kind, "id", d.ID, "damage", d.Detail, "users", d.Users)
	}
}
