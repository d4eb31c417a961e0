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

// errStopping ends what is under way in a pod that is stopped and whose grace is over.
var errStopping = errors.New("the pod is being stopped")

// failure is what the end of a guest means.
type failure int

const (
	failedOther failure = iota
	failedTrap
	failedTimeout  // compute budget, or the request's deadline
	failedMemory   // its own limit, or the pod's
	failedQuota    // handles, host calls, metadata, instances
	failedExit     // it called exit
	failedCanceled // the client is gone
	failedStopping
)

// classify tells what ended a guest. ctx is the request's.
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

// status is the gRPC status of a call whose guest has failed. What a client is not to see stays in the log.
func (f failure) status(err error) *dataplane.Status {
	switch f {
	case failedStopping:
		return dataplane.Errorf(codes.Unavailable, "the server is shutting down")
	case failedMemory:
		return dataplane.Errorf(codes.ResourceExhausted, "the component is over its memory limit")
	case failedQuota:
		return dataplane.Errorf(codes.ResourceExhausted, "the component needs more than it may have")
	case failedTimeout:
		return dataplane.Errorf(codes.DeadlineExceeded, "the component did not answer in time")
	case failedCanceled:
		return dataplane.Errorf(codes.Canceled, "the client is gone")
	case failedTrap:
		var trap *engine.Trap
		errors.As(err, &trap)
		return dataplane.Errorf(codes.Internal, "the component trapped: %s", trap.Kind)
	case failedExit:
		return dataplane.Errorf(codes.Internal, "the component ended in the middle of the call")
	}
	return dataplane.Errorf(codes.Internal, "the component could not be run")
}

// noted tells whether a failure is the component's, to be found in the pod's log.
func (f failure) noted() bool { return f != failedCanceled && f != failedStopping }

// maxMessage is how much of an engine's message, which has a backtrace, is kept in a status or log line.
const maxMessage = 4 << 10

func shorten(s string) string {
	s = strings.TrimSpace(s)
	if len(s) > maxMessage {
		s = strings.ToValidUTF8(s[:maxMessage], "") + " …"
	}
	return s
}
