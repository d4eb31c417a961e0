package workerapi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/component/wit"
	"github.com/tripod-run/tripod/internal/fdpass"
)

// handler records requests and answers from its fields. It closes the files that it gets.
type handler struct {
	hello  Hello
	daemon atomic.Bool // a client has subscribed to events

	mu       sync.Mutex
	specs    []PodSpec
	contents []string // of the files passed to Start, in order
	err      error

	starting chan struct{} // if not nil, Start waits for it
	blocked  chan string   // receives the pod ID when a Stop or Start blocks
	release  chan struct{}
	session  chan *AttachSession
}

func newHandler() *handler {
	return &handler{
		hello:   Hello{Version: Version, Name: "test", Engine: "engine"},
		blocked: make(chan string, 16), release: make(chan struct{}), session: make(chan *AttachSession, 16),
	}
}

// fail makes every later request fail with err.
func (h *handler) fail(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.err = err
}

func (h *handler) answer() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.err
}

func (h *handler) Hello() Hello { return h.hello }

func (h *handler) Daemon(connected bool) { h.daemon.Store(connected) }

func (h *handler) Load(_ context.Context, code Code) (Loaded, error) {
	if code.Image.File == nil {
		return Loaded{}, fmt.Errorf("no code: %w", errdefs.ErrInvalidArgument)
	}
	defer code.Image.Close()
	data, err := io.ReadAll(code.Image)
	return Loaded{Digest: code.Digest, World: wit.World(data)}, err
}

func (h *handler) Unload(context.Context, string) error         { return h.answer() }
func (h *handler) Kill(context.Context, string) error           { return h.answer() }
func (h *handler) Remove(context.Context, string) error         { return h.answer() }
func (h *handler) UpdateTLS(context.Context, string, TLS) error { return h.answer() }
func (h *handler) Update(context.Context, Update) error         { return h.answer() }
func (h *handler) UpdateDialer(_ context.Context, _ string, dialer *os.File) error {
	if dialer != nil {
		dialer.Close()
	}
	return h.answer()
}
func (h *handler) List(context.Context) ([]Status, error) {
	return []Status{{ID: "a"}, {ID: "b"}}, h.answer()
}
func (h *handler) Stats(context.Context, []string) ([]Stats, error)      { return nil, h.answer() }
func (h *handler) Profile(context.Context, string, int) (Profile, error) { return Profile{}, nil }

func (h *handler) Metrics(context.Context, []string) ([]Metrics, error) {
	return []Metrics{{ID: "a", Methods: []MethodMetrics{{Procedure: "/p.S/M", Codes: map[string]uint64{"OK": 3}}}}}, h.answer()
}

func (h *handler) ReopenLog(_ context.Context, _ string, file *os.File) error {
	if file != nil {
		file.Close()
	}
	return h.answer()
}

func (h *handler) Start(_ context.Context, spec PodSpec) (Status, error) {
	defer spec.CloseFiles()
	if h.starting != nil {
		h.blocked <- spec.ID
		<-h.starting
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, f := range spec.files() {
		if f.File != nil {
			data, err := io.ReadAll(f)
			if err != nil {
				return Status{}, err
			}
			h.contents = append(h.contents, string(data))
		}
	}
	h.specs = append(h.specs, spec)
	return Status{ID: spec.ID, State: StateRunning}, h.err
}

func (h *handler) Stop(ctx context.Context, id string, _ time.Duration) (Status, error) {
	h.blocked <- id
	select {
	case <-h.release:
		return Status{ID: id, State: StateExited}, nil
	case <-ctx.Done():
		return Status{}, ctx.Err()
	}
}

// Channels answers "channels of <id>" on the connection.
func (h *handler) Channels(_ context.Context, id string, conn net.Conn) error {
	if err := h.answer(); err != nil {
		return err
	}
	defer conn.Close()
	_, err := io.WriteString(conn, "channels of "+id)
	return err
}

func (h *handler) Attach(_ context.Context, id string, s *AttachSession) error {
	if id == "none" {
		return fmt.Errorf("pod %s: %w", id, errdefs.ErrNotFound)
	}
	h.session <- s
	return nil
}

func start(t testing.TB, h *handler) (*Server, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "control.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	require.NoError(t, err)
	s := NewServer(l, h, slog.New(slog.DiscardHandler))
	served := make(chan error, 1)
	go func() { served <- s.Serve() }()
	t.Cleanup(func() {
		s.Close()
		require.NoError(t, <-served)
	})
	return s, path
}

// connect returns a client of the server at path.
func connect(ctx context.Context, path string) (*Client, error) {
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path})
	if err != nil {
		return nil, err
	}
	return NewClient(ctx, conn)
}

func dial(t testing.TB, path string) *Client {
	t.Helper()
	c, err := connect(t.Context(), path)
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	return c
}

// file returns an open temporary file with content.
func file(t testing.TB, content string) *os.File {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "")
	require.NoError(t, err)
	t.Cleanup(func() { f.Close() })
	_, err = f.WriteString(content)
	require.NoError(t, err)
	_, err = f.Seek(0, io.SeekStart)
	require.NoError(t, err)
	return f
}

// TestWorkersPassNoFiles: a worker that passes a file loses the connection, and the file is not kept.
func TestWorkersPassNoFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "control.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	require.NoError(t, err)
	defer l.Close()
	go func() {
		conn, err := l.AcceptUnix()
		if err != nil {
			return
		}
		defer conn.Close()
		_, _, _ = conn.WriteMsgUnix(make([]byte, 1), unix.UnixRights(0), nil) // the begin of a frame
		_, _ = conn.Read(make([]byte, MaxMessage))
		_, _ = conn.Read(make([]byte, 1)) // the end
	}()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	_, err = connect(ctx, path)
	require.ErrorIs(t, err, fdpass.ErrFrame)
}

func openFiles(t testing.TB) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(entries)
}

// TestDaemon checks that the handler learns whether a subscribed client is connected, and that a session's client does
// not count.
func TestDaemon(t *testing.T) {
	h := newHandler()
	_, path := start(t, h)
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path})
	require.NoError(t, err)
	session, err := NewSessionClient(t.Context(), conn)
	require.NoError(t, err)
	defer session.Close()
	require.False(t, h.daemon.Load())
	first, second := dial(t, path), dial(t, path)
	require.True(t, h.daemon.Load())
	first.Close()
	require.NoError(t, second.Kill(t.Context(), "a"))
	require.True(t, h.daemon.Load())
	second.Close()
	require.Eventually(t, func() bool { return !h.daemon.Load() }, 10*time.Second, time.Millisecond)
	dial(t, path)
	require.True(t, h.daemon.Load())
}

func TestRequests(t *testing.T) {
	h := newHandler()
	_, path := start(t, h)
	c := dial(t, path)
	require.Equal(t, "test", c.Hello().Name)

	loaded, err := c.Load(t.Context(), Code{Digest: "sha256:1", Image: File{File: file(t, "grpc")}})
	require.NoError(t, err)
	require.Equal(t, Loaded{Digest: "sha256:1", World: "grpc"}, loaded)

	list, err := c.List(t.Context())
	require.NoError(t, err)
	require.Len(t, list, 2)

	m, err := c.Metrics(t.Context(), "a")
	require.NoError(t, err)
	require.Equal(t, uint64(3), m[0].Methods[0].Codes["OK"])
}

func TestFilesTravelWithTheirRequest(t *testing.T) {
	h := newHandler()
	_, path := start(t, h)
	c := dial(t, path)
	spec := PodSpec{
		ID: "pod", Args: []string{strings.Repeat("a", 3<<20)}, // much more than one read
		Log:    File{File: file(t, "log")},
		Mounts: []Mount{{Guest: "/a", Dir: File{File: file(t, "mount a")}}, {Guest: "/b", Dir: File{File: file(t, "mount b")}}},
		Ports:  []Port{{Kind: PortTLS, Socket: File{File: file(t, "port")}}},
	}
	before := openFiles(t)
	for range 8 { // sequentially, because all reads share the files' offsets
		status, err := c.Start(t.Context(), spec)
		require.NoError(t, err)
		require.Equal(t, "pod", status.ID)
		for _, f := range spec.files() {
			_, err := f.Seek(0, io.SeekStart)
			require.NoError(t, err)
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	require.Len(t, h.specs, 8)
	for i, s := range h.specs {
		require.Equal(t, spec.Args, s.Args)
		require.Equal(t, []string{"log", "mount a", "mount b", "port"}, h.contents[4*i:4*i+4])
	}
	// Connections of earlier tests may end meanwhile. A copy that is left open would be left by each of the requests.
	require.LessOrEqual(t, openFiles(t), before, "the worker's copies are closed")
	require.Nil(t, spec.Log.Index, "the caller's spec is as it was")
}

func TestErrorsKeepTheirClass(t *testing.T) {
	h := newHandler()
	_, path := start(t, h)
	c := dial(t, path)
	for _, class := range fdpass.Classes() {
		fault := fmt.Errorf("what was asked: %w", class)
		h.fail(fault)
		err := c.Remove(t.Context(), "pod")
		require.ErrorIs(t, err, class)
		require.EqualError(t, err, fault.Error())
	}
	h.fail(errors.New("a fault"))
	err := c.Remove(t.Context(), "pod")
	require.EqualError(t, err, "a fault")
	require.Nil(t, errors.Unwrap(err))

	_, err = c.Load(t.Context(), Code{Digest: "d"})
	require.True(t, errdefs.IsInvalidArgument(err))
	require.True(t, errdefs.IsNotImplemented(c.call(t.Context(), "unheard-of", idRequest{}, nil)))
}

func TestRepliesComeInAnyOrder(t *testing.T) {
	h := newHandler()
	_, path := start(t, h)
	c := dial(t, path)
	stopped := make(chan error, 1)
	go func() {
		_, err := c.Stop(t.Context(), "slow", time.Hour)
		stopped <- err
	}()
	require.Equal(t, "slow", <-h.blocked)
	_, err := c.List(t.Context()) // not blocked by the pending Stop
	require.NoError(t, err)
	close(h.release)
	require.NoError(t, <-stopped)
}

func TestEndOfContextEndsTheWaiting(t *testing.T) {
	h := newHandler()
	_, path := start(t, h)
	c := dial(t, path)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-h.blocked
		cancel()
	}()
	_, err := c.Stop(ctx, "slow", time.Hour)
	require.ErrorIs(t, err, context.Canceled)
	_, err = c.List(t.Context()) // the connection still works
	require.NoError(t, err)
}

func TestWorkerGone(t *testing.T) {
	h := newHandler()
	s, path := start(t, h)
	c := dial(t, path)
	s.Publish(Event{Exited: &Status{ID: "pod", ExitCode: 3}})
	_, err := c.List(t.Context()) // after its reply, the event has arrived
	require.NoError(t, err)
	go func() { <-h.blocked; s.Close() }()
	_, err = c.Stop(t.Context(), "pod", 0)
	require.Error(t, err)
	<-c.Done()
	require.Error(t, c.Err())
	require.Equal(t, int32(3), (<-c.Events()).Exited.ExitCode, "events from before the end are delivered")
	_, open := <-c.Events()
	require.False(t, open)
	_, err = c.List(t.Context())
	require.True(t, errdefs.IsUnavailable(err), "%v", err)

	_, err = connect(t.Context(), path)
	require.Error(t, err)
}

func TestOtherVersion(t *testing.T) {
	h := newHandler()
	h.hello.Version = Version + 1
	_, path := start(t, h)
	_, err := connect(t.Context(), path)
	require.True(t, errdefs.IsFailedPrecondition(err), "%v", err)
	require.ErrorContains(t, err, fmt.Sprint("version ", Version+1))
}

func TestEvents(t *testing.T) {
	h := newHandler()
	s, path := start(t, h)
	a, b := dial(t, path), dial(t, path)
	const exits = 300
	for i := range exits { // b does not read yet
		s.Publish(Event{Exited: &Status{ID: fmt.Sprint(i)}})
		s.Publish(Event{Spans: []byte{byte(i)}})
	}
	s.Publish(Event{Fallback: &Fallback{ID: "slow", Reason: "why"}})
	for _, c := range []*Client{a, b} {
		seen := 0
		for seen < exits {
			if e := <-c.Events(); e.Exited != nil {
				require.Equal(t, fmt.Sprint(seen), e.Exited.ID)
				seen++
			}
		}
		for e := range c.Events() {
			if e.Fallback != nil {
				require.Equal(t, Fallback{ID: "slow", Reason: "why"}, *e.Fallback)
				break
			}
		}
	}
}

func TestSpansThatNobodyReadsAreDropped(t *testing.T) {
	q := newEventQueue()
	defer q.abandon()
	for i := range 10 * maxQueuedSpans {
		q.put(Event{Spans: []byte{byte(i)}})
		q.put(Event{Exited: &Status{}})
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	exits := 0
	for _, e := range q.queue {
		if e.Exited != nil {
			exits++
		}
	}
	require.GreaterOrEqual(t, exits, 10*maxQueuedSpans-1) // pump can hold one
	require.LessOrEqual(t, len(q.queue)-exits, maxQueuedSpans)
}

func TestStrangersAreCutOff(t *testing.T) {
	_, path := start(t, newHandler())
	for name, bytes := range map[string]string{
		"junk":         "GET / HTTP/1.1\r\n\r\n",
		"too long":     "\xff\xff\xff\xff\x00\x00\x00\x00",
		"lying":        "\x00\x00\x00\x02\x00\x00\x00\x01{}",
		"not a number": "\x00\x00\x00\x02\x00\x00\x00\x00{}",
	} {
		conn, err := net.Dial("unix", path)
		require.NoError(t, err)
		_, err = io.WriteString(conn, bytes)
		require.NoError(t, err)
		_ = conn.SetReadDeadline(time.Now().Add(10 * time.Second))
		_, err = conn.Read(make([]byte, 1))
		require.True(t, errors.Is(err, io.EOF) || strings.Contains(fmt.Sprint(err), "reset"), "%s: %v", name, err)
		conn.Close()
	}
	c := dial(t, path)
	_, err := c.List(t.Context())
	require.NoError(t, err)
}

// TestPacketLimits checks that requests beyond the frame limits are refused and the connection stays usable.
func TestPacketLimits(t *testing.T) {
	_, path := start(t, newHandler())
	c := dial(t, path)
	_, err := c.Start(t.Context(), PodSpec{Args: []string{strings.Repeat("a", MaxMessage)}})
	require.True(t, errdefs.IsInvalidArgument(err), "%v", err)
	spec := PodSpec{}
	f := file(t, "")
	for range fdpass.MaxFiles + 1 {
		spec.Mounts = append(spec.Mounts, Mount{Dir: File{File: f}})
	}
	_, err = c.Start(t.Context(), spec)
	require.True(t, errdefs.IsInvalidArgument(err), "%v", err)
	spec.Mounts = spec.Mounts[:fdpass.MaxFiles]
	_, err = c.Start(t.Context(), spec)
	require.NoError(t, err)
}

// TestTakeover checks that a new daemon's Hello waits for the orders of a killed one, except Stop.
func TestTakeover(t *testing.T) {
	h := newHandler()
	h.starting = make(chan struct{})
	_, path := start(t, h)
	first := dial(t, path)
	go func() { _, _ = first.Start(t.Context(), PodSpec{ID: "late"}) }()
	go func() { _, _ = first.Stop(t.Context(), "slow", time.Hour) }()
	<-h.blocked
	<-h.blocked
	live := dial(t, path) // orders on an open connection do not delay Hello
	go func() { _, _ = live.Start(t.Context(), PodSpec{ID: "other"}) }()
	<-h.blocked
	first.Close()
	second := make(chan *Client, 1)
	go func() { second <- dial(t, path) }()
	select {
	case <-second:
		t.Fatal("the second daemon does not wait for the orders of the first")
	case <-time.After(50 * time.Millisecond): // long enough to see a Hello that does not wait
	}
	close(h.starting)
	<-second
	h.mu.Lock()
	defer h.mu.Unlock()
	require.Contains(t, []string{h.specs[0].ID, h.specs[min(1, len(h.specs)-1)].ID}, "late")
}
