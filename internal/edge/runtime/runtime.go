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

// Runtime runs modules. Implementations: runtime/minimal, runtime/unitpods, the tests' fakes.
//
// One manager calls Start and Receive, which do not overlap; the other methods may be called concurrently. Errors have
// an errdefs class: errdefs.ErrUnavailable means that the runtime is lost.
type Runtime interface {
	Info() Info
	// Start starts the runtime. It returns fields to add to its registration, if any, once modules can be created. It is
	// called again after Receive has failed.
	Start(ctx context.Context) (registration map[string]any, err error)
	// Receive waits for the next message. It comes from a module's channel, or is a control message (edge/wire,
	// internal/channel). If it fails, the runtime is lost, and its modules have ended unless the runtime is Durable.
	Receive(ctx context.Context) (channel.Message, error)
	// Send passes a message to a module's channel. It waits until the runtime accepts the message.
	Send(ctx context.Context, m channel.Message) error

	// Create starts the module at index, which is also the field "index" of data. It returns once the module has started
	// or failed to start. A module that has started always ends with a message of type wire.Exited, which can arrive
	// before Create returns.
	Create(ctx context.Context, index int, data wire.ModuleData) error
	// Adopt resumes the module that an earlier daemon created at index. It also adopts a module that has ended since then,
	// if its exit is known, and a message of type wire.Exited follows. If Adopt returns false or an error, the manager
	// must create the module again.
	Adopt(ctx context.Context, index int, data wire.ModuleData) (running bool, err error)
	// Delete ends the module at index. A message of type wire.Exited follows, as after any other end.
	Delete(ctx context.Context, index int, uuid string) error
	// Cleanup removes the remains of an ended module, before its index is used again.
	Cleanup(ctx context.Context, index int, uuid string) error
	// Group returns the group of the module at index. The modules of a group deliver channel messages to each other
	// without the manager; "" means no group.
	Group(index int) string

	// Stop ends all modules and, unless the runtime is Durable, the runtime itself, so that Receive fails.
	Stop(ctx context.Context) error
	// Close ends the connection and, unless the runtime is Durable, the runtime. No other call follows.
	Close() error
}
