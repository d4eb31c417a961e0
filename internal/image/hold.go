package image

import (
	"context"
	"fmt"
	"strings"

	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/errdefs"
)

// holdPrefix begins the IDs of the leases that Hold makes.
const holdPrefix = "hold-"

// Hold keeps the blobs of an image until Unhold(key), even if the image is removed. Prepare does the same for a root
// filesystem. A repeated call for the same image does nothing. The error is errdefs.ErrAlreadyExists if the key holds
// another image, and errdefs.ErrNotFound for an unknown image.
func (s *Store) Hold(ctx context.Context, key, imageID string) error {
	if err := s.readyFor(key); err != nil {
		return err
	}
	ctx = s.withNamespace(ctx)
	s.change.Lock() // the image must not be removed between the look-up and the lease
	defer s.change.Unlock()
	if err := s.reserve(); err != nil {
		return fmt.Errorf("hold %q: %w", key, err)
	}
	e, err := s.index.find(imageID)
	if err != nil {
		return fmt.Errorf("hold %q: %w", key, err)
	}
	resource := leases.Resource{ID: e.image.Manifest.String(), Type: "content"}
	err = s.transact(ctx, func(ctx context.Context) error {
		lease, err := s.leases.Create(ctx, leases.WithID(holdPrefix+key))
		if err != nil {
			return err
		}
		return s.leases.AddResource(ctx, lease, resource)
	})
	if errdefs.IsAlreadyExists(err) {
		held, listErr := s.leases.ListResources(ctx, leases.Lease{ID: holdPrefix + key})
		if listErr == nil && len(held) == 1 && held[0] == resource {
			err = nil
		}
	}
	if err != nil {
		return fmt.Errorf("hold %q of image %s: %w", key, e.image.ID, err)
	}
	e.touch()
	return nil
}

// Unhold releases the blobs that Hold keeps under key. It succeeds if the key is unknown.
func (s *Store) Unhold(ctx context.Context, key string) error {
	if err := s.ready(); err != nil {
		return err
	}
	if err := s.leases.Delete(s.withNamespace(ctx), leases.Lease{ID: holdPrefix + key}); err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("unhold %q: %w", key, err)
	}
	s.Kick()
	return nil
}

// Holds lists the keys of all holds.
func (s *Store) Holds(ctx context.Context) ([]string, error) {
	if err := s.ready(); err != nil {
		return nil, err
	}
	all, err := s.leases.List(s.withNamespace(ctx))
	if err != nil {
		return nil, fmt.Errorf("list holds: %w", err)
	}
	var keys []string
	for _, lease := range all {
		if key, ok := strings.CutPrefix(lease.ID, holdPrefix); ok {
			keys = append(keys, key)
		}
	}
	return keys, nil
}
