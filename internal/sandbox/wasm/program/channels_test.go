package program

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// loadFile loads a guest from a file and returns its digest.
func (r *rig) loadFile(file string) string {
	r.t.Helper()
	code := workerapi.Code{Digest: "file:" + file, Image: workerapi.File{File: codeFile(r.t, file)}}
	_, err := r.Load(r.t.Context(), code)
	require.NoError(r.t, err)
	return code.Digest
}

// channels opens the daemon's connection to a pod's channels, and waits until the pod has opened its channel 0 on it:
// what is written earlier reaches nobody. next skips control frames and returns the next message.
func (p *pod) channels(c *workerapi.Client) (conn *channel.Conn, next func() string) {
	p.rig.t.Helper()
	raw, err := c.Channels(p.rig.t.Context(), p.ID)
	require.NoError(p.rig.t, err)
	p.rig.t.Cleanup(func() { raw.Close() })
	require.NoError(p.rig.t, raw.SetDeadline(time.Now().Add(time.Minute)))
	conn = channel.NewConn(raw, channel.ConnOptions{})
	m, err := conn.Read()
	require.NoError(p.rig.t, err)
	require.True(p.rig.t, m.Control && m.Arg == channel.OpenChannel, "the first frame is %+v, want one that opens a channel", m)
	o, err := channel.ParseOpen(m.Payload)
	require.NoError(p.rig.t, err)
	require.Zero(p.rig.t, o.FD)
	return conn, func() string {
		for {
			m, err := conn.Read()
			require.NoError(p.rig.t, err)
			if !m.Control {
				return string(m.Payload)
			}
		}
	}
}

// TestChannelsUnderLockdown checks that modules can use channels and directories in a locked-down worker, and that the
// channels survive a restart of the daemon.
func TestChannelsUnderLockdown(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{})
	guests := map[string]string{
		"module": "../../../component/engine/testdata/channels.wasm", "component": "../../../../examples/edge/relay-wit-c/relay.wasm",
		"component on its own path": "../internal/worker/testdata/relay.wasm",
	}
	for name, file := range guests {
		t.Run(name, func(t *testing.T) {
			digest, dir := r.loadFile(file), t.TempDir()
			require.NoError(t, os.Chmod(dir, 0o777))
			p := r.command(func(s *workerapi.PodSpec) {
				d, err := os.Open(dir)
				require.NoError(t, err)
				s.Digest, s.Mounts = digest, []workerapi.Mount{{Guest: "/data", Dir: workerapi.File{File: d}}}
				s.Channels = []channel.Channel{{Name: "in", Topic: "app/in", Flags: 1}, {Name: "out", Topic: "app/out", Flags: 2}}
				s.Args = []string{"relay"}
				if name == "module" {
					s.Args = []string{"prog", "files", "", "words"}
					s.Channels = []channel.Channel{{Name: "io", Topic: "app/io", Flags: 3}}
				}
			})
			conn, next := p.channels(r.Client)
			if name == "module" {
				require.Equal(t, "words", next())
				moved, err := os.ReadFile(filepath.Join(dir, "moved"))
				require.NoError(t, err)
				require.Equal(t, "words", string(moved))
			}
			for range 2 {
				require.NoError(t, conn.Write(channel.Message{Payload: []byte("MESSAGE")}))
				require.Equal(t, "MESSAGE", next())
				conn.Close()
				conn, next = p.channels(r.connect()) // a restarted daemon
			}
			end, err := r.Stop(t.Context(), p.ID, 30*time.Second)
			require.NoError(t, err)
			require.Zero(t, end.ExitCode, "%s %s", end.Message, p.logged("stderr"))
			require.Equal(t, end, p.exit())
			require.False(t, strings.Contains(r.logText(), "WARN"), r.logText())
		})
	}
}
