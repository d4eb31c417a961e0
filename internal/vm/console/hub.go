package console

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/tripod-run/tripod/internal/attach"
	"github.com/tripod-run/tripod/internal/vm/machine"
)

const (
	// redial and redialMax are the first and the last pause between two tries to connect.
	redial, redialMax = 50 * time.Millisecond, time.Second
	hubBuffer         = 32 << 10
	// inputPiece is how much of a client's input is passed on at once.
	inputPiece = 4 << 10
	// settleTime is how long the end of a connection is waited for when the machine has ended.
	settleTime = time.Second
)

// hub is our one connection to a serial socket, which all attached clients share. It is always read, so that neither a client
// nor a lack of clients holds the machine up, and made again when it has ended.
type hub struct {
	socket string
	log    *slog.Logger
	input  chan []byte
	cancel context.CancelFunc
	done   chan struct{}

	mu      sync.Mutex
	clients map[*attach.Client]struct{}
	serving chan struct{} // closed when the connection has ended; nil when there is none
	over    bool
}

func openHub(socket string, log *slog.Logger) *hub {
	ctx, cancel := context.WithCancel(context.Background())
	h := &hub{socket: socket, log: log, input: make(chan []byte), cancel: cancel, done: make(chan struct{}), clients: map[*attach.Client]struct{}{}}
	go h.keep(ctx)
	return h
}

// settle is for a machine that has ended: it returns when the last of its output is with the clients.
func (h *hub) settle(ctx context.Context) {
	h.mu.Lock()
	serving := h.serving
	h.mu.Unlock()
	if serving == nil {
		return
	}
	select {
	case <-serving:
	case <-time.After(settleTime): // somebody else holds the socket
	case <-ctx.Done():
	}
}

// close ends the connection, and the clients once they have what there was.
func (h *hub) close() {
	h.cancel()
	<-h.done
	h.mu.Lock()
	defer h.mu.Unlock()
	h.over = true
	for c := range h.clients {
		c.End(nil)
	}
}

// add gives a new client, or nil when the hub is closed.
func (h *hub) add() *attach.Client {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.over {
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

// keep connects until the end.
func (h *hub) keep(ctx context.Context) {
	defer close(h.done)
	for pause := redial; ctx.Err() == nil; pause = min(2*pause, redialMax) {
		conn, err := machine.Dial(ctx, h.socket)
		if err == nil {
			pause = redial
			err = h.serve(ctx, conn)
		}
		if ctx.Err() == nil {
			h.log.Debug("no connection to the serial console", "socket", h.socket, "error", err)
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
		}
	}
}

// serve reads and feeds a connection until it ends.
func (h *hub) serve(ctx context.Context, conn net.Conn) error {
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	ended := make(chan struct{})
	h.setServing(ended)
	defer h.setServing(nil)
	var feeding sync.WaitGroup
	feeding.Go(func() { h.feed(conn, ended) })
	defer feeding.Wait()
	defer conn.Close()
	defer close(ended)
	buf := make([]byte, hubBuffer)
	for {
		n, err := conn.Read(buf)
		if n > 0 {
			h.fanOut(buf[:n])
		}
		if err != nil {
			return err
		}
	}
}

func (h *hub) setServing(until chan struct{}) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.serving = until
}

func (h *hub) fanOut(data []byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.clients) == 0 {
		return
	}
	p := attach.Packet{Data: bytes.Clone(data)}
	for c := range h.clients {
		if !c.Put(p) {
			delete(h.clients, c)
		}
	}
}

// feed gives the guest what clients say. While it does not read, they wait.
func (h *hub) feed(conn net.Conn, ended <-chan struct{}) {
	for {
		select {
		case data := <-h.input:
			if _, err := conn.Write(data); err != nil {
				return // the reader notices too
			}
		case <-ended:
			return
		}
	}
}

// send passes a client's input on, until its end or the client's. The console's input has no end.
func (h *hub) send(ctx context.Context, input io.Reader) {
	buf := make([]byte, inputPiece)
	for {
		n, err := input.Read(buf)
		if n > 0 {
			select {
			case h.input <- bytes.Clone(buf[:n]):
			case <-h.done:
				return
			case <-ctx.Done():
				return
			}
		}
		if err != nil {
			return
		}
	}
}
