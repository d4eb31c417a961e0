package runtime

import (
	"context"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

// Info is what a runtime is, constant over its life (seed 4: TYPE, APIS, MAX_NMODULES).
type Info struct {
	// Type is the runtime_type told to the orchestrator, as "linux/minimal".
	Type string
	// Name is unique on the node.
	Name string
	// UUID names the runtime to the orchestrator; it is the same after a restart of the node.
	UUID string
	// APIs are what modules may use, as "wasi:snapshot_preview1".
	APIs []string
	// MaxModules bounds the modules at a time: 1 to channel.MaxModules.
	MaxModules int
}

// Runtime runs modules. Implementations: runtime/minimal, runtime/unitpods, the tests' fake.
//
// Start, Send and Receive are called by one manager. Send may be called from many goroutines, Receive by one.
// Errors carry an errdefs class.
type Runtime interface {
	// Info tells what the runtime is.
	Info() Info
	// Start brings the runtime up and returns what is added to its registration (nil: nothing); it returns once modules
	// can be created. It is called again, on the same value, after Receive has failed. A runtime that does not come up is
	// errdefs.ErrUnavailable.
	Start(ctx context.Context) (registration map[string]any, err error)
	// Send hands over one message of the manager (seed 4, "Messaging"). It waits while the runtime does not take it, at
	// most until ctx ends. A runtime that is lost is errdefs.ErrUnavailable.
	Send(ctx context.Context, m channel.Message) error
	// Receive waits for the runtime's next message. A runtime that is lost is errdefs.ErrUnavailable: none of its modules
	// runs any more, unless it is an Adopter.
	Receive(ctx context.Context) (channel.Message, error)
	// Close ends the runtime, unless it is an Adopter: then modules go on, and only the connection ends. Start is not
	// called afterwards.
	Close() error
}

// Creator is a runtime that creates modules in another way than by a message of type wire.Create.
type Creator interface {
	// CreateModule starts the module at index. It returns once the module runs or has failed; a module that ends later is told by
	// a message of type wire.Exited, also when its end is seen before CreateModule returns. data has "index".
	CreateModule(ctx context.Context, index int, data wire.ModuleData) error
}

// Deleter is a runtime that deletes modules in another way than by a message of type wire.Delete.
type Deleter interface {
	// DeleteModule ends the module at index. Its end is told by a message of type wire.Exited, as any other.
	DeleteModule(ctx context.Context, index int, uuid string) error
}

// Cleaner is told of modules that have ended, before their index is used again.
type Cleaner interface {
	// CleanupModule removes what is left of the module. exited is the runtime's message, or the manager's when the
	// runtime was lost.
	CleanupModule(ctx context.Context, index int, uuid string, exited channel.Message) error
}

// Grouper is a runtime in which some modules deliver channel messages among themselves.
type Grouper interface {
	// Group names the modules that do so with the one at index; "" is nobody.
	Group(index int) string
}

// Adopter is a runtime whose modules outlive the daemon.
type Adopter interface {
	// Adopt goes on with the module that was created at index by an earlier daemon. It is also called for a module that has
	// ended since, which counts as running where its end is known: wire.Exited follows. False means that nothing of the module
	// is left, or how it ended is not known (a reboot): the manager creates it again. So does an error.
	Adopt(ctx context.Context, index int, data wire.ModuleData) (running bool, err error)
}
