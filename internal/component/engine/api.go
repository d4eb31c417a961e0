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

// Config configures an Engine. The zero value has no pool, which is right for compiling.
type Config struct {
	// Instances is the capacity of the pooling allocator; 0 means no pool. An unused slot costs address space (4 GiB
	// plus guard regions) but no memory.
	Instances int
	// Overflow is the number of instances allowed outside the pool. An instance is made there if the pool is full or
	// the instance does not fit into a slot, and always if the guest's memory is detached; for those, Instances is added.
	// Beyond that number, Instantiate fails with errdefs.ErrResourceExhausted.
	// Default 1024.
	Overflow int
	// MaxMemory is the largest linear memory that any guest may declare or grow to, in bytes. Default 4 GiB.
	MaxMemory uint64
	// MaxTableElements is the largest table that any guest may declare or grow to, in elements. Default 65536.
	MaxTableElements uint32
	// If Quick is set, Compile uses a compiler (Winch) that takes a fraction of the time and makes code that is slower. It
	// refuses some guests that the other one accepts, and all on machines other than x86-64. Engines load both kinds of code.
	Quick bool
	// Logger logs events that are not reported to a caller as an error. Default: slog.Default().
	Logger *slog.Logger
}

// World is the kind of service that a guest implements.
type World = wit.World

// The worlds.
const (
	WorldGRPC     = wit.WorldGRPC
	WorldRaw      = wit.WorldRaw
	WorldHTTP     = wit.WorldHTTP
	WorldMessages = wit.WorldMessages
	WorldCommand  = wit.WorldCommand
)

// CompileOptions configure Compile.
type CompileOptions struct {
	// Provided reports whether the host will provide the given interface ("tripod:grpc/response@0.1.0"). Provided may
	// return false for WASI 0.2 and preview 1, because the engine provides them. nil means that there are no other
	// interfaces.
	Provided func(iface string) bool
	// ModuleHost is what the host will provide to a core module that is a server (see Engine.Compile), in addition to
	// preview 1. ModuleExports are the functions that such a module must export.
	ModuleHost    Host
	ModuleExports []Signature
	// If Both is set, the guest is compiled for both paths, so that the paths can be compared. Otherwise the image
	// contains only the fastest path that the guest allows.
	Both bool
	// If ComponentPath is set, a component takes the component path even if the core path is possible, for comparisons.
	ComponentPath bool
	// plan makes a component take the core path by its plan even if its first core module suffices, for tests.
	plan bool
}

// Item is a function that a guest exports or imports.
type Item struct {
	// Interface is the interface's full name ("wasi:http/types@0.2.3"), or "" at the top level. For an import of a core
	// module, it is the name of the module that provides the import.
	Interface string
	Name      string
	Params    []*wit.Type `json:",omitempty"`
	Result    *wit.Type   `json:",omitempty"`
}

// String returns the function's name for messages: INTERFACE#NAME, or NAME at the top level.
func (i Item) String() string {
	if i.Interface == "" {
		return i.Name
	}
	return i.Interface + "#" + i.Name
}

// Signature is the name and type of an exported function, as its caller expects them.
type Signature struct {
	// Interface is the full name. Any compatible version matches: 0.2.12 matches 0.2.0, and 1.4.0 matches 1.0.0.
	Interface, Name string
	Params          []*wit.Type
	Result          *wit.Type // nil if there is none
}

// Host lists the functions and resources that the host offers to guests in addition to WASI. An interface in Host
// replaces the engine's WASI interface of the same name entirely, and shares no resources with the rest of WASI.
type Host struct {
	Funcs     []HostFunc
	Resources []HostResource
}

// HostFunc is a function of the host.
type HostFunc struct {
	// Interface and Name are as in WIT, with methods spelled as in the component model ("[method]fields.append",
	// "[constructor]fields", "[static]outgoing-body.finish").
	Interface, Name string
	Params          []*wit.Type
	Result          *wit.Type
	// Call takes the flat parameters and returns the flat result. The parameters are valid until Call returns; the
	// result is copied immediately. Call runs on the guest's thread and may block, but must return when c.Context()
	// ends. If Call returns an error, the guest traps, and Instance.Call or Run returns an error that wraps this error.
	// If the error is an *Exit, the guest exits.
	// Call takes ownership of each resource that args contains as own<T>; Drop is not called for such a resource. A
	// resource that the result contains as own<T> belongs to the guest until the guest returns or drops it.
	Call func(c *HostCall, args []byte) ([]byte, error)
	// Role lets the engine carry out the function itself, as far as the call's Exchange goes, or says what it does not do. The
	// types must be those that the role says.
	Role Role
}

// Role is what a host function is for the messages of a call, or for a snapshot.
type Role int

// The roles. The numbers are those of tw.h.
const (
	// RoleReceive is a func(bool) -> result<V, E>, where V is a variant whose first case has the size of a message (u32).
	RoleReceive Role = 1 + iota
	// RoleTake is a func() -> list<u8>, and returns the message whose size RoleReceive has returned.
	RoleTake
	// RoleSend is a func(list<u8>) -> result<_, E>.
	RoleSend
	// RoleConstant is a function of any type that does nothing but return the same result in all instances that can begin from
	// one snapshot. A guest may call it before its snapshot.
	RoleConstant
)

// Exchange is the messages of a call that need no host function, because they are there before it or wait until after it.
// Each crossing costs about a microsecond, and on a busy machine a switch of threads. It is for the core path: on the other
// one, the guest calls the host's functions as without it.
type Exchange struct {
	// Message is the request, as a flat list<u8>. The guest gets it by RoleReceive and RoleTake, once.
	Message []byte
	// Sent gets the first message of RoleSend: before another host function is called, or when the guest has returned. It is
	// valid until Sent returns. If Sent is nil, RoleSend is an ordinary function.
	Sent func(message []byte)
}

// HostResource is a resource type implemented by the host. A wit.Type refers to the resource type by the name
// "INTERFACE#NAME" (wit.Type.Name). The host chooses a number ("rep") for each value of the type.
type HostResource struct {
	Interface, Name string
	// Drop is called on the guest's thread when the guest drops a resource that it owns. The first argument is
	// InstanceOptions.Host. Drop is not called for resources that are still live when the instance is closed. If Drop
	// is nil, nothing is called.
	Drop func(host any, rep uint32)
}

// Path selects one of the two ways to call a guest (see the package comment).
type Path uint8

// The paths.
const (
	PathAuto Path = iota // core if the guest allows it, otherwise component
	PathComponent
	PathCore
)

// String returns the path's name.
func (p Path) String() string { return [...]string{"auto", "component", "core"}[p] }

// Preopen is a directory of the host that the guest can use.
type Preopen struct {
	Path     string // on the host (for example "/proc/self/fd/7")
	Guest    string // absolute, as the guest sees it
	ReadOnly bool
}

// InstanceOptions are the environment and the limits of one instance.
type InstanceOptions struct {
	Args []string // the first is the program's name
	Env  []string // NAME=value
	// Stdin is read by a separate goroutine, up to a pipe's capacity ahead of the guest. nil means empty input. If Read
	// blocks, the goroutine outlives the instance.
	Stdin io.Reader
	// A preview 1 guest writes to Stdout and Stderr on its own thread. For a component, wasmtime's WASI writes to them
	// on several background threads, possibly even after Close. nil discards the output. If a write fails, the guest
	// sees an I/O error.
	Stdout, Stderr io.Writer
	Preopens       []Preopen
	// Channels are the guest's channels, in its directory /ch. If Channels is nil, the guest has no such directory.
	// Components never have the directory.
	Channels Channels

	MaxMemory        uint64 // bytes of each linear memory; 0 means the engine's limit
	MaxTableElements uint32 // elements of each table; 0 means the engine's limit
	MaxHandles       uint32 // live resources of the host that the guest holds; 0 means 10,000
	MaxHostCalls     uint64 // calls of host functions in one Call or Run since the last Renew; 0 means unlimited
	// MaxValue limits the size in flat bytes of each result and of the arguments of each host call. A limit is needed
	// because a list in the guest can refer to one long string a million times; the flat bytes would contain a million
	// copies. 0 means 64 MiB. (The component path checks only the values that come from the guest.)
	MaxValue uint64
	// Deadline is the compute budget of instantiation and of each Call. Sleeping, waiting in host calls and waiting for
	// the CPU quota do not count, except during instantiation, where all time counts. 0 means unlimited. Deadline does
	// not apply to Run, which lasts as long as the program.
	Deadline time.Duration

	// Host is passed to host functions (HostCall.Host) and to HostResource.Drop.
	Host any
	// Account, if set, adds up and limits the resources of several instances.
	Account *Account
	Path    Path

	// Snapshot, if set, is the state in which the instance begins, without initialization of its own. If the snapshot is
	// closed, the instance is initialized as usual. Capture makes Instance.Capture possible.
	Snapshot *Snapshot
	Capture  bool
}

// Trap is the error of a call in which the guest failed. The instance is dead.
type Trap struct {
	Kind TrapKind
	// Message is the engine's message with the backtrace, on several lines.
	Message string
}

// TrapKind is the cause of a Trap, in words.
type TrapKind string

// The causes that callers need to distinguish. For any other cause, the kind is wasmtime's text ("integer divide by
// zero").
const (
	TrapStackOverflow TrapKind = "stack overflow"
	TrapUnreachable   TrapKind = "unreachable instruction executed"
	TrapOutOfBounds   TrapKind = "out of bounds memory access"
	// TrapABI means that the guest broke the canonical ABI: bad pointers, strings, cases or handles.
	TrapABI TrapKind = "canonical ABI violated"
	// TrapHost means that a host function failed. The error of the call wraps the error of the host function.
	TrapHost TrapKind = "host function failed"
	// TrapOther is a trap whose cause wasmtime does not name.
	TrapOther TrapKind = "trap"
)

func (t *Trap) Error() string { return fmt.Sprintf("guest trapped: %s", t.Kind) }

// Exit is the error of a Call in which the guest called exit. Run returns the exit code instead of this error. A host
// function returns it to make the guest exit.
type Exit struct{ Code int }

func (e *Exit) Error() string { return fmt.Sprintf("guest exited with code %d", e.Code) }

// Errors of a call besides Trap and Exit. If the compute budget is used up, the error is context.DeadlineExceeded. If
// the context has ended, the error is context.Cause of that context.
var (
	// ErrMemory means that the guest, or its Account, exceeds its memory limit.
	ErrMemory = fmt.Errorf("guest is out of memory: %w", errdefs.ErrResourceExhausted)
	// ErrHandles means that the guest holds too many resources of the host.
	ErrHandles = fmt.Errorf("guest holds too many host resources: %w", errdefs.ErrResourceExhausted)
	// ErrValue means that the guest passed or returned a value that is too large.
	ErrValue = fmt.Errorf("guest gave too large a value: %w", errdefs.ErrResourceExhausted)
	// ErrStarved means that the worker itself, not the guest, has run out of memory for the call.
	ErrStarved = fmt.Errorf("no memory for the guest's call: %w", errdefs.ErrResourceExhausted)
	// ErrHostCalls means that the guest called the host too often in one call.
	ErrHostCalls = fmt.Errorf("guest called the host too often: %w", errdefs.ErrResourceExhausted)
	// ErrKilled means that Instance.Kill was called.
	ErrKilled = fmt.Errorf("guest was killed: %w", errdefs.ErrAborted)
	// ErrDead means that the instance trapped or was killed in an earlier call, or is closed.
	ErrDead = fmt.Errorf("instance is dead: %w", errdefs.ErrFailedPrecondition)
)

// Runner runs a guest. *Instance implements it. Tests can pass another implementation, so that they need no guest.
type Runner interface {
	Call(ctx context.Context, f *Func, args, out []byte) ([]byte, error)
	Run(ctx context.Context) (int, error)
	Kill()
	CPU() time.Duration
	Memory() uint64
	Close()
}
