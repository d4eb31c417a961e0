package fdpass

import (
	"context"
	"errors"

	"github.com/containerd/errdefs"
)

// Error is an error that came over the wire: its text and, by errors.Is, its class.
type Error struct {
	Class   string `json:"class,omitempty"`
	Message string `json:"message"`
}

func (e *Error) Error() string { return e.Message }

// Unwrap is the errdefs error of the class, so that errors.Is and the errdefs functions see it.
func (e *Error) Unwrap() error {
	for _, c := range classes {
		if c.name == e.Class {
			return c.err
		}
	}
	return nil
}

// classes travel over the wire; any other error becomes Internal.
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

// ToWire converts an error for the wire; nil stays nil.
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

// Classes lists the errors whose class travels over the wire.
func Classes() []error {
	all := make([]error, len(classes))
	for i, c := range classes {
		all[i] = c.err
	}
	return all
}
