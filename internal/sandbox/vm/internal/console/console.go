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
	// SerialLog is machine.Definition.SerialLog; it is made, for root only, when it is not there.
	SerialLog string
	// Input is machine.SerialInput of the machine; it need not be there yet.
	Input string
	// StateFile is a file of ours, kept as long as SerialLog is: over restarts of the machine too.
	StateFile string
	// OpenLog opens the container's log for appending; the file is nil when none is wanted.
	OpenLog func() (*os.File, error)
	// LogSizeMax is how large that may get, in bytes: output that is more is dropped until it is rotated. 0 is no bound.
	LogSizeMax int64
	Logger     *slog.Logger
}

// Console is the console of a machine that runs. Its methods may be called from many goroutines.
type Console struct {
	relay *relay
	hub   *hub
}

// Open goes on where an earlier Console of the same machine ended, be it by SIGKILL, and serves until Close. A log that cannot be
// opened is an error for the first one only: later ones try again, for the machine may be running.
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

// Attach joins the console until ctx ends, the client goes away or Close: a terminal's bytes both ways, as they are. A client
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

// ReopenLog goes on in the file that Config.OpenLog gives now: the log was rotated.
func (c *Console) ReopenLog() error { return c.relay.reopen() }

// Note puts a line of ours into the container's log, on the stream stderr, where the guest's output is on stdout.
func (c *Console) Note(text string) error { return c.relay.note(text) }

// Drain is for a machine that has ended: it returns when all of its output is in the log and with the clients, an unfinished line as a whole one. An
// end of ctx is an error, with the rest still to come.
func (c *Console) Drain(ctx context.Context) error {
	c.hub.settle()
	return c.relay.drain(ctx)
}

// Close ends what is attached, and the log where it is.
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
