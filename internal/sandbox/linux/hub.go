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

	"github.com/tripod-run/tripod/internal/attach"
)

const (
	// attachPacket is at least what conmon sends at once: a byte that names the stream, and 8 KiB of it.
	attachPacket = 16 << 10
	// attachWrite is the most that conmon takes at once.
	attachWrite = 8 << 10
	// The streams as conmon names them.
	attachStdout, attachStderr = 2, 3
	// farewellPause and farewellPauseMax are the first and the last pause between two looks for conmon's answer.
	farewellPause, farewellPauseMax = time.Millisecond, time.Second
)

// hub is our one connection to the attach socket of a container's conmon, which all attach clients of a run share. It
// is opened for the first of them, so that a container without any costs nothing.
//
//	conmon ══ SOCK_SEQPACKET ══▶ read ──▶ queue ──▶ client      a queue that is full: the client is cut off
//	   ▲                           └────▶ queue ──▶ client      nobody there: dropped, and the hub leaves
//	   ╚══════════════════════════ feed ◀── input ── clients
//
// Two properties of conmon (2.1) make it necessary. It writes output to each connection and waits until that is taken:
// so we always read, and nobody can hold the container up. And it dies of a connection that is closed at the wrong
// time: when a write to it fails before conmon has seen its end, conmon frees it, sees the end, and uses it once more.
// Of a connection whose end of input it has seen it expects no more, and a failing write just frees it. Therefore a
// farewell goes before each closing: an empty packet, which conmon takes for the end of input. It answers by shutting
// its side for reading, after which our own writes fail: only then the connection is closed. A container without stdin
// gets the farewell at once, and then even our sudden death is safe for it.
//
// With stdin_once the farewell is also the end of the container's stdin, said once the first client's input has ended.
type hub struct {
	conn *net.UnixConn
	once bool
	// before is closed when the run's previous hub is gone: so that at most one waits for conmon's answer.
	before <-chan struct{}

	input    chan []byte
	bye      chan struct{} // closed when no more input is to be sent
	sayBye   sync.Once
	parted   chan struct{} // closed when none is, and conmon knows it: the connection can be closed
	gone     chan struct{} // closed when the connection is
	mu       sync.Mutex
	clients  map[*attach.Client]struct{}
	departed bool  // takes no more clients
	err      error // why output has ended, if not by the container's end
}

// newHub makes a hub with its first client, without whom it would leave again.
func newHub(conn *net.UnixConn, stdin, once bool, before <-chan struct{}) (*hub, *attach.Client) {
	h := &hub{
		conn: conn, once: once, before: before, input: make(chan []byte), bye: make(chan struct{}),
		parted: make(chan struct{}), gone: make(chan struct{}), clients: map[*attach.Client]struct{}{},
	}
	if !stdin {
		h.endInput()
	}
	first := h.add()
	go h.read()
	go h.feed()
	return h, first
}

// add gives a new client, or nil when the hub is leaving.
func (h *hub) add() *attach.Client {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.departed {
		return nil
	}
	c := attach.NewClient()
	h.clients[c] = struct{}{}
	return c
}

func (h *hub) drop(c *attach.Client) {
	h.mu.Lock()
	delete(h.clients, c)
	h.mu.Unlock()
	c.Discard()
}

// read takes all that conmon sends, until the container ends or the hub has left.
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

// fanOut gives output to the clients. It is false when the hub shall leave, since there are none: not before, since
// conmon notices by its next output only that a connection is closed.
func (h *hub) fanOut(stream byte, data []byte) (stay bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.clients) == 0 {
		if h.departed || !h.mayLeave() {
			return true
		}
		h.departed = true
		return false
	}
	p := attach.Packet{Stderr: stream == attachStderr, Data: bytes.Clone(data)}
	for c := range h.clients {
		if !c.Put(p) {
			delete(h.clients, c)
		}
	}
	return true
}

func (h *hub) mayLeave() bool {
	if h.once && !closed(h.bye) {
		return false // it would end the stdin that the first client with input is still to come for
	}
	return closed(h.before)
}

// leave closes the connection as soon as it can be.
func (h *hub) leave() {
	h.endInput()
	<-h.parted
	_ = h.conn.Close()
}

// endInput has the end of input said, if it was not.
func (h *hub) endInput() { h.sayBye.Do(func() { close(h.bye) }) }

// feed gives conmon what clients say, and in the end the farewell.
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

// farewell ends the input and returns when conmon knows. While the container leaves earlier input unread it does not.
func (h *hub) farewell() {
	for pause := farewellPause; ; pause = min(2*pause, farewellPauseMax) {
		// Further empty packets are not read any more, and ask whether conmon has shut its side.
		if _, err := h.conn.Write(nil); err != nil && !errors.Is(err, unix.EAGAIN) {
			return
		}
		select {
		case <-h.gone:
			return
		case <-time.After(pause): // nothing tells when a peer stops reading
		}
	}
}

// send passes a client's input on, until its end, or the client's or the container's.
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
