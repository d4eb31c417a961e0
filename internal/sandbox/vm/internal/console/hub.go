package console

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/stream"
)

const (
	// The pause between attempts to write input doubles from redial to redialMax.
	redial, redialMax = 50 * time.Millisecond, time.Second
	hubBuffer         = 32 << 10
	// inputPiece is the maximum number of bytes of a client's input that are written together.
	inputPiece = 4 << 10
)

// hub serves the attached clients: it sends them new output from the serial log, and writes their input to the pipe.
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
	offset  int64 // the end of the output that was sent to the clients
	clients map[*stream.OutputQueue]struct{}
	closed  bool
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
	h.work.Go(h.writeInput)
	return h, nil
}

// close stops the input, and detaches the clients after they have received their queued output.
func (h *hub) close() {
	h.cancel()
	h.work.Wait()
	serialLogs.remove(h.path, h.wake)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	for c := range h.clients {
		c.End(nil)
	}
	_ = h.serial.Close()
}

// add returns a new client, which receives only the output that follows. It returns nil if the hub is closed.
func (h *hub) add() *stream.OutputQueue {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil
	}
	if len(h.clients) == 0 {
		h.offset = 0
		h.keep()
		info, err := h.serial.Stat()
		if err != nil {
			return nil
		}
		h.offset = info.Size()
		h.keep()
	} else {
		h.deliver() // the new client must not get this output
	}
	c := stream.NewOutputQueue()
	h.clients[c] = struct{}{}
	return c
}

func (h *hub) drop(c *stream.OutputQueue) {
	h.mu.Lock()
	delete(h.clients, c)
	if len(h.clients) == 0 && !h.closed {
		_ = lockFrom(h.serial, unix.F_UNLCK, 0)
	}
	h.mu.Unlock()
	c.Discard()
}

// keep keeps the relay, which can be in another process, from freeing output that the clients have not received.
func (h *hub) keep() {
	if err := lockFrom(h.serial, unix.F_RDLCK, h.offset); err != nil {
		h.log.Warn("cannot lock the serial log; attached clients can miss output", "path", h.path, "err", err)
	}
}

// attach attaches a client until ctx ends, the client leaves, or the hub is closed.
func (h *hub) attach(ctx context.Context, req sandbox.AttachRequest) error {
	client := h.add()
	if client == nil {
		return fmt.Errorf("attach: the machine has ended: %w", errdefs.ErrFailedPrecondition)
	}
	defer h.drop(client)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go discardSizes(req.Resize, ctx.Done())
	if req.Stdin != nil {
		go h.readClient(ctx, req.Stdin)
	}
	return client.Serve(ctx, req.Stdout, nil)
}

// follow sends new output to the clients until close is called.
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
		h.flush()
	}
}

// flush sends all output so far to the clients.
func (h *hub) flush() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.deliver()
}

func (h *hub) deliver() {
	if len(h.clients) > 0 {
		defer h.keep()
	}
	for len(h.clients) > 0 {
		buf := make([]byte, hubBuffer)
		n, err := h.serial.ReadAt(buf, h.offset)
		if n > 0 {
			h.offset += int64(n)
			h.fanOut(stream.Packet{Data: buf[:n]})
		}
		if err != nil {
			if !errors.Is(err, io.EOF) {
				h.log.Debug("cannot read the serial log for attached clients", "path", h.path, "err", err)
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

// writeInput writes the clients' input to the pipe until close is called. While the guest does not read, the clients
// wait.
func (h *hub) writeInput() {
	var pipe *os.File
	defer func() { _ = pipe.Close() }() // harmless if pipe is nil
	for {
		select {
		case data := <-h.input:
			pipe = h.writePipe(pipe, data)
		case <-h.ctx.Done():
			return
		}
	}
}

// writePipe writes the data to the given pipe and returns the pipe. If the pipe is nil or the write fails, writePipe
// opens the pipe again and retries.
func (h *hub) writePipe(pipe *os.File, data []byte) *os.File {
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
		h.log.Debug("cannot write to the serial console", "pipe", h.pipe, "err", err)
		_ = pipe.Close()
		pipe = nil
		select {
		case <-time.After(pause):
		case <-h.ctx.Done():
			return nil
		}
	}
}

// readClient forwards a client's input until the input or ctx ends. The end of the input is not forwarded.
func (h *hub) readClient(ctx context.Context, input io.Reader) {
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
