package qmp

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// eventQueue is the capacity of the event channel.
const eventQueue = 128

// Client is a connection to a monitor. It is safe for concurrent use.
type Client struct {
	conn    net.Conn
	version Version
	events  chan Event
	lost    atomic.Uint64
	ctx     context.Context // canceled with the reason when the connection ends
	end     context.CancelCauseFunc

	writing chan struct{} // held by the writer

	mu      sync.Mutex
	next    uint64
	pending map[uint64]chan *message
}

// NewClient waits for the greeting on conn, negotiates capabilities and serves the connection. On failure it closes
// conn. The error is errdefs.ErrUnavailable if the monitor ends or does not answer before ctx ends, and
// errdefs.ErrDataLoss if the peer does not speak QMP.
func NewClient(ctx context.Context, conn net.Conn) (*Client, error) {
	c := &Client{
		conn: conn, events: make(chan Event, eventQueue),
		writing: make(chan struct{}, 1), pending: map[uint64]chan *message{},
	}
	c.ctx, c.end = context.WithCancelCause(context.Background())
	r := bufio.NewReaderSize(conn, 16<<10)
	if err := c.greet(ctx, r); err != nil {
		conn.Close()
		return nil, err
	}
	go c.read(r)
	if err := c.Execute(ctx, "qmp_capabilities", nil, nil); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

func (c *Client) greet(ctx context.Context, r *bufio.Reader) error {
	stop := context.AfterFunc(ctx, func() { _ = c.conn.SetReadDeadline(time.Unix(1, 0)) })
	m, err := readMessage(r)
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	switch {
	case errdefs.IsDataLoss(err):
		return err
	case err != nil && ctx.Err() != nil:
		return fmt.Errorf("QEMU's monitor sent no greeting in time: %w (%w)", context.Cause(ctx), errdefs.ErrUnavailable)
	case err != nil:
		return fmt.Errorf("QEMU's monitor ended before its greeting: %w (%w)", err, errdefs.ErrUnavailable)
	case m.Greeting == nil:
		return fmt.Errorf("QEMU's monitor sent something other than a greeting: %w", errdefs.ErrDataLoss)
	}
	c.version = m.Greeting.Version.QEMU
	return nil
}

// Version returns the version of QEMU.
func (c *Client) Version() Version { return c.version }

// Events returns the channel of events. The channel is closed when the connection ends. If the channel is full, new
// events are dropped, and Lost counts them. When the count has grown, the caller must query the state.
func (c *Client) Events() <-chan Event { return c.events }

// Lost returns the number of dropped events.
func (c *Client) Lost() uint64 { return c.lost.Load() }

// Done returns a channel that is closed when the connection has ended; Err returns the reason.
func (c *Client) Done() <-chan struct{} { return c.ctx.Done() }

// Err returns the reason why the connection ended, or nil.
func (c *Client) Err() error { return context.Cause(c.ctx) }

// Close closes the connection. QEMU continues to run.
func (c *Client) Close() { c.fail(net.ErrClosed) }

// Execute runs a command and stores its return value in result, unless result is nil. arguments is nil or marshals to a
// JSON object. A failure that QEMU reports is an *Error. If the connection ends, or ctx ends before the answer, Execute
// returns errdefs.ErrUnavailable; the command may have run.
func (c *Client) Execute(ctx context.Context, command string, arguments, result any) error {
	return c.ExecuteFile(ctx, command, arguments, nil, result)
}

// ExecuteFile is like Execute for a command that takes a file, such as add-fd. The monitor must be a unix socket.
func (c *Client) ExecuteFile(ctx context.Context, command string, arguments any, file *os.File, result any) error {
	id, answer, err := c.register()
	if err != nil {
		return fmt.Errorf("%s: %w", command, err)
	}
	defer c.forget(id)
	line, err := json.Marshal(struct {
		Execute   string `json:"execute"`
		Arguments any    `json:"arguments,omitempty"`
		ID        uint64 `json:"id"`
	}{command, arguments, id})
	if err != nil {
		return fmt.Errorf("%s: %w (%w)", command, err, errdefs.ErrInvalidArgument)
	}
	if err := c.write(ctx, append(line, '\n'), file); err != nil {
		return fmt.Errorf("%s: %w", command, err)
	}
	select {
	case m := <-answer:
		if m.Error != nil {
			return fmt.Errorf("%s: %w", command, m.Error)
		}
		if result == nil {
			return nil
		}
		if err := json.Unmarshal(m.Return, result); err != nil {
			return fmt.Errorf("%s: unexpected answer %.80q: %w (%w)", command, m.Return, err, errdefs.ErrDataLoss)
		}
		return nil
	case <-c.ctx.Done():
		return fmt.Errorf("%s: %w", command, c.endedError())
	case <-ctx.Done():
		return fmt.Errorf("%s: QEMU's monitor does not answer: %w (%w)", command, context.Cause(ctx), errdefs.ErrUnavailable)
	}
}

func (c *Client) register() (uint64, chan *message, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.Err(); err != nil {
		return 0, nil, fmt.Errorf("QEMU's monitor ended: %w (%w)", err, errdefs.ErrUnavailable)
	}
	c.next++
	answer := make(chan *message, 1) // buffered, so that the reader never blocks
	c.pending[c.next] = answer
	return c.next, answer, nil
}

func (c *Client) forget(id uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.pending, id)
}

// write sends a line, with a file unless it is nil. If it can send only a part, it closes the connection, because the next line
// would be garbled.
func (c *Client) write(ctx context.Context, line []byte, file *os.File) error {
	select {
	case c.writing <- struct{}{}:
	case <-c.ctx.Done():
		return c.endedError()
	case <-ctx.Done():
		return fmt.Errorf("QEMU's monitor accepts no command: %w (%w)", context.Cause(ctx), errdefs.ErrUnavailable)
	}
	defer func() { <-c.writing }()
	_ = c.conn.SetWriteDeadline(time.Time{})
	cut := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_ = c.conn.SetWriteDeadline(time.Unix(1, 0))
		close(cut)
	})
	n, err := c.send(line, file)
	if !stop() {
		<-cut // otherwise the deadline could hit the next writer
	}
	if err == nil {
		return nil
	}
	if n > 0 || ctx.Err() == nil {
		c.fail(err)
	}
	return fmt.Errorf("QEMU's monitor accepts no command: %w (%w)", err, errdefs.ErrUnavailable)
}

func (c *Client) send(line []byte, file *os.File) (int, error) {
	if file == nil {
		return c.conn.Write(line)
	}
	socket, ok := c.conn.(*net.UnixConn)
	if !ok {
		return 0, fmt.Errorf("a %T cannot pass files: %w", c.conn, errdefs.ErrNotImplemented)
	}
	n, _, err := socket.WriteMsgUnix(line, unix.UnixRights(int(file.Fd())), nil)
	runtime.KeepAlive(file)
	if err == nil && n < len(line) {
		err = io.ErrShortWrite
	}
	return n, err
}

func (c *Client) read(r *bufio.Reader) {
	defer close(c.events)
	for {
		m, err := readMessage(r)
		if err != nil {
			c.fail(err)
			return
		}
		c.deliver(m)
	}
}

func (c *Client) deliver(m *message) {
	switch {
	case m.Event != "":
		select {
		case c.events <- Event{Name: m.Event, Data: m.Data, Time: m.time()}:
		default:
			c.lost.Add(1)
		}
	case m.ID != nil && (m.Return != nil || m.Error != nil):
		c.mu.Lock()
		answer := c.pending[*m.ID]
		delete(c.pending, *m.ID)
		c.mu.Unlock()
		if answer != nil {
			answer <- m
		}
	}
}

// fail closes the connection. If fail is called again, Err still returns the reason of the first call.
func (c *Client) fail(err error) {
	c.end(err)
	c.conn.Close()
}

func (c *Client) endedError() error {
	err := c.Err()
	if errdefs.IsDataLoss(err) {
		return err
	}
	return fmt.Errorf("QEMU's monitor ended: %w (%w)", err, errdefs.ErrUnavailable)
}
