package image

import (
	"context"
	"fmt"
	"strings"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/metadata/boltutil"
	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	bolt "go.etcd.io/bbolt"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/keys"
)

// Points at which the crash tests kill the program.
var (
	failRecord     = failpoint.New("image.pull.record")
	failRemove     = failpoint.New("image.remove.records")
	failFoundation = failpoint.New("image.remove.foundation")
)

// isID reports whether the name of a record is an image's ID rather than a reference.
func isID(name string) bool { return strings.HasPrefix(name, "sha256:") }

// transact runs fn in one metadata transaction.
func (s *Store) transact(ctx context.Context, fn func(context.Context) error) error {
	return s.db.Update(func(tx *bolt.Tx) error { return fn(boltutil.WithTransaction(ctx, tx)) })
}

// record writes all records of a complete image in one transaction and updates the index. The labels go to the records
// of the names, but not to the record of the ID.
func (s *Store) record(ctx context.Context, d *details, target ocispec.Descriptor, names []string,
	labels map[string]string) (Image, error) {
	if err := failRecord.Hit(ctx); err != nil {
		return Image{}, err
	}
	s.change.Lock()
	defer s.change.Unlock()
	err := s.transact(ctx, func(ctx context.Context) error {
		if err := s.writeRecord(ctx, d.id, target, nil); err != nil {
			return fmt.Errorf("record %q: %w", d.id, err)
		}
		for _, name := range names {
			if err := s.writeRecord(ctx, name, target, labels); err != nil {
				return fmt.Errorf("record %q: %w", name, err)
			}
		}
		return nil
	})
	if err != nil {
		return Image{}, err
	}
	defer s.watchers.notify()
	return s.index.put(d, s.pinned, names...), nil
}

// filters returns the filters for leases or records with a label.
func filters(key, value string) []string {
	return []string{fmt.Sprintf("labels.%q==%q", key, value), fmt.Sprintf("labels.%q==%q", keys.Former(key), value)}
}

func (s *Store) writeRecord(ctx context.Context, name string, target ocispec.Descriptor, labels map[string]string) error {
	img := images.Image{Name: name, Target: target, Labels: labels}
	_, err := s.records.Create(ctx, img)
	if errdefs.IsAlreadyExists(err) {
		_, err = s.records.Update(ctx, img)
	}
	return err
}

// Remove removes the image that refOrID names, with all its names. The collector then removes the image's content,
// except what containers or other images use. The error is errdefs.ErrNotFound for an unknown image.
func (s *Store) Remove(ctx context.Context, refOrID string) error {
	if err := s.ready(); err != nil {
		return err
	}
	e, err := s.index.find(refOrID)
	if err != nil {
		return err
	}
	ctx, id := s.withNamespace(ctx), e.image.ID
	if err := failRemove.Hit(ctx); err != nil {
		return err
	}
	s.change.Lock()
	defer s.change.Unlock()
	if err := s.deleteImage(ctx, id); err != nil {
		return fmt.Errorf("remove image %q: %w", refOrID, err)
	}
	s.Kick()
	return nil
}

// deleteImage deletes all records of an image and removes it from the index. The caller holds s.change.
func (s *Store) deleteImage(ctx context.Context, id string) error {
	err := s.transact(ctx, func(ctx context.Context) error {
		for _, name := range append(s.index.namesOf(id), id) {
			if err := s.records.Delete(ctx, name); err != nil && !errdefs.IsNotFound(err) {
				return fmt.Errorf("record %q: %w", name, err)
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	e, err := s.index.find(id)
	s.index.drop(id)
	s.watchers.notify()
	if err != nil || e.image.ChainID == "" {
		return nil // nobody has unpacked it
	}
	s.releaseFoundation(ctx, e.image.ChainID)
	return nil
}
