package worker

import (
	"context"
	"errors"
	"strings"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc/codes"

	"github.com/tripod-run/tripod/internal/component/engine"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/dataplane"
)

// errStopping is the cause for cancelling everything that still runs in a pod when the grace period expires.
var errStopping = errors.New("the pod is being stopped")

// failure is a class of guest failures.
type failure int

const (
	failedOther failure = iota
	failedTrap
	failedTimeout  // compute budget or the request's deadline
	failedMemory   // memory limit of the guest or the pod
	failedQuota    // limit on handles, host calls, metadata or instances
	failedExit     // the guest called exit
	failedCanceled // the client disconnected
	failedStopping
)

// classify returns the class of err. The context is the request's.
func classify(ctx context.Context, err error) failure {
	var trap *engine.Trap
	var exit *engine.Exit
	switch {
	case errors.Is(err, errStopping) || errors.Is(context.Cause(ctx), errStopping):
		return failedStopping
	case errors.Is(err, engine.ErrMemory):
		return failedMemory
	case errors.Is(err, errdefs.ErrResourceExhausted):
		return failedQuota
	case errors.Is(err, context.DeadlineExceeded), errors.Is(ctx.Err(), context.DeadlineExceeded):
		return failedTimeout
	case errors.Is(err, context.Canceled), ctx.Err() != nil:
		return failedCanceled
	case errors.As(err, &trap):
		return failedTrap
	case errors.As(err, &exit):
		return failedExit
	}
	return failedOther
}

// status returns the gRPC status for a failed call. It leaves out details that belong only in the pod's log.
func (f failure) status(err error) *dataplane.Status {
	switch f {
	case failedStopping:
		return dataplane.Errorf(codes.Unavailable, "the server is shutting down")
	case failedMemory:
		return dataplane.Errorf(codes.ResourceExhausted, "the component is over its memory limit")
	case failedQuota:
		return dataplane.Errorf(codes.ResourceExhausted, "the component exceeded one of its limits")
	case failedTimeout:
		return dataplane.Errorf(codes.DeadlineExceeded, "the component did not answer in time")
	case failedCanceled:
		return dataplane.Errorf(codes.Canceled, "the client disconnected")
	case failedTrap:
		var trap *engine.Trap
		errors.As(err, &trap)
		return dataplane.Errorf(codes.Internal, "the component trapped: %s", trap.Kind)
	case failedExit:
		return dataplane.Errorf(codes.Internal, "the component exited during the call")
	}
	return dataplane.Errorf(codes.Internal, "the component failed to run")
}

// logged reports whether the failure is the component's fault and belongs in the pod's log.
func (f failure) logged() bool { return f != failedCanceled && f != failedStopping }

// maxMessage bounds the bytes of an engine error in a status or log line, because engine errors include a backtrace.
const maxMessage = 4 << 10

func shorten(s string) string {
	s = strings.TrimSpace(s)
	if len(s) > maxMessage {
		s = strings.ToValidUTF8(s[:maxMessage], "") + " …"
	}
	return s
}
