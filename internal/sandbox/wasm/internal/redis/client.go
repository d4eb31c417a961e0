package redis

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/tripod-run/tripod/internal/component/wasi"
)

const (
	commandTime = 10 * time.Second // bounds a command, with the connection that it opens
	maxIdle     = 8                // connections
	idleTime    = 30 * time.Second
	// trustTime is how long a connection is used again without a check that the server has not closed it.
	trustTime = time.Second
	// scanCount is about how many keys a server looks at for one call of Keys.
	scanCount = "250"
)

// Client keeps pairs in a server. All methods can be called concurrently.
type Client struct {
	address Address
	dial    func(ctx context.Context) (net.Conn, error)

	mu     sync.Mutex
	idle   []*conn // the one that was used last is the last
	closed bool
}

// New makes a Client. The function dial opens a connection to the server, with TLS if the address says so. Its errors are
// for the guest.
func New(a Address, dial func(ctx context.Context) (net.Conn, error)) *Client {
	return &Client{address: a, dial: dial}
}

// CloseIdle closes the connections that no command uses.
func (c *Client) CloseIdle() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closeIdle(0)
}

// Close makes the Client keep no connections.
func (c *Client) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	c.closeIdle(0)
}

// closeIdle closes the connections that were not used for some time. The caller holds c.mu.
func (c *Client) closeIdle(unused time.Duration) {
	c.idle = slices.DeleteFunc(c.idle, func(old *conn) bool {
		expired := time.Since(old.used) >= unused
		if expired {
			old.Close()
		}
		return expired
	})
}

// small is hold for replies without values.
func small(n int) error {
	if n > 4<<10 {
		return errTooLarge
	}
	return nil
}

// command sends a command and returns the reply. If the connection fails, whether the server has carried out the command
// is unknown.
func (c *Client) command(ctx context.Context, hold func(n int) error, name string, args ...[]byte) (reply, error) {
	ctx, cancel := context.WithTimeout(ctx, commandTime)
	defer cancel()
	at, err := c.get(ctx)
	if err != nil {
		return reply{}, err
	}
	r, err := at.do(ctx, hold, name, args...)
	if _, usable := errors.AsType[serverError](err); err != nil && !usable {
		at.Close()
		return reply{}, plain(err)
	}
	c.put(at)
	return r, err
}

// plain returns an error of a connection without the addresses of its ends.
func plain(err error) error {
	if op, ok := errors.AsType[*net.OpError](err); ok {
		return fmt.Errorf("connection to the server: %w", op.Err)
	}
	return err
}

// get returns an idle connection, or a new one.
func (c *Client) get(ctx context.Context) (*conn, error) {
	for {
		at := c.takeIdle()
		if at == nil {
			return c.connect(ctx)
		}
		if time.Since(at.used) < trustTime {
			return at, nil
		}
		if _, err := at.do(ctx, small, "PING"); err == nil {
			return at, nil
		}
		at.Close()
	}
}

func (c *Client) takeIdle() *conn {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closeIdle(idleTime)
	n := len(c.idle)
	if n == 0 {
		return nil
	}
	at := c.idle[n-1]
	c.idle = c.idle[:n-1]
	return at
}

// put keeps a connection for the next command.
func (c *Client) put(at *conn) {
	at.used = time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closeIdle(idleTime)
	if c.closed || len(c.idle) >= maxIdle {
		at.Close()
		return
	}
	c.idle = append(c.idle, at)
}

func (c *Client) connect(ctx context.Context) (*conn, error) {
	raw, err := c.dial(ctx)
	if err != nil {
		return nil, err
	}
	at := newConn(raw)
	if err := at.begin(ctx, c.address); err != nil {
		at.Close()
		return nil, plain(err)
	}
	return at, nil
}

// begin authenticates and selects the database.
func (c *conn) begin(ctx context.Context, a Address) error {
	if a.Password != "" {
		args := [][]byte{[]byte(a.Password)}
		if a.User != "" {
			args = [][]byte{[]byte(a.User), []byte(a.Password)}
		}
		_, err := c.do(ctx, small, "AUTH", args...)
		if e, ok := errors.AsType[serverError](err); ok {
			return e.class() // the rest can repeat the password
		}
		if err != nil {
			return err
		}
	}
	if a.Database != 0 {
		_, err := c.do(ctx, small, "SELECT", []byte(strconv.Itoa(int(a.Database))))
		return err
	}
	return nil
}

// do sends a command and returns the reply.
func (c *conn) do(ctx context.Context, hold func(n int) error, name string, args ...[]byte) (reply, error) {
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := c.send(name, args...); err != nil {
		return reply{}, late(ctx, err)
	}
	r, err := c.receive(hold)
	if !stop() {
		err = context.Cause(ctx) // the connection cannot be used further
	}
	return r, late(ctx, err)
}

// late returns the reason if err comes from the end of ctx.
func late(ctx context.Context, err error) error {
	switch {
	case err == nil || ctx.Err() == nil:
		return err
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return errLate
	}
	return context.Cause(ctx)
}

var errLate = fmt.Errorf("the server has not answered within %s", commandTime)

func (c *Client) key(key string) []byte { return []byte(c.address.Prefix + key) }

func (c *Client) keys(keys []string) [][]byte {
	all := make([][]byte, len(keys))
	for i, key := range keys {
		all[i] = c.key(key)
	}
	return all
}

// Get implements wasi.Store.
func (c *Client) Get(ctx context.Context, hold func(n int) error, keys ...string) ([][]byte, error) {
	switch len(keys) {
	case 0:
		return nil, nil
	case 1: // unlike MGET, an error if the value is no string
		r, err := c.command(ctx, hold, "GET", c.key(keys[0]))
		return [][]byte{r.text}, err
	}
	r, err := c.command(ctx, hold, "MGET", c.keys(keys)...)
	if err != nil {
		return nil, err
	}
	if len(r.array) != len(keys) {
		return nil, errProtocol
	}
	values := make([][]byte, len(keys))
	for i, v := range r.array {
		values[i] = v.text
	}
	return values, nil
}

// Set implements wasi.Store.
func (c *Client) Set(ctx context.Context, pairs ...wasi.Pair) error {
	if len(pairs) == 0 {
		return nil
	}
	var args [][]byte
	for _, p := range pairs {
		args = append(args, c.key(p.Key), p.Value)
	}
	_, err := c.command(ctx, small, "MSET", args...)
	return err
}

// Delete implements wasi.Store.
func (c *Client) Delete(ctx context.Context, keys ...string) error {
	if len(keys) == 0 {
		return nil
	}
	_, err := c.command(ctx, small, "DEL", c.keys(keys)...)
	return err
}

// Exists implements wasi.Store.
func (c *Client) Exists(ctx context.Context, key string) (bool, error) {
	r, err := c.command(ctx, small, "EXISTS", c.key(key))
	return r.number > 0, err
}

// special are the characters with a meaning in the patterns of SCAN.
var special = strings.NewReplacer(`\`, `\\`, "*", `\*`, "?", `\?`, "[", `\[`, "]", `\]`)

// Keys implements wasi.Store. It leaves out keys that are not UTF-8, which no guest can name.
func (c *Client) Keys(ctx context.Context, hold func(n int) error, cursor uint64) ([]string, uint64, error) {
	args := [][]byte{[]byte(strconv.FormatUint(cursor, 10)), []byte("COUNT"), []byte(scanCount)}
	if c.address.Prefix != "" {
		args = append(args, []byte("MATCH"), []byte(special.Replace(c.address.Prefix)+"*"))
	}
	r, err := c.command(ctx, hold, "SCAN", args...)
	if err != nil {
		return nil, 0, err
	}
	if len(r.array) != 2 {
		return nil, 0, errProtocol
	}
	next, err := strconv.ParseUint(string(r.array[0].text), 10, 64)
	if err != nil {
		return nil, 0, errProtocol
	}
	var keys []string
	for _, k := range r.array[1].array {
		if key, ok := strings.CutPrefix(string(k.text), c.address.Prefix); ok && utf8.ValidString(key) {
			keys = append(keys, key)
		}
	}
	return keys, next, nil
}

// Increment implements wasi.Store.
func (c *Client) Increment(ctx context.Context, key string, delta int64) (int64, error) {
	r, err := c.command(ctx, small, "INCRBY", c.key(key), []byte(strconv.FormatInt(delta, 10)))
	return r.number, err
}

// swapScript compares and sets in one step: the server runs nothing else meanwhile.
const swapScript = `local now = redis.call('GET', KEYS[1])
if (ARGV[1] == '0' and now == false) or (ARGV[1] == '1' and now == ARGV[2]) then
  redis.call('SET', KEYS[1], ARGV[3])
  return 1
end
return 0`

// Swap implements wasi.Store.
func (c *Client) Swap(ctx context.Context, key string, old, value []byte) (bool, error) {
	exists := "1"
	if old == nil {
		exists = "0"
	}
	r, err := c.command(ctx, small, "EVAL", []byte(swapScript), []byte("1"), c.key(key), []byte(exists), old, value)
	return r.number == 1, err
}

var _ wasi.Store = (*Client)(nil)
