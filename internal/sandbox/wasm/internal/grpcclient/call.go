package grpcclient

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"

	"google.golang.org/grpc/codes"

	"github.com/tripod-run/tripod/internal/component/wasi"
	"github.com/tripod-run/tripod/internal/component/wasihttp"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/dataplane"
)

const (
	// prefixSize is the size of a message's prefix: a flag for compression, and the message's length.
	prefixSize = 5
	// firstRead is how many bytes of a message are allocated before any of them have arrived.
	firstRead = 64 << 10
	// entryCost is the memory of a metadata entry besides its key and value, in bytes.
	entryCost = 128
)

// Kind is a kind of Event.
type Kind int

// The kinds of events, in the order of the cases of the variant event.
const (
	Header Kind = iota
	Message
	End
	Pending
)

// Event is what a server has sent.
type Event struct {
	Kind Kind
	// Metadata is the header, or the trailer for End.
	Metadata http.Header
	// Size is the size of the message in bytes.
	Size int
	// Status is the status at the End; nil means OK.
	Status *dataplane.Status
}

// Sending is the outcome of Call.Send.
type Sending int

// The outcomes of Send, in the order of the cases of the enum sending.
const (
	Sent  Sending = iota
	Busy          // the previous message is still being sent
	Ended         // the server reads no more
)

// Call is one call. All methods can be called concurrently; only Close waits.
type Call struct {
	state  *wasi.State
	target string
	ctx    context.Context
	cancel context.CancelCauseFunc
	max    int
	done   chan struct{} // closed when the goroutine that receives has returned

	mu       sync.Mutex
	changed  sync.Cond
	wake     func() // nil before Notify
	waking   bool   // unlock calls wake
	held     int    // bytes that the State counts for the call
	out      []byte // the unsent part of the message that is being sent, with its prefix
	outSize  int    // of the whole message
	finished bool   // the guest sends no more messages
	refusing bool   // the transport reads no more of the body
	events   []Event
	message  []byte // of the event Message, until Take
	over     bool   // the End is in events, or was returned
}

// Start begins a call. The State counts what the call holds. A nil transport means that the guest may not call out. If
// the call cannot be sent, Start returns its status. Otherwise, the caller must call Close.
func Start(ctx context.Context, state *wasi.State, transport http.RoundTripper, r *Request) (*Call, *dataplane.Status) {
	request, st := r.build()
	if st != nil {
		return nil, st
	}
	if transport == nil {
		return nil, dataplane.Errorf(codes.PermissionDenied, "the pod may not call out (annotation egress)")
	}
	size := wasihttp.CallSize + r.size()
	if !state.Hold(size) {
		return nil, errHeld()
	}
	c := &Call{state: state, target: r.Target, max: int(min(r.MaxReceive, 1<<31-1)), held: size, done: make(chan struct{})}
	c.changed.L = &c.mu
	end := context.CancelFunc(func() {})
	if r.Timeout >= 0 {
		ctx, end = context.WithTimeout(ctx, r.Timeout)
	}
	c.ctx, c.cancel = context.WithCancelCause(ctx)
	request = request.WithContext(c.ctx)
	request.Body = (*body)(c)
	// While the transport waits for the body, it does not notice the end of the context.
	stop := context.AfterFunc(c.ctx, func() { _ = request.Body.Close() })
	go func() {
		defer close(c.done)
		defer end()
		defer stop()
		if err := state.Guard("outgoing gRPC call", func() error { c.run(transport, request); return nil }); err != nil {
			c.end(dataplane.Errorf(codes.Internal, "internal error; see the node's log"), nil)
		}
	}()
	return c, nil
}

func errHeld() *dataplane.Status {
	return dataplane.Errorf(codes.ResourceExhausted,
		"the component's outgoing calls need more memory than wasm.max_host_bytes or an instance's limit allows")
}

// Notify makes the call wake the guest when Ready can have changed.
func (c *Call) Notify(wake func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.wake = wake
}

// notify is called after a change of what Ready returns. The caller holds the lock, and calls unlock.
func (c *Call) notify() {
	c.changed.Broadcast()
	c.waking = true
}

// unlock releases the lock, and wakes the guest if notify was called. A wake-up must not happen under the lock, which the
// guest's thread can wait for.
func (c *Call) unlock() {
	wake := c.wake
	if !c.waking {
		wake = nil
	}
	c.waking = false
	c.mu.Unlock()
	if wake != nil {
		wake()
	}
}

// Ready reports whether Next would not return Pending, or with write, whether Send would not return Busy.
func (c *Call) Ready(write bool) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if write {
		return len(c.out) == 0
	}
	return len(c.events) > 0 || c.over
}

// hold adds n to the bytes that the State counts for the call. The caller holds the lock.
func (c *Call) hold(n int) bool {
	if !c.state.Hold(n) {
		return false
	}
	c.held += n
	return true
}

// Send begins to send a message, and does not keep it.
func (c *Call) Send(message []byte) Sending {
	c.mu.Lock()
	defer c.unlock()
	switch {
	case c.over || c.refusing || c.finished:
		return Ended
	case len(c.out) > 0:
		return Busy
	case !c.hold(prefixSize + len(message)):
		c.fail(errHeld())
		return Ended
	}
	c.outSize = prefixSize + len(message)
	c.out = make([]byte, prefixSize, c.outSize)
	binary.BigEndian.PutUint32(c.out[1:], uint32(len(message)))
	c.out = append(c.out, message...)
	c.changed.Broadcast()
	return Sent
}

// Finish ends the stream of messages to the server, after the message that is being sent.
func (c *Call) Finish() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.finished = true
	c.changed.Broadcast()
}

// Next returns what the server has sent next. A Message is returned again until Take, and the End forever.
func (c *Call) Next() Event {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.events) == 0 {
		return Event{Kind: Pending}
	}
	e := c.events[0]
	if e.Kind == Header {
		c.events = c.events[1:]
	}
	return e
}

// Take returns the message that Next has announced. It returns false if there is none.
func (c *Call) Take() ([]byte, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.events) == 0 || c.events[0].Kind != Message {
		return nil, false
	}
	m := c.message
	c.hold(-cap(m))
	c.message, c.events = nil, c.events[1:]
	c.changed.Broadcast()
	return m, true
}

// Close cancels the call, unless it has ended, and waits until it holds nothing.
func (c *Call) Close() {
	c.cancel(context.Canceled)
	c.mu.Lock()
	c.refusing, c.over = true, true
	c.changed.Broadcast()
	c.mu.Unlock()
	<-c.done
	c.mu.Lock()
	defer c.mu.Unlock()
	c.state.Hold(-c.held)
	c.held, c.out, c.outSize, c.message, c.events, c.wake = 0, nil, 0, nil, nil, nil
}

// fail ends the call with a status of the host. The caller holds the lock.
func (c *Call) fail(st *dataplane.Status) {
	c.endLocked(st, nil)
	c.cancel(st)
}

// end ends the call.
func (c *Call) end(st *dataplane.Status, trailer http.Header) {
	c.mu.Lock()
	defer c.unlock()
	c.endLocked(st, trailer)
}

func (c *Call) endLocked(st *dataplane.Status, trailer http.Header) {
	if c.over {
		return
	}
	c.over = true
	c.dropOut()
	c.events = append(c.events, Event{Kind: End, Status: st, Metadata: trailer})
	c.notify()
}

// dropOut discards the message that is being sent. The caller holds the lock.
func (c *Call) dropOut() {
	c.hold(-c.outSize)
	c.out, c.outSize, c.refusing = nil, 0, true
}

// run sends the request, and receives the response.
func (c *Call) run(transport http.RoundTripper, request *http.Request) {
	response, err := transport.RoundTrip(request)
	if err != nil {
		c.end(c.statusOf(err), nil)
		return
	}
	defer response.Body.Close()
	if st := checkResponse(response); st != nil {
		c.end(st, nil)
		c.cancel(st)
		return
	}
	if !c.metadata(response.Header) {
		return
	}
	if st, ended := statusIn(response.Header); ended { // "Trailers-Only"
		c.end(st, response.Header)
		return
	}
	c.put(Event{Kind: Header, Metadata: response.Header})
	for {
		message, err := c.read(response.Body)
		switch {
		case errors.Is(err, io.EOF):
			if !c.metadata(response.Trailer) {
				return
			}
			st, ended := statusIn(response.Trailer)
			if !ended {
				st = dataplane.Errorf(codes.Internal, "the server closed the stream without sending trailers")
			}
			c.end(st, response.Trailer)
			return
		case err != nil:
			c.end(c.statusOf(err), nil)
			c.cancel(err)
			return
		}
		if !c.deliver(message) {
			return
		}
	}
}

// metadata counts metadata of the server. If there is no room for it, the call ends.
func (c *Call) metadata(header http.Header) bool {
	n := 0
	for name, values := range header {
		for _, v := range values {
			n += len(name) + len(v) + entryCost
		}
	}
	c.mu.Lock()
	defer c.unlock()
	if !c.hold(n) {
		c.fail(errHeld())
		return false
	}
	return true
}

// put adds an event.
func (c *Call) put(e Event) {
	c.mu.Lock()
	defer c.unlock()
	if !c.over {
		c.events = append(c.events, e)
		c.notify()
	}
}

// deliver gives the guest a message, and waits until it has taken it. It returns false if the call is over.
func (c *Call) deliver(message []byte) bool {
	c.mu.Lock()
	if !c.over {
		c.message = message
		c.events = append(c.events, Event{Kind: Message, Size: len(message)})
		c.notify()
	}
	c.unlock()
	c.mu.Lock()
	defer c.unlock()
	for c.message != nil && !c.over && c.ctx.Err() == nil {
		c.changed.Wait()
	}
	if c.ctx.Err() != nil { // the guest can still take the message
		c.endLocked(c.statusOf(c.ctx.Err()), nil)
	}
	return !c.over
}

// read reads one message, whose capacity the State counts. Its error is io.EOF at the end of the stream.
func (c *Call) read(from io.Reader) ([]byte, error) {
	var prefix [prefixSize]byte
	if n, err := io.ReadFull(from, prefix[:]); err != nil {
		if n > 0 && errors.Is(err, io.ErrUnexpectedEOF) {
			return nil, dataplane.Errorf(codes.Internal, "the stream ended within a message's prefix")
		}
		return nil, err
	}
	if prefix[0] != 0 {
		return nil, dataplane.Errorf(codes.Internal, "the server sent a compressed message, which the request did not accept")
	}
	size := binary.BigEndian.Uint32(prefix[1:])
	if uint64(size) > uint64(c.max) {
		return nil, dataplane.Errorf(codes.ResourceExhausted, "received message larger than max (%d vs. %d)", size, c.max)
	}
	message := []byte{}
	for len(message) < int(size) {
		if len(message) == cap(message) {
			grown, err := c.grow(message, min(int(size), max(2*cap(message), firstRead)))
			if err != nil {
				return nil, err
			}
			message = grown
		}
		n, err := from.Read(message[len(message):cap(message)])
		message = message[:len(message)+n]
		if err != nil && len(message) < int(size) {
			if errors.Is(err, io.EOF) {
				err = dataplane.Errorf(codes.Internal, "the stream ended within a message")
			}
			return nil, err
		}
	}
	return message, nil
}

// grow returns a copy of b with the given capacity, which counts instead of that of b.
func (c *Call) grow(b []byte, capacity int) ([]byte, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.hold(capacity) {
		return nil, errHeld()
	}
	c.hold(-cap(b))
	return append(make([]byte, 0, capacity), b...), nil
}

// body is a call as the body of its request.
type body Call

var errRefusing = fmt.Errorf("the call reads no more messages: %w", io.ErrClosedPipe)

// Read implements io.Reader. It waits for messages of the guest.
func (b *body) Read(p []byte) (int, error) {
	c := (*Call)(b)
	c.mu.Lock()
	defer c.unlock()
	for len(c.out) == 0 && !c.finished && !c.refusing {
		c.changed.Wait()
	}
	switch {
	case c.refusing:
		return 0, errRefusing
	case len(c.out) == 0:
		return 0, io.EOF
	}
	n := copy(p, c.out)
	if c.out = c.out[n:]; len(c.out) == 0 {
		c.hold(-c.outSize)
		c.out, c.outSize = nil, 0
		c.notify()
	}
	return n, nil
}

// Close implements io.Closer. It is called when nobody reads the body any more.
func (b *body) Close() error {
	c := (*Call)(b)
	c.mu.Lock()
	defer c.unlock()
	c.dropOut()
	c.notify()
	return nil
}
