package failure

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"slices"
	"syscall"
	"time"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/containerd/v2/core/remotes/docker/auth"
	remoteerrors "github.com/containerd/containerd/v2/core/remotes/errors"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"

	"github.com/tripod-run/tripod/internal/lazyregexp"
)

// CorruptError means that a stored blob does not match its digest. The blob must be dropped and fetched again.
type CorruptError struct{ Digest digest.Digest }

func (e *CorruptError) Error() string { return fmt.Sprintf("stored blob %s is corrupt", e.Digest) }

func (e *CorruptError) Unwrap() error { return errdefs.ErrDataLoss }

// ErrRedirect means that a registry's redirect was refused.
var ErrRedirect = errors.New("redirect refused")

// Invalidf returns an error for an image that violates the specification or one of our limits.
func Invalidf(format string, args ...any) error {
	return fmt.Errorf(format+": %w", append(args, errdefs.ErrInvalidArgument)...)
}

// Classify adds the failed operation ("pull image … from …") and an errdefs class to an error from a transfer.
func Classify(ctx context.Context, what string, err error) error {
	// The libraries return a bare context.Canceled; the cause of the cancellation says more.
	if cause := context.Cause(ctx); cause != nil && errors.Is(err, context.Canceled) {
		err = cause
	}
	return fmt.Errorf("%s: %w", what, Redact(WithClass(err)))
}

// WithClass adds the class that ClassOf returns for err, if any.
func WithClass(err error) error {
	if class := ClassOf(err); class != nil {
		return fmt.Errorf("%w (%w)", err, class)
	}
	return err
}

// ClassOf returns the errdefs class to add to err. It returns nil if err already has the right class, or if no class
// applies.
func ClassOf(err error) error {
	if class := statusClass(err); class != nil {
		return class
	}
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT), errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE):
		return errdefs.ErrResourceExhausted
	case HasClass(err):
		return nil
	case errors.Is(err, docker.ErrInvalidAuthorization), errors.Is(err, auth.ErrNoToken):
		return errdefs.ErrUnauthenticated
	case errors.Is(err, ErrRedirect):
		return errdefs.ErrFailedPrecondition
	case Transient(err):
		return errdefs.ErrUnavailable
	default:
		return nil
	}
}

func HasClass(err error) bool {
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

// A broken transfer resumes after RetryPace. It is given up once MaxIdleRetries retries in a row have received no byte.
const (
	MaxIdleRetries = 3
	RetryPace      = 200 * time.Millisecond
)

// Transient recognises network errors after which the same request may succeed.
func Transient(err error) bool {
	if errors.Is(err, context.Canceled) || errors.Is(err, ErrRedirect) {
		return false
	}
	// Do not test for net.Error, because the errnos of disk errors also implement net.Error.
	_, isURL := errors.AsType[*url.Error](err)
	_, isOp := errors.AsType[*net.OpError](err)
	return isURL || isOp || errors.Is(err, io.ErrUnexpectedEOF)
}

// Redact returns err with a text that has no queries of URLs.
func Redact(err error) error { return redacted{err} }

type redacted struct{ error }

func (e redacted) Error() string { return WithoutQueries(e.error.Error()) }

func (e redacted) Unwrap() error { return e.error }

// query matches the query of a URL in a text.
var query = lazyregexp.New(`(https?://[^\s"'?]+)\?[^\s"']*`)

// WithoutQueries removes the queries of URLs from a text, because they can hold signatures that let anybody read an image.
func WithoutQueries(text string) string { return query().ReplaceAllString(text, "$1?…") }

// IsGone reports whether err means that a file does not exist.
func IsGone(err error) bool { return errors.Is(err, fs.ErrNotExist) }
