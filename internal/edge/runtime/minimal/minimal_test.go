package minimal

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/runtime"
	"github.com/tripod-run/tripod/internal/edge/wire"
	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/test/edgetest"
	"github.com/tripod-run/tripod/test/races"
)

func TestMain(m *testing.M) {
	edgetest.Main()
	os.Exit(races.Run(m.Run))
}

// newRuntime makes a runtime whose program is this test binary. change may be nil.
func newRuntime(t *testing.T, script edgetest.Script, change func(*Config)) *Runtime {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	dir, err := os.MkdirTemp("", "sl") // a socket's path is short
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	script.Dir = dir
	cfg := Config{
		Info: runtime.Info{Name: "test", UUID: "u"}, Index: 10, Dir: dir, Command: []string{self}, Env: script.Env(),
		ConnectTimeout: 30 * time.Second, StopTimeout: 30 * time.Second,
	}
	if change != nil {
		change(&cfg)
	}
	r, err := New(cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, r.Close()) })
	return r
}

func start(t *testing.T, r *Runtime) {
	t.Helper()
	_, err := r.Start(t.Context())
	require.NoError(t, err)
}

func receive(t *testing.T, r *Runtime) channel.Message {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	m, err := r.Receive(ctx)
	require.NoError(t, err)
	return m
}

// find receives until a message of the type contains the text, and skips the program's own lines.
func find(t *testing.T, r *Runtime, arg int, text string) channel.Message {
	t.Helper()
	for {
		m := receive(t, r)
		if m.Control && m.Arg == arg && strings.Contains(string(m.Payload), text) {
			return m
		}
		require.True(t, m.Control && m.Arg == wire.RuntimeLog, "%+v %q", m.Header, m.Payload)
	}
}

func create(t *testing.T, r *Runtime, index int, argv ...string) {
	t.Helper()
	d, err := wire.ModuleData{}.With("args", argv)
	require.NoError(t, err)
	d, err = d.With("index", index)
	require.NoError(t, err)
	d, err = d.With("uuid", fmt.Sprintf("m%d", index))
	require.NoError(t, err)
	require.NoError(t, r.Create(t.Context(), index, d))
}

// lost receives until the runtime is lost.
func lost(t *testing.T, r *Runtime) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for {
		if _, err := r.Receive(ctx); err != nil {
			require.NoError(t, ctx.Err())
			return err
		}
	}
}

func TestAModuleFromItsCreationToItsExit(t *testing.T) {
	r := newRuntime(t, edgetest.Script{}, nil)
	assert.Equal(t, runtime.Info{Type: "linux/minimal", Name: "test", UUID: "u", MaxModules: 128}, r.Info())
	start(t, r)
	find(t, r, wire.RuntimeLog, `runtime with 2 arguments: ["10"]`)
	create(t, r, 5, "stdio", "a")
	opened := find(t, r, channel.OpenChannel, "")
	o, err := channel.ParseOpen(opened.Payload)
	require.NoError(t, err)
	assert.Equal(t, channel.Open{FD: 0, Flags: channel.Write, Topic: "$SL/proc/stdio"}, o)
	assert.Equal(t, 5, opened.Module)
	said := receive(t, r)
	assert.Equal(t, channel.Header{Module: 5, Arg: 0}, said.Header)
	assert.Equal(t, "hello argc=2 [a] SLTEST=(unset)\n", string(said.Payload))
	assert.Equal(t, `{"status": "exited"}`, string(find(t, r, wire.Exited, "").Payload))

	create(t, r, 127, "echo", "t")
	find(t, r, channel.OpenChannel, "")
	find(t, r, wire.ModuleLog, "open")
	require.NoError(t, r.Send(t.Context(), channel.Message{Header: channel.Header{Module: 127}, Payload: make([]byte, 1<<20)}))
	assert.Len(t, receive(t, r).Payload, 1<<20)
	require.NoError(t, r.Delete(t.Context(), 127, "m127"))
	find(t, r, wire.Exited, "killed")
}

func TestPathsAreHexAndIndexesDecimal(t *testing.T) {
	assert.Equal(t, "/tmp/sl/0a.s", SocketPath(DefaultDir, 10))
	assert.Equal(t, "/tmp/sl/ff.s", SocketPath(DefaultDir, 255))
}

func TestAStaleSocketIsReplacedAndNothingElseIs(t *testing.T) {
	r := newRuntime(t, edgetest.Script{}, nil)
	path := SocketPath(r.cfg.Dir, 10)
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	require.NoError(t, err)
	stale.SetUnlinkOnClose(false)
	stale.Close()
	start(t, r)
	require.NoFileExists(t, path, "one program connects, and no other after it")

	other := newRuntime(t, edgetest.Script{}, nil)
	path = SocketPath(other.cfg.Dir, 10)
	require.NoError(t, os.WriteFile(path, []byte("precious"), 0o600))
	_, err = other.Start(t.Context())
	require.ErrorIs(t, err, errdefs.ErrFailedPrecondition)
	require.FileExists(t, path)
}

func TestADirectoryThatOthersWriteToIsRefused(t *testing.T) {
	r := newRuntime(t, edgetest.Script{}, nil)
	require.NoError(t, os.Chmod(r.cfg.Dir, 0o777))
	_, err := r.Start(t.Context())
	require.ErrorIs(t, err, errdefs.ErrFailedPrecondition)
	link := r.cfg.Dir + ".link"
	require.NoError(t, os.Symlink(t.TempDir(), link))
	t.Cleanup(func() { os.Remove(link) })
	_, _, err = listen(link, 1)
	require.ErrorIs(t, err, errdefs.ErrFailedPrecondition)
	_, _, err = listen(filepath.Join(t.TempDir(), "made"), 1)
	require.NoError(t, err)
}

func TestFailedStarts(t *testing.T) {
	t.Run("the program does not connect", func(t *testing.T) {
		r := newRuntime(t, edgetest.Script{Silent: true}, func(c *Config) { c.ConnectTimeout = 500 * time.Millisecond })
		_, err := r.Start(t.Context())
		require.ErrorIs(t, err, errdefs.ErrUnavailable)
		assert.ErrorContains(t, err, "did not connect")
	})
	t.Run("the program ends", func(t *testing.T) {
		r := newRuntime(t, edgetest.Script{ExitEarly: true}, nil)
		begin := time.Now()
		_, err := r.Start(t.Context())
		require.ErrorIs(t, err, errdefs.ErrUnavailable)
		assert.ErrorContains(t, err, "exit status 4")
		assert.ErrorContains(t, err, "it said: cannot start")
		assert.Less(t, time.Since(begin), 25*time.Second, "the time limit is not waited for")
		_, err = r.Receive(t.Context())
		assert.ErrorIs(t, err, errdefs.ErrUnavailable)
		assert.ErrorIs(t, r.Send(t.Context(), channel.Message{}), errdefs.ErrUnavailable)
	})
	t.Run("there is no program", func(t *testing.T) {
		r := newRuntime(t, edgetest.Script{}, func(c *Config) { c.Command = []string{"/nowhere/runtime"} })
		_, err := r.Start(t.Context())
		require.ErrorIs(t, err, errdefs.ErrUnavailable)
	})
	t.Run("nobody waits any more", func(t *testing.T) {
		r := newRuntime(t, edgetest.Script{Silent: true}, nil)
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		_, err := r.Start(ctx)
		require.ErrorIs(t, err, context.DeadlineExceeded)
	})
}

// A program that dies makes Receive fail once its messages are read. Then it is started again with the same arguments.
func TestALostRuntimeIsStartedAgain(t *testing.T) {
	r := newRuntime(t, edgetest.Script{}, nil)
	for range 3 {
		start(t, r)
		find(t, r, wire.RuntimeLog, `runtime with 2 arguments: ["10"]`)
		create(t, r, 0, "log", "last words")
		create(t, r, 1, "crash")
		find(t, r, wire.ModuleLog, "last words")
		find(t, r, wire.ModuleLog, "level")
		err := lost(t, r)
		require.ErrorIs(t, err, errdefs.ErrUnavailable)
		assert.ErrorIs(t, r.Send(t.Context(), channel.Message{}), errdefs.ErrUnavailable)
		_, err = r.Receive(t.Context())
		require.ErrorIs(t, err, errdefs.ErrUnavailable, "and no busy loop: it stays lost")
	}
}

func TestWhatIsSentBeforeTheEndIsReceived(t *testing.T) {
	r := newRuntime(t, edgetest.Script{}, nil)
	start(t, r)
	for i := range 100 {
		create(t, r, i, "exit", "7")
	}
	create(t, r, 100, "crash")
	exits := 0
	for {
		m, err := r.Receive(t.Context())
		if err != nil {
			require.ErrorIs(t, err, errdefs.ErrUnavailable)
			break
		}
		if m.Arg == wire.Exited {
			exits++
		}
	}
	assert.Equal(t, 100, exits)
}

func TestBadFramesEndTheRuntimeOnly(t *testing.T) {
	for script, text := range map[string]string{"oversized": "the limit is", "truncated": "cut off"} {
		t.Run(script, func(t *testing.T) {
			r := newRuntime(t, edgetest.Script{}, nil)
			start(t, r)
			pid := r.life.cmd.Process.Pid
			create(t, r, 0, script)
			err := lost(t, r)
			require.ErrorIs(t, err, errdefs.ErrUnavailable)
			assert.ErrorContains(t, err, text)
			assert.ErrorIs(t, unix.Kill(-pid, 0), unix.ESRCH, "nothing is left of the program")
			start(t, r)
		})
	}
}

func TestMessagesThatAreNoFrames(t *testing.T) {
	r := newRuntime(t, edgetest.Script{}, func(c *Config) { c.MaxFrame = 1 << 10 })
	start(t, r)
	for _, m := range []channel.Message{{Header: channel.Header{Module: 128}}, {Header: channel.Header{Arg: 256}},
		{Payload: make([]byte, 1<<10+1)}} {
		assert.ErrorIs(t, r.Send(t.Context(), m), errdefs.ErrInvalidArgument)
	}
	create(t, r, 0, "log", "still there")
	find(t, r, wire.ModuleLog, "still there")
}

// The public manager closes its runtimes' input, so that a runtime that reads it loops (a known defect of the
// protocol).
func TestTheInputStaysOpenAndSilent(t *testing.T) {
	r := newRuntime(t, edgetest.Script{}, nil)
	start(t, r)
	create(t, r, 0, "log", "x")
	for {
		m := receive(t, r)
		require.NotContains(t, string(m.Payload), "stdin:")
		if string(m.Payload) == "\x82level" {
			break
		}
	}
	r.life.stdin.Close()
	find(t, r, wire.RuntimeLog, "stdin: EOF") // that is how it would look
}

func TestAProgramThatDoesNotReadIsLost(t *testing.T) {
	r := newRuntime(t, edgetest.Script{NotReading: true}, func(c *Config) { c.WriteTimeout = 200 * time.Millisecond })
	start(t, r)
	var err error
	for err == nil { // fills the socket and what waits before it
		err = r.Send(t.Context(), channel.Message{Payload: make([]byte, 1<<20)})
	}
	require.ErrorIs(t, err, errdefs.ErrUnavailable)
	require.ErrorIs(t, lost(t, r), errdefs.ErrUnavailable)
}

func TestSendWaitsNoLongerThanItsContext(t *testing.T) {
	r := newRuntime(t, edgetest.Script{NotReading: true}, nil)
	start(t, r)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	var err error
	for err == nil {
		err = r.Send(ctx, channel.Message{Payload: make([]byte, 1<<20)})
	}
	require.ErrorIs(t, err, context.DeadlineExceeded)
	r.life.end(errStopped) // Close would wait for it to read
}

func TestClose(t *testing.T) {
	t.Run("by the Stop message", func(t *testing.T) {
		r := newRuntime(t, edgetest.Script{}, nil)
		start(t, r)
		l := r.life
		require.NoError(t, r.Close())
		assert.True(t, l.cmd.ProcessState.Success(), "it ended by itself: %s", l.cmd.ProcessState)
		_, err := r.Start(t.Context())
		assert.ErrorIs(t, err, errdefs.ErrFailedPrecondition)
		assert.ErrorIs(t, lost(t, r), errdefs.ErrUnavailable)
	})
	t.Run("by force", func(t *testing.T) {
		r := newRuntime(t, edgetest.Script{IgnoreStop: true}, func(c *Config) { c.StopTimeout = 200 * time.Millisecond })
		start(t, r)
		l := r.life
		require.NoError(t, r.Close())
		assert.Contains(t, l.cmd.ProcessState.String(), "killed")
	})
	t.Run("before the start", func(t *testing.T) {
		require.NoError(t, newRuntime(t, edgetest.Script{}, nil).Close())
	})
}

func TestNewRefuses(t *testing.T) {
	for _, c := range []Config{
		{}, {Command: []string{""}}, {Command: []string{"x"}, Index: 256}, {Command: []string{"x"}, Index: -1},
		{Command: []string{"x"}, Dir: "relative"},
		{Command: []string{"x"}, Info: runtime.Info{MaxModules: 129}},
	} {
		_, err := New(c)
		assert.ErrorIs(t, err, errdefs.ErrInvalidArgument, "%+v", c)
	}
}

// A child process that the program leaves behind does not keep the connection or the output open.
func TestChildrenOfTheProgramEndWithIt(t *testing.T) {
	self, err := os.Executable()
	require.NoError(t, err)
	r := newRuntime(t, edgetest.Script{}, func(c *Config) {
		c.Command = []string{"/bin/sh", "-c", `sleep 1000 & echo child=$!; "` + self + `" "$0"`}
	})
	start(t, r)
	_, number, _ := strings.Cut(string(find(t, r, wire.RuntimeLog, "child=").Payload), "=")
	pid, err := strconv.Atoi(number)
	require.NoError(t, err)
	child, err := process.Open(pid)
	require.NoError(t, err)
	create(t, r, 0, "crash")
	begin := time.Now()
	require.ErrorIs(t, lost(t, r), errdefs.ErrUnavailable)
	assert.Less(t, time.Since(begin), 25*time.Second)
	assert.True(t, child.WaitFor(30*time.Second))
}

// A program of ours switches to the wide header by itself, so that messages in both directions can have more channels.
func TestTheWideHeaderIsTakenFromAProgramThatOffersIt(t *testing.T) {
	r := newRuntime(t, edgetest.Script{}, func(c *Config) {
		c.Command = []string{"/bin/sh", "-c", `test "$TRIPOD_EDGE_WIRE" = wide && test -S "$TRIPOD_EDGE_SOCKET" && exec sleep 1000`}
		c.StopTimeout = time.Millisecond // sleep knows no Stop
	})
	connected := make(chan *channel.Conn, 1)
	go func() { // speaks for the program
		for {
			if conn, err := net.Dial("unix", SocketPath(r.cfg.Dir, 10)); err == nil {
				connected <- channel.NewConn(conn, channel.ConnOptions{Wide: true})
				return
			}
			<-time.After(time.Millisecond)
		}
	}()
	start(t, r)
	program := <-connected
	defer program.Close()
	far := channel.Message{Header: channel.Header{Module: 5, Arg: 300}, Payload: []byte("x")}
	require.ErrorIs(t, r.Send(t.Context(), far), errdefs.ErrInvalidArgument)
	require.NoError(t, program.Widen())
	require.NoError(t, program.Write(far))
	assert.Equal(t, far, receive(t, r))
	require.NoError(t, r.Send(t.Context(), far))
	got, err := program.Read()
	require.NoError(t, err)
	assert.Equal(t, far, got)
}
