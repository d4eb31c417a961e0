package engine

// #include "tw.h"
import "C"

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"
	"unsafe"

	"github.com/tripod-run/tripod/internal/component/wasmbin"
)

// Call calls f with the flat parameters args, and appends the flat result to out. It returns when the guest does, or
// soon (a tick) after ctx ends, Kill is called, or the compute budget is used up. Errors: *Trap, *Exit, ErrMemory,
// ErrHandles, ErrHostCalls, ErrValue, ErrStarved, ErrKilled, ErrDead, context.DeadlineExceeded, context.Cause(ctx), and
// errdefs.ErrInvalidArgument for args that do not fit the types, which leaves the instance as it was.
func (i *Instance) Call(ctx context.Context, f *Func, args, out []byte) ([]byte, error) {
	if f.code != i.code {
		return out, invalid("%v belongs to other code than the instance", f)
	}
	fn, err := f.in(i.link)
	if err != nil {
		return out, err
	}
	room := out[len(out):cap(out)]
	if i.waits { // the guest may outlive this call, and what its caller then does with these
		room, args = nil, bytes.Clone(args)
	}
	err = i.do(ctx, func(c *C.tw_inst, seq C.uint64_t) C.int {
		return C.tw_call(c, fn, seq, bytePtr(args), C.size_t(len(args)), bytePtr(room), C.size_t(len(room)))
	}, func(c *C.tw_inst) error {
		n := int(c.out.len)
		if !c.out.owned {
			out = out[:len(out)+n]
			return nil
		}
		out = append(out, unsafe.Slice((*byte)(c.out.data), n)...)
		C.tw_buf_free(&c.out)
		return nil
	})
	return out, err
}

// Run runs a command to its end: its exit code, or the errors of Call. An instance runs once.
func (i *Instance) Run(ctx context.Context) (int, error) {
	if i.code.img.World != WorldCommand {
		return 0, invalid("the guest is no command; its world is %s", i.code.img.World)
	}
	code := 0
	i.running = true
	err := i.do(ctx, i.run, func(c *C.tw_inst) error {
		code = int(c.exit_code)
		return nil
	})
	i.die(errRan)
	var exit *Exit
	if errors.As(err, &exit) {
		return exit.Code, nil
	}
	return code, err
}

// run runs the command on the guest's thread, which may outlive Run.
func (i *Instance) run(c *C.tw_inst, seq C.uint64_t) C.int {
	if i.link.module != nil {
		return C.tw_run(c, nil, seq)
	}
	var index *C.wasmtime_component_export_index_t
	for _, item := range i.code.img.Exports {
		if track(item.Interface) == cliRun && item.Name == "run" {
			index = exportIndex(i.link.c.component, item)
			break
		}
	}
	if index != nil {
		defer C.wasmtime_component_export_index_delete(index)
	}
	return C.tw_run(c, index, seq)
}

var errRan = fmt.Errorf("%w: it has run to its end", ErrDead)

// do runs the guest on this goroutine's thread; or, if it can wait where no tick reaches it, on another that can be left
// behind. If the guest ended well, result reads what it has left.
func (i *Instance) do(ctx context.Context, guest func(*C.tw_inst, C.uint64_t) C.int, result func(*C.tw_inst) error) error {
	seq, err := i.begin(ctx)
	if err != nil {
		return err
	}
	if ctx.Done() != nil {
		defer context.AfterFunc(ctx, func() { i.kill(seq) })()
	}
	var why int
	if !i.waits {
		why = int(guest(i.c, C.uint64_t(seq)))
	} else if why, err = i.doBeside(ctx, seq, guest); err != nil {
		return err
	}
	defer i.end()
	if why != C.TW_OK {
		return i.outcome(ctx, why)
	}
	if i.c.spent { // it has trapped after it gave its result
		i.die(fmt.Errorf("%w: %s", ErrDead, C.GoString(i.c.message)))
	}
	return result(i.c)
}

// doBeside runs the guest on a goroutine of its own, and leaves it there if it does not end when it is killed.
func (i *Instance) doBeside(ctx context.Context, seq uint64, guest func(*C.tw_inst, C.uint64_t) C.int) (int, error) {
	done := make(chan int, 1)
	go func() {
		why := guest(i.c, C.uint64_t(seq))
		i.mu.Lock()
		i.back = true
		left := i.left
		i.mu.Unlock()
		if left {
			i.end()
		}
		done <- int(why)
	}()
	return i.await(ctx, seq, done)
}

// await waits for the guest's end. A guest that sleeps in WASI sees no tick, so that its budget is looked after here.
func (i *Instance) await(ctx context.Context, seq uint64, done <-chan int) (int, error) {
	budget := i.opts.Deadline
	if i.running || budget == 0 {
		budget = math.MaxInt64
	}
	timer := time.NewTimer(budget)
	defer timer.Stop()
	for {
		select {
		case why := <-done:
			return why, nil
		case <-ctx.Done():
			return i.leave(ctx, seq, done)
		case <-i.killed:
			return i.leave(ctx, seq, done)
		case <-timer.C:
			left := budget
			if seen := int64(C.tw_load(&i.c.seen)); seen != 0 {
				left -= time.Duration(int64(C.tw_now()) - seen)
			}
			if left > 0 {
				timer.Reset(left)
				continue
			}
			i.late = true
			return i.leave(ctx, seq, done)
		}
	}
}

// leave gives a guest that has been killed a moment to end, and then leaves it to itself.
func (i *Instance) leave(ctx context.Context, seq uint64, done <-chan int) (int, error) {
	i.kill(seq) // from here on it calls no host function any more
	patience := time.NewTimer(abandonAfter)
	defer patience.Stop()
	select {
	case why := <-done:
		return why, nil
	case <-patience.C:
	}
	if !i.abandon() {
		return <-done, nil
	}
	return 0, i.ended(ctx)
}

// begin makes the call under way the instance's only one, and numbers it.
func (i *Instance) begin(ctx context.Context) (seq uint64, err error) {
	if ctx.Err() != nil {
		return 0, context.Cause(ctx)
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	switch {
	case i.dead != nil:
		return 0, i.dead
	case i.closed:
		return 0, fmt.Errorf("%w: closed", ErrDead)
	case i.busy:
		return 0, invalid("the instance is in a call already")
	}
	i.busy, i.back, i.ctx, i.hostErr = true, false, ctx, nil
	i.seq++
	return i.seq, nil
}

func (i *Instance) end() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.busy = false
	if i.cancel != nil {
		i.cancel()
		i.cancel, i.derived = nil, nil
	}
	if i.left {
		i.release()
	}
	i.idle.Broadcast()
}

// abandon leaves a guest that waits to itself: end releases it. It gives false if it has ended meanwhile, or is in one of
// the host's functions: they end with the call's context, and use what is the caller's.
func (i *Instance) abandon() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.back || i.hosting.Load() {
		return false
	}
	i.left, i.dead = true, fmt.Errorf("%w: it was left waiting", ErrDead)
	i.code.engine.cfg.Logger.Warn("a killed guest waits in WASI, and is left there until it wakes up")
	return true
}

// callContext is the context of the call under way, which also ends with Kill. It is made when it is asked for.
func (i *Instance) callContext() context.Context {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.derived == nil {
		i.derived, i.cancel = context.WithCancel(i.ctx)
		select {
		case <-i.killed:
			i.cancel()
		default:
		}
	}
	return i.derived
}

// Kill ends what the instance does, and the instance. It does not wait.
func (i *Instance) Kill() {
	i.mu.Lock()
	defer i.mu.Unlock()
	select {
	case <-i.killed:
		return
	default:
	}
	close(i.killed)
	if i.dead == nil {
		i.dead = fmt.Errorf("%w: killed", ErrDead)
	}
	if i.c != nil {
		C.tw_kill(i.c, C.TW_FOREVER)
	}
	if i.cancel != nil {
		i.cancel()
	}
	if i.stdin != nil {
		_ = i.stdin.Close() // a guest that waits for input finds its end
	}
}

// kill ends one call, if it is still under way.
func (i *Instance) kill(seq uint64) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.c == nil || i.seq != seq || !i.busy {
		return
	}
	C.tw_kill(i.c, C.uint64_t(seq))
	if i.stdin != nil {
		_ = i.stdin.Close()
	}
}

// Alive tells whether the instance may be called again.
func (i *Instance) Alive() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.dead == nil && !i.closed
}

func (i *Instance) die(err error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.dead == nil {
		i.dead = err
	}
}

// CPU is the time that the guest has run (system and user, of its thread), up to the last tick.
func (i *Instance) CPU() time.Duration {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.c == nil {
		return i.cpu
	}
	return time.Duration(C.tw_load(&i.c.cpu))
}

// Memory is the size of the guest's linear memory in bytes, up to the last tick; 0 when it is released. (On the component
// path: what it has declared at least.)
func (i *Instance) Memory() uint64 {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.c == nil {
		return 0
	}
	return uint64(C.tw_load(&i.c.mem))
}

// Close ends the instance, waits until nothing runs in it any more, and releases it. (A guest that a killed call has left
// waiting in WASI is released when it wakes up.) It may be called again.
func (i *Instance) Close() {
	i.mu.Lock()
	if i.busy && !i.left {
		i.mu.Unlock()
		i.Kill()
		i.mu.Lock()
	}
	defer i.mu.Unlock()
	for i.busy && !i.left {
		i.idle.Wait()
	}
	i.closed = true
	if !i.busy {
		i.release()
	}
}

// release frees what the instance holds, once. i.mu is held and no guest code runs.
func (i *Instance) release() {
	if i.handle == 0 {
		return
	}
	if i.c != nil {
		i.cpu = time.Duration(C.tw_load(&i.c.cpu))
		C.tw_free(i.c)
		i.c = nil
	}
	i.handle.Delete()
	i.handle = 0
	if i.stdin != nil {
		_ = i.stdin.Close()
		_ = i.stdinEnd.Close()
	}
	if i.extra {
		i.code.engine.overflow.Add(-1)
	}
	i.opts.Account.use(-1)
	_ = i.code.use(-1)
}

// ended is the error of a call that was killed: by its context, or by Kill.
func (i *Instance) ended(ctx context.Context) error {
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case i.late:
		return fmt.Errorf("guest has waited in WASI for %v: %w", i.opts.Deadline, context.DeadlineExceeded)
	}
	return ErrKilled
}

// outcome turns the bad end of a call into its error. After any but the caller's own mistake the instance is dead.
func (i *Instance) outcome(ctx context.Context, why int) error {
	text := C.GoString(i.c.message)
	err := i.failed(ctx, why, text)
	if why != C.TW_ARGS {
		i.die(fmt.Errorf("%w: %s", ErrDead, err.Error()))
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
		return fmt.Errorf("%w: it exited with code %d at %s of %s", ErrMemory, i.c.exit_code, inBytes(i.size()), inBytes(i.limit))
	case C.TW_DEADLINE:
		return fmt.Errorf("guest has computed for %v: %w", i.opts.Deadline, context.DeadlineExceeded)
	case C.TW_KILLED:
		return i.ended(ctx)
	case C.TW_MEMORY:
		return fmt.Errorf("%w: it has %s, its limit is %s%s", ErrMemory, inBytes(i.size()), inBytes(i.limit), i.account())
	case C.TW_HANDLES:
		return fmt.Errorf("%w: %s", ErrHandles, text)
	case C.TW_HOSTCALLS:
		return fmt.Errorf("%w: %s", ErrHostCalls, text)
	case C.TW_STARVED:
		return fmt.Errorf("%w: %s", ErrStarved, text)
	case C.TW_OUTPUT:
		return fmt.Errorf("%w: %s", ErrValue, text)
	case C.TW_ABI:
		return &Trap{Kind: TrapABI, Message: text}
	case C.TW_HOST:
		return &hostTrap{Trap{Kind: TrapHost, Message: i.hostErr.Error()}, i.hostErr}
	case C.TW_ARGS:
		return invalid("flat arguments: %s", text)
	}
	return fmt.Errorf("engine: %s", text)
}

// trapped tells what a trap's text says. Text is all that the component API gives.
func (i *Instance) trapped(text string) error {
	if strings.Contains(text, "maximum concurrent") {
		return fmt.Errorf("%w: %s", errNoRoom, text)
	}
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
		return fmt.Errorf("%w: it trapped at %s of %s (%s)", ErrMemory, inBytes(i.size()), inBytes(i.limit), kind)
	}
	return &Trap{Kind: kind, Message: text}
}

// full tells whether the guest's memory is so near its limit that giving up is most likely for want of memory: an
// allocator that is refused more has no way to tell us.
func (i *Instance) full() bool {
	return i.size() > 0 && i.size()+i.limit/8+wasmbin.PageSize > i.limit
}

func (i *Instance) size() uint64 { return uint64(C.tw_load(&i.c.mem)) }

func (i *Instance) account() string {
	if a := i.opts.Account; a != nil && a.limit() > 0 {
		return fmt.Sprintf("; all instances together have %s of %s", inBytes(a.Memory()), inBytes(a.limit()))
	}
	return ""
}

// hostTrap is a Trap that wraps the host's error.
type hostTrap struct {
	Trap
	err error
}

func (t *hostTrap) Error() string { return t.Message }
func (t *hostTrap) Unwrap() []error {
	return []error{&t.Trap, t.err}
}
