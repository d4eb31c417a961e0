package linux

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/stream"
)

const (
	// attachPacket is at least the size of conmon's packets: a byte that names the stream and 8 KiB of data.
	attachPacket = 16 << 10
	// attachWrite is the largest input that conmon accepts at once.
	attachWrite = 8 << 10
	// conmon's numbers of the streams.
	attachStdout, attachStderr = 2, 3
	// farewellPause and farewellPauseMax are the first and the longest pause between two checks for conmon's answer.
	farewellPause, farewellPauseMax = time.Millisecond, time.Second
)

// hub is our single connection to a container's conmon, shared by all attach clients of a run. The first client opens it, so
// a container without clients costs nothing.
//
//	conmon ══ SOCK_SEQPACKET ══▶ read ──▶ queue ──▶ client      queue full: the client is disconnected
//	   ▲                           └────▶ queue ──▶ client      no clients: dropped, and the hub disconnects
//	   ╚══════════════════════════ feed ◀── input ── clients
//
// Two properties of conmon (2.1) make it necessary. First, conmon writes output to each connection and waits until it is
// read. So the hub always reads, and no client can block the container. Second, conmon crashes if a connection closes at the
// wrong time: when a write to it fails before conmon has seen its end, conmon frees the connection, sees the end, and uses it
// again. Once conmon has seen the end of a connection's input, a failing write just frees it. Therefore the hub sends a
// farewell before it closes: an empty packet, which conmon takes for the end of input. conmon then shuts down its reading
// side, our writes fail, and only then the connection is closed. A container without stdin gets the farewell at once, so that
// even our crash is harmless.
//
// With stdin_once the farewell also closes the container's stdin. The hub sends it after the first client's input has ended.
type hub struct {
	conn *net.UnixConn
	once bool
	// before is closed when the run's previous hub is gone, so that at most one hub waits for conmon's answer.
	before <-chan struct{}

	input    chan []byte
	bye      chan struct{} // closed when no more input follows
	sayBye   sync.Once
	parted   chan struct{} // closed when conmon has seen the end of input: the connection can be closed
	gone     chan struct{} // closed after the connection
	mu       sync.Mutex
	clients  map[*stream.OutputQueue]struct{}
	departed bool  // accepts no more clients
	err      error // why output ended, unless the container did
}

// newHub makes a hub with its first client; without one it would disconnect again.
func newHub(conn *net.UnixConn, stdin, once bool, before <-chan struct{}) (*hub, *stream.OutputQueue) {
	h := &hub{
		conn: conn, once: once, before: before, input: make(chan []byte), bye: make(chan struct{}),
		parted: make(chan struct{}), gone: make(chan struct{}), clients: map[*stream.OutputQueue]struct{}{},
	}
	if !stdin {
		h.endInput()
	}
	first := h.add()
	go h.read()
	go h.feed()
	return h, first
}

// add returns a new client, or nil if the hub is disconnecting.
func (h *hub) add() *stream.OutputQueue {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.departed {
		return nil
	}
	c := stream.NewOutputQueue()
	h.clients[c] = struct{}{}
	return c
}

func (h *hub) drop(c *stream.OutputQueue) {
	h.mu.Lock()
	delete(h.clients, c)
	h.mu.Unlock()
	c.Discard()
}

// read receives all of conmon's output until the container ends or the hub has disconnected.
func (h *hub) read() {
	buf := make([]byte, attachPacket)
	var err error
	for {
		var n int
		if n, err = h.conn.Read(buf); err != nil {
			break
		}
		if n > 1 && !h.fanOut(buf[0], buf[1:n]) {
			go h.leave()
		}
	}
	h.mu.Lock()
	h.departed = true
	if !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, net.ErrClosed) {
		h.err = fmt.Errorf("attach: %w", err)
	}
	for c := range h.clients {
		c.End(h.err)
	}
	h.mu.Unlock()
	_ = h.conn.Close()
	close(h.gone)
}

// fanOut sends output to the clients. It returns false if the hub should disconnect because there are none. It waits for
// output to do so, because only then conmon notices a closed connection.
func (h *hub) fanOut(origin byte, data []byte) (stay bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.clients) == 0 {
		if h.departed || !h.canLeave() {
			return true
		}
		h.departed = true
		return false
	}
	p := stream.Packet{Stderr: origin == attachStderr, Data: bytes.Clone(data)}
	for c := range h.clients {
		if !c.Put(p) {
			delete(h.clients, c)
		}
	}
	return true
}

func (h *hub) canLeave() bool {
	if h.once && !closed(h.bye) {
		return false // that would close the stdin before its first client
	}
	return closed(h.before)
}

// leave closes the connection as soon as possible.
func (h *hub) leave() {
	h.endInput()
	<-h.parted
	_ = h.conn.Close()
}

// endInput requests the farewell.
func (h *hub) endInput() { h.sayBye.Do(func() { close(h.bye) }) }

// feed sends the clients' input to conmon, and finally the farewell.
func (h *hub) feed() {
	defer close(h.parted)
	for {
		select {
		case data := <-h.input:
			if _, err := h.conn.Write(data); err != nil {
				return // conmon is gone, and with it the container
			}
		case <-h.bye:
			h.farewell()
			return
		case <-h.gone:
			return
		}
	}
}

// farewell ends the input and returns once conmon has seen it, which waits for the container to read earlier input.
func (h *hub) farewell() {
	for pause := farewellPause; ; pause = min(2*pause, farewellPauseMax) {
		// conmon no longer reads further empty packets; they test whether it has shut down its reading side.
		if _, err := h.conn.Write(nil); err != nil && !errors.Is(err, unix.EAGAIN) {
			return
		}
		select {
		case <-h.gone:
			return
		case <-time.After(pause): // there is no event for a peer that stops reading
		}
	}
}

// send forwards a client's input until the input, the client or the container ends.
func (h *hub) send(ctx context.Context, input io.Reader) {
	buf := make([]byte, attachWrite)
	for {
		n, err := input.Read(buf)
		if n > 0 {
			select {
			case h.input <- bytes.Clone(buf[:n]):
			case <-h.parted:
				return
			case <-ctx.Done():
				return
			}
		}
		if err != nil {
			if h.once {
				h.endInput()
			}
			return
		}
	}
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
