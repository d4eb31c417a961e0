package cri

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	crierrors "k8s.io/cri-api/pkg/errors"
)

// TestMessagesSayEachThingOnce also checks that a message is one line.
func TestMessagesSayEachThingOnce(t *testing.T) {
	for want, err := range map[string]error{
		"broker: unavailable":              fmt.Errorf("broker: %w: %w", errdefs.ErrUnavailable, errdefs.ErrUnavailable),
		"create module m: no room":         fmt.Errorf("create module m: %w", fmt.Errorf("create module m: %w", errors.New("no room"))),
		"stop: first; second":              fmt.Errorf("stop: %w", errors.Join(errors.New("first"), errors.New("second"))),
		"a: b: a":                          errors.New("a: b: a"),
		`mount "x": invalid argument: why`: errors.New("mount \"x\": invalid argument: why\n"),
	} {
		if got := toStatus(t.Context(), err).Message(); got != want {
			t.Errorf("message of %q = %q, want %q", err, got, want)
		}
	}
}

func TestErrorCodes(t *testing.T) {
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	for _, c := range []struct {
		name string
		ctx  context.Context
		err  error
		code codes.Code
	}{
		{"invalid argument", nil, errdefs.ErrInvalidArgument, codes.InvalidArgument},
		{"not found", nil, errdefs.ErrNotFound, codes.NotFound},
		{"already exists", nil, errdefs.ErrAlreadyExists, codes.AlreadyExists},
		{"permission denied", nil, errdefs.ErrPermissionDenied, codes.PermissionDenied},
		{"unauthenticated", nil, errdefs.ErrUnauthenticated, codes.Unauthenticated},
		{"resource exhausted", nil, errdefs.ErrResourceExhausted, codes.ResourceExhausted},
		{"failed precondition", nil, errdefs.ErrFailedPrecondition, codes.FailedPrecondition},
		{"conflict", nil, errdefs.ErrConflict, codes.FailedPrecondition},
		{"not modified", nil, errdefs.ErrNotModified, codes.FailedPrecondition},
		{"aborted", nil, errdefs.ErrAborted, codes.Aborted},
		{"out of range", nil, errdefs.ErrOutOfRange, codes.OutOfRange},
		{"not implemented", nil, errdefs.ErrNotImplemented, codes.Unimplemented},
		{"unavailable", nil, errdefs.ErrUnavailable, codes.Unavailable},
		{"data loss", nil, errdefs.ErrDataLoss, codes.DataLoss},
		{"internal", nil, errdefs.ErrInternal, codes.Internal},
		{"unknown", nil, errdefs.ErrUnknown, codes.Unknown},
		{"cancelled", nil, context.Canceled, codes.Canceled},
		{"deadline", nil, context.DeadlineExceeded, codes.DeadlineExceeded},

		{"wrapped", nil, fmt.Errorf("a: %w", fmt.Errorf("b: %w", errdefs.ErrNotFound)), codes.NotFound},
		{"joined", nil, errors.Join(io.EOF, errdefs.ErrAborted), codes.Aborted},
		{"the outermost class counts", nil, fmt.Errorf("%w: %w", errdefs.ErrFailedPrecondition, errdefs.ErrNotFound), codes.FailedPrecondition},
		{"a gRPC error keeps its code", nil, fmt.Errorf("peer: %w", status.Error(codes.OutOfRange, "far")), codes.OutOfRange},
		{"our class before a gRPC error's code", nil, fmt.Errorf("%w: %w", errdefs.ErrNotFound, status.Error(codes.OutOfRange, "far")),
			codes.NotFound},
		{"unclassified", nil, io.EOF, codes.Unknown},
		{"unclassified after the call's end", ended, io.EOF, codes.Canceled},
		{"classified after the call's end", ended, errdefs.ErrNotFound, codes.NotFound},

		{"no room", nil, fmt.Errorf("create: %w", &os.PathError{Op: "mkdir", Path: "/x", Err: syscall.ENOSPC}), codes.ResourceExhausted},
		{"quota", nil, fmt.Errorf("create: %w", syscall.EDQUOT), codes.ResourceExhausted},
		{"no descriptors", nil, errors.Join(io.EOF, syscall.EMFILE), codes.ResourceExhausted},
		{"read-only", nil, fmt.Errorf("stop: %w", &os.PathError{Op: "open", Path: "/x", Err: syscall.EROFS}), codes.Unavailable},
		{"failing disk", nil, fmt.Errorf("stop: %w", syscall.EIO), codes.Unavailable},
		{"a class before an errno", nil, fmt.Errorf("%w: %w", syscall.ENOSPC, errdefs.ErrInvalidArgument), codes.InvalidArgument},

		{"registry unavailable", nil, fmt.Errorf("pull: %w: %w", crierrors.ErrRegistryUnavailable, errdefs.ErrUnavailable), codes.Unknown},
		{"signature", nil, fmt.Errorf("%w: %w", crierrors.ErrSignatureValidationFailed, errdefs.ErrPermissionDenied), codes.Unknown},
		{"recursive read-only", nil, fmt.Errorf("%w: %w", crierrors.ErrRROUnsupported, errdefs.ErrNotImplemented), codes.Unimplemented},
		{"image volume", nil, fmt.Errorf("mount: %w: %w", crierrors.ErrImageVolumeMountFailed, errdefs.ErrNotFound), codes.NotFound},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.ctx == nil {
				c.ctx = context.Background()
			}
			s := toStatus(c.ctx, c.err)
			wantEqual(t, "code", s.Code(), c.code)
			if !strings.Contains(s.Message(), strings.ReplaceAll(c.err.Error(), "\n", "; ")) &&
				!errors.As(c.err, new(interface{ GRPCStatus() *status.Status })) {
				t.Errorf("message %q does not contain the error %q", s.Message(), c.err)
			}
		})
	}
}

// The kubelet's client recognises a named error by the beginning of its text (cri-client, kubelet image manager).
func TestNamedErrorsBeginTheText(t *testing.T) {
	for _, named := range append(append([]error{}, pullErrors...), containerErrors...) {
		s := toStatus(context.Background(), fmt.Errorf("deep down: %w: %w", named, errdefs.ErrUnavailable))
		if !strings.HasPrefix(s.Message(), named.Error()+": ") {
			t.Errorf("message %q does not begin with %q", s.Message(), named)
		}
		s = toStatus(context.Background(), fmt.Errorf("%w: %w", named, errdefs.ErrUnavailable))
		if strings.Count(s.Message(), named.Error()) != 1 {
			t.Errorf("message %q contains the name more than once", s.Message())
		}
	}
}

func TestPanicBecomesInternalAndLeavesItsStackInTheLog(t *testing.T) {
	log := &syncBuffer{}
	srv := &Server{log: slog.New(slog.NewTextHandler(log, nil))}
	check := func(err error) {
		t.Helper()
		wantCode(t, err, codes.Internal, "/x/Y", "what a pity")
		if !strings.Contains(log.String(), "errors_test.go") || !strings.Contains(log.String(), "what a pity") {
			t.Errorf("the log does not contain the panic's stack: %s", log)
		}
	}
	_, err := interceptUnary(t.Context(), nil, &grpc.UnaryServerInfo{Server: srv, FullMethod: "/x/Y"},
		func(context.Context, any) (any, error) { panic("what a pity") })
	check(err)
	check(interceptStream(srv, &deadStream{ctx: t.Context()}, &grpc.StreamServerInfo{FullMethod: "/x/Y"},
		func(any, grpc.ServerStream) error { panic("what a pity") }))
}

// The node's own faults are logged as errors; the caller's do not fill the log.
func TestOurFaultsAreLogged(t *testing.T) {
	log := &syncBuffer{}
	srv := &Server{log: slog.New(slog.NewTextHandler(log, nil))}
	call := func(err error) {
		_, _ = interceptUnary(t.Context(), nil, &grpc.UnaryServerInfo{Server: srv, FullMethod: "/x/Y"},
			func(context.Context, any) (any, error) { return nil, err })
	}
	call(fmt.Errorf("no such pod: %w", errdefs.ErrNotFound))
	if log.String() != "" {
		t.Errorf("log of a caller's mistake: got %s, want none", log)
	}
	call(fmt.Errorf("%w: %w", crierrors.ErrRegistryUnavailable, errdefs.ErrUnavailable))
	if log.String() != "" {
		t.Errorf("log of an unreachable registry: got %s, want none", log)
	}
	call(errors.New("disk on fire"))
	if !strings.Contains(log.String(), "disk on fire") || !strings.Contains(log.String(), "ERROR") {
		t.Errorf("log of the node's fault: got %s, want an error", log)
	}
}

// deadStream is a server stream without a client.
type deadStream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s *deadStream) Context() context.Context { return s.ctx }
