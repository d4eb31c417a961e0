package worker

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/component/engine"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

const relayMessaging = "../../../../../examples/edge/relay-messaging-c/relay.wasm"

// subscribe starts relayMessaging, and returns a function that reads the pod's log.
func subscribe(tb testing.TB, w *Worker, channels ...channel.Channel) (log func() string) {
	tb.Helper()
	path := filepath.Join(tb.TempDir(), "log")
	file, err := os.Create(path)
	require.NoError(tb, err)
	_, err = w.Start(context.Background(), workerapi.PodSpec{ID: "a", Digest: "d", Channels: channels, Log: workerapi.File{File: file}})
	require.NoError(tb, err)
	return func() string {
		text, err := os.ReadFile(path)
		require.NoError(tb, err)
		return string(text)
	}
}

func TestMessages(t *testing.T) {
	for _, path := range []engine.Path{engine.PathCore, engine.PathComponent} {
		t.Run(string(path), func(t *testing.T) {
			w := workerOn(t, relayMessaging, path)
			log := subscribe(t, w, relayChannels...)
			d := connect(t, w, "a")
			d.expect("open 0 r:1 app/in", "open 1 w app/out")
			large := strings.Repeat("x", 4<<20)
			if path == engine.PathComponent {
				large = large[:1<<20] // this path converts each byte to a value
			}
			for _, m := range []string{"hello", "", large, "no\x00text", "again"} {
				d.send(0, m)
				if m != "" && !strings.Contains(m, "\x00") {
					d.expect("1:" + strings.ToUpper(m))
				}
			}
			for n := range 100 { // in their order, and before the end
				d.send(0, fmt.Sprint("message ", n))
			}
			for n := range 100 {
				d.expect(fmt.Sprint("1:MESSAGE ", n))
			}
			go func() { _, _ = w.Stop(context.Background(), "a", soon) }()
			status := exited(t, w, "a")
			require.Zero(t, status.ExitCode, status.Message)
			require.Contains(t, log(), "in: HELLO")
			require.Contains(t, log(), `message on channel "in": the component could not handle it: other: the message is empty`)
			p, err := w.pod("a")
			require.NoError(t, err)
			stats := p.stats()
			require.EqualValues(t, 105, stats.Requests)
			require.EqualValues(t, 1, stats.Traps, log())
			require.Zero(t, p.account.Instances())
			require.Zero(t, p.account.Held(engine.HeldBytes))
		})
	}
}

// TestMessagesWithoutAWay checks what a component gets for a topic that is not there, or that it may not write to.
func TestMessagesWithoutAWay(t *testing.T) {
	for name, c := range map[string]struct {
		out  channel.Channel
		want string
	}{
		"no channel": {ch("other", "app/other", channel.Write), `other: channel "out": the module has no channel of this name`},
		"read-only":  {ch("out", "app/out", channel.Read), `permission-denied: channel "out" has mode r`},
	} {
		t.Run(name, func(t *testing.T) {
			w := channelWorker(t, relayMessaging)
			log := subscribe(t, w, relayChannels[0], c.out)
			d := connect(t, w, "a")
			d.next()
			d.send(0, "hello")
			require.Eventually(t, func() bool { return strings.Contains(log(), c.want) }, soon, time.Millisecond)
		})
	}
}

// TestMessagesStop checks that a guest that waits until the node takes its message is killed with the pod.
func TestMessagesStop(t *testing.T) {
	w := channelWorker(t, relayMessaging)
	w.Daemon(true)
	subscribe(t, w, relayChannels...)
	opened(t, w, "a", 2)
	p, err := w.pod("a")
	require.NoError(t, err)
	require.True(t, p.channels.fill(t, 1))
	p.channels.receive(0, []byte("more"))
	p.channels.blocks(t, 1)
	require.NoError(t, w.Kill(t.Context(), "a"))
	require.EqualValues(t, exitKill, exited(t, w, "a").ExitCode)
	require.Zero(t, p.account.Instances())
}

func TestMessagesRefused(t *testing.T) {
	w := channelWorker(t, relayMessaging)
	for name, spec := range map[string]workerapi.PodSpec{
		"no channels":         {},
		"nothing to read":     {Channels: relayChannels[1:]},
		"with standard input": {Channels: relayChannels, Stdin: true},
	} {
		spec.ID, spec.Digest = name, "d"
		_, err := w.Start(t.Context(), spec)
		require.ErrorIs(t, err, errdefs.ErrInvalidArgument, name)
		require.Zero(t, w.router.Count(name, 0))
	}
}
