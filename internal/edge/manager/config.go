package manager

import (
	"cmp"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/runtime"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

// Config configures a Manager.
type Config struct {
	// Root is the daemon's directory for files that survive a reboot. The record is edge/manager.db in this directory.
	Root string
	// UUID identifies the manager to the orchestrator and never changes; Name is for people.
	UUID, Name string
	Topics     wire.Topics
	// MQTT configures the connection. The manager sets NoLocal, the will and the handlers, and ClientID if it is empty.
	MQTT mqtt.Config
	// Dial makes the client; mqtt.New by default.
	Dial     func(mqtt.Config) (mqtt.Client, error)
	Runtimes []runtime.Runtime
	// KeepAlive is the time between keepalives of a runtime. By default the orchestrator chooses the time; if the
	// orchestrator chooses none, the time is 60 s.
	KeepAlive time.Duration
	Limits    Limits
	// RegisterTimeout bounds the wait for the orchestrator's answer; 5 s by default.
	RegisterTimeout time.Duration
	// BackoffMin and BackoffMax bound the delays between attempts to register, to start a runtime and to restart a module.
	// The delays double each time; 500 ms and 30 s by default.
	BackoffMin, BackoffMax time.Duration
	// Probation is how long a module must run for its runtime's later death not to count against it; 10 s by default.
	Probation time.Duration
	Log       *slog.Logger
}

// Limits are the limits of one module.
type Limits struct {
	// Messages and Bytes bound the queue for a module that does not read; 1024 and 16 MiB by default. A full queue drops
	// the oldest message. A message larger than Bytes fits only into an empty queue.
	Messages int
	Bytes    int
	// MessagesPerSecond and BytesPerSecond bound the messages that a module publishes, with bursts of one second's
	// worth. Messages beyond these bounds are dropped. 0 means unlimited.
	MessagesPerSecond float64
	BytesPerSecond    float64
}

// defaultKeepAlive is the time between keepalives if neither the configuration nor the orchestrator sets it.
const defaultKeepAlive = 60 * time.Second

func (c *Config) complete() error {
	if err := wire.ValidName("uuid", c.UUID); err != nil {
		return fmt.Errorf("the edge manager: %w", err)
	}
	if err := channel.ValidTopic(c.Topics.Realm); err != nil {
		return fmt.Errorf("the edge manager's realm: %w", err)
	}
	if c.Dial == nil {
		c.Dial = mqtt.New
	}
	seen := []string{c.UUID}
	for _, rt := range c.Runtimes {
		info := rt.Info()
		if err := wire.ValidName("uuid", info.UUID); err != nil {
			return fmt.Errorf("the edge runtime %q: %w", info.Name, err)
		}
		if info.MaxModules < 1 || info.MaxModules > channel.MaxModules {
			return fmt.Errorf("the edge runtime %q: %d modules at a time: want 1 to %d: %w", info.Name, info.MaxModules, channel.MaxModules,
				errdefs.ErrInvalidArgument)
		}
		if slices.Contains(seen, info.UUID) {
			return fmt.Errorf("the edge runtime %q: its uuid %s is in use: %w", info.Name, info.UUID, errdefs.ErrInvalidArgument)
		}
		seen = append(seen, info.UUID)
	}
	c.RegisterTimeout = cmp.Or(c.RegisterTimeout, 5*time.Second)
	c.BackoffMin = cmp.Or(c.BackoffMin, 500*time.Millisecond)
	c.BackoffMax = cmp.Or(c.BackoffMax, max(30*time.Second, c.BackoffMin))
	c.Probation = cmp.Or(c.Probation, stable)
	c.Limits.Messages = cmp.Or(c.Limits.Messages, 1024)
	c.Limits.Bytes = cmp.Or(c.Limits.Bytes, 16<<20)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return nil
}
