package protowit

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/containerd/errdefs"
)

// Error says what is wrong with a message, and where. It wraps errdefs.ErrInvalidArgument if a request is malformed,
// errdefs.ErrResourceExhausted if a message exceeds a limit, and errdefs.ErrInternal if flat bytes or strings from a
// guest do not form a message.
type Error struct {
	Path string // "items[3].name", or "" for the whole message
	Err  error
}

func (e *Error) Error() string {
	if e.Path == "" {
		return e.Err.Error()
	}
	return e.Path + ": " + e.Err.Error()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// fault is a kind of damage. A fault has no position, because all messages share the faults.
type fault struct {
	text  string
	class error
}

func (f *fault) Error() string { return f.text }
func (f *fault) Unwrap() error { return f.class }

var (
	errTruncated   = &fault{"the message ends in the middle of a field", errdefs.ErrInvalidArgument}
	errVarint      = &fault{"a varint of more than 64 bits", errdefs.ErrInvalidArgument}
	errFieldNumber = &fault{"a field number outside of 1 to 536870911", errdefs.ErrInvalidArgument}
	errWireType    = &fault{"a wire type that does not exist", errdefs.ErrInvalidArgument}
	errEndGroup    = &fault{"the end of a group that has not begun", errdefs.ErrInvalidArgument}
	errUTF8        = &fault{"a string that is not UTF-8", errdefs.ErrInvalidArgument}
	errRequired    = &fault{"a required field is missing", errdefs.ErrInvalidArgument}
	errDepth       = &fault{fmt.Sprintf("messages nested more than %d deep", MaxDepth), errdefs.ErrInvalidArgument}
	errExpansion   = &fault{"the message grows too much: it has too many messages with absent fields", errdefs.ErrResourceExhausted}
	errSize        = &fault{"a message of 2 GiB or more", errdefs.ErrResourceExhausted}

	errGuestUTF8 = &fault{"the guest's string is not UTF-8", errdefs.ErrInternal}
	errGuestFlat = &fault{"the guest's value is not of its type", errdefs.ErrInternal}
	errGuestSize = &fault{"the guest's message has 2 GiB or more", errdefs.ErrInternal}
)

// within adds a step at the front of an error's path.
func within(err error, step string) error {
	var e *Error
	if !errors.As(err, &e) {
		return &Error{step, err}
	}
	switch {
	case e.Path == "":
		e.Path = step
	case e.Path[0] == '[':
		e.Path = step + e.Path
	default:
		e.Path = step + "." + e.Path
	}
	return e
}

// whole converts any error to an [*Error]. If err has no path, the path is that of the whole message.
func whole(err error) error {
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	return &Error{Err: err}
}

// element adds a list index at the front of an error's path.
func element(err error, i int) error { return within(err, "["+strconv.Itoa(i)+"]") }
