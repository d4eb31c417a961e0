package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/remotes"
	remoteerrors "github.com/containerd/containerd/v2/core/remotes/errors"
	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"

	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/image/internal/failure"
)

// lockBlob makes concurrent pulls transfer a blob only once. It uses the same key as containerd's unpacker.
func (s *Store) lockBlob(ctx context.Context, desc ocispec.Descriptor) (unlock func(), err error) {
	key := fmt.Sprintf("blob://%v", desc.Digest)
	if err := s.locks.Lock(ctx, key); err != nil {
		return nil, err
	}
	return func() { s.locks.Unlock(key) }, nil
}

// fetch downloads a blob from the first source that has it, or adds the stored one to the pull's lease. The caller holds
// the blob's lock. If no source has it, the error is that of the last one, which is the registry unless it is unavailable.
func (p *puller) fetch(ctx context.Context, desc ocispec.Descriptor) error {
	if err := p.dropDamaged(ctx, desc); err != nil {
		return err
	}
	defer p.tracker.Busy()()
	if desc.Size == 0 { // containerd fetches none, and its digest says what it is
		return content.WriteBlob(ctx, p.content, remotes.MakeRefKey(ctx, desc), http.NoBody, desc)
	}
	var last error
	for _, fetcher := range p.fetchers(desc.Size) {
		if fetcher == nil {
			continue
		}
		for again := true; again; again = p.passOver(ctx, desc, last) {
			if last = p.fetchFrom(ctx, fetcher, desc); last == nil || ctx.Err() != nil {
				return last
			}
		}
	}
	if peer := p.lastResort(last); peer != nil && p.fetchFrom(ctx, peer, desc) == nil {
		return nil
	}
	return last
}

// passOver reports whether another host may have the blob, because the one that sent wrong or too little content is a mirror.
func (p *puller) passOver(ctx context.Context, desc ocispec.Descriptor, err error) bool {
	if !errdefs.IsDataLoss(err) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return false
	}
	mirror := p.hosts.PassOver(desc.Digest)
	if mirror == "" {
		return false
	}
	p.cfg.Logger.WarnContext(ctx, "a mirror sent wrong content and is passed over", "mirror", mirror, "blob", desc.Digest, "err",
		failure.Redact(err))
	_ = p.content.Abort(ctx, remotes.MakeRefKey(ctx, desc)) // what it has sent, if anything
	return true
}

// fetchFrom downloads a blob from one source. A broken transfer resumes.
func (p *puller) fetchFrom(ctx context.Context, fetcher remotes.Fetcher, desc ocispec.Descriptor) error {
	for idle := 0; ; idle++ {
		before := p.tracker.position(desc.Digest)
		err := remotes.Fetch(ctx, p.content, trackedFetcher{fetcher, p.tracker}, desc)
		switch {
		case err == nil:
			return nil
		case errdefs.IsAlreadyExists(err):
			p.tracker.Reached(desc.Digest, desc.Size)
			return nil
		case wrongContent(err):
			return p.dropWrongContent(ctx, desc, err)
		}
		if p.tracker.position(desc.Digest) != before {
			idle = 0
		}
		if ctx.Err() != nil || !failure.Transient(err) || idle == failure.MaxIdleRetries {
			return fmt.Errorf("blob %s: %w", desc.Digest, err)
		}
		select {
		case <-time.After(failure.RetryPace):
		case <-ctx.Done():
		}
	}
}

// wrongContent reports whether err means that the registry's content does not match the descriptor: another digest, too
// many bytes, or too few (in this case, the registry rejects the request to resume).
func wrongContent(err error) bool {
	status, ok := errors.AsType[remoteerrors.ErrUnexpectedStatus](err)
	return errdefs.IsFailedPrecondition(err) || ok && status.StatusCode == http.StatusRequestedRangeNotSatisfiable
}

// dropWrongContent deletes wrong content, so that the next attempt starts over instead of resuming.
func (p *puller) dropWrongContent(ctx context.Context, desc ocispec.Descriptor, cause error) error {
	err := p.content.Abort(context.WithoutCancel(ctx), remotes.MakeRefKey(ctx, desc))
	if err != nil && !errdefs.IsNotFound(err) {
		return errors.Join(cause, err)
	}
	return fmt.Errorf("the registry's content is not blob %s of %d bytes: %v: %w", desc.Digest, desc.Size, cause, errdefs.ErrDataLoss)
}

// fetchLayers downloads the blobs of an image that is not unpacked.
func (p *puller) fetchLayers(ctx context.Context, d *details) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(p.cfg.MaxConcurrentDownloads)
	for _, layer := range d.layers {
		group.Go(func() error {
			unlock, err := p.lockBlob(ctx, layer)
			if err != nil {
				return err
			}
			defer unlock()
			return guard.Call(p.cfg.Logger, "image pull", func() error { return p.fetch(ctx, layer) })
		})
	}
	return group.Wait()
}
