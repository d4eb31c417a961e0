package worker

import (
	"io"
	"os"
	"sync"
	"sync/atomic"

	"github.com/tripod-run/tripod/internal/crilog"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// output is where a pod's guests write: the log and all attached clients. It never makes them wait for a client, and no
// trouble with the log is theirs.
type output struct {
	tty bool

	log     *crilog.Writer // nil: no log
	dropped atomic.Uint64  // bytes that could not be logged

	mu      sync.Mutex
	clients map[*client]bool
	ended   bool
}

// newOutput takes over the log file, which may be nil, and writes at most so many bytes to it; 0 is no bound.
func newOutput(log *os.File, most int64, tty bool) *output {
	o := &output{tty: tty, clients: map[*client]bool{}}
	if log != nil {
		o.log = crilog.NewWriter(log, most)
	}
	return o
}

// stream is one guest's stdout or stderr. It holds the beginning of a line until Close.
func (o *output) stream(stderr bool) io.WriteCloser {
	s := &outputStream{output: o, stderr: stderr && !o.tty}
	if o.log != nil {
		name := crilog.Stdout
		if s.stderr {
			name = crilog.Stderr
		}
		s.log = o.log.Stream(name)
	}
	return s
}

// outputStream is used by several threads: the engine's WASI writes in the background, for each handle that a guest gets of
// the stream, and it may still do so when the instance is closed.
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

// note writes a line of the worker's own to the log.
func (o *output) note(line string) {
	s := o.stream(true)
	_, _ = io.WriteString(s, line+"\n")
	_ = s.Close()
}

func (o *output) broadcast(stderr bool, p []byte) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for c := range o.clients {
		c.push(stderr, p)
	}
}

// reopen writes the log to file from now on.
func (o *output) reopen(file *os.File) error {
	if o.log == nil {
		file.Close()
		return nil
	}
	return o.log.Replace(file)
}

// end closes the log, and lets the clients go once they have read what there is.
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

// attach joins a client, which is the output's from then on; false when the pod has ended.
func (o *output) attach(session *workerapi.AttachSession, stdin *stdin) bool {
	c := &client{output: o, session: session, wake: make(chan struct{}, 1), gone: make(chan struct{})}
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
