package console

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/stream"
)

const (
	// redial and redialMax are the first and the longest pause between attempts to write.
	redial, redialMax = 50 * time.Millisecond, time.Second
	hubBuffer         = 32 << 10
	// inputPiece is how much of a client's input is passed on at once.
	inputPiece = 4 << 10
)

// hub is shared by the attached clients: it sends them the end of the serial log, and writes their input to the pipe.
type hub struct {
	path, pipe string
	log        *slog.Logger
	input      chan []byte
	wake       chan struct{}
	poll       bool // inotify does not work
	ctx        context.Context
	cancel     context.CancelFunc
	work       sync.WaitGroup

	mu      sync.Mutex
	serial  *os.File
	offset  int64 // what the clients have got, if there are any
	clients map[*stream.OutputQueue]struct{}
	over    bool
}

func openHub(cfg Config) (*hub, error) {
	serial, err := os.Open(cfg.SerialLog)
	if err != nil {
		return nil, err
	}
	h := &hub{
		path: filepath.Clean(cfg.SerialLog), pipe: cfg.Input, log: cfg.Logger, serial: serial,
		input: make(chan []byte), wake: make(chan struct{}, 1), clients: map[*stream.OutputQueue]struct{}{},
	}
	h.ctx, h.cancel = context.WithCancel(context.Background())
	h.poll = serialLogs.add(h.path, h.wake) != nil
	h.work.Go(h.follow)
	h.work.Go(h.feed)
	return h, nil
}

// close ends the input, and the clients once they have what there was.
func (h *hub) close() {
	h.cancel()
	h.work.Wait()
	serialLogs.remove(h.path, h.wake)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.over = true
	for c := range h.clients {
		c.End(nil)
	}
	_ = h.serial.Close()
}

// add gives a new client, whose output begins now; nil when the hub is closed.
func (h *hub) add() *stream.OutputQueue {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.over {
		return nil
	}
	if len(h.clients) == 0 {
		info, err := h.serial.Stat()
		if err != nil {
			return nil
		}
		h.offset = info.Size()
	} else {
		h.deliver() // what was there before is the others'
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

// needs is where the part of the serial log begins that clients have still to be given.
func (h *hub) needs() int64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.clients) == 0 {
		return math.MaxInt64
	}
	return h.offset
}

// follow gives the clients what comes, until close.
func (h *hub) follow() {
	for {
		var again <-chan time.Time
		if h.poll {
			again = time.After(retry)
		}
		select {
		case <-h.wake:
		case <-again:
		case <-h.ctx.Done():
			return
		}
		h.settle()
	}
}

// settle gives the clients what there is: all, when the machine has ended.
func (h *hub) settle() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.deliver()
}

func (h *hub) deliver() {
	for len(h.clients) > 0 {
		buf := make([]byte, hubBuffer)
		n, err := h.serial.ReadAt(buf, h.offset)
		if n > 0 {
			h.offset += int64(n)
			h.fanOut(stream.Packet{Data: buf[:n]})
		}
		if err != nil {
			if !errors.Is(err, io.EOF) {
				h.log.Debug("read the serial log for those who are attached", "path", h.path, "err", err)
			}
			return
		}
	}
}

func (h *hub) fanOut(p stream.Packet) {
	for c := range h.clients {
		if !c.Put(p) {
			delete(h.clients, c)
		}
	}
}

// feed gives the guest what clients say, until close. While it does not read, they wait.
func (h *hub) feed() {
	var pipe *os.File
	defer func() { _ = pipe.Close() }() // nil: there is none
	for {
		select {
		case data := <-h.input:
			pipe = h.tell(pipe, data)
		case <-h.ctx.Done():
			return
		}
	}
}

// tell writes data to the pipe, or to the one that is in its place, and gives the one that took it.
func (h *hub) tell(pipe *os.File, data []byte) *os.File {
	for pause := redial; ; pause = min(2*pause, redialMax) {
		var err error
		if pipe == nil {
			pipe, err = machine.OpenPipe(h.pipe)
		}
		if err == nil {
			stop := context.AfterFunc(h.ctx, func() { _ = pipe.SetWriteDeadline(time.Now()) })
			var n int
			n, err = pipe.Write(data)
			stop()
			data = data[n:]
		}
		if err == nil || h.ctx.Err() != nil {
			return pipe
		}
		h.log.Debug("the serial console takes no input", "pipe", h.pipe, "err", err)
		_ = pipe.Close()
		pipe = nil
		select {
		case <-time.After(pause):
		case <-h.ctx.Done():
			return nil
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
			case <-h.ctx.Done():
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
