package agent

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"unicode"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent/wire"
)

// maxText is the maximum length in bytes of a guest's message, name or path; longer texts are cut.
const maxText = 4096

// call is one operation, on its own stream.
type call struct {
	*wire.Stream
	mux      *wire.Mux
	result   wire.Result   // valid once answered is closed
	answered chan struct{} // closed when the result has arrived
}

// open begins an operation in the guest.
func (a *Agent) open(ctx context.Context, op wire.Op, request []byte) (*call, error) {
	if len(request) >= wire.MaxPayload {
		return nil, fmt.Errorf("arguments and environment have %d bytes, a guest accepts at most %d: %w", len(request), wire.MaxPayload-1,
			errdefs.ErrInvalidArgument)
	}
	mux, err := a.session()
	if err != nil {
		return nil, err
	}
	select {
	case a.opening <- struct{}{}:
		defer func() { <-a.opening }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	s, err := mux.Open()
	switch {
	case errors.Is(err, wire.ErrTooMany):
		return nil, fmt.Errorf("%d operations, the maximum, are already under way in the guest: %w", wire.MaxStreams,
			errdefs.ErrResourceExhausted)
	case errors.Is(err, wire.ErrSession):
		mux.End(err)
		return nil, fmt.Errorf("the session with the guest's agent has run out of stream numbers: %w (%w)", err, errdefs.ErrUnavailable)
	case err != nil:
		return nil, err
	}
	c := &call{Stream: s, mux: mux, answered: make(chan struct{})}
	s.SetValue(c)
	if !s.Send(ctx.Done(), wire.KindOpen, []byte{byte(op)}, request) {
		s.Finish()
		return nil, c.ended(ctx)
	}
	return c, nil
}

// stop ends the operation in the guest, unless the operation has already ended.
func (c *call) stop() {
	select {
	case <-c.answered:
	default:
		c.Urgent(wire.KindCancel)
		c.Finish()
	}
}

// ended returns the error for an operation that ended without a result.
func (c *call) ended(ctx context.Context) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err := c.mux.Err(); err != nil {
		return err
	}
	return fmt.Errorf("the operation in the guest has ended: %w", errdefs.ErrUnavailable)
}

// wait waits for the result and returns the error that the result contains, if any.
func (c *call) wait(ctx context.Context) error {
	select {
	case <-c.answered:
		return c.failure()
	case <-ctx.Done():
	case <-c.mux.Done():
		select {
		case <-c.answered:
			return c.failure()
		default:
		}
	}
	return c.ended(ctx)
}

var classes = map[wire.Class]error{
	wire.ClassInvalidArgument:    errdefs.ErrInvalidArgument,
	wire.ClassNotFound:           errdefs.ErrNotFound,
	wire.ClassFailedPrecondition: errdefs.ErrFailedPrecondition,
	wire.ClassUnavailable:        errdefs.ErrUnavailable,
	wire.ClassUnimplemented:      errdefs.ErrNotImplemented,
	wire.ClassExhausted:          errdefs.ErrResourceExhausted,
}

func (c *call) failure() error {
	if c.result.Class == wire.ClassNone {
		return nil
	}
	class, known := classes[c.result.Class]
	if !known {
		class = errdefs.ErrInternal
	}
	return fmt.Errorf("the guest's agent: %s: %w", printable(c.result.Message), class)
}

// control handles the results of operations.
func control(s *wire.Stream, f wire.Frame) error {
	if f.Kind != wire.KindResult {
		return nil // a frame kind of a newer protocol
	}
	c, ok := s.Value().(*call)
	if !ok {
		return nil // the guest answered before the operation was sent
	}
	if err := c.result.Parse(f.Payload); err != nil {
		return fmt.Errorf("%w: %w", wire.ErrSession, err)
	}
	close(c.answered)
	s.Finish()
	return nil
}

// printable replaces unprintable characters in a text from the guest, and cuts the text to maxText bytes.
func printable(s string) string {
	if len(s) > maxText {
		s = s[:maxText]
	}
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '?'
	}, strings.ToValidUTF8(s, "?"))
}
