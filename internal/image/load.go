package image

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/image/internal/failure"
	"github.com/tripod-run/tripod/internal/keys"
)

// load rebuilds the index from the records at Open and removes the unfinished work of a crashed process.
func (s *Store) load(ctx context.Context) error {
	records, err := s.records.List(ctx)
	if err != nil {
		return fmt.Errorf("list image records: %w", err)
	}
	type found struct {
		*details
		err error
	}
	read := map[string]found{} // by target digest
	dirs, err := s.snapshotDirs(ctx)
	if err != nil {
		return err
	}
	inspect := func(target ocispec.Descriptor) (*details, error) {
		f, ok := read[target.Digest.String()]
		if !ok {
			f.details, f.err = s.inspectIn(ctx, target, dirs)
			read[target.Digest.String()] = f
		}
		return f.details, f.err
	}
	for _, record := range records {
		d, err := inspect(record.Target)
		if err != nil {
			if err := s.dropImage(ctx, record, err); err != nil {
				return err
			}
			continue
		}
		if isID(record.Name) {
			s.index.put(d, s.pinned)
		} else {
			s.index.put(d, s.pinned, record.Name)
		}
	}
	return s.dropUnfinished(ctx)
}

// inspect reads an image's metadata from its blobs, all of which must be intact.
func (s *Store) inspect(ctx context.Context, target ocispec.Descriptor) (*details, error) {
	dirs, err := s.snapshotDirs(ctx)
	if err != nil {
		return nil, err
	}
	return s.inspectIn(ctx, target, dirs)
}

// inspectIn is like inspect, for a caller that already has the snapshot directories.
func (s *Store) inspectIn(ctx context.Context, target ocispec.Descriptor, dirs snapshotDirs) (*details, error) {
	for range s.cfg.Limits.IndexDepth + 1 {
		document, err := s.readBlob(ctx, target)
		if err != nil {
			return nil, err
		}
		if images.IsIndexType(target.MediaType) {
			if target, err = choose(target, document, s.platform); err != nil {
				return nil, err
			}
			continue
		}
		d, err := parseManifest(target, document, s.cfg.Limits)
		if err != nil {
			return nil, err
		}
		config, err := s.readBlob(ctx, d.config)
		if err != nil {
			return nil, err
		}
		if err := d.setConfig(config, s.platform); err != nil {
			return nil, err
		}
		if !s.intactIn(ctx, d, dirs) {
			return nil, fmt.Errorf("blobs or unpacked layers of %s are missing or damaged: %w", d.id, errdefs.ErrDataLoss)
		}
		return d, nil
	}
	return nil, failure.Invalidf("more than %d nested indexes", s.cfg.Limits.IndexDepth)
}

// dropImage deletes the record of a damaged image, so that it is pulled again, and keeps its intact parts for that
// pull.
func (s *Store) dropImage(ctx context.Context, record images.Image, cause error) error {
	s.cfg.Logger.WarnContext(ctx, "an image is incomplete and must be pulled again", "image", record.Name, "err", cause)
	s.dropped.Store(record.Name, cause.Error())
	if isID(record.Name) {
		// This record needs no lease: the image also has a record under name@digest, for which dropImage makes the
		// lease that the next pull finds.
		return s.records.Delete(ctx, record.Name)
	}
	return s.transact(ctx, func(ctx context.Context) error {
		id, err := s.newLease(ctx, record.Name)
		if err != nil {
			return err
		}
		resource := leases.Resource{ID: record.Target.Digest.String(), Type: "content"}
		if err := s.leases.AddResource(ctx, leases.Lease{ID: id}, resource); err != nil {
			return err
		}
		return s.records.Delete(ctx, record.Name)
	})
}

// dropNameless removes downloads whose name file is missing because a crash interrupted their creation or removal. The
// content store itself would never remove them.
func dropNameless(ingests string) error {
	entries, err := os.ReadDir(ingests)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		dir := filepath.Join(ingests, entry.Name())
		if ref, err := os.ReadFile(filepath.Join(dir, "ref")); err == nil && len(ref) > 0 {
			continue
		} else if err != nil && !failure.IsGone(err) {
			return err
		}
		if err := os.RemoveAll(dir); err != nil {
			return err
		}
	}
	return nil
}

// dropUnfinished removes the snapshots of unfinished pulls, because layers without an image record may have lost data
// in a power failure. It keeps the layers of containers, because these had an image record when the container was made.
func (s *Store) dropUnfinished(ctx context.Context) error {
	keep := s.index.trusted()
	all := map[string]snapshots.Info{}
	children := map[string][]string{}
	err := s.snaps.Walk(ctx, func(_ context.Context, info snapshots.Info) error {
		all[info.Name] = info
		children[info.Parent] = append(children[info.Parent], info.Name)
		return nil
	})
	if err != nil {
		return fmt.Errorf("walk snapshots: %w", err)
	}
	for name, info := range all {
		if keys.Value(info.Labels, keys.Owner) == "" {
			continue
		}
		for ; name != "" && !keep[name]; name = all[name].Parent {
			keep[name] = true
		}
	}
	var drop func(name string) error
	drop = func(name string) error {
		for _, child := range children[name] {
			if err := drop(child); err != nil {
				return err
			}
		}
		if name == "" || keep[name] {
			return nil
		}
		if err := s.snaps.Remove(ctx, name); err != nil && !errdefs.IsNotFound(err) {
			return fmt.Errorf("remove unfinished snapshot %s: %w", name, err)
		}
		return nil
	}
	return drop("")
}
