package console

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// Config configures a console.
type Config struct {
	// SerialLog is the path of the machine's serial log (machine.Definition.SerialLog). A missing file is made,
	// readable by root only.
	SerialLog string
	// Input is the path of the machine's serial input (machine.SerialInput). The file may be missing until the machine
	// starts.
	Input string
	// StateFile is the path of the file with the offsets. Like SerialLog, the file must survive restarts of the machine.
	StateFile string
	// OpenLog opens the container's log for appending. It returns nil, nil if the container has no log.
	OpenLog func() (*os.File, error)
	// LogSizeMax is the maximum size of the container's log in bytes; 0 means no limit. Output beyond the limit is dropped
	// until the log is rotated.
	LogSizeMax int64
	// TTY writes unfinished lines to the log at once, so that whoever follows it sees prompts.
	TTY    bool
	Logger *slog.Logger
}

// Console is the console of a running machine. Its methods are safe for concurrent use.
type Console struct {
	relay *relay
	hub   *hub
}

// Open opens a machine's console, which works until Close. It continues where the machine's previous Console stopped,
// even if SIGKILL ended the previous daemon. If the container's log cannot be opened, Open fails only for the machine's
// first Console. A later Console retries in the background, because the machine may already be running.
func Open(cfg Config) (*Console, error) {
	r, err := openRelay(cfg)
	if err != nil {
		return nil, fmt.Errorf("console: %w", err)
	}
	h, err := openHub(cfg)
	if err != nil {
		return nil, fmt.Errorf("console: %w", errors.Join(err, r.release()))
	}
	r.start()
	return &Console{relay: r, hub: h}, nil
}

// Attach attaches a client until ctx ends, the client leaves, or Close is called. Bytes pass unchanged. A client that
// does not read its output is detached with errdefs.ErrResourceExhausted. A serial console has no size, so req.Resize
// is discarded. After Attach has returned, a read from req.Stdin or a write to req.Stdout may still be under way.
func (c *Console) Attach(ctx context.Context, req sandbox.AttachRequest) error {
	return c.hub.attach(ctx, req)
}

// Attach is like Console.Attach, but in another process than the one with the machine's Console: it neither logs nor
// frees the output. The channel ended must be closed when the machine has ended. It uses only the fields SerialLog,
// Input and Logger of the configuration.
func Attach(ctx context.Context, cfg Config, ended <-chan struct{}, req sandbox.AttachRequest) error {
	h, err := openHub(cfg)
	if err != nil {
		return fmt.Errorf("attach: the machine has ended: %w: %w", err, errdefs.ErrFailedPrecondition)
	}
	closeOnce := sync.OnceFunc(h.close)
	defer closeOnce()
	attached, leave := context.WithCancel(ctx)
	defer leave()
	go func() {
		select {
		case <-ended:
			h.flush()
			closeOnce() // sends the client what is queued, and ends its session
		case <-attached.Done():
		}
	}()
	return h.attach(ctx, req)
}

// ReopenLog calls Config.OpenLog again, after the log was rotated, and continues in the new file.
func (c *Console) ReopenLog() error { return c.relay.reopen() }

// Note writes a line to the container's log, as stderr. The guest's output is stdout.
func (c *Console) Note(text string) error { return c.relay.note(text) }

// Drain waits until all output of an ended machine, including an unfinished last line, is in the log and has been sent
// to the clients. It returns an error if ctx ends first.
func (c *Console) Drain(ctx context.Context) error {
	c.hub.flush()
	return c.relay.drain(ctx)
}

// Close detaches the clients and stops logging.
func (c *Console) Close() error {
	c.hub.close()
	return c.relay.close()
}

func discardSizes(sizes <-chan sandbox.TermSize, stop <-chan struct{}) {
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
