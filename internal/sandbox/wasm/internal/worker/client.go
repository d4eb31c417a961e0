package worker

import (
	"io"
	"sync"
	"time"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

const (
	// maxBacklog is how many bytes of output wait for an attached client; one that is further behind is cut off.
	maxBacklog = 4 << 20
	// farewell is how long a client may take for the rest of the output when the pod has ended.
	farewell = 10 * time.Second
)

// client is one attached client.
type client struct {
	output  *output
	session *workerapi.AttachSession
	wake    chan struct{}
	gone    chan struct{} // closed when the client has left
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

// push queues output, or cuts the client off.
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
		c.leave()
		return
	}
	if n := len(c.backlog); n > 0 && c.backlog[n-1].stderr == stderr {
		c.backlog[n-1].data = append(c.backlog[n-1].data, p...)
	} else {
		c.backlog = append(c.backlog, chunk{stderr, append([]byte(nil), p...)})
	}
	c.size += len(p)
	c.signal()
}

// end sends what there is, and then closes.
func (c *client) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ending = true
	c.session.SetWriteDeadline(time.Now().Add(farewell))
	c.signal()
}

func (c *client) signal() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// leave closes the session, which ends both goroutines.
func (c *client) leave() {
	c.once.Do(func() {
		c.session.Close()
		close(c.gone)
	})
}

func (c *client) send() {
	defer c.output.detach(c)
	defer c.leave()
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
		case <-c.wake:
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

// receive takes the client's input, and notices when it goes away.
func (c *client) receive(stdin *stdin) {
	defer c.leave()
	wants := c.session.Stdin && stdin != nil
	if wants {
		defer stdin.left()
	}
	for {
		data, err := c.session.ReadStdin()
		switch {
		case err == io.EOF && wants:
			stdin.left()
			wants = false
		case err == io.EOF: // stays for the output
		case err != nil:
			return
		case wants:
			if !stdin.put(data) {
				wants = false // the guest reads no more
			}
		}
	}
}
