package console

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// Config says where a console's parts are.
type Config struct {
	// SerialLog is machine.Definition.SerialLog. It is made, for root only, if it is missing.
	SerialLog string
	// Input is machine.SerialInput of the machine. It may be missing until the machine starts.
	Input string
	// StateFile holds the offsets. It is kept as long as SerialLog, over restarts of the machine too.
	StateFile string
	// OpenLog opens the container's log for appending; the file is nil if the container has none.
	OpenLog func() (*os.File, error)
	// LogSizeMax bounds the container's log, in bytes. Further output is dropped until the log is rotated. 0 is no bound.
	LogSizeMax int64
	Logger     *slog.Logger
}

// Console is the console of a machine that runs. Its methods may be called from many goroutines.
type Console struct {
	relay *relay
	hub   *hub
}

// Open continues where an earlier Console of the machine ended, even by SIGKILL, and serves until Close. A log that cannot be
// opened is an error for the first Console of a machine only; later ones retry, since the machine may be running.
func Open(cfg Config) (*Console, error) {
	r, err := openRelay(cfg)
	if err != nil {
		return nil, fmt.Errorf("console: %w", err)
	}
	h, err := openHub(cfg)
	if err != nil {
		return nil, fmt.Errorf("console: %w", errors.Join(err, r.abandon()))
	}
	r.needs = h.needs
	r.start()
	return &Console{relay: r, hub: h}, nil
}

// Attach attaches a client until ctx ends, the client leaves or Close. Bytes pass unchanged, as on a terminal. A client
// that does not read its output is cut off with errdefs.ErrResourceExhausted. The size of a serial console cannot be set:
// req.Resize is drained. After Attach has returned a read of req.Stdin or a write to req.Stdout may still be under way.
func (c *Console) Attach(ctx context.Context, req sandbox.AttachRequest) error {
	client := c.hub.add()
	if client == nil {
		return fmt.Errorf("attach: the machine has ended: %w", errdefs.ErrFailedPrecondition)
	}
	defer c.hub.drop(client)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go ignoreSizes(req.Resize, ctx.Done())
	if req.Stdin != nil {
		go c.hub.send(ctx, req.Stdin)
	}
	return client.Serve(ctx, req.Stdout, nil)
}

// ReopenLog continues in the file that Config.OpenLog returns now, after a rotation.
func (c *Console) ReopenLog() error { return c.relay.reopen() }

// Note writes a line to the container's log on stderr; the guest's output is on stdout.
func (c *Console) Note(text string) error { return c.relay.note(text) }

// Drain is for a machine that has ended. It returns when all output is in the log and sent to the clients, an unfinished last
// line included, or with an error when ctx ends first.
func (c *Console) Drain(ctx context.Context) error {
	c.hub.settle()
	return c.relay.drain(ctx)
}

// Close detaches the clients and stops logging.
func (c *Console) Close() error {
	c.hub.close()
	return c.relay.close()
}

func ignoreSizes(sizes <-chan sandbox.TermSize, stop <-chan struct{}) {
	for {
		select {
		case _, ok := <-sizes:
			if !ok {
				return
			}
		case <-stop:
			return
		}
	}
}
