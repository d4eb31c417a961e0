package cri

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"syscall"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	crierrors "k8s.io/cri-api/pkg/errors"

	"github.com/tripod-run/tripod/internal/guard"
)

// classCodes translates error classes to gRPC codes. The outermost class of an error counts (errdefs.Resolve).
var classCodes = map[error]codes.Code{
	errdefs.ErrInvalidArgument:    codes.InvalidArgument,
	errdefs.ErrNotFound:           codes.NotFound,
	errdefs.ErrAlreadyExists:      codes.AlreadyExists,
	errdefs.ErrPermissionDenied:   codes.PermissionDenied,
	errdefs.ErrUnauthenticated:    codes.Unauthenticated,
	errdefs.ErrResourceExhausted:  codes.ResourceExhausted,
	errdefs.ErrFailedPrecondition: codes.FailedPrecondition,
	errdefs.ErrConflict:           codes.FailedPrecondition,
	errdefs.ErrNotModified:        codes.FailedPrecondition,
	errdefs.ErrAborted:            codes.Aborted,
	errdefs.ErrOutOfRange:         codes.OutOfRange,
	errdefs.ErrNotImplemented:     codes.Unimplemented,
	errdefs.ErrUnavailable:        codes.Unavailable,
	errdefs.ErrDataLoss:           codes.DataLoss,
	errdefs.ErrInternal:           codes.Internal,
	errdefs.ErrUnknown:            codes.Unknown,
	context.Canceled:              codes.Canceled,
	context.DeadlineExceeded:      codes.DeadlineExceeded,
}

// errnoCodes translates errnos of exhausted resources and failing disks, for errors without a class. Such an error is
// not the caller's fault, and a retry can succeed.
var errnoCodes = map[syscall.Errno]codes.Code{
	syscall.ENOSPC: codes.ResourceExhausted,
	syscall.EDQUOT: codes.ResourceExhausted,
	syscall.EMFILE: codes.ResourceExhausted,
	syscall.ENFILE: codes.ResourceExhausted,
	syscall.ENOMEM: codes.ResourceExhausted,
	syscall.EROFS:  codes.Unavailable,
	syscall.EIO:    codes.Unavailable,
}

// pullErrors are the CRI's named errors that the kubelet recognises after a pull. They use codes.Unknown: the kubelet
// compares the beginning of the error's text, and its client removes the prefix with the code only for codes.Unknown.
var pullErrors = []error{crierrors.ErrRegistryUnavailable, crierrors.ErrSignatureValidationFailed}

// containerErrors are the CRI's named errors for containers. The text of the answer begins with the error's name; the
// error's class determines the gRPC code.
var containerErrors = []error{crierrors.ErrRROUnsupported, crierrors.ErrImageVolumeMountFailed}

// toStatus converts err to a gRPC status. If err has no class (a killed child process, a closed connection) and the
// call's context ctx has ended, the context's error determines the code.
func toStatus(ctx context.Context, err error) *status.Status {
	class := errdefs.Resolve(err)
	if class == errdefs.ErrUnknown {
		if s, ok := status.FromError(err); ok {
			return s
		}
		if ctx.Err() != nil {
			class = ctx.Err()
		} else if errno, ok := errors.AsType[syscall.Errno](err); ok && errnoCodes[errno] != codes.OK {
			return status.New(errnoCodes[errno], oneLine(err.Error()))
		}
	}
	code, text := classCodes[class], oneLine(err.Error())
	if name := nameOf(err, pullErrors); name != "" {
		return status.New(codes.Unknown, withPrefix(name, text))
	}
	return status.New(code, withPrefix(nameOf(err, containerErrors), text))
}

// oneLine puts an error's text on one line and removes repeated parts. Each joined error has a line of its own, and an
// error that wraps its class can contain the same words twice.
func oneLine(text string) string {
	text = strings.Join(strings.FieldsFunc(text, func(r rune) bool { return r == '\n' || r == '\r' }), "; ")
	parts := strings.Split(text, ": ")
	return strings.Join(slices.Compact(parts), ": ")
}

// nameOf returns the name of the first of the given errors that err matches, or "" if it matches none.
func nameOf(err error, named []error) string {
	for _, n := range named {
		if errors.Is(err, n) {
			return n.Error()
		}
	}
	return ""
}

func withPrefix(name, text string) string {
	if name == "" || strings.HasPrefix(text, name) {
		return text
	}
	return name + ": " + text
}

func interceptUnary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (resp any, err error) {
	err = answer(ctx, loggerOf(info.Server), info.FullMethod, func() error {
		resp, err = handler(ctx, req)
		return err
	})
	if err != nil {
		return nil, err
	}
	return resp, nil
}

func interceptStream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	return answer(stream.Context(), loggerOf(srv), info.FullMethod, func() error { return handler(srv, stream) })
}

// answer runs one call. It turns a panic into codes.Internal and logs the stack, converts errors to statuses, and logs
// the node's faults at error level and the caller's at debug level.
func answer(ctx context.Context, log *slog.Logger, method string, call func() error) error {
	if err := guard.Call(log, method, call); err != nil {
		s := toStatus(ctx, err)
		level := slog.LevelDebug
		fault := slices.Contains([]codes.Code{codes.Internal, codes.Unknown, codes.DataLoss}, s.Code()) // the node is at fault, not the request
		if fault && nameOf(err, pullErrors) == "" {
			level = slog.LevelError
		}
		log.Log(ctx, level, "call failed", "method", method, "code", s.Code().String(), "err", err)
		return s.Err()
	}
	return nil
}

// loggerOf returns the logger of the service that handles a call.
func loggerOf(srv any) *slog.Logger {
	if s, ok := srv.(*Server); ok {
		return s.log
	}
	return slog.Default()
}

// invalid returns the error for an invalid request. field is the field's name in the API.
func invalid(field, format string, args ...any) error {
	return fmt.Errorf("%s: %s: %w", field, fmt.Sprintf(format, args...), errdefs.ErrInvalidArgument)
}

// required returns the error for a missing field.
func required(field string) error { return invalid(field, "must be set") }
