package worker

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

func TestChannelsOpenMany(t *testing.T) {
	w := channelWorker(t)
	run(t, w, "a", []channel.Channel{ch("io", "t", channel.ReadWrite)}, "many")
	require.EqualValues(t, 33, exited(t, w, "a").ExitCode) // EMFILE
	require.Zero(t, w.router.Count("a", 0))
}

func TestChannelsRefused(t *testing.T) {
	w := channelWorker(t)
	for name, all := range map[string][]channel.Channel{
		"no name": {ch("", "t", channel.Read)}, "a path": {ch("a/b", "t", channel.Read)}, "parent": {ch("..", "t", channel.Read)},
		"twice": {ch("a", "t", channel.Read), ch("a", "u", channel.Read)}, "no mode": {ch("a", "t", channel.QoS1)},
		"wildcard to write": {ch("a", "t/#", channel.ReadWrite)}, "no topic": {ch("a", "", channel.Read)},
		"NUL": {ch("a\x00", "t", channel.Read)},
	} {
		_, err := w.Start(t.Context(), workerapi.PodSpec{ID: "a", Digest: "d", Channels: all})
		require.ErrorIs(t, err, errdefs.ErrInvalidArgument, name)
	}
}

// TestChannelsComeAndGo checks for leaks when pods and connections end in any order with messages in flight.
func TestChannelsComeAndGo(t *testing.T) {
	w := channelWorker(t)
	comeAndGo(t, w, 2) // warm-up: one-time goroutines and files
	goroutines, files := runtime.NumGoroutine(), openFiles(t)
	comeAndGo(t, w, 10)
	const slack = 20 // for the test's own; one leak per pod would be 80
	require.Eventually(t, func() bool { return runtime.NumGoroutine() < goroutines+slack && openFiles(t) < files+slack },
		soon, time.Millisecond, "%d goroutines and %d files before", goroutines, files)
	require.Zero(t, w.router.Count("pod-0", 0))
}

func openFiles(t *testing.T) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(all)
}

func comeAndGo(t *testing.T, w *Worker, times int) {
	var all sync.WaitGroup
	for k := range 8 {
		all.Go(func() {
			id := fmt.Sprint("pod-", k)
			for range times {
				run(t, w, id, []channel.Channel{ch("io", "t", channel.ReadWrite)}, "echo")
				d := connect(t, w, id)
				go func() {
					for {
						if _, err := d.conn.Read(); err != nil {
							return
						}
					}
				}()
				_ = d.conn.Write(channel.Message{Payload: []byte("message")})
				if k%2 == 0 {
					d.raw.Close()
				}
				require.NoError(t, w.Remove(context.Background(), id))
				d.raw.Close()
			}
		})
	}
	all.Wait()
}

// BenchmarkChannels measures the median one-way time, in ns, of a 64-byte message between two modules of one worker.
func BenchmarkChannels(b *testing.B) {
	w := channelWorker(b)
	log, err := os.Create(filepath.Join(b.TempDir(), "log"))
	require.NoError(b, err)
	for range b.N {
		run(b, w, "echo", []channel.Channel{ch("io", "a", channel.Read), ch("out", "b", channel.Write)}, "pass", "/ch/io", "/ch/out")
		opened(b, w, "echo", 2)
		spec := workerapi.PodSpec{ID: "ping", Digest: "d", Args: []string{"prog", "ping", "/ch/out", "/ch/in", "10000"},
			Channels: []channel.Channel{ch("out", "a", channel.Write), ch("in", "b", channel.Read)}}
		spec.Log.File = log
		_, err := w.Start(context.Background(), spec)
		require.NoError(b, err)
		require.EqualValues(b, 0, exited(b, w, "ping").ExitCode)
		require.NoError(b, w.Remove(context.Background(), "echo"))
	}
	data, err := os.ReadFile(log.Name())
	require.NoError(b, err)
	var ns float64
	_, rest, _ := strings.Cut(string(data), "stdout F ")
	_, err = fmt.Sscanf(rest, "%f", &ns)
	require.NoError(b, err)
	b.ReportMetric(ns, "ns/message")
}

// BenchmarkPublish measures sending a 1000-byte message from a module to the daemon's end of a socket.
func BenchmarkPublish(b *testing.B) {
	w := channelWorker(b)
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(b, err)
	var ends [2]net.Conn
	for k, fd := range fds {
		f := os.NewFile(uintptr(fd), "channels")
		ends[k], err = net.FileConn(f)
		require.NoError(b, err)
		f.Close()
	}
	defer ends[1].Close()
	run(b, w, "a", []channel.Channel{ch("in", "start", channel.Read), ch("io", "t", channel.Write)}, "flood-on-start", "/ch/io",
		fmt.Sprint(b.N), "w")
	require.NoError(b, w.Channels(context.Background(), "a", ends[0]))
	d := &daemon{tb: b, conn: channel.NewConn(ends[1], channel.ConnOptions{}), raw: ends[1], reliable: map[int]bool{}}
	d.settle()
	d.expect("open 0 r start")
	b.ResetTimer()
	d.send(0, "go")
	for got := 0; got < b.N; {
		m, err := d.conn.Read()
		require.NoError(b, err)
		if !m.Control {
			got++
		}
	}
	b.StopTimer()
	d.send(0, "leave")
	require.EqualValues(b, 0, exited(b, w, "a").ExitCode)
}
