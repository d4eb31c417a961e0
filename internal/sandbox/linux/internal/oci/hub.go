package oci

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/stream"
	"github.com/tripod-run/tripod/internal/unixsocket"
)

const (
	// attachPacket is the size of the buffer for conmon's packets, which have one byte for the stream and up to 8 KiB of
	// data.
	attachPacket = 16 << 10
	// attachWrite is the largest packet of input that conmon accepts.
	attachWrite = 8 << 10
	// attachStdout and attachStderr are conmon's numbers for the streams.
	attachStdout, attachStderr = 2, 3
	// eofPause and eofPauseMax are the first and the longest interval between checks of whether conmon has seen the end
	// of input.
	eofPause, eofPauseMax = time.Millisecond, time.Second
)

// Hub is the connection to a container's conmon, shared by all attach clients of a run. The first client opens the
// connection, so a container without clients costs nothing.
//
//	conmon ══ SOCK_SEQPACKET ══▶ read ──▶ queue ──▶ client      queue full: the client is disconnected
//	   ▲                           └────▶ queue ──▶ client      no clients: dropped, and the hub disconnects
//	   ╚══════════════════════════ feed ◀── input ── clients
//
// The hub works around two properties of conmon 2.1:
//
//   - conmon waits until every connection has accepted the output. So the hub always reads, and no client can block the
//     container.
//   - conmon crashes if a connection closes at the wrong time. If a write to the connection fails before conmon has
//     seen the end of the connection's input, conmon frees the connection, but uses it again when it sees that end. So
//     before the hub closes the connection, it sends an empty packet, which conmon takes for the end of input. Then the
//     hub waits until conmon has shut down its reading side; the hub notices this because its own writes fail. If the
//     container has no stdin, the hub sends the empty packet at the start, so that even a crash of the daemon does no
//     harm.
//
// With stdin_once, the end of input also closes the container's stdin. The hub sends the end of input after the first
// client's input.
type Hub struct {
	// Conn is the connection.
	Conn *net.UnixConn
	// Closable is closed when conmon has seen the end of input; the connection can then be closed. Disconnected is closed after the
	// connection is closed.
	Closable, Disconnected chan struct{}
	// Attached is the number of clients, for those who only look.
	Attached atomic.Int32

	stdinOnce bool
	// previous is closed when the run's previous hub has disconnected, so that at most one hub waits for conmon.
	previous <-chan struct{}

	input   chan []byte
	noInput chan struct{} // closed when no more input follows
	endOnce sync.Once     // closes noInput
	mu      sync.Mutex
	clients map[*stream.OutputQueue]struct{}
	closing bool  // accepts no more clients
	err     error // why output ended; nil if the container ended
}

// Attach connects to the attach socket of a container's conmon, and returns a hub with its first client, which must be
// served. previous is closed when the run's previous hub has disconnected.
func Attach(ctx context.Context, bundle string, s Stdio, previous <-chan struct{}) (*Hub, *stream.OutputQueue, error) {
	conn, err := dialAttach(ctx, bundle)
	if err != nil {
		return nil, nil, err
	}
	h, first := newHub(conn, s.Stdin, s.endsStdin(), previous)
	return h, first, nil
}

// newHub returns a hub with its first client, because a hub without clients disconnects.
func newHub(conn *net.UnixConn, stdin, once bool, previous <-chan struct{}) (*Hub, *stream.OutputQueue) {
	h := &Hub{
		Conn: conn, stdinOnce: once, previous: previous, input: make(chan []byte), noInput: make(chan struct{}),
		Closable: make(chan struct{}), Disconnected: make(chan struct{}), clients: map[*stream.OutputQueue]struct{}{},
	}
	if !stdin {
		h.endInput()
	}
	first := h.Add()
	go h.read()
	go h.feed()
	return h, first
}

// Add returns a new client, or nil if the hub is disconnecting.
func (h *Hub) Add() *stream.OutputQueue {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closing {
		return nil
	}
	c := stream.NewOutputQueue()
	h.clients[c] = struct{}{}
	h.Attached.Store(int32(len(h.clients)))
	return c
}

// Serve copies output to a client until the client, the context or the container ends, and sends the client's input,
// which may be nil. Then it removes the client. Afterwards, a read of the input or a write to the output can still be in
// progress.
func (h *Hub) Serve(ctx context.Context, c *stream.OutputQueue, stdin io.Reader, stdout, stderr io.Writer) error {
	defer h.remove(c)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if stdin != nil {
		if h.stdinOnce {
			defer h.endInput()
		}
		go h.send(ctx, stdin)
	}
	return c.Serve(ctx, stdout, stderr)
}

func (h *Hub) remove(c *stream.OutputQueue) {
	h.mu.Lock()
	delete(h.clients, c)
	h.Attached.Store(int32(len(h.clients)))
	h.mu.Unlock()
	c.Discard()
}

// read receives all of conmon's output until the container ends or the hub has disconnected.
//
// If conmon ends before it has read all packets of the hub, the kernel reports a reset, once, before the output that is still to be
// read.
func (h *Hub) read() {
	buf := make([]byte, attachPacket)
	var err error
	for reset := false; ; {
		var n int
		n, err = h.Conn.Read(buf)
		if errors.Is(err, unix.ECONNRESET) && !reset {
			reset = true
			continue
		}
		if err != nil {
			break
		}
		if n > 1 && !h.fanOut(buf[0], buf[1:n]) {
			go h.Disconnect()
		}
	}
	h.mu.Lock()
	h.closing = true
	if !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, net.ErrClosed) {
		h.err = fmt.Errorf("attach: %w", err)
	}
	for c := range h.clients {
		c.End(h.err)
	}
	h.mu.Unlock()
	_ = h.Conn.Close()
	close(h.Disconnected)
}

// fanOut sends output to the clients. It returns false if the hub should disconnect because it has no clients. The hub
// disconnects only on output, because conmon does not notice a closed connection until it writes to that connection.
func (h *Hub) fanOut(origin byte, data []byte) (stay bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.clients) == 0 {
		if h.closing || h.stdinOnce && !guard.IsClosed(h.noInput) || !guard.IsClosed(h.previous) {
			return true // with stdin_once, disconnecting would close stdin before the first client's input
		}
		h.closing = true
		return false
	}
	p := stream.Packet{Stderr: origin == attachStderr, Data: bytes.Clone(data)}
	for c := range h.clients {
		if !c.Put(p) {
			delete(h.clients, c)
		}
	}
	h.Attached.Store(int32(len(h.clients)))
	return true
}

// Disconnect ends the input and closes the connection as soon as conmon allows it.
func (h *Hub) Disconnect() {
	h.endInput()
	<-h.Closable
	_ = h.Conn.Close()
}

// endInput makes feed send the end of input. Only the first call has an effect.
func (h *Hub) endInput() { h.endOnce.Do(func() { close(h.noInput) }) }

// feed sends the clients' input to conmon, and then the end of input.
func (h *Hub) feed() {
	defer close(h.Closable)
	for {
		select {
		case data := <-h.input:
			if _, err := h.Conn.Write(data); err != nil {
				return // conmon is gone, and with it the container
			}
		case <-h.noInput:
			h.sendEOF()
			return
		case <-h.Disconnected:
			return
		}
	}
}

// sendEOF sends the end of input and waits until conmon has seen it. conmon sees it only after the container has read
// all earlier input.
func (h *Hub) sendEOF() {
	for pause := eofPause; ; pause = min(2*pause, eofPauseMax) {
		// After the first empty packet conmon reads no more. Later packets only test whether conmon has shut down its
		// reading side.
		if _, err := h.Conn.Write(nil); err != nil && !errors.Is(err, unix.EAGAIN) {
			return
		}
		select {
		case <-h.Disconnected:
			return
		case <-time.After(pause): // no event reports that a peer stops reading
		}
	}
}

// send forwards a client's input until the input, the client or the container ends.
func (h *Hub) send(ctx context.Context, input io.Reader) {
	buf := make([]byte, attachWrite)
	for {
		n, err := input.Read(buf)
		if n > 0 {
			select {
			case h.input <- bytes.Clone(buf[:n]):
			case <-h.Closable:
				return
			case <-ctx.Done():
				return
			}
		}
		if err != nil {
			if h.stdinOnce {
				h.endInput()
			}
			return
		}
	}
}

// dialAttach connects to conmon's attach socket.
func dialAttach(ctx context.Context, bundle string) (*net.UnixConn, error) {
	conn, err := unixsocket.DialPacket(ctx, filepath.Join(bundle, "attach"))
	if err != nil {
		return nil, fmt.Errorf("attach: %w: %w", err, errdefs.ErrUnavailable)
	}
	return conn, nil
}
