package engine

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// Config sizes an Engine. The zero value is an engine without a pool, which is right for compiling.
type Config struct {
	// Instances is how many instances the pooling allocator has room for at the same time; 0: no pool. A slot costs
	// address space (4 GiB and guards) until it is used, not memory.
	Instances int
	// Overflow is how many instances more may live outside of the pool when it is full, or when they do not fit
	// into one of its slots; beyond, Instantiate fails with errdefs.ErrResourceExhausted. Default 1024.
	Overflow int
	// MaxMemory is the largest linear memory that any guest may declare or grow to, in bytes. Default 4 GiB.
	MaxMemory uint64
	// MaxTableElements is the same for tables, in elements. Default 65536.
	MaxTableElements uint32
	// Logger logs what is not returned as an error. Default: slog.Default().
	Logger *slog.Logger
}

// World is what a guest is made for.
type World = wit.World

// The worlds.
const (
	WorldGRPC    = wit.WorldGRPC
	WorldHTTP    = wit.WorldHTTP
	WorldCommand = wit.WorldCommand
)

// CompileOptions bound what Compile accepts.
type CompileOptions struct {
	// Provided tells whether the host will offer an interface ("tripod:grpc/response@0.1.0"), beyond WASI 0.2 and
	// preview 1, which the engine brings; nil: nothing more.
	Provided func(iface string) bool
	// Both makes an image that can be called on both paths, for comparing them. Otherwise it has the better one.
	Both bool
}

// Item is one function that a guest exports or imports.
type Item struct {
	// Interface is the full name ("wasi:http/types@0.2.3", for a core module the module), or "" at the top level.
	Interface string
	Name      string
	Params    []*wit.Type `json:",omitempty"`
	Result    *wit.Type   `json:",omitempty"`
}

// String is the name that messages give it.
func (i Item) String() string {
	if i.Interface == "" {
		return i.Name
	}
	return i.Interface + "#" + i.Name
}

// Signature is what a caller expects of an exported function.
type Signature struct {
	// Interface is the full name. A version is met by one that is compatible with it (0.2.0 and 0.2.12; 1.0.0 and 1.4.0).
	Interface, Name string
	Params          []*wit.Type
	Result          *wit.Type // nil: none
}

// Host is what guests are offered beyond WASI. An interface that is here replaces the engine's own of that name as a
// whole, and its resources are not those of the engine's other interfaces.
type Host struct {
	Funcs     []HostFunc
	Resources []HostResource
}

// HostFunc is a function of the host.
type HostFunc struct {
	// Interface and Name as in WIT, methods as the component model spells them ("[method]fields.append",
	// "[constructor]fields", "[static]outgoing-body.finish").
	Interface, Name string
	Params          []*wit.Type
	Result          *wit.Type
	// Call gets flat parameters, valid until it returns, and gives the flat result, which is copied at once. It runs on the
	// guest's thread and may block, minding c.Context(). An error traps the guest and ends its call with this error wrapped
	// (errors.Is, errors.As). Own resources in args are the host's from then on (their Drop is not called); an own
	// resource in the result is the guest's until it gives it back or drops it.
	Call func(c *HostCall, args []byte) ([]byte, error)
}

// HostResource is a type of resource that lives in the host. Types refer to it by the name "INTERFACE#NAME"
// (wit.Type.Name); its values are numbers that the host chooses ("rep").
type HostResource struct {
	Interface, Name string
	// Drop is called on the guest's thread when the guest drops a resource that it owns; host is InstanceOptions.Host.
	// Resources that live when the instance is closed are not dropped one by one. nil: nothing to do.
	Drop func(host any, rep uint32)
}

// Path chooses between the two ways of calling (see the package's documentation).
type Path uint8

// The paths.
const (
	PathAuto Path = iota // core where the guest allows it, else component
	PathComponent
	PathCore
)

// String is the path's name.
func (p Path) String() string { return [...]string{"auto", "component", "core"}[p] }

// Preopen is a directory that the guest gets.
type Preopen struct {
	Path     string // on the host ("/proc/self/fd/7" is one)
	Guest    string // absolute, as the guest sees it
	ReadOnly bool
}

// InstanceOptions are one instance's world and limits.
type InstanceOptions struct {
	Args []string // the first is the program's name
	Env  []string // NAME=value
	// Stdin is read on a goroutine of its own, ahead of the guest by what a pipe holds; nil: empty. A reader that blocks
	// for ever holds that goroutine until it returns.
	Stdin io.Reader
	// Stdout and Stderr are written on the guest's thread, or by the engine's WASI on several in the background, and then
	// perhaps even after Close; nil: discarded. An error of theirs is an I/O error for the guest.
	Stdout, Stderr io.Writer
	Preopens       []Preopen
	// Channels are what a guest of preview 1 finds in /ch; nil: it has no such directory. Components never have it.
	Channels Channels

	MaxMemory        uint64 // bytes of each linear memory; 0: the engine's
	MaxTableElements uint32 // elements of each table; 0: the engine's
	MaxHandles       uint32 // live resources of the host that the guest holds; 0: 10 000
	MaxHostCalls     uint64 // calls of host functions in one Call or Run since the last Renew; 0: unlimited
	// MaxValue is the largest result, or list of arguments for a host function, that the guest may give, in flat bytes:
	// a guest's list may hold one long string a million times. 0: 64 MiB. (The component path learns of it late.)
	MaxValue uint64
	// Deadline is the compute budget of instantiation and of each Call: time that is not spent sleeping, waiting in host
	// calls, or for the CPU quota. All time of an instantiation counts, since nothing waits there. 0: unlimited.
	// It does not apply to Run, which lasts as long as the program does.
	Deadline time.Duration

	// Host is handed to host functions (HostCall.Host) and to HostResource.Drop.
	Host any
	// Account, if set, adds up what this instance and others use, and bounds it.
	Account *Account
	Path    Path
}

// Trap is the end of a call by the guest's own fault. The instance is dead.
type Trap struct {
	Kind TrapKind
	// Message has the engine's words and the backtrace, several lines.
	Message string
}

// TrapKind is the cause of a Trap, in words.
type TrapKind string

// Causes of traps that callers tell apart; others have the engine's name ("integer divide by zero").
const (
	TrapStackOverflow TrapKind = "stack overflow"
	TrapUnreachable   TrapKind = "unreachable instruction executed"
	TrapOutOfBounds   TrapKind = "out of bounds memory access"
	// TrapABI is a guest that breaks the canonical ABI: pointers out of bounds, strings that are not UTF-8, unknown cases
	// and handles.
	TrapABI TrapKind = "canonical ABI violated"
	// TrapHost is an error of a host function, which the error wraps.
	TrapHost TrapKind = "host function failed"
	// TrapOther is what the engine has no code for.
	TrapOther TrapKind = "trap"
)

func (t *Trap) Error() string { return fmt.Sprintf("guest trapped: %s", t.Kind) }

// Exit is the end of a guest by its own call of exit, in a Call (in a Run it is the result).
type Exit struct{ Code int }

func (e *Exit) Error() string { return fmt.Sprintf("guest exited with code %d", e.Code) }

// Errors that end a call, besides Trap and Exit. An exhausted compute budget is context.DeadlineExceeded; a context that ends
// is its context.Cause.
var (
	// ErrMemory: the guest, or its Account, is over its memory.
	ErrMemory = fmt.Errorf("guest is out of memory: %w", errdefs.ErrResourceExhausted)
	// ErrHandles: the guest holds too many resources of the host.
	ErrHandles = fmt.Errorf("guest holds too many host resources: %w", errdefs.ErrResourceExhausted)
	// ErrValue: the guest gave a value that is too large.
	ErrValue = fmt.Errorf("guest gave too large a value: %w", errdefs.ErrResourceExhausted)
	// ErrStarved: the worker has no memory for what the call needs besides the guest's own.
	ErrStarved = fmt.Errorf("no memory for the guest's call: %w", errdefs.ErrResourceExhausted)
	// ErrHostCalls: the guest has called the host too often in one call.
	ErrHostCalls = fmt.Errorf("guest called the host too often: %w", errdefs.ErrResourceExhausted)
	// ErrKilled: Instance.Kill.
	ErrKilled = fmt.Errorf("guest was killed: %w", errdefs.ErrAborted)
	// ErrDead: the instance trapped or was killed in an earlier call, or is closed.
	ErrDead = fmt.Errorf("instance is dead: %w", errdefs.ErrFailedPrecondition)
)

// Runner is the part of an Instance that runs a guest; *Instance is one. With it, callers can be tested without guests.
type Runner interface {
	Call(ctx context.Context, f *Func, args, out []byte) ([]byte, error)
	Run(ctx context.Context) (int, error)
	Kill()
	CPU() time.Duration
	Memory() uint64
	Close()
}
