package runtime

import (
	"context"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

// Info describes a runtime. It never changes.
type Info struct {
	// Type is the runtime_type that the orchestrator sees, for example "linux/minimal".
	Type string
	// Name is unique on the node.
	Name string
	// UUID identifies the runtime to the orchestrator. It survives a restart of the node.
	UUID string
	// APIs are the APIs that modules can use, for example "wasi:snapshot_preview1".
	APIs []string
	// MaxModules bounds the number of modules at a time: 1 to channel.MaxModules.
	MaxModules int
	// Durable is set if modules survive the end of the connection and of the daemon. Adopt then resumes them.
	Durable bool
}

// Meter is a Runtime that measures its modules.
type Meter interface {
	// Usage returns what the module at the given index uses. It reports false if it cannot be measured.
	Usage(ctx context.Context, index int) (Usage, bool)
}

// Usage is what a module uses now.
type Usage struct {
	CPU    float64 // of one processor: 1 means all of it
	Memory uint64  // bytes
}

// Runtime runs modules. Implementations: runtime/minimal, runtime/unitpods, the tests' fakes.
//
// One manager calls Start and Receive, which do not overlap; the other methods may be called concurrently. Errors have
// an errdefs class: errdefs.ErrUnavailable means that the runtime is lost.
type Runtime interface {
	Info() Info
	// Start starts the runtime, and returns once modules can be created. The result holds additional fields for the
	// runtime's registration, if any. After Receive has failed, Start is called again.
	Start(ctx context.Context) (registration map[string]any, err error)
	// Receive waits for the next message, which comes from a module's channel or is a control message (edge/wire,
	// internal/channel). If Receive fails, the runtime is lost, and its modules have ended unless the runtime is
	// Durable.
	Receive(ctx context.Context) (channel.Message, error)
	// Send passes a message to a module's channel. It waits until the runtime accepts the message.
	Send(ctx context.Context, m channel.Message) error

	// Create starts a module at the given index, which the data also have in the field "index". It returns once the
	// module has started or failed to start. A module that has started always ends with a message of type wire.Exited,
	// which can arrive before Create returns.
	Create(ctx context.Context, index int, data wire.ModuleData) error
	// Adopt resumes the module that an earlier daemon created at the given index. If the module has ended since then
	// and its exit is known, Adopt adopts it too; a message of type wire.Exited then follows. If Adopt returns false or
	// an error, the manager must create the module again.
	Adopt(ctx context.Context, index int, data wire.ModuleData) (running bool, err error)
	// Delete ends the module at the given index. A message of type wire.Exited follows, as after any other end.
	Delete(ctx context.Context, index int, uuid string) error
	// Cleanup removes the remains of an ended module, before its index is used again.
	Cleanup(ctx context.Context, index int, uuid string) error
	// Group returns the group of the module at the given index; "" means no group. The modules of a group exchange
	// channel messages without the manager.
	Group(index int) string

	// Stop ends all modules. Unless the runtime is Durable, Stop also ends the runtime itself, so that Receive fails.
	Stop(ctx context.Context) error
	// Close ends the connection. Unless the runtime is Durable, Close also ends the runtime. No other call follows.
	Close() error
}
