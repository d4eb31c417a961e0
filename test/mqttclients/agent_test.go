package mqttclients

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// agent is a program in another language that has the connections of one client implementation. It reads requests and writes
// replies and events, each a JSON object on a line.
type agent struct {
	mu      sync.Mutex
	stdin   io.Writer
	last    int
	replies map[int]chan error
	inboxes map[string]*inbox // by client
}

// request is a line to an agent.
type request struct {
	ID      int    `json:"id"`
	Request string `json:"request"` // connect, publish or disconnect
	options
	Messages []message `json:"messages,omitempty"` // of publish
	WantWill bool      `json:"wantWill,omitempty"` // of disconnect
}

// event is a line from an agent: the reply to a request, a connection, or a message.
type event struct {
	ID        int      `json:"id"`
	Error     string   `json:"error"`
	Client    string   `json:"client"`
	Connected bool     `json:"connected"`
	Session   *bool    `json:"session"`
	Message   *message `json:"message"`
}

// installed returns the path of a file that make test-mqtt installs.
func installed(t testing.TB, path string) string {
	t.Helper()
	path, err := filepath.Abs(filepath.Join("../../build/mqttclients", path))
	require.NoError(t, err)
	_, err = os.Stat(path)
	require.NoError(t, err, "make test-mqtt installs it")
	return path
}

func startMQTTjs(t testing.TB) program {
	c := exec.Command("node", "mqttjs.cjs")
	c.Env = append(os.Environ(), "NODE_PATH="+installed(t, "node_modules"))
	return startAgent(t, c)
}

func startPaho(t testing.TB) program {
	return startAgent(t, exec.Command(installed(t, "venv/bin/python"), "-B", "paho_agent.py"))
}

func startAiomqtt(t testing.TB) program {
	return startAgent(t, exec.Command(installed(t, "venv/bin/python"), "-B", "aiomqtt_agent.py"))
}

func startAgent(t testing.TB, c *exec.Cmd) *agent {
	a := &agent{replies: map[int]chan error{}, inboxes: map[string]*inbox{}}
	c.Stderr = os.Stderr
	stdin, err := c.StdinPipe()
	require.NoError(t, err)
	a.stdin = stdin
	stdout, err := c.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, c.Start())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for lines := bufio.NewReader(stdout); ; {
			line, err := lines.ReadBytes('\n')
			if err != nil {
				return
			}
			a.handle(line)
		}
	}()
	t.Cleanup(func() {
		_ = c.Process.Kill() // its connections have ended
		<-ended
		_ = c.Wait()
	})
	return a
}

func (a *agent) handle(line []byte) {
	var e event
	if err := json.Unmarshal(line, &e); err != nil {
		panic(fmt.Sprintf("agent: %v: %s", err, line))
	}
	a.mu.Lock()
	in, reply := a.inboxes[e.Client], a.replies[e.ID]
	delete(a.replies, e.ID)
	a.mu.Unlock()
	switch {
	case e.Message != nil:
		in.received(*e.Message)
	case e.Connected:
		in.connected(e.Session)
	case e.Error != "":
		reply <- errors.New(e.Error)
	default:
		reply <- nil
	}
}

// do sends a request and waits for its reply.
func (a *agent) do(ctx context.Context, r request) error {
	reply := make(chan error, 1)
	a.mu.Lock()
	a.last++
	r.ID = a.last
	a.replies[r.ID] = reply
	err := json.NewEncoder(a.stdin).Encode(r)
	a.mu.Unlock()
	if err != nil {
		return err
	}
	select {
	case err := <-reply:
		return err
	case <-ctx.Done():
		return fmt.Errorf("%s: no reply: %w", r.Request, ctx.Err())
	}
}

func (a *agent) connect(t testing.TB, o options, in *inbox) (connection, error) {
	a.mu.Lock()
	a.inboxes[o.Client] = in
	a.mu.Unlock()
	return &agentConnection{a, o.Client}, a.do(patient(t), request{Request: "connect", options: o})
}

// agentConnection is a client of an agent.
type agentConnection struct {
	agent *agent
	name  string
}

func (c *agentConnection) publish(ctx context.Context, messages ...message) error {
	return c.agent.do(ctx, request{Request: "publish", options: options{Client: c.name}, Messages: messages})
}

func (c *agentConnection) disconnect(ctx context.Context, wantWill bool) error {
	return c.agent.do(ctx, request{Request: "disconnect", options: options{Client: c.name}, WantWill: wantWill})
}
