package image

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/containerd/v2/core/leases"
)

// labelPull marks a lease with the reference whose pull works under it.
const labelPull = "tripod.run/pull"

// pullLeases counts the pulls that work under a lease.
type pullLeases struct{ inUse map[string]int }

// lease protects what a pull of names brings from the collector, until the image's records do. With the end of the
// pull it goes away, and with it those that earlier attempts left; unless it is kept, for ResumeWindow, so that the
// next pull goes on where this one stopped. The context is one to go on with, also with an error.
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
		// A lease must outlive the pull: what is left of it is more than PullTimeout.
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
	l, err := s.leases.Create(ctx, leases.WithRandomID(), leases.WithLabel(labelPull, name),
		leases.WithExpiration(s.cfg.ResumeWindow+s.cfg.PullTimeout+time.Minute))
	return l.ID, err
}

func (s *Store) leasesOf(ctx context.Context, name string) ([]leases.Lease, error) {
	return s.leases.List(ctx, fmt.Sprintf("labels.%q==%q", labelPull, name))
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
		s.cfg.Logger.WarnContext(ctx, "leases of a pull stay until they expire", "err", err)
	}
}
