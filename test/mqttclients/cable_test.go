package mqttclients

import (
	"fmt"
	"io"
	"net"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// cable is a path to a broker that a test may cut: it forwards TCP connections.
type cable struct {
	listener net.Listener
	broker   int // its port
	mu       sync.Mutex
	severed  bool
	conns    []*net.TCPConn
	ended    sync.WaitGroup
}

func newCable(t testing.TB, broker int) *cable {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	c := &cable{listener: l, broker: broker}
	c.ended.Go(c.accept)
	t.Cleanup(func() {
		c.sever()
		c.ended.Wait()
	})
	return c
}

func (c *cable) port() int { return c.listener.Addr().(*net.TCPAddr).Port }

func (c *cable) accept() {
	for {
		client, err := c.listener.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp", fmt.Sprint("127.0.0.1:", c.broker))
		if err != nil {
			client.Close()
			continue
		}
		c.mu.Lock()
		c.conns = append(c.conns, client.(*net.TCPConn), server.(*net.TCPConn))
		severed := c.severed
		c.mu.Unlock()
		if severed {
			c.cut()
			return
		}
		forward := func(to, from net.Conn) func() {
			return func() {
				_, _ = io.Copy(to, from) // ends with either connection
				to.Close()
			}
		}
		c.ended.Go(forward(client, server))
		c.ended.Go(forward(server, client))
	}
}

// cut resets the connections. Clients may connect again.
func (c *cable) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, conn := range c.conns {
		_ = conn.SetLinger(0)
		conn.Close()
	}
	c.conns = nil
}

// sever resets the connections and refuses new ones.
func (c *cable) sever() {
	c.mu.Lock()
	c.severed = true
	c.mu.Unlock()
	c.listener.Close()
	c.cut()
}
