package engine

// #include "tw.h"
import "C"

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"regexp"
	"sync"
	"time"
	"unsafe"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// Call calls f with the flat parameters args, and appends the flat result to out. It returns when the guest returns, or
// about a tick after ctx ends, Kill is called or the compute budget is used up. Errors are *Trap, *Exit, ErrMemory,
// ErrHandles, ErrHostCalls, ErrValue, ErrStarved, ErrKilled, ErrDead, context.DeadlineExceeded, context.Cause(ctx), and
// errdefs.ErrInvalidArgument if args has the wrong types. After ErrInvalidArgument, the instance stays usable.
func (i *Instance) Call(ctx context.Context, f *Func, args, out []byte) ([]byte, error) {
	return i.CallExchange(ctx, f, args, out, Exchange{})
}

// CallExchange is Call with messages that need no host function.
func (i *Instance) CallExchange(ctx context.Context, f *Func, args, out []byte, x Exchange) ([]byte, error) {
	if f.code != i.code {
		return out, invalid("%v belongs to a Code other than the instance's", f)
	}
	fn, err := f.bind(i.link)
	if err != nil {
		return out, err
	}
	room := out[len(out):cap(out)]
	if i.canWait { // an abandoned guest can still use these buffers after Call returns
		room, args, x.Message = nil, bytes.Clone(args), bytes.Clone(x.Message)
	}
	err = i.enter(ctx, func(c *C.tw_inst, seq C.uint64_t) C.int {
		i.onSent = x.Sent
		return C.tw_call(c, fn, seq, bytePtr(args), C.size_t(len(args)), bytePtr(room), C.size_t(len(room)), bytePtr(x.Message), x.Sent != nil)
	}, func(c *C.tw_inst) error {
		i.passOn(c)
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

// passOn gives the message that the guest has sent to the Exchange, if it does not have it yet.
func (i *Instance) passOn(c *C.tw_inst) {
	if !c.exchange.sent {
		return
	}
	c.exchange.sent = false
	defer i.recoverPanic("receiver of a guest's message")
	flat := unsafe.Slice((*byte)(c.exchange.reply.data), int(c.exchange.reply.len))
	i.onSent(wit.NewReader(flat).Bytes())
	if c.exchange.reply.cap > C.TW_KEPT {
		C.tw_buf_free(&c.exchange.reply)
	}
}

// Taken reports whether the guest has taken the message of the current call's Exchange. Only host functions and channels may
// call it, on the guest's thread.
func (i *Instance) Taken() bool { return bool(i.c.exchange.taken) }

// Run runs a guest that is a command, and returns the command's exit code. It returns the same errors as Call. An
// instance can run only once.
func (i *Instance) Run(ctx context.Context) (int, error) {
	if i.code.img.World != WorldCommand {
		return 0, invalid("the guest is not a command; its world is %s", i.code.img.World)
	}
	if err := i.bindRun(); err != nil {
		return 0, err
	}
	code := 0
	i.running = true
	err := i.enter(ctx, i.run, func(c *C.tw_inst) error {
		code = int(c.exit_code)
		return nil
	})
	i.markDead(errRan)
	var exit *Exit
	if errors.As(err, &exit) {
		return exit.Code, nil
	}
	return code, err
}

// run runs the command on the guest's thread, which can outlive Run.
func (i *Instance) run(c *C.tw_inst, seq C.uint64_t) C.int {
	return C.tw_run(c, i.runFunc, seq)
}

// bindRun finds the function that Run calls. It is nil for a preview 1 command on the core path, which has _start.
func (i *Instance) bindRun() (err error) {
	if i.link.c.component != nil || !i.code.img.Start {
		i.runFunc, err = i.code.run.bind(i.link)
	}
	return err
}

// findRun finds the function run of a component that is a command.
func (c *Code) findRun() (err error) {
	if c.img.World == WorldCommand && c.img.Component {
		c.run, err = c.Func(Signature{Interface: cliRun, Name: "run", Result: &wit.Type{Kind: wit.Result}})
	}
	return err
}

var errRan = fmt.Errorf("%w: it has already run", ErrDead)

// enter runs the guest on this goroutine's thread. If the guest can wait where no tick reaches it, enter instead runs
// the guest on another thread, which can be abandoned. If the guest ends without an error, the function passed as
// result reads the guest's result.
func (i *Instance) enter(ctx context.Context, guest func(*C.tw_inst, C.uint64_t) C.int, result func(*C.tw_inst) error) error {
	seq, err := i.begin(ctx)
	if err != nil {
		return err
	}
	if ctx.Done() != nil {
		defer context.AfterFunc(ctx, func() { i.kill(seq) })()
	}
	var why int
	if !i.canWait {
		why = int(guest(i.c, C.uint64_t(seq)))
	} else if why, err = i.enterDetached(ctx, seq, guest); err != nil {
		return err
	}
	defer i.end()
	i.closeCallChannels()
	if why != C.TW_OK {
		return i.outcome(ctx, why)
	}
	if i.c.spent { // the guest trapped after it had returned its result
		i.markDead(fmt.Errorf("%w: %s", ErrDead, C.GoString(i.c.message)))
	}
	return result(i.c)
}

// enterDetached runs the guest on another goroutine, and abandons the guest if it does not end when killed.
func (i *Instance) enterDetached(ctx context.Context, seq uint64, guest func(*C.tw_inst, C.uint64_t) C.int) (int, error) {
	done := make(chan int, 1)
	go func() {
		why := guest(i.c, C.uint64_t(seq))
		i.mu.Lock()
		i.returned = true
		abandoned := i.abandoned
		i.mu.Unlock()
		if abandoned {
			i.end()
		}
		done <- int(why)
	}()
	return i.await(ctx, seq, done)
}

// await waits for the guest's end. It enforces the compute budget itself, because no tick reaches a guest that sleeps
// in WASI.
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
			return i.killAndWait(ctx, seq, done)
		case <-i.killed:
			return i.killAndWait(ctx, seq, done)
		case <-timer.C:
			remaining := budget
			if seen := int64(C.tw_load(&i.c.seen)); seen != 0 {
				remaining -= time.Duration(int64(C.tw_now()) - seen)
			}
			if remaining > 0 {
				timer.Reset(remaining)
				continue
			}
			i.late = true
			return i.killAndWait(ctx, seq, done)
		}
	}
}

// killAndWait kills the guest. If the guest does not end within abandonAfter, killAndWait abandons it.
func (i *Instance) killAndWait(ctx context.Context, seq uint64, done <-chan int) (int, error) {
	i.kill(seq) // from here on the guest cannot call host functions
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

// begin marks the instance as busy with one call and returns that call's number.
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
		return 0, invalid("the instance is already in a call")
	}
	i.busy, i.returned, i.ctx, i.hostErr = true, false, ctx, nil
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
	if i.abandoned {
		i.release()
	}
	i.idle.Broadcast()
}

// abandon marks the guest as abandoned: nobody waits for it any longer, and end releases it later. If the guest has
// returned in the meantime or is in a host function, abandon does nothing and returns false, and the caller must wait.
// (A host function could be using memory of Call's caller. The host function returns soon, because the call's context
// ends.)
func (i *Instance) abandon() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.returned || i.hosting.Load() {
		return false
	}
	i.abandoned, i.dead = true, fmt.Errorf("%w: abandoned while it waited", ErrDead)
	i.code.engine.cfg.Logger.Warn("a killed guest still waits in WASI; it is released when it wakes up")
	return true
}

// callContext returns the context of the current call. The context is made on first use. Kill also ends the context.
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

// Kill ends the current call and the instance. It does not wait.
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
		_ = i.stdin.Close() // a guest that waits for input gets EOF
	}
}

// kill ends the call with the number seq, if that call is still running.
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

// InterruptAfter makes the next call end some time after its begin, when the guest enters a function or loop, without waiting for
// a tick. Other guests of the engine look at their budgets, too, so it is for profiles only.
func (i *Instance) InterruptAfter(d time.Duration) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.c != nil && !i.busy {
		C.tw_interrupt_after(i.c, i.link.c.engine, C.int64_t(max(d, 1)))
	}
}

// Backtrace returns the names of the functions in which the guest was when InterruptAfter ended its last call, the innermost
// first, and at most the 20 that the engine keeps. A function without a name has its number.
func (i *Instance) Backtrace() (functions []string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.c == nil || i.busy || !bool(i.c.interrupt.hit) || i.c.why != C.TW_KILLED || i.c.message == nil {
		return nil
	}
	for _, frame := range frames().FindAllStringSubmatch(C.GoString(i.c.message), -1) {
		functions = append(functions, frame[1])
	}
	return functions
}

// frames matches a line of wasmtime's backtrace: number, offset, module and function.
var frames = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`(?m)^ +[0-9]+: +0x[0-9a-f]+ - (?:[^!\n]*!)?(.+)$`) })

// Alive reports whether the instance can be called again.
func (i *Instance) Alive() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.dead == nil && !i.closed
}

// Outdated reports whether Code.Replace has replaced the machine code that the instance runs.
func (i *Instance) Outdated() bool {
	return i.link.replaced.Load()
}

func (i *Instance) markDead(err error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.dead == nil {
		i.dead = err
	}
}

// CPU returns the time that the guest's thread has run (system and user), up to the latest tick.
func (i *Instance) CPU() time.Duration {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.c == nil {
		return i.cpu
	}
	return time.Duration(C.tw_load(&i.c.cpu))
}

// Memory returns the size of the guest's linear memory at the latest tick, with what is charged beside it, in bytes, or 0
// once the instance is released. (On the component path the memory has its declared minimum size.)
func (i *Instance) Memory() uint64 {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.c == nil {
		return 0
	}
	return uint64(C.tw_load(&i.c.mem))
}

// Close kills the current call, waits for the call to end, and releases the instance. (An abandoned guest, which still
// waits in WASI, is released later, when it wakes up.) Close may be called more than once.
func (i *Instance) Close() {
	i.mu.Lock()
	if i.busy && !i.abandoned {
		i.mu.Unlock()
		i.Kill()
		i.mu.Lock()
	}
	defer i.mu.Unlock()
	for i.busy && !i.abandoned {
		i.idle.Wait()
	}
	i.closed = true
	if !i.busy {
		i.release()
	}
}

// release frees everything that the instance holds, once. The caller holds i.mu, and no guest code runs.
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
	if i.overflow {
		i.code.engine.overflow.Add(-1)
	}
	i.opts.Account.addInstances(-1)
	i.link.drop()
}
