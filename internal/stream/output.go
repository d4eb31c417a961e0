package stream

import (
	"context"
	"fmt"
	"io"
	"sync"

	"github.com/containerd/errdefs"
)

const (
	// MaxBacklog limits the output that waits for an attached client, in bytes. The queues of a container's clients
	// share the bytes of their packets, so together they need only about as much memory as the longest queue.
	MaxBacklog = 8 << 20
	// PacketCost is what each packet adds to the size of a queue besides the length of its data, in bytes.
	PacketCost = 64
)

// ErrSlowClient is the error for a client that was cut off because it reads too slowly.
var ErrSlowClient = fmt.Errorf("attach: cut off, because the client reads more slowly than the container writes, and %d MiB of output are waiting: %w",
	MaxBacklog>>20, errdefs.ErrResourceExhausted)

// Packet is a piece of a container's output. Queues share its bytes.
type Packet struct {
	Stderr bool
	Data   []byte
}

// OutputQueue holds the output that waits for one attached client, so that the reader of the container's output never
// waits for clients. A client that falls too far behind is cut off.
//
//	output ──▶ Put ──▶ queue ──▶ Deliver ──▶ the client's stdout and stderr
//	                     └ full: Put returns false, Cut is closed
type OutputQueue struct {
	cut chan struct{}

	mu    sync.Mutex
	more  sync.Cond
	queue []Packet
	size  int
	ended bool // Put ignores further packets
	err   error
}

// NewOutputQueue makes an empty queue.
func NewOutputQueue() *OutputQueue {
	q := &OutputQueue{cut: make(chan struct{})}
	q.more.L = &q.mu
	return q
}

// Cut returns a channel that is closed when the client is cut off with ErrSlowClient.
func (q *OutputQueue) Cut() <-chan struct{} { return q.cut }

// Put adds a packet. If the queue is full, it cuts the client off and returns false. On an ended queue it does nothing.
func (q *OutputQueue) Put(p Packet) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.ended {
		return true
	}
	q.size += len(p.Data) + PacketCost
	if q.size > MaxBacklog {
		q.queue, q.ended = nil, true
		close(q.cut)
		return false
	}
	q.queue = append(q.queue, p)
	q.more.Signal()
	return true
}

// End ends the output: Deliver writes the queued packets and then returns the given error, which is nil if the
// container has ended.
func (q *OutputQueue) End(err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.ended, q.err = true, err
	q.more.Signal()
}

// Discard ends the queue and drops its packets.
func (q *OutputQueue) Discard() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.queue, q.ended = nil, true
	q.more.Signal()
}

// next waits for a packet; ok is false at the end.
func (q *OutputQueue) next() (p Packet, ok bool, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.queue) == 0 && !q.ended {
		q.more.Wait()
	}
	if len(q.queue) == 0 {
		return Packet{}, false, q.err
	}
	p, q.queue[0] = q.queue[0], Packet{}
	q.queue = q.queue[1:]
	q.size -= len(p.Data) + PacketCost
	return p, true, nil
}

// Deliver writes the queue to the client until the output ends or a write fails. A nil writer discards its stream.
func (q *OutputQueue) Deliver(stdout, stderr io.Writer) error {
	for {
		p, ok, err := q.next()
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

// Serve is like Deliver, but also returns when ctx ends or the client is cut off.
func (q *OutputQueue) Serve(ctx context.Context, stdout, stderr io.Writer) error {
	delivered := make(chan error, 1)
	go func() { delivered <- q.Deliver(stdout, stderr) }()
	var err error
	select {
	case err = <-delivered:
	case <-q.Cut():
		err = ErrSlowClient
	case <-ctx.Done():
	}
	if ctx.Err() != nil {
		return fmt.Errorf("attach: %w", context.Cause(ctx))
	}
	return err
}
