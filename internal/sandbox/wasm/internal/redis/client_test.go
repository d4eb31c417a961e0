package redis

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/component/wasi"
	"github.com/tripod-run/tripod/test/until"
)

// server starts Debian's redis-server on a unix socket and returns its path.
func server(t *testing.T, args ...string) (socket string, stop func()) {
	t.Helper()
	program, err := exec.LookPath("redis-server")
	require.NoError(t, err, "hack/setup.sh installs redis-server")
	dir := t.TempDir()
	socket = filepath.Join(dir, "redis.sock")
	c := exec.Command(program, append([]string{"--port", "0", "--unixsocket", socket, "--save", "", "--dir", dir}, args...)...)
	require.NoError(t, c.Start())
	stop = sync.OnceFunc(func() {
		_ = c.Process.Kill()
		_ = c.Wait()
	})
	t.Cleanup(stop)
	until.Holds(t, "redis-server listens", func() bool {
		conn, err := net.Dial("unix", socket)
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
	return socket, stop
}

// client returns a client of the server at a socket. dials counts the connections.
func client(t *testing.T, socket string, a Address) (c *Client, dials func() int) {
	var mu sync.Mutex
	n := 0
	c = New(a, func(ctx context.Context) (net.Conn, error) {
		mu.Lock()
		n++
		mu.Unlock()
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	})
	t.Cleanup(c.Close)
	return c, func() int {
		mu.Lock()
		defer mu.Unlock()
		return n
	}
}

func anySize(int) error { return nil }

func TestStore(t *testing.T) {
	socket, _ := server(t)
	all, dials := client(t, socket, Address{})
	c, _ := client(t, socket, Address{Prefix: "a*:"})
	ctx := t.Context()
	require.NoError(t, all.Set(ctx, wasi.Pair{Key: "axx:other", Value: []byte("hidden")}, wasi.Pair{Key: "a*:binary\xff", Value: nil}))

	values, err := c.Get(ctx, anySize, "missing")
	require.NoError(t, err)
	require.Equal(t, [][]byte{nil}, values)
	odd := "../x\x00 \r\n*1\r\n"
	require.NoError(t, c.Set(ctx, wasi.Pair{Key: odd, Value: []byte("v\r\n\x00")}, wasi.Pair{Key: "empty", Value: nil}))
	values, err = c.Get(ctx, anySize, odd, "missing", "empty")
	require.NoError(t, err)
	require.Equal(t, [][]byte{[]byte("v\r\n\x00"), nil, {}}, values)
	keys, next, err := c.Keys(ctx, anySize, 0)
	require.NoError(t, err)
	require.Zero(t, next)
	require.ElementsMatch(t, []string{odd, "empty"}, keys, "keys without the prefix, or not UTF-8")
	exists, err := c.Exists(ctx, "empty")
	require.NoError(t, err)
	require.True(t, exists)
	require.NoError(t, c.Delete(ctx, "empty", "missing"))
	exists, err = c.Exists(ctx, "empty")
	require.NoError(t, err)
	require.False(t, exists)

	sum, err := c.Increment(ctx, "n", -5)
	require.NoError(t, err)
	require.Equal(t, int64(-5), sum)
	_, err = c.Increment(ctx, odd, 1)
	require.ErrorContains(t, err, "the server says: ERR value is not an integer")
	for _, s := range []struct {
		old, value []byte
		want       bool
	}{{[]byte{}, []byte("x"), false}, {nil, []byte("1"), true}, {nil, []byte("2"), false}, {[]byte("0"), []byte("2"), false},
		{[]byte("1"), []byte("2"), true}} {
		swapped, err := c.Swap(ctx, "cas", s.old, s.value)
		require.NoError(t, err)
		require.Equal(t, s.want, swapped, "swap %q for %q", s.old, s.value)
	}
	require.Equal(t, 1, dials(), "connections for commands one after the other")
}

// TestTwoClientsAtOnce: increments and swaps of several clients are not lost.
func TestTwoClientsAtOnce(t *testing.T) {
	socket, _ := server(t)
	const each = 200
	var all sync.WaitGroup
	for range 4 {
		c, _ := client(t, socket, Address{})
		all.Go(func() {
			for range each {
				if _, err := c.Increment(t.Context(), "sum", 1); err != nil {
					t.Error(err)
				}
				for swapped := false; !swapped; {
					values, err := c.Get(t.Context(), anySize, "text")
					if err == nil {
						swapped, err = c.Swap(t.Context(), "text", values[0], append(slices.Clone(values[0]), 'x'))
					}
					if err != nil {
						t.Error(err)
						return
					}
				}
			}
		})
	}
	all.Wait()
	c, _ := client(t, socket, Address{})
	values, err := c.Get(t.Context(), anySize, "sum", "text")
	require.NoError(t, err)
	require.Equal(t, fmt.Sprint(4*each), string(values[0]))
	require.Len(t, values[1], 4*each)
}

func TestManyKeys(t *testing.T) {
	socket, _ := server(t)
	c, _ := client(t, socket, Address{Prefix: "p:"})
	const many = 2000
	for i := range many {
		require.NoError(t, c.Set(t.Context(), wasi.Pair{Key: fmt.Sprint(i), Value: []byte("v")}))
	}
	seen := map[string]bool{}
	for cursor, calls := uint64(0), 0; ; calls++ {
		keys, next, err := c.Keys(t.Context(), anySize, cursor)
		require.NoError(t, err)
		for _, key := range keys {
			seen[key] = true
		}
		if cursor = next; cursor == 0 {
			require.Greater(t, calls, 2, "all keys came at once")
			break
		}
	}
	require.Len(t, seen, many)
}

// TestServerRestarts: after the server has ended, commands fail, and after its restart they succeed.
func TestServerRestarts(t *testing.T) {
	socket, stop := server(t)
	c, _ := client(t, socket, Address{})
	_, err := c.Increment(t.Context(), "n", 1)
	require.NoError(t, err)
	stop()
	_, err = c.Increment(t.Context(), "n", 1)
	require.Error(t, err)
	again, _ := server(t)
	c.dial = func(ctx context.Context) (net.Conn, error) { return new(net.Dialer).DialContext(ctx, "unix", again) }
	sum, err := c.Increment(t.Context(), "n", 1)
	require.NoError(t, err)
	require.Equal(t, int64(1), sum)
}

// TestStaleConnection: a connection that was idle for some time is checked before a command that must not run twice.
func TestStaleConnection(t *testing.T) {
	socket, _ := server(t)
	c, dials := client(t, socket, Address{})
	_, err := c.Increment(t.Context(), "n", 1)
	require.NoError(t, err)
	c.mu.Lock()
	c.idle[0].used = time.Now().Add(-2 * trustTime)
	_ = c.idle[0].Conn.(*net.UnixConn).CloseWrite() // the server closes its end, too
	c.mu.Unlock()
	sum, err := c.Increment(t.Context(), "n", 1)
	require.NoError(t, err)
	require.Equal(t, int64(2), sum)
	require.Equal(t, 2, dials())
	c.CloseIdle()
	_, err = c.Increment(t.Context(), "n", 1)
	require.NoError(t, err)
	require.Equal(t, 3, dials())
}

func TestAuthentication(t *testing.T) {
	socket, _ := server(t, "--requirepass", "right")
	for password, want := range map[string]bool{"": false, "wrong": false, "right": true} {
		c, _ := client(t, socket, Address{Password: password, Database: 3})
		_, err := c.Exists(t.Context(), "k")
		require.Equal(t, want, err == nil, "password %q: %v", password, err)
		require.Equal(t, !want, errdefs.IsPermissionDenied(err), "%v", err)
	}
	c, _ := client(t, socket, Address{User: "default", Password: "right", Database: 1000})
	_, err := c.Exists(t.Context(), "k")
	require.ErrorContains(t, err, "DB index is out of range")
}

// TestPasswordInError: a server that does not know AUTH repeats its arguments, but the guest's error does not.
func TestPasswordInError(t *testing.T) {
	socket, _ := server(t, "--rename-command", "AUTH", "")
	c, _ := client(t, socket, Address{Password: "secret"})
	_, err := c.Exists(t.Context(), "k")
	require.ErrorContains(t, err, "the server says: ERR")
	require.NotContains(t, err.Error(), "secret")
}

// scripted returns a client of a server that answers each command with the same bytes, and then with nothing.
func scripted(t *testing.T, answer string) *Client {
	return New(Address{}, func(context.Context) (net.Conn, error) {
		ours, theirs := net.Pipe()
		t.Cleanup(func() { theirs.Close() })
		go func() {
			in := bufio.NewReader(theirs)
			if _, err := in.ReadByte(); err == nil {
				go func() { _, _ = in.WriteTo(discard{}) }()
				_, _ = theirs.Write([]byte(answer))
			}
		}()
		return ours, nil
	})
}

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

// TestHostileServer: no reply makes the client use memory without limit or fail in an unknown way.
func TestHostileServer(t *testing.T) {
	nested := strings.Repeat("*1\r\n", maxDepth+1) + ":1\r\n"
	for answer, want := range map[string]error{
		fmt.Sprintf("$%d\r\n", maxReply+1): errTooLarge, "$9223372036854775807\r\n": errTooLarge,
		"*1500\r\n" + strings.Repeat("+"+strings.Repeat("x", 4000)+"\r\n", 1500): errTooLarge,
		"*1000000000\r\n": errTooLarge, fmt.Sprintf("*2\r\n*%d\r\n", maxElements): errTooLarge,
		"$-2\r\n": errProtocol, "$x\r\n": errProtocol, "$99999999999999999999\r\n": errProtocol, "\r\n": errProtocol, "x\r\n": errProtocol,
		"$1\r\nabc": errProtocol, nested: errProtocol, "*1\r\n-ERR\r\n": errProtocol, strings.Repeat("+", 5000) + "\r\n": errProtocol,
	} {
		c := scripted(t, answer)
		_, err := c.Get(t.Context(), anySize, "k")
		require.ErrorIs(t, err, want, "%.40q", answer)
		require.Empty(t, c.idle, "the connection is kept after %.40q", answer)
	}
	c := scripted(t, "*0\r\n") // not what MGET and SCAN return
	_, err := c.Get(t.Context(), anySize, "a", "b")
	require.ErrorIs(t, err, errProtocol)
	_, _, err = scripted(t, "*2\r\n$1\r\nx\r\n*0\r\n").Keys(t.Context(), anySize, 0)
	require.ErrorIs(t, err, errProtocol)
	_, err = scripted(t, "$5000\r\n").Exists(t.Context(), "k")
	require.ErrorIs(t, err, errTooLarge)
}

// TestHold: the memory of a value is counted before it is read.
func TestHold(t *testing.T) {
	full := errors.New("full")
	held := 0
	_, err := scripted(t, "$1000\r\n").Get(t.Context(), func(n int) error { held = n; return full }, "k")
	require.ErrorIs(t, err, full)
	require.Equal(t, 1000, held)
	_, err = scripted(t, "+123456789\r\n").Get(t.Context(), func(n int) error { held = n; return full }, "k")
	require.ErrorIs(t, err, full)
	require.Equal(t, 9, held)
}

// TestCancelled: a command ends with its context.
func TestCancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	c := scripted(t, "") // never answers
	done := make(chan error)
	go func() {
		_, err := c.Get(ctx, anySize, "k")
		done <- err
	}()
	cancel()
	select {
	case err := <-done:
		require.ErrorIs(t, err, context.Canceled)
	case <-time.After(commandTime):
		t.Fatal("the command goes on")
	}
}

func TestParseURL(t *testing.T) {
	for text, want := range map[string]Address{
		"redis://redis":                         {Host: "redis", Port: 6379},
		"redis://:p%40ss@10.0.0.1:1/2?prefix=a": {Host: "10.0.0.1", Port: 1, Password: "p@ss", Database: 2, Prefix: "a"},
		"rediss://user:secret@[fd00::1]:6380/":  {Host: "fd00::1", Port: 6380, TLS: true, User: "user", Password: "secret"},
	} {
		got, err := ParseURL(text)
		require.NoError(t, err, text)
		require.Equal(t, want, got, text)
	}
	for _, text := range []string{
		"", "redis", "http://secret@redis", "redis://:secret@", "redis://:secret@redis:x", "redis://:secret@redis:0", "redis://:secret@redis/x",
		"redis:secret",
		"redis://:secret@redis?db=1", "redis://:secret@redis#x", "redis://:secret@redis/70000",
		"redis://x?prefix=" + strings.Repeat("secret", 1000), "redis://:secret%zz@redis",
	} {
		_, err := ParseURL(text)
		require.True(t, errdefs.IsInvalidArgument(err), "%q: %v", text, err)
		require.NotContains(t, err.Error(), "secret")
	}
}
