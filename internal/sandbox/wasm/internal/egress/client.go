package egress

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"

	"github.com/tripod-run/tripod/internal/fdpass"
)

// Client is a pod's connection to the dialer. All methods can be called concurrently.
type Client struct {
	conn    *net.UnixConn
	slots   chan struct{} // one for each pending request
	done    chan struct{}
	writing sync.Mutex

	mu      sync.Mutex
	last    uint64
	pending map[uint64]chan answer // requests without a reply; nil if nobody waits for it
	closed  bool
}

type answer struct {
	Reply
	file *os.File
}

// errGone is the error of requests whose dialer has ended.
var errGone = &Error{Code: CodeUnavailable, Message: "the node's dialer has ended"}

// NewClient makes a Client, which owns the connection.
func NewClient(conn *net.UnixConn) *Client {
	c := &Client{conn: conn, slots: make(chan struct{}, MaxPending), done: make(chan struct{}), pending: map[uint64]chan answer{}}
	go c.read()
	return c
}

// Done is closed when the dialer has ended, or after Close.
func (c *Client) Done() <-chan struct{} { return c.done }

// Close ends the pod's egress. Requests in progress fail; open connections are not affected.
func (c *Client) Close() { c.conn.Close() }

// Connect opens a connection from the pod's network namespace. The network is "tcp" or "udp", and the host is a name or an
// address. An error of the dialer is an *Error; otherwise it is the cause of ctx.
func (c *Client) Connect(ctx context.Context, network, host string, port uint16) (net.Conn, error) {
	a, err := c.do(ctx, Request{Op: OpConnect, Network: network, Host: host, Port: port})
	if err != nil {
		return nil, err
	}
	if a.file == nil {
		return nil, &Error{Code: CodeUnavailable, Message: "the dialer passed no socket"}
	}
	defer a.file.Close() // net.FileConn makes a copy
	return net.FileConn(a.file)
}

// Resolve returns the addresses of a name that the pod may connect to. Errors are like those of Connect.
func (c *Client) Resolve(ctx context.Context, name string) ([]netip.Addr, error) {
	a, err := c.do(ctx, Request{Op: OpResolve, Host: name})
	if a.file != nil {
		a.file.Close()
	}
	return a.Addrs, err
}

// do sends a request and waits for the answer. If ctx ends first, do cancels the request, which then keeps its slot until
// the dialer replies.
func (c *Client) do(ctx context.Context, r Request) (answer, error) {
	select {
	case c.slots <- struct{}{}:
	case <-c.done:
		return answer{}, errGone
	case <-ctx.Done():
		return answer{}, context.Cause(ctx)
	}
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return answer{}, errGone
	}
	c.last++
	r.ID = c.last
	answered := make(chan answer, 1)
	c.pending[r.ID] = answered
	c.mu.Unlock()
	if err := c.send(r); err != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.take(r.ID) // there will be no reply
		return answer{}, err
	}
	select {
	case a := <-answered:
		if a.Error != nil {
			return answer{}, a.Error
		}
		return a, nil
	case <-ctx.Done():
		if c.giveUp(r.ID) {
			_ = c.send(Request{ID: r.ID, Op: OpCancel})
		} else if a := <-answered; a.file != nil {
			a.file.Close()
		}
		return answer{}, context.Cause(ctx)
	}
}

// giveUp makes the client discard the reply to a request. It returns false if the reply has arrived.
func (c *Client) giveUp(id uint64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, pending := c.pending[id]
	if pending {
		c.pending[id] = nil
	}
	return pending
}

// take removes a request and frees its slot. It returns nil if nobody waits for the reply. The caller holds c.mu.
func (c *Client) take(id uint64) chan answer {
	answered, pending := c.pending[id]
	if pending {
		delete(c.pending, id)
		<-c.slots
	}
	return answered
}

func (c *Client) send(r Request) error {
	payload, err := json.Marshal(r)
	if err != nil {
		return err
	}
	c.writing.Lock()
	defer c.writing.Unlock()
	err = fdpass.Write(c.conn, MaxMessage, payload, nil)
	switch {
	case errors.Is(err, fdpass.ErrFrame):
		return &Error{Code: CodeInvalid, Message: "the host name is too long"}
	case err != nil:
		return errGone
	}
	return nil
}

// read delivers replies until the connection ends.
func (c *Client) read() {
	r := fdpass.NewReader(c.conn, MaxMessage)
	defer r.Close()
	for {
		f, err := r.Next()
		if err == nil {
			err = c.deliver(&f)
			f.Close()
		}
		if err != nil {
			c.end()
			return
		}
	}
}

func (c *Client) deliver(f *fdpass.Frame) error {
	var a answer
	if err := json.Unmarshal(f.Payload, &a.Reply); err != nil {
		return fmt.Errorf("%w: not a JSON reply: %w", fdpass.ErrFrame, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	answered := c.take(a.ID)
	if answered == nil {
		return nil // the request was given up
	}
	if len(f.Files) > 0 {
		a.file, f.Files[0] = f.Files[0], nil
	}
	answered <- a
	return nil
}

func (c *Client) end() {
	c.conn.Close()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	for id := range c.pending {
		if answered := c.take(id); answered != nil {
			answered <- answer{Reply: Reply{Error: errGone}}
		}
	}
	close(c.done)
}
