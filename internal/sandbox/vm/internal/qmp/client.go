package qmp

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
)

// eventQueue is how many events wait for their reader.
const eventQueue = 128

// Client is a connection to a monitor. Its methods may be called from many goroutines.
type Client struct {
	conn    net.Conn
	version Version
	events  chan Event
	lost    atomic.Uint64
	ctx     context.Context // ends with the connection, for its reason
	end     context.CancelCauseFunc

	writing chan struct{} // holds one token: who has it writes

	mu      sync.Mutex
	next    uint64
	pending map[uint64]chan *message
}

// NewClient waits for the greeting on conn, negotiates and serves the connection from then on. It is closed when that
// fails: errdefs.ErrUnavailable for a monitor that ends or does not answer until ctx ends, errdefs.ErrDataLoss for one
// that speaks something else.
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
		return fmt.Errorf("QEMU's monitor does not greet: %w (%w)", context.Cause(ctx), errdefs.ErrUnavailable)
	case err != nil:
		return fmt.Errorf("QEMU's monitor ended before it greeted: %w (%w)", err, errdefs.ErrUnavailable)
	case m.Greeting == nil:
		return fmt.Errorf("QEMU's monitor began without a greeting: %w", errdefs.ErrDataLoss)
	}
	c.version = m.Greeting.Version.QEMU
	return nil
}

// Version is that of the QEMU at the other end.
func (c *Client) Version() Version { return c.version }

// Events gives what happens. It is closed with the connection. When it is not read, the latest events are dropped and
// counted by Lost: then the state must be asked for.
func (c *Client) Events() <-chan Event { return c.events }

// Lost is how many events were dropped so far.
func (c *Client) Lost() uint64 { return c.lost.Load() }

// Done is closed when the connection has ended; Err tells why.
func (c *Client) Done() <-chan struct{} { return c.ctx.Done() }

// Err is why the connection ended, nil while it has not.
func (c *Client) Err() error { return context.Cause(c.ctx) }

// Close ends the connection. QEMU goes on.
func (c *Client) Close() { c.fail(net.ErrClosed) }

// Execute runs a command with its arguments (nil for none, else what is JSON for an object) and stores what it returns
// in result, unless that is nil. A failure that QEMU reports is an *Error. A connection that ends, or an answer that
// does not come until ctx ends, is errdefs.ErrUnavailable; the command may have been run then.
func (c *Client) Execute(ctx context.Context, command string, arguments, result any) error {
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
	if err := c.write(ctx, append(line, '\n')); err != nil {
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
			return fmt.Errorf("%s: answered %.80q: %w (%w)", command, m.Return, err, errdefs.ErrDataLoss)
		}
		return nil
	case <-c.ctx.Done():
		return fmt.Errorf("%s: %w", command, c.ended())
	case <-ctx.Done():
		return fmt.Errorf("%s: QEMU's monitor does not answer: %w (%w)", command, context.Cause(ctx), errdefs.ErrUnavailable)
	}
}

func (c *Client) register() (uint64, chan *message, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.Err(); err != nil {
		return 0, nil, fmt.Errorf("QEMU's monitor: %w (%w)", err, errdefs.ErrUnavailable)
	}
	c.next++
	answer := make(chan *message, 1) // so that the reader never waits
	c.pending[c.next] = answer
	return c.next, answer, nil
}

func (c *Client) forget(id uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.pending, id)
}

// write sends a line, or ends the connection: half a line would spoil the next.
func (c *Client) write(ctx context.Context, line []byte) error {
	select {
	case c.writing <- struct{}{}:
	case <-c.ctx.Done():
		return c.ended()
	case <-ctx.Done():
		return fmt.Errorf("QEMU's monitor takes no command: %w (%w)", context.Cause(ctx), errdefs.ErrUnavailable)
	}
	defer func() { <-c.writing }()
	_ = c.conn.SetWriteDeadline(time.Time{})
	cut := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_ = c.conn.SetWriteDeadline(time.Unix(1, 0))
		close(cut)
	})
	n, err := c.conn.Write(line)
	if !stop() {
		<-cut // or it would cut the next writer
	}
	if err == nil {
		return nil
	}
	if n > 0 || ctx.Err() == nil {
		c.fail(err)
	}
	return fmt.Errorf("QEMU's monitor takes no command: %w (%w)", err, errdefs.ErrUnavailable)
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
		case c.events <- Event{Name: m.Event, Data: m.Data, Time: m.at()}:
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

// fail ends the connection for a reason; the first one counts.
func (c *Client) fail(err error) {
	c.end(err)
	c.conn.Close()
}

func (c *Client) ended() error {
	err := c.Err()
	if errdefs.IsDataLoss(err) {
		return err
	}
	return fmt.Errorf("QEMU's monitor ended: %w (%w)", err, errdefs.ErrUnavailable)
}
