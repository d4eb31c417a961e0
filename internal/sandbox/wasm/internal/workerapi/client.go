package workerapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/fdpass"
)

// Client is the daemon's side of a connection. It is safe for concurrent use. Once the connection has ended, all calls
// fail with errdefs.ErrUnavailable, and a new Client is needed.
type Client struct {
	conn  *net.UnixConn
	hello Hello

	write sync.Mutex

	mu      sync.Mutex
	nextID  uint64
	waiting map[uint64]chan message

	ctx    context.Context // ends with the connection; the cause says why
	end    context.CancelCauseFunc
	events *eventQueue
}

// NewClient sends Hello on a connection to the worker's control socket and subscribes to events. It takes ownership of
// conn even if NewClient fails. The error is errdefs.ErrFailedPrecondition if the worker has another protocol version,
// and ErrUnavailable if the connection ends.
func NewClient(ctx context.Context, conn *net.UnixConn) (*Client, error) {
	return newClient(ctx, conn, true)
}

// NewSessionClient is like NewClient, for a process that only attaches: the connection delivers no events.
func NewSessionClient(ctx context.Context, conn *net.UnixConn) (*Client, error) {
	return newClient(ctx, conn, false)
}

func newClient(ctx context.Context, conn *net.UnixConn, events bool) (*Client, error) {
	c := &Client{conn: conn, waiting: map[uint64]chan message{}, events: newEventQueue()}
	c.ctx, c.end = context.WithCancelCause(context.Background())
	go c.read()
	if err := c.call(ctx, opHello, helloRequest{Version: Version, Events: events}, &c.hello); err != nil {
		c.Close()
		return nil, err
	}
	if c.hello.Version != Version {
		c.Close()
		return nil, fmt.Errorf("wasm worker %s (%s) speaks version %d of the control protocol, but this program speaks version %d: %w",
			c.hello.Name, c.hello.Program, c.hello.Version, Version, errdefs.ErrFailedPrecondition)
	}
	return c, nil
}

// Hello returns the worker's description of itself.
func (c *Client) Hello() Hello { return c.hello }

// Events returns the worker's events. After the connection has ended, the returned channel delivers the events received
// until then and is closed. If the reader is slow, exit events are queued without limit, and old spans are dropped.
func (c *Client) Events() <-chan Event { return c.events.out }

// Done returns a channel that is closed when the connection has ended. Err then says why.
func (c *Client) Done() <-chan struct{} { return c.ctx.Done() }

// Err returns why the connection has ended, or nil while the connection is open.
func (c *Client) Err() error { return context.Cause(c.ctx) }

// Close ends the connection, not the worker or its pods. Call it even if the connection has already ended.
func (c *Client) Close() error {
	c.fail(net.ErrClosed)
	c.events.abandon()
	return nil
}

// Load loads compiled code into the worker, which checks that the component exports every method in its descriptors
// with the right types. If code with the same digest is already loaded, Load does nothing. It returns
// ErrFailedPrecondition for damaged code and for code from another engine version. The text of ErrInvalidArgument names
// the wrong function and type, or the wrong import.
func (c *Client) Load(ctx context.Context, code Code) (Loaded, error) {
	return ask[Loaded](ctx, c, opLoad, &code)
}

// Unload unloads code. Pods that use the code keep it until they are removed.
func (c *Client) Unload(ctx context.Context, digest string) error {
	return c.call(ctx, opUnload, Code{Digest: digest}, nil)
}

// Start starts a pod, or restarts one that has exited. It returns once the pod's server accepts requests or its command
// runs. It returns ErrAlreadyExists if the pod is running, and ErrNotFound if the code is not loaded. If Start fails,
// it leaves nothing behind.
func (c *Client) Start(ctx context.Context, spec PodSpec) (Status, error) {
	return ask[Status](ctx, c, opStart, spec.clone())
}

// Stop stops a pod and returns once the pod has exited. During the grace period, a server refuses new requests and
// completes the requests in progress. A command gets end of file on its standard input and channels, because WASI has
// no signals, and can then exit. When the grace period expires, the pod is killed. A later Stop can only shorten the
// grace period.
func (c *Client) Stop(ctx context.Context, id string, grace time.Duration) (Status, error) {
	return ask[Status](ctx, c, opStop, idRequest{ID: id, Grace: grace})
}

// Kill is Stop without a grace period. It succeeds for a pod that does not exist.
func (c *Client) Kill(ctx context.Context, id string) error {
	return c.call(ctx, opKill, idRequest{ID: id}, nil)
}

// Remove kills the pod if it is running, and forgets it. It succeeds for a pod that does not exist.
func (c *Client) Remove(ctx context.Context, id string) error {
	return c.call(ctx, opRemove, idRequest{ID: id}, nil)
}

// List returns the status of all pods that have not been removed.
func (c *Client) List(ctx context.Context) ([]Status, error) {
	return ask[[]Status](ctx, c, opList, idRequest{})
}

// Stats returns the statistics of the pods with the given IDs, or of all pods if there are no IDs. It omits unknown
// IDs.
func (c *Client) Stats(ctx context.Context, ids ...string) ([]Stats, error) {
	return ask[[]Stats](ctx, c, opStats, idsRequest{IDs: ids})
}

// Metrics returns the per-method counters of the pods with the given IDs, or of all pods if there are no IDs.
func (c *Client) Metrics(ctx context.Context, ids ...string) ([]Metrics, error) {
	return ask[[]Metrics](ctx, c, opMetrics, idsRequest{IDs: ids})
}

// Profile begins to end calls of a pod's component at random moments, those that are the nth of their instances (from 1); with
// 0 it ends that. It returns what has been seen since the last time.
func (c *Client) Profile(ctx context.Context, id string, nth int) (Profile, error) {
	return ask[Profile](ctx, c, opProfile, profileRequest{ID: id, Nth: nth})
}

// ReopenLog replaces the pod's log file.
func (c *Client) ReopenLog(ctx context.Context, id string, file *os.File) error {
	return c.call(ctx, opReopenLog, &fileRequest{ID: id, File: File{File: file}}, nil)
}

// UpdateTLS replaces the pod's certificate and its authorities for client certificates. Open connections keep the old
// ones.
func (c *Client) UpdateTLS(ctx context.Context, id string, t TLS) error {
	return c.call(ctx, opUpdateTLS, tlsRequest{ID: id, TLS: t}, nil)
}

// UpdateDialer gives the pod a new connection to the node's dialer. Connections that guests have opened stay open.
func (c *Client) UpdateDialer(ctx context.Context, id string, dialer *os.File) error {
	return c.call(ctx, opDialer, &fileRequest{ID: id, File: File{File: dialer}}, nil)
}

// Update changes the limits of a running pod. Request limits apply to new requests. Memory and CPU limits apply
// immediately.
func (c *Client) Update(ctx context.Context, u Update) error {
	return c.call(ctx, opUpdate, u, nil)
}

// ask sends a request and returns the reply, decoded as an R.
func ask[R any](ctx context.Context, c *Client, op string, request any) (reply R, err error) {
	err = c.call(ctx, op, request, &reply)
	return reply, err
}

// call sends a request and waits for its reply. If ctx ends first, the worker still completes the request.
func (c *Client) call(ctx context.Context, op string, request, reply any) error {
	body, files, err := pack(request)
	if err != nil {
		return err
	}
	id, answer, err := c.expect()
	if err != nil {
		return err
	}
	defer c.forget(id)
	payload, err := json.Marshal(message{ID: id, Op: op, Body: body})
	if err != nil {
		return err
	}
	if err := c.send(ctx, payload, files); err != nil {
		return err
	}
	select {
	case m := <-answer:
		if m.Error != nil {
			return m.Error
		}
		if reply == nil {
			return nil
		}
		return json.Unmarshal(m.Body, reply)
	case <-c.ctx.Done():
		return c.ended()
	case <-ctx.Done():
		return fmt.Errorf("wasm worker: %s: %w", op, ctx.Err())
	}
}

// sendTimeout bounds the sending of one request, in addition to ctx. A worker always reads, so the timeout expires only
// if the worker is stuck.
const sendTimeout = 30 * time.Second

func (c *Client) send(ctx context.Context, payload []byte, files []*os.File) error {
	c.write.Lock()
	defer c.write.Unlock()
	deadline := time.Now().Add(sendTimeout)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	_ = c.conn.SetWriteDeadline(deadline)
	if err := fdpass.Write(c.conn, MaxMessage, payload, files); err != nil {
		if errors.Is(err, fdpass.ErrFrame) { // nothing was sent
			return fmt.Errorf("%w: %w", err, errdefs.ErrInvalidArgument)
		}
		c.fail(err) // part of the frame may have been sent
		return c.ended()
	}
	return nil
}

func (c *Client) expect() (uint64, chan message, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.Err(); err != nil {
		return 0, nil, fmt.Errorf("wasm worker: %w: %w", err, errdefs.ErrUnavailable)
	}
	c.nextID++
	answer := make(chan message, 1)
	c.waiting[c.nextID] = answer
	return c.nextID, answer, nil
}

func (c *Client) forget(id uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.waiting, id)
}

func (c *Client) ended() error {
	return fmt.Errorf("wasm worker: connection lost: %w: %w", c.Err(), errdefs.ErrUnavailable)
}

// fail ends the connection. Afterwards, Err returns err, unless the connection had already ended with another error.
func (c *Client) fail(err error) {
	c.end(err)
	c.conn.Close()
}

func (c *Client) read() {
	r := fdpass.NewReader(fdpass.NoFiles(c.conn), MaxMessage)
	defer r.Close()
	defer c.events.finish()
	for {
		f, err := r.Next()
		if err != nil {
			c.fail(err)
			return
		}
		var m message
		if err := json.Unmarshal(f.Payload, &m); err != nil {
			c.fail(fmt.Errorf("%w: %w", fdpass.ErrFrame, err))
			return
		}
		if m.ID == 0 {
			c.event(m)
			continue
		}
		c.mu.Lock()
		answer := c.waiting[m.ID]
		delete(c.waiting, m.ID)
		c.mu.Unlock()
		if answer != nil {
			answer <- m
		}
	}
}

// event queues an event. It ignores unknown kinds and invalid content.
func (c *Client) event(m message) {
	var e Event
	var err error
	switch m.Op {
	case eventExited:
		err = json.Unmarshal(m.Body, &e.Exited)
	case eventFallback:
		err = json.Unmarshal(m.Body, &e.Fallback)
	case eventSpans:
		err = json.Unmarshal(m.Body, &e.Spans)
	}
	if err == nil && (e.Exited != nil || e.Fallback != nil || e.Spans != nil) {
		c.events.put(e)
	}
}
