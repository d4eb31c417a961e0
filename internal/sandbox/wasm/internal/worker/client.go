package worker

import (
	"io"
	"sync"
	"time"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

const (
	// maxBacklog bounds the bytes of output queued for an attached client. A client that falls further behind is
	// disconnected.
	maxBacklog = 4 << 20
	// drainTimeout limits how long a client can read the rest of the output after the pod has ended.
	drainTimeout = 10 * time.Second
)

// client is one attached client.
type client struct {
	output  *output
	session *workerapi.AttachSession
	sender  notifier
	gone    chan struct{} // closed by disconnect
	once    sync.Once

	mu      sync.Mutex
	backlog []chunk
	size    int
	ending  bool
}

type chunk struct {
	stderr bool
	data   []byte
}

// push queues output, or disconnects the client if its backlog is full.
func (c *client) push(stderr bool, p []byte) {
	if stderr && !c.session.Stderr || !stderr && !c.session.Stdout {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ending {
		return
	}
	if c.size+len(p) > maxBacklog {
		c.disconnect()
		return
	}
	if n := len(c.backlog); n > 0 && c.backlog[n-1].stderr == stderr {
		c.backlog[n-1].data = append(c.backlog[n-1].data, p...)
	} else {
		c.backlog = append(c.backlog, chunk{stderr, append([]byte(nil), p...)})
	}
	c.size += len(p)
	c.sender.wake()
}

// end disconnects the client once the queued output is sent. It returns at once and leaves the work to the goroutine
// that runs the method send.
func (c *client) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ending = true
	c.session.SetWriteDeadline(time.Now().Add(drainTimeout))
	c.sender.wake()
}

// disconnect closes the session, which ends the goroutines that run the methods send and receive.
func (c *client) disconnect() {
	c.once.Do(func() {
		c.session.Close()
		close(c.gone)
	})
}

func (c *client) send() {
	defer c.output.detach(c)
	defer c.disconnect()
	for {
		chunks, ending := c.take()
		for _, chunk := range chunks {
			if c.session.Write(chunk.stderr, chunk.data) != nil {
				return
			}
		}
		if len(chunks) > 0 {
			continue
		}
		if ending {
			return
		}
		select {
		case <-c.sender:
		case <-c.gone:
			return
		}
	}
}

func (c *client) take() ([]chunk, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	chunks := c.backlog
	c.backlog, c.size = nil, 0
	return chunks, c.ending
}

// receive passes the client's input to stdin until the client disconnects.
func (c *client) receive(stdin *stdin) {
	defer c.disconnect()
	wants := c.session.Stdin && stdin != nil
	if wants {
		defer stdin.clientDone()
	}
	for {
		data, err := c.session.ReadStdin()
		switch {
		case err == io.EOF && wants:
			stdin.clientDone()
			wants = false
		case err == io.EOF: // the client still reads output
		case err != nil:
			return
		case wants:
			if !stdin.put(data) {
				wants = false // the guest's stdin has ended
			}
		}
	}
}
