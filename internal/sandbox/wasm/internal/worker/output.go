package worker

import (
	"context"
	"io"
	"maps"
	"os"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/tripod-run/tripod/internal/crilog"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// output copies the output of a pod's guests to the log and to all attached clients. Writes never wait for a client,
// and never fail: bytes that cannot be logged are counted.
type output struct {
	tty bool

	log     *crilog.Writer // nil without a log
	dropped atomic.Uint64  // bytes that could not be logged

	mu      sync.Mutex
	clients map[*client]bool
	ended   bool
}

// newOutput takes ownership of the log file, which can be nil. The output writes at most maxBytes to the file; 0 means
// no limit.
func newOutput(log *os.File, maxBytes int64, tty bool) *output {
	o := &output{tty: tty, clients: map[*client]bool{}}
	if log != nil {
		o.log = crilog.NewWriter(log, maxBytes)
	}
	return o
}

// stream returns a guest's stdout or stderr. Without a terminal, the stream buffers an unfinished line until Close.
func (o *output) stream(stderr bool) io.WriteCloser {
	s := &outputStream{output: o, stderr: stderr && !o.tty}
	if o.log != nil {
		name := crilog.Stdout
		if s.stderr {
			name = crilog.Stderr
		}
		if s.log = o.log.Stream(name); o.tty {
			s.log = o.log.Terminal(name)
		}
	}
	return s
}

// outputStream is safe for concurrent use. The engine's WASI writes in the background, separately for each of the
// guest's handles to the stream, even while the instance is being closed.
type outputStream struct {
	output *output
	stderr bool

	mu  sync.Mutex
	log io.WriteCloser
}

func (s *outputStream) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.log != nil {
		if _, err := s.log.Write(p); err != nil {
			s.output.dropped.Add(uint64(len(p)))
		}
	}
	s.output.broadcast(s.stderr, p)
	return len(p), nil
}

func (s *outputStream) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.log != nil {
		return s.log.Close()
	}
	return nil
}

// logLine writes a line from the worker to the pod's log and clients.
func (o *output) logLine(line string) { o.logEntry([]byte(line + "\n")) }

// logEntry writes a complete line to the pod's log and clients, as standard error.
func (o *output) logEntry(line []byte) {
	s := o.stream(true)
	_, _ = s.Write(line)
	_ = s.Close()
}

func (o *output) broadcast(stderr bool, p []byte) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for c := range o.clients {
		c.push(stderr, p)
	}
}

// reopen replaces the log file. It takes ownership of the new file.
func (o *output) reopen(file *os.File) error {
	if o.log == nil {
		file.Close()
		return nil
	}
	return o.log.Replace(file)
}

// end closes the log, and disconnects each client once the client has read the queued output.
func (o *output) end() {
	if o.log != nil {
		_ = o.log.Close()
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.ended = true
	for c := range o.clients {
		c.end()
	}
}

// drain waits until the clients of an ended pod have read its output, or until ctx ends.
func (o *output) drain(ctx context.Context) {
	o.mu.Lock()
	clients := slices.Collect(maps.Keys(o.clients))
	o.mu.Unlock()
	for _, c := range clients {
		select {
		case <-c.gone:
		case <-ctx.Done():
			return
		}
	}
}

// attach adds a client and takes ownership of its session. It returns false if the pod has ended.
func (o *output) attach(session *workerapi.AttachSession, stdin *stdin) bool {
	c := &client{output: o, session: session, sender: make(notifier, 1), gone: make(chan struct{})}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.ended {
		return false
	}
	o.clients[c] = true
	go c.send()
	go c.receive(stdin)
	return true
}

func (o *output) detach(c *client) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.clients, c)
}
