package stream

import (
	"context"
	"fmt"
	"io"
	"sync"

	"github.com/containerd/errdefs"
)

const (
	// Backlog is how much output may wait for a client, in bytes; one that is further behind is cut off. Clients share what
	// waits for them, so that it bounds a container's memory, not each client's.
	Backlog = 8 << 20
	// PacketCost is what a packet costs beside its bytes.
	PacketCost = 64
)

// ErrSlow is for clients that are cut off.
var ErrSlow = fmt.Errorf("attach: cut off, since the client reads more slowly than the container writes and %d MiB of output wait: %w",
	Backlog>>20, errdefs.ErrResourceExhausted)

// Packet is a piece of output; its bytes are shared by the clients.
type Packet struct {
	Stderr bool
	Data   []byte
}

// Client is an attached client's queue of output.
type Client struct {
	cut chan struct{}

	mu    sync.Mutex
	more  sync.Cond
	queue []Packet
	size  int
	over  bool // nothing more will come
	err   error
}

// NewClient makes a client for whom nothing waits.
func NewClient() *Client {
	c := &Client{cut: make(chan struct{})}
	c.more.L = &c.mu
	return c
}

// Cut is closed when the client is cut off: ErrSlow.
func (c *Client) Cut() <-chan struct{} { return c.cut }

// Put queues a packet. It is false when the client is too far behind: then it is cut off.
func (c *Client) Put(p Packet) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over {
		return true
	}
	c.size += len(p.Data) + PacketCost
	if c.size > Backlog {
		c.queue, c.over = nil, true
		close(c.cut)
		return false
	}
	c.queue = append(c.queue, p)
	c.more.Signal()
	return true
}

// End says that nothing comes after what is queued; err is why, if not by the container's end.
func (c *Client) End(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.over, c.err = true, err
	c.more.Signal()
}

// Discard ends a client that takes no more.
func (c *Client) Discard() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.queue, c.over = nil, true
	c.more.Signal()
}

// next waits for a packet; there is none at the end.
func (c *Client) next() (p Packet, ok bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(c.queue) == 0 && !c.over {
		c.more.Wait()
	}
	if len(c.queue) == 0 {
		return Packet{}, false, c.err
	}
	p, c.queue[0] = c.queue[0], Packet{}
	c.queue = c.queue[1:]
	c.size -= len(p.Data) + PacketCost
	return p, true, nil
}

// Deliver writes what is queued, until the container ends or a write fails, which is a client that went away. A writer that is
// nil gets nothing.
func (c *Client) Deliver(stdout, stderr io.Writer) error {
	for {
		p, ok, err := c.next()
		if !ok {
			return err
		}
		to := stdout
		if p.Stderr {
			to = stderr
		}
		if to == nil {
			continue
		}
		if _, err := to.Write(p.Data); err != nil {
			return fmt.Errorf("attach: the client went away: %w", err)
		}
	}
}

// Serve is Deliver until ctx ends or the client is cut off.
func (c *Client) Serve(ctx context.Context, stdout, stderr io.Writer) error {
	delivered := make(chan error, 1)
	go func() { delivered <- c.Deliver(stdout, stderr) }()
	var err error
	select {
	case err = <-delivered:
	case <-c.Cut():
		err = ErrSlow
	case <-ctx.Done():
	}
	if ctx.Err() != nil {
		return fmt.Errorf("attach: %w", context.Cause(ctx))
	}
	return err
}
