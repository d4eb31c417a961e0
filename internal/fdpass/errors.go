package fdpass

import (
	"context"
	"errors"

	"github.com/containerd/errdefs"
)

// Error is an error received from the peer. errors.Is finds its class.
type Error struct {
	Class   string `json:"class,omitempty"`
	Message string `json:"message"`
}

func (e *Error) Error() string { return e.Message }

// Unwrap returns the error of the class, for errors.Is and the errdefs functions. It returns nil if the class is
// unknown.
func (e *Error) Unwrap() error {
	for _, c := range classes {
		if c.name == e.Class {
			return c.err
		}
	}
	return nil
}

// classes maps names on the wire to error classes. Errors of other classes are sent without a class.
var classes = []struct {
	name string
	err  error
}{
	{"invalid-argument", errdefs.ErrInvalidArgument},
	{"not-found", errdefs.ErrNotFound},
	{"already-exists", errdefs.ErrAlreadyExists},
	{"failed-precondition", errdefs.ErrFailedPrecondition},
	{"resource-exhausted", errdefs.ErrResourceExhausted},
	{"unavailable", errdefs.ErrUnavailable},
	{"not-implemented", errdefs.ErrNotImplemented},
	{"canceled", context.Canceled},
	{"deadline-exceeded", context.DeadlineExceeded},
}

// ToWire converts an error to the form that is sent to the peer; nil stays nil.
func ToWire(err error) *Error {
	if err == nil {
		return nil
	}
	e := &Error{Message: err.Error()}
	for _, c := range classes {
		if errors.Is(err, c.err) {
			e.Class = c.name
			break
		}
	}
	return e
}

// Classes returns the error classes that can be sent to the peer.
func Classes() []error {
	all := make([]error, len(classes))
	for i, c := range classes {
		all[i] = c.err
	}
	return all
}
