package engine

// #include "tw.h"
import "C"

import (
	"context"
	"fmt"
	"strings"

	"github.com/tripod-run/tripod/internal/component/wasmbin"
)

// ended returns the error of a call that was killed because its context ended, its budget was used up or Kill was
// called.
func (i *Instance) ended(ctx context.Context) error {
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case i.late:
		return fmt.Errorf("guest waited in WASI for %v: %w", i.opts.Deadline, context.DeadlineExceeded)
	}
	return ErrKilled
}

// outcome returns the error of a failed call. The instance is dead, unless the caller passed wrong arguments.
func (i *Instance) outcome(ctx context.Context, why int) error {
	text := C.GoString(i.c.message)
	err := i.failed(ctx, why, text)
	if why != C.TW_ARGS {
		i.markDead(fmt.Errorf("%w: %s", ErrDead, err.Error()))
	}
	return err
}

func (i *Instance) failed(ctx context.Context, why int, text string) error {
	switch why {
	case C.TW_TRAP:
		return i.trapped(text)
	case C.TW_EXIT:
		if code := int(i.c.exit_code); code == 0 || !i.full() {
			return &Exit{Code: code}
		}
		return fmt.Errorf("%w: it exited with code %d while it used %s of %s", ErrMemory, i.c.exit_code, inBytes(i.size()), inBytes(i.limit))
	case C.TW_DEADLINE:
		return fmt.Errorf("guest computed for %v: %w", i.opts.Deadline, context.DeadlineExceeded)
	case C.TW_KILLED:
		return i.ended(ctx)
	case C.TW_MEMORY:
		return fmt.Errorf("%w: it has %s, its limit is %s%s", ErrMemory, inBytes(i.size()), inBytes(i.limit), i.account())
	case C.TW_HANDLES:
		return fmt.Errorf("%w: %s", ErrHandles, text)
	case C.TW_HOSTCALLS:
		return fmt.Errorf("%w: %s", ErrHostCalls, text)
	case C.TW_NOROOM:
		return fmt.Errorf("%w: %s", errNoRoom, text)
	case C.TW_STARVED:
		return fmt.Errorf("%w: %s", ErrStarved, text)
	case C.TW_OUTPUT:
		return fmt.Errorf("%w: %s", ErrValue, text)
	case C.TW_ABI:
		return &Trap{Kind: TrapABI, Message: text}
	case C.TW_HOST:
		select {
		case <-i.killed: // so the host function gave up
			return i.ended(ctx)
		default:
		}
		return &hostTrap{Trap{Kind: TrapHost, Message: i.hostErr.Error()}, i.hostErr}
	case C.TW_ARGS:
		return invalid("flat arguments: %s", text)
	}
	return fmt.Errorf("engine: %s", text)
}

// trapped returns the error for a trap. It parses the trap's message, because the component API reports only text.
func (i *Instance) trapped(text string) error {
	_, cause, ok := strings.Cut(text, "wasm trap: ")
	if !ok {
		return &Trap{Kind: TrapOther, Message: text}
	}
	cause, _, _ = strings.Cut(cause, "\n")
	kind := TrapKind(cause)
	switch cause {
	case "call stack exhausted":
		kind = TrapStackOverflow
	case "wasm `unreachable` instruction executed":
		kind = TrapUnreachable
	}
	if i.full() && (kind == TrapUnreachable || kind == TrapOutOfBounds) {
		return fmt.Errorf("%w: it trapped while it used %s of %s (%s)", ErrMemory, inBytes(i.size()), inBytes(i.limit), kind)
	}
	return &Trap{Kind: kind, Message: text}
}

// full reports whether the guest's memory is so near its limit that lack of memory is the likely cause of a trap or
// exit. A trap or an exit is the only way in which a guest's allocator can report a refused allocation.
func (i *Instance) full() bool {
	memory := i.size() - min(i.size(), i.code.img.charged())
	return memory > 0 && memory+i.limit/8+wasmbin.PageSize > i.limit
}

func (i *Instance) size() uint64 { return uint64(C.tw_load(&i.c.mem)) }

func (i *Instance) account() string {
	if a := i.opts.Account; a != nil && a.limit() > 0 {
		return fmt.Sprintf("; all instances together use %s of %s", inBytes(a.Memory()), inBytes(a.limit()))
	}
	return ""
}

// hostTrap is a Trap that wraps the error of a host function.
type hostTrap struct {
	Trap
	err error
}

func (t *hostTrap) Error() string { return t.Message }
func (t *hostTrap) Unwrap() []error {
	return []error{&t.Trap, t.err}
}
