package image

import (
	"context"
	"errors"
	"time"

	"github.com/containerd/containerd/v2/core/leases"
	"github.com/tripod-run/tripod/internal/keys"
)

// pullLeases counts the pulls under each lease.
type pullLeases struct{ inUse map[string]int }

// lease protects a pull's content from the collector until the image's records protect it. The returned function ends
// this lease and the leases of earlier attempts. If keep is set, it ends none of them, so that a pull within
// ResumeWindow can resume. The returned context is usable even after an error.
func (s *Store) lease(ctx context.Context, names []string) (context.Context, func(keep bool), error) {
	if err := s.reserve(); err != nil {
		return ctx, nil, err
	}
	s.change.Lock()
	defer s.change.Unlock()
	old, err := s.leasesOf(ctx, names[0])
	if err != nil {
		return ctx, nil, err
	}
	id := ""
	for _, l := range old {
		// A lease must outlive the pull. A lease younger than ResumeWindow lasts for more than PullTimeout from now.
		if time.Since(l.CreatedAt) < s.cfg.ResumeWindow {
			id = l.ID
		}
	}
	if id == "" {
		if id, err = s.newLease(ctx, names[0]); err != nil {
			return ctx, nil, err
		}
	}
	s.pulls.inUse[id]++
	clean := context.WithoutCancel(ctx)
	return leases.WithLease(ctx, id), func(keep bool) { s.unlease(clean, names, id, keep) }, nil
}

func (s *Store) newLease(ctx context.Context, name string) (string, error) {
	l, err := s.leases.Create(ctx, leases.WithRandomID(), leases.WithLabel(keys.Pull, name),
		leases.WithExpiration(s.cfg.ResumeWindow+s.cfg.PullTimeout+time.Minute))
	return l.ID, err
}

func (s *Store) leasesOf(ctx context.Context, name string) ([]leases.Lease, error) {
	return s.leases.List(ctx, filters(keys.Pull, name)...)
}

func (s *Store) unlease(ctx context.Context, names []string, id string, keep bool) {
	s.change.Lock()
	defer s.change.Unlock()
	if s.pulls.inUse[id]--; s.pulls.inUse[id] == 0 {
		delete(s.pulls.inUse, id)
	}
	if keep {
		return
	}
	defer s.Kick()
	var errs []error
	for _, name := range names {
		old, err := s.leasesOf(ctx, name)
		errs = append(errs, err)
		for _, l := range old {
			if s.pulls.inUse[l.ID] == 0 {
				errs = append(errs, s.leases.Delete(ctx, l))
			}
		}
	}
	if err := errors.Join(errs...); err != nil {
		s.cfg.Logger.WarnContext(ctx, "cannot delete leases of a pull; they stay until they expire", "err", err)
	}
}
