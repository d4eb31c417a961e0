package worker

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// TestLossesAreLogged checks that lines in the pod's and in the worker's log name the channel and the topic of dropped
// messages in both directions.
func TestLossesAreLogged(t *testing.T) {
	w := channelWorker(t)
	var workerLog bytes.Buffer // slog's handlers lock their writes, and it is read only after the pod's end
	w.logger = slog.New(slog.NewTextHandler(&workerLog, nil))
	file := filepath.Join(t.TempDir(), "log")
	log, err := os.Create(file)
	require.NoError(t, err)
	_, err = w.Start(context.Background(),
		workerapi.PodSpec{ID: "a", Digest: "d", Component: "relay", Args: []string{"prog", "sleep", "/ch/io", "600"},
			Channels: []channel.Channel{ch("io", "t/a", channel.ReadWrite)}, Log: workerapi.File{File: log}})
	require.NoError(t, err)
	opened(t, w, "a", 1)
	p, err := w.pod("a")
	require.NoError(t, err)
	c := p.channels
	port := c.openPorts()[0]
	for range maxWaiting + 3 {
		c.receive(0, []byte("x"))
	}
	for range maxBacklogMessages + 5 {
		require.NoError(t, port.Send([]byte("x")))
	}
	require.EqualValues(t, 8, w.mustStats(t, "a").ChannelDropped)
	require.NoError(t, w.Kill(t.Context(), "a"))
	exited(t, w, "a")
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	for _, one := range []struct {
		reader string
		counts []int
	}{{"component", []int{1, 2}}, {"daemon", []int{1, 4 + maxBacklogMessages}}} { // what still waited at the end is lost, too
		for _, n := range one.counts {
			require.Contains(t, string(text),
				fmt.Sprintf("dropped %d messages of channel \"io\" (topic \"t/a\") that the %s did not read in time", n, one.reader))
			require.Contains(t, workerLog.String(), fmt.Sprintf("pod=a component=relay channel=io topic=t/a reader=%s messages=%d\n", one.reader, n))
		}
	}
}
