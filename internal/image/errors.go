package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"syscall"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/containerd/v2/core/remotes/docker/auth"
	remoteerrors "github.com/containerd/containerd/v2/core/remotes/errors"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// corruptError means that a stored blob does not match its digest. The blob must be dropped and fetched again.
type corruptError struct{ digest digest.Digest }

func (e *corruptError) Error() string { return fmt.Sprintf("stored blob %s is corrupt", e.digest) }

func (e *corruptError) Unwrap() error { return errdefs.ErrDataLoss }

// invalidf returns an error for an image that violates the specification or one of our limits.
func invalidf(format string, args ...any) error {
	return fmt.Errorf(format+": %w", append(args, errdefs.ErrInvalidArgument)...)
}

// classify adds the failed operation ("pull image … from …") and an errdefs class to an error from a transfer.
func classify(ctx context.Context, what string, err error) error {
	// The libraries return a bare context.Canceled; the cause of the cancellation says more.
	if cause := context.Cause(ctx); cause != nil && errors.Is(err, context.Canceled) {
		err = cause
	}
	return fmt.Errorf("%s: %w", what, redacted{withClass(err)})
}

// withClass adds the class that classOf returns for err, if any.
func withClass(err error) error {
	if class := classOf(err); class != nil {
		return fmt.Errorf("%w (%w)", err, class)
	}
	return err
}

// classOf returns the errdefs class to add to err. It returns nil if err already has the right class, or if no class
// applies.
func classOf(err error) error {
	if class := statusClass(err); class != nil {
		return class
	}
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT), errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE):
		return errdefs.ErrResourceExhausted
	case hasClass(err):
		return nil
	case errors.Is(err, docker.ErrInvalidAuthorization), errors.Is(err, auth.ErrNoToken):
		return errdefs.ErrUnauthenticated
	case errors.Is(err, errRedirect):
		return errdefs.ErrFailedPrecondition
	case transient(err):
		return errdefs.ErrUnavailable
	default:
		return nil
	}
}

func hasClass(err error) bool {
	return slices.ContainsFunc([]func(error) bool{
		errdefs.IsNotFound, errdefs.IsInvalidArgument, errdefs.IsDataLoss, errdefs.IsUnavailable, errdefs.IsPermissionDenied,
		errdefs.IsUnauthorized, errdefs.IsResourceExhausted, errdefs.IsFailedPrecondition, errdefs.IsCanceled,
		errdefs.IsDeadlineExceeded, errdefs.IsNotImplemented,
	}, func(is func(error) bool) bool { return is(err) })
}

// statusClass classifies the HTTP status of a registry or its token server.
func statusClass(err error) error {
	status, ok := errors.AsType[remoteerrors.ErrUnexpectedStatus](err)
	if !ok {
		return nil
	}
	switch code := status.StatusCode; {
	case code == http.StatusUnauthorized:
		return errdefs.ErrUnauthenticated
	case code == http.StatusForbidden:
		return errdefs.ErrPermissionDenied
	case code == http.StatusNotFound:
		return errdefs.ErrNotFound
	case code == http.StatusRequestedRangeNotSatisfiable:
		return errdefs.ErrDataLoss
	case code == http.StatusTooManyRequests, code == http.StatusRequestTimeout, code >= 500:
		return errdefs.ErrUnavailable
	default:
		return errdefs.ErrFailedPrecondition
	}
}

// transient recognises network errors after which the same request may succeed.
func transient(err error) bool {
	if errors.Is(err, context.Canceled) || errors.Is(err, errRedirect) {
		return false
	}
	// Do not test for net.Error, because the errnos of disk errors also implement net.Error.
	_, isURL := errors.AsType[*url.Error](err)
	_, isOp := errors.AsType[*net.OpError](err)
	return isURL || isOp || errors.Is(err, io.ErrUnexpectedEOF)
}

// noMatchingPlatform returns an error saying that an index has no entry for this node. The error lists the index's
// platforms.
func noMatchingPlatform(index ocispec.Descriptor, has []ocispec.Descriptor) error {
	var names []string
	for _, m := range has {
		if m.Platform != nil && len(names) < 20 {
			names = append(names, platforms.Format(*m.Platform))
		}
	}
	return fmt.Errorf("index %s has no entry for this node's platform, only for %q: %w", index.Digest, names, errdefs.ErrNotFound)
}
