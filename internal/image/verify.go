package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/image/internal/failure"
	"github.com/tripod-run/tripod/internal/image/internal/layer"
	"github.com/tripod-run/tripod/internal/image/internal/readers"
	"github.com/tripod-run/tripod/internal/keys"
)

// Damage is a damaged part of an image. Pulling one of the image's names repairs it.
type Damage struct {
	// Image is the image's ID, and Names are the references that can be used to pull it. Both are empty if only a
	// container is damaged.
	Image string   `json:"image,omitempty"`
	Names []string `json:"names,omitempty"`
	// Kind is the kind of the damaged part: "image" (dropped by Open), "blob", "layer", "record" or "container".
	Kind string `json:"kind"`
	// ID is the digest of the blob, the chain ID of the layer, the name of the record or the key of the container's
	// file system.
	ID     string `json:"id"`
	Detail string `json:"detail"`
	// Users are the keys of the containers' file systems that depend on the damaged part. These containers can still
	// use files that they have open.
	Users []string `json:"users,omitempty"`
}

// Verify checks that the blobs, unpacked layers and records of all images exist and match each other. If contents is
// set, it also reads every blob and every file of the layers, and compares them to the digests. It changes nothing on
// disk, but remembers damage, so that the next pull of the image repairs it.
func (s *Store) Verify(ctx context.Context, contents bool) ([]Damage, error) {
	if err := s.ready(); err != nil {
		return nil, err
	}
	v := &verifier{Store: s, contents: contents, blobsSeen: map[digest.Digest]string{}, layersSeen: map[string]string{}}
	ctx = s.withNamespace(ctx)
	var err error
	if v.dirs, err = s.snapshotDirs(ctx); err != nil {
		return nil, err
	}
	if v.users, err = s.dependents(ctx); err != nil {
		return nil, err
	}
	for _, e := range s.index.entries() {
		if err := v.checkImage(ctx, e); err != nil {
			return nil, fmt.Errorf("verify image %s: %w", e.image.ID, err)
		}
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("verify images: %w", context.Cause(ctx))
		}
	}
	if err := v.checkRecords(ctx); err != nil {
		return nil, err
	}
	if err := v.checkContainers(ctx); err != nil {
		return nil, err
	}
	v.addDropped()
	return v.found, nil
}

// verifier is one run of Verify. It checks shared parts once.
type verifier struct {
	*Store
	contents bool
	dirs     snapshotDirs
	users    map[string][]string
	// blobsSeen and layersSeen are the results for blobs and, by chain ID, for layers; "" means intact.
	blobsSeen  map[digest.Digest]string
	layersSeen map[string]string
	found      []Damage
}

func (v *verifier) add(e *entry, kind, id, detail string) {
	v.found = append(v.found, Damage{
		Image: e.image.ID, Names: slices.Concat(e.image.RepoTags, e.image.RepoDigests), Kind: kind, ID: id, Detail: detail, Users: v.users[id],
	})
}

func (v *verifier) checkImage(ctx context.Context, e *entry) error {
	d := e.details
	made, err := v.derivedBlobs(ctx, d)
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

// derivedBlobs returns the blobs made from an image on this node: an unpacked disk, and a component and a root disk from
// a root filesystem.
func (v *verifier) derivedBlobs(ctx context.Context, d *details) ([]ocispec.Descriptor, error) {
	manifest, err := v.content.Info(ctx, d.manifest.Digest)
	if errdefs.IsNotFound(err) {
		return nil, nil // checkImage reports the missing manifest
	} else if err != nil {
		return nil, err
	}
	var made []ocispec.Descriptor
	for _, label := range []string{labelDisk, labelComponent, labelRootDisk} {
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

// blobDamage describes a blob's damage; "" means intact. If mayBeGone is set, a missing blob counts as intact, because
// an unpacked rootfs does not need its layers' blobs.
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
	return "its content does not match its digest", nil
}

func (v *verifier) sum(ctx context.Context, desc ocispec.Descriptor) (digest.Digest, error) {
	ra, err := v.content.ReaderAt(ctx, desc)
	if err != nil {
		return "", err
	}
	defer ra.Close()
	digester := desc.Digest.Algorithm().Digester()
	_, err = io.Copy(digester.Hash(), readers.Cancel(ctx, content.NewReader(ra)))
	return digester.Digest(), err
}

// layerDamage describes the damage of the i-th unpacked layer; "" means that the layer matches its blob.
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
	state, err := v.checkBlob(ctx, d.layers[i])
	if err != nil || state != blobWhole {
		return "", err // without its blob the layer cannot be compared
	}
	blob, err := v.content.ReaderAt(ctx, d.layers[i])
	if err != nil {
		return "", err
	}
	defer blob.Close()
	detail, err = layer.Compare(ctx, d.layers[i].MediaType, content.NewReader(blob), filepath.Join(v.dirs[chain], "fs"))
	if detail != "" {
		v.badLayers.Store(chain, true)
	}
	return detail, err
}

// checkRecords compares the image records with the index.
func (v *verifier) checkRecords(ctx context.Context) error {
	all, err := v.records.List(ctx)
	if err != nil {
		return fmt.Errorf("list image records: %w", err)
	}
	recorded := map[string]bool{}
	for _, r := range all {
		recorded[r.Name] = true
		if _, err := v.index.find(r.Name); errdefs.IsNotFound(err) {
			v.found = append(v.found, Damage{Kind: "record", ID: r.Name, Names: []string{r.Name}, Detail: "its image does not exist"})
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

// checkContainers checks that the directories of containers' file systems exist.
func (v *verifier) checkContainers(ctx context.Context) error {
	check := func(key, dir string) error {
		if dir != "" {
			if _, err := os.Lstat(filepath.Join(dir, "fs")); !failure.IsGone(err) {
				return err
			}
		}
		v.found = append(v.found, Damage{Kind: "container", ID: key, Detail: "the directory of its file system is missing; remove the container"})
		return nil
	}
	for key, info := range v.layerList() {
		if err := check(key, v.filesOf(key, info)); err != nil {
			return err
		}
	}
	err := v.snaps.Walk(ctx, func(_ context.Context, info snapshots.Info) error {
		if owner := keys.Value(info.Labels, keys.Owner); owner == "" || owner == ownerFoundation {
			return nil
		}
		return check(info.Name, v.dirs[info.Name])
	})
	if err != nil {
		return fmt.Errorf("walk snapshots: %w", err)
	}
	return nil
}

// addDropped reports the images that Open dropped and that have not been pulled since.
func (v *verifier) addDropped() {
	v.dropped.Range(func(name, why any) bool {
		if _, err := v.index.find(name.(string)); errdefs.IsNotFound(err) {
			v.found = append(v.found, Damage{Names: []string{name.(string)}, Kind: "image", ID: name.(string), Detail: why.(string)})
		}
		return true
	})
}

// verifyAtStart runs the checks that read no files, once, in the background.
func (s *Store) verifyAtStart() {
	damages, err := s.Verify(s.base, false)
	if err != nil && s.base.Err() == nil {
		s.cfg.Logger.Warn("cannot verify images", "err", err)
	}
	for _, d := range damages {
		s.cfg.Logger.Warn("an image is damaged; pull it again", "image", d.Image, "names", d.Names, "kind", d.Kind, "id", d.ID, "damage",
			d.Detail, "users", d.Users)
	}
}
