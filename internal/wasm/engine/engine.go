package engine

import (
	"context"
	"time"

	"github.com/containerd/errdefs"
)

// Engine compiles and runs guests. It is safe for concurrent use. It is never closed: a process has one.
type Engine struct{}

// Fingerprint names the engine's version, its configuration and the target: what compiled code depends on. A cache of
// code images has it in its keys.
func Fingerprint() string { return "" }

// New makes an engine. It maps the pool's address space; that it cannot is errdefs.ErrResourceExhausted.
func New(cfg Config) (*Engine, error) { return nil, errdefs.ErrNotImplemented }

// Compile makes the code image of a component or of a core module with _start. What is wrong with the guest is
// errdefs.ErrInvalidArgument and named: not WebAssembly, truncated, invalid, an import that nobody provides, a
// memory or table beyond the limits, nothing exported that could be served. It takes CPU and memory in proportion to
// the guest (10 s and 600 MB for 12 MB): run it in a child process with limits. ctx is looked at between steps only.
func (e *Engine) Compile(ctx context.Context, wasm []byte, opts CompileOptions) ([]byte, error) {
	return nil, errdefs.ErrNotImplemented
}

// Load makes guests from a code image. The image must come from Compile of an engine with the same Fingerprint, over a
// way that is trusted: it holds machine code. One that is damaged or of another fingerprint is
// errdefs.ErrFailedPrecondition (compile again). An import that neither WASI nor host provides, or with another type, is
// errdefs.ErrInvalidArgument and named.
func (e *Engine) Load(image []byte, host Host) (*Code, error) { return nil, errdefs.ErrNotImplemented }

// Code is a loaded guest; any number of instances are made of it. It is safe for concurrent use.
type Code struct{}

// World is what the guest is made for.
func (c *Code) World() World { return "" }

// Exports are the functions that the guest exports, with their types (core modules: names only).
func (c *Code) Exports() []Item { return nil }

// Imports are the functions that the guest imports, WASI's without their types.
func (c *Code) Imports() []Item { return nil }

// Path is the way that calls take by default: PathCore or PathComponent.
func (c *Code) Path() Path { return PathAuto }

// Func binds an exported function. One that does not exist is errdefs.ErrNotFound; one of another type is
// errdefs.ErrInvalidArgument, naming the function, the place in the type and both types.
func (c *Code) Func(sig Signature) (*Func, error) { return nil, errdefs.ErrNotImplemented }

// Instantiate makes an instance, which runs the guest's own initialisation within opts.Deadline and ctx. Errors are
// those of Instance.Call, and errdefs.ErrResourceExhausted when there is no room for one more.
func (c *Code) Instantiate(ctx context.Context, opts InstanceOptions) (*Instance, error) {
	return nil, errdefs.ErrNotImplemented
}

// Close releases the code once its last instance is closed.
func (c *Code) Close() {}

// Func is a function bound to the types that its caller uses. It belongs to a Code and serves all its instances.
type Func struct{}

// String is the function's full name.
func (f *Func) String() string { return "" }

// Instance is one running guest with memory of its own. One goroutine at a time calls it; Kill, CPU and Memory may be
// used by others meanwhile.
type Instance struct{}

// Call calls f with the flat parameters args, and appends the flat result to out. It returns when the guest does, or
// soon (a tick) after ctx ends, Kill is called, or the compute budget is used up. Errors: *Trap, *Exit, ErrMemory,
// ErrHandles, ErrHostCalls, ErrKilled, ErrDead, context.DeadlineExceeded, context.Cause(ctx), and
// errdefs.ErrInvalidArgument for args that do not fit the types, which leaves the instance as it was.
func (i *Instance) Call(ctx context.Context, f *Func, args, out []byte) ([]byte, error) {
	return out, errdefs.ErrNotImplemented
}

// Run runs a command to its end: its exit code, or the errors of Call. An instance runs once.
func (i *Instance) Run(ctx context.Context) (int, error) { return 0, errdefs.ErrNotImplemented }

// Kill ends what the instance does, and the instance. It does not wait.
func (i *Instance) Kill() {}

// Alive tells whether the instance may be called again.
func (i *Instance) Alive() bool { return false }

// CPU is the time that the guest has run (system and user, of its thread), up to the last tick.
func (i *Instance) CPU() time.Duration { return 0 }

// Memory is the size of the guest's linear memory in bytes, up to the last tick. (On the component path: what it has
// declared at least.)
func (i *Instance) Memory() uint64 { return 0 }

// Close ends the instance, waits until nothing runs in it any more, and releases it. It may be called again.
func (i *Instance) Close() {}

// HostCall is one call of a host function.
type HostCall struct{}

// Context is that of the Call or Run under way; it also ends when the instance is killed.
func (c *HostCall) Context() context.Context { return nil }

// Host is InstanceOptions.Host.
func (c *HostCall) Host() any { return nil }

// Renew gives the guest's call a fresh compute budget and quota of host calls: for functions that bring new work (the
// next message of a stream).
func (c *HostCall) Renew() {}

// Account adds up what several instances use (a pod's), and bounds it. It is safe for concurrent use.
type Account struct{}

// NewAccount makes an account with a limit of memory: the sum of the linear memories, in bytes; 0: none. An instance
// that grows beyond it ends with ErrMemory at its next tick.
func NewAccount(memory uint64) *Account { return nil }

// SetMemory changes the limit.
func (a *Account) SetMemory(limit uint64) {}

// SetCPU lets the instances run for quota in every period, all together; beyond, their threads sleep until the next
// period begins, and this sleep is not computing. A quota of 0 lifts it.
func (a *Account) SetCPU(quota, period time.Duration) {}

// Memory is the sum of the linear memories at the last ticks, in bytes; CPU that of the time that guests have run, with
// those of instances which are closed.
func (a *Account) Memory() uint64 { return 0 }

// CPU is documented at Memory.
func (a *Account) CPU() time.Duration { return 0 }

// MemoryPeak is the largest that Memory has been.
func (a *Account) MemoryPeak() uint64 { return 0 }
