package runtime

import (
	"context"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

// Info describes a runtime. It never changes.
type Info struct {
	// Type is the runtime_type that the orchestrator sees, as "linux/minimal".
	Type string
	// Name is unique on the node.
	Name string
	// UUID names the runtime to the orchestrator; it is the same after a restart of the node.
	UUID string
	// APIs are what modules may use, as "wasi:snapshot_preview1".
	APIs []string
	// MaxModules bounds the modules at a time: 1 to channel.MaxModules.
	MaxModules int
	// Durable runtimes keep their modules when the connection or the daemon ends; Adopt finds them again.
	Durable bool
}

// Runtime runs modules. Implementations: runtime/minimal, runtime/unitpods, the tests' fakes.
//
// One manager calls Start and Receive, which do not overlap; the other methods may be called concurrently. Errors carry an errdefs
// class: a runtime that is lost is errdefs.ErrUnavailable.
type Runtime interface {
	Info() Info
	// Start brings the runtime up and returns fields to add to its registration; nil is none. It returns once modules can be
	// created, and is called again after Receive has failed.
	Start(ctx context.Context) (registration map[string]any, err error)
	// Receive waits for the next message: from a module's channel, or one of the control messages that runtimes send (edge/wire,
	// internal/channel). When it fails the runtime is lost, and none of its modules runs unless it is Durable.
	Receive(ctx context.Context) (channel.Message, error)
	// Send hands over a message for a module's channel. It waits while the runtime does not take it.
	Send(ctx context.Context, m channel.Message) error

	// Create starts the module at index; data has "index". It returns once the module is started or cannot be. The end of a module
	// is always a message of type wire.Exited, which may come before Create returns.
	Create(ctx context.Context, index int, data wire.ModuleData) error
	// Adopt resumes the module that an earlier daemon created at index. It also adopts a module that has ended since, if it knows
	// how: wire.Exited follows. False or an error means that the manager must create the module again.
	Adopt(ctx context.Context, index int, data wire.ModuleData) (running bool, err error)
	// Delete ends the module at index. A message of type wire.Exited follows, as for any other end.
	Delete(ctx context.Context, index int, uuid string) error
	// Cleanup removes what is left of a module that has ended, before its index is used again.
	Cleanup(ctx context.Context, index int, uuid string) error
	// Group names the modules that deliver channel messages to each other without the manager; "" is none.
	Group(index int) string

	// Stop ends all modules and, unless the runtime is Durable, the runtime itself: Receive fails then.
	Stop(ctx context.Context) error
	// Close ends the connection and, unless the runtime is Durable, the runtime. No other call follows.
	Close() error
}
