package worker

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/component/engine"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

var relayChannels = []channel.Channel{ch("in", "app/in", channel.Read|channel.QoS1), ch("out", "app/out", channel.Write)}

// onBothPaths runs a test with a component of one core module and with one of several on the engine's core path, and
// with the latter on the component path.
func onBothPaths(t *testing.T, test func(t *testing.T, w *Worker)) {
	for name, c := range map[string]struct {
		file string
		path engine.Path
	}{
		"core":         {"../../../../../examples/edge/relay-wit-c/relay.wasm", engine.PathCore},
		"core modules": {"testdata/relay.wasm", engine.PathCore}, "component": {"testdata/relay.wasm", engine.PathComponent},
	} {
		t.Run(name, func(t *testing.T) {
			test(t, workerOn(t, c.file, c.path))
		})
	}
}

// workerOn returns a worker with a component loaded, which takes the given path.
func workerOn(t *testing.T, file string, path engine.Path) *Worker {
	t.Helper()
	w := New(Config{Engine: channelEngine(), Logger: slog.New(slog.DiscardHandler), Publish: func(workerapi.Event) {}})
	t.Cleanup(w.Close)
	options := CompileOptions()
	options.ComponentPath = path == engine.PathComponent
	loadFile(t, w, file, options)
	require.Equal(t, path, w.codes["d"].engine.Path(), w.codes["d"].OwnWorkerReason)
	return w
}

func TestComponentChannels(t *testing.T) {
	onBothPaths(t, func(t *testing.T, w *Worker) {
		large := strings.Repeat("x", 15<<20)
		if w.codes["d"].engine.Path() == engine.PathComponent {
			large = large[:1<<20] // this path converts each byte to a value
		}
		run(t, w, "a", relayChannels)
		d := connect(t, w, "a")
		d.expect("open 0 r:1 app/in", "open 1 w app/out")
		for _, m := range []string{"hello", "", large} {
			d.send(0, m)
			d.expect("1:" + strings.ToUpper(m))
		}
		go func() { _, _ = w.Stop(context.Background(), "a", soon) }()
		require.ElementsMatch(t, []string{"close 0", "close 1"}, []string{d.next(), d.next()})
		status := exited(t, w, "a")
		require.Zero(t, status.ExitCode, status.Message)
	})
}

// TestComponentChannelsBeforeTheLink checks that a component that sends before a running daemon has linked its channels
// waits instead of losing messages.
func TestComponentChannelsBeforeTheLink(t *testing.T) {
	onBothPaths(t, func(t *testing.T, w *Worker) {
		w.Daemon(true)
		run(t, w, "a", relayChannels)
		opened(t, w, "a", 2)
		p, err := w.pod("a")
		require.NoError(t, err)
		c := p.channels
		require.True(t, c.fill(t, 1))
		c.receive(0, []byte("more"))
		c.blocks(t, 1)
		d := connect(t, w, "a")
		d.expect("open 0 r:1 app/in", "open 1 w app/out")
		for range maxBacklogMessages {
			d.expect("1:queued")
		}
		d.expect("1:MORE")
		require.Zero(t, c.dropped())
	})
}

func TestComponentWithoutChannels(t *testing.T) {
	onBothPaths(t, func(t *testing.T, w *Worker) {
		run(t, w, "none", nil)
		require.EqualValues(t, 1, exited(t, w, "none").ExitCode)
		run(t, w, "other", relayChannels[:1])
		require.EqualValues(t, 1, exited(t, w, "other").ExitCode)
		require.Zero(t, w.router.Count("other", 0))
		run(t, w, "turned", []channel.Channel{ch("in", "x", channel.Write), ch("out", "y", channel.Read)})
		require.NotZero(t, exited(t, w, "turned").ExitCode) // not-permitted
	})
}

// TestComponentWaits checks that a component that waits for a message can be killed immediately, and that a wait can
// time out.
func TestComponentWaits(t *testing.T) {
	onBothPaths(t, func(t *testing.T, w *Worker) {
		run(t, w, "a", relayChannels)
		opened(t, w, "a", 2)
		start := time.Now()
		require.NoError(t, w.Kill(t.Context(), "a"))
		require.Less(t, time.Since(start), 5*time.Second)
		require.EqualValues(t, exitKill, exited(t, w, "a").ExitCode)
		p, err := w.pod("a")
		require.NoError(t, err)
		require.Zero(t, p.account.Instances())
	})
	w := channelWorker(t, "../../../../../examples/edge/relay-wit-c/relay.wasm")
	run(t, w, "a", relayChannels, "20")
	require.EqualValues(t, 2, exited(t, w, "a").ExitCode)
}

// TestComponentStdio checks that a component's standard output goes to the channel stdout.
func TestComponentStdio(t *testing.T) {
	onBothPaths(t, func(t *testing.T, w *Worker) {
		run(t, w, "a", append([]channel.Channel{ch("stdout", "app/log", channel.Write)}, relayChannels...))
		d := connect(t, w, "a")
		opened(t, w, "a", 3)
		d.send(1, "hello")
		got := map[string]string{}
		for len(got["0"]) < 6 || len(got["2"]) < 5 {
			if fd, text, ok := strings.Cut(d.next(), ":"); ok && !strings.HasPrefix(fd, "open") {
				got[fd] += text
			}
		}
		require.Equal(t, map[string]string{"0": "HELLO\n", "2": "HELLO"}, got)
	})
}

// TestChannelsOfServers checks that a server component with channels is refused.
func TestChannelsOfServers(t *testing.T) {
	w := newServing(t, "echo-c", examples+"echo-c/echo.proto", workerapi.Limits{}).pod.worker
	_, err := w.Start(t.Context(), workerapi.PodSpec{ID: "other", Digest: "d", Channels: relayChannels})
	require.ErrorIs(t, err, errdefs.ErrInvalidArgument)
}
