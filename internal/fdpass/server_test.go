package fdpass

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
)

// openFiles counts the descriptors of this process.
func openFiles(t testing.TB) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(entries)
}

// start serves handler and returns a function that connects to it.
func start(t *testing.T, handler Handler) (*Server, func() *net.UnixConn) {
	t.Helper()
	dir, err := os.MkdirTemp("", "fdpass")
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	addr := &net.UnixAddr{Name: filepath.Join(dir, "s"), Net: "unix"}
	listener, err := net.ListenUnix("unix", addr)
	require.NoError(t, err)
	s := NewServer(listener, handler, slog.New(slog.DiscardHandler))
	done := make(chan error, 1)
	go func() { done <- s.Serve() }()
	t.Cleanup(func() {
		require.NoError(t, s.Close())
		require.NoError(t, <-done)
	})
	return s, func() *net.UnixConn {
		conn, err := net.DialUnix("unix", nil, addr)
		require.NoError(t, err)
		return conn
	}
}

type question struct{ Name string }

// pipeHandler replies with the reading end of a pipe that contains the name.
func pipeHandler(ctx context.Context, peer Peer, request []byte) (Reply, error) {
	var q question
	if err := json.Unmarshal(request, &q); err != nil {
		return Reply{}, fmt.Errorf("not understood: %w", errdefs.ErrInvalidArgument)
	}
	if q.Name == "nobody" {
		return Reply{}, fmt.Errorf("no %s here: %w", q.Name, errdefs.ErrNotFound)
	}
	r, w, err := os.Pipe()
	if err != nil {
		return Reply{}, err
	}
	defer w.Close()
	_, err = w.WriteString(q.Name)
	return Reply{Body: peer, Files: []*os.File{r}}, err
}

func TestCall(t *testing.T) {
	_, connect := start(t, pipeHandler)
	before := openFiles(t)
	for range 10 {
		var peer Peer
		files, err := Call(t.Context(), connect(), question{"Ada"}, &peer)
		require.NoError(t, err)
		require.Equal(t, Peer{os.Getpid(), os.Geteuid(), os.Getegid()}, peer)
		require.Len(t, files, 1)
		text, err := io.ReadAll(files[0])
		require.NoError(t, err)
		require.Equal(t, "Ada", string(text))
		CloseFiles(files)
	}
	_, err := Call(t.Context(), connect(), question{"nobody"}, nil)
	require.ErrorIs(t, err, errdefs.ErrNotFound)
	require.EqualError(t, err, "no nobody here: not found")
	_, err = Call(t.Context(), connect(), question{strings.Repeat("x", MaxRequest)}, nil)
	require.ErrorIs(t, err, errdefs.ErrInvalidArgument)
	require.Eventually(t, func() bool { return openFiles(t) == before }, 10*time.Second, 10*time.Millisecond)
}

// TestClientGoesAway checks that the handler's context ends when the client disconnects, and that no file stays open.
func TestClientGoesAway(t *testing.T) {
	entered, ended := make(chan struct{}), make(chan struct{})
	_, connect := start(t, func(ctx context.Context, _ Peer, _ []byte) (Reply, error) {
		close(entered)
		<-ctx.Done()
		defer close(ended)
		r, w, err := os.Pipe()
		w.Close()
		return Reply{Files: []*os.File{r}}, err
	})
	before := openFiles(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := Call(ctx, connect(), question{"Ada"}, nil)
		done <- err
	}()
	<-entered
	cancel()
	err := <-done
	require.ErrorIs(t, err, errdefs.ErrUnavailable)
	require.ErrorIs(t, err, context.Canceled)
	<-ended
	require.Eventually(t, func() bool { return openFiles(t) == before }, 10*time.Second, 10*time.Millisecond)
}

// TestCloseEndsRequests checks that Close ends running requests and idle connections.
func TestCloseEndsRequests(t *testing.T) {
	entered := make(chan struct{})
	s, connect := start(t, func(ctx context.Context, _ Peer, _ []byte) (Reply, error) {
		close(entered)
		<-ctx.Done()
		return Reply{}, ctx.Err()
	})
	done := make(chan error, 1)
	go func() {
		_, err := Call(t.Context(), connect(), question{"Ada"}, nil)
		done <- err
	}()
	idle := connect()
	defer idle.Close()
	<-entered
	require.NoError(t, s.Close())
	require.Error(t, <-done)
}

// TestPerUser checks the limit on connections per user.
func TestPerUser(t *testing.T) {
	s := NewServer(nil, nil, slog.New(slog.DiscardHandler))
	var conns []*net.UnixConn
	for range maxPerUser {
		c := &net.UnixConn{}
		conns = append(conns, c)
		require.NoError(t, s.admit(c, Peer{UID: 7}))
	}
	require.Error(t, s.admit(&net.UnixConn{}, Peer{UID: 7}))
	require.NoError(t, s.admit(&net.UnixConn{}, Peer{UID: 8}))
	s.release(conns[0], Peer{UID: 7})
	require.NoError(t, s.admit(&net.UnixConn{}, Peer{UID: 7}))
}

// TestJunk checks that invalid requests end the connection, and that files in requests are closed.
func TestJunk(t *testing.T) {
	_, connect := start(t, pipeHandler)
	before := openFiles(t)
	for _, junk := range [][]byte{{}, {1}, header(1<<31, 0), header(2, 3), append(header(2, 0), "[]"...), append(header(1, 1), 'x')} {
		conn := connect()
		null, err := os.Open("/dev/null")
		require.NoError(t, err)
		if len(junk) > 0 {
			require.NoError(t, Write(conn, MaxRequest, junk, []*os.File{null})) // a valid frame with an invalid request
		}
		_, _ = conn.Write(junk) // the server may have hung up already
		_ = conn.CloseWrite()
		_, _ = io.Copy(io.Discard, conn) // until the server hangs up
		conn.Close()
		null.Close()
	}
	require.Eventually(t, func() bool { return openFiles(t) == before }, 10*time.Second, 10*time.Millisecond)
}

// FuzzAnswers checks that Call returns files only without an error, and leaves no file open, whatever a server sends.
func FuzzAnswers(f *testing.F) {
	f.Add([]byte(`{"body":{"Name":"x"}}`), uint8(2))
	f.Add([]byte(`{"error":{"class":"not-found","message":"m"}}`), uint8(1))
	f.Add([]byte(`{"body":[]}`), uint8(1))
	f.Add([]byte(`x`), uint8(3))
	f.Fuzz(func(t *testing.T, payload []byte, count uint8) {
		if len(payload) > MaxReply {
			t.Skip()
		}
		before := nulls(t)
		fds, err := socketpair()
		if err != nil {
			t.Fatal(err)
		}
		var files []*os.File
		for range count % 4 {
			file, err := os.Open("/dev/null")
			if err != nil {
				t.Fatal(err)
			}
			files = append(files, file)
		}
		done := make(chan error, 1)
		go func() {
			r := NewReader(fds[1], MaxRequest)
			defer r.Close()
			_, err := r.Next()
			done <- errors.Join(err, Write(fds[1], MaxReply, payload, files))
			fds[1].Close()
		}()
		var q question
		got, err := Call(t.Context(), fds[0], question{"Ada"}, &q)
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		CloseFiles(files)
		if err != nil && len(got) > 0 || err == nil && len(got) != int(count%4) {
			t.Fatalf("Call returned %d of %d files and the error %v, want all files or an error", len(got), count%4, err)
		}
		CloseFiles(got)
		if after := nulls(t); after != before {
			t.Fatalf("%d files are open after Call, want %d", after, before)
		}
	})
}

// nulls counts the open descriptors of /dev/null. The fuzzing engine opens other files, which must not count.
func nulls(t testing.TB) (n int) {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	for _, e := range entries {
		if to, _ := os.Readlink("/proc/self/fd/" + e.Name()); to == "/dev/null" {
			n++
		}
	}
	return n
}
