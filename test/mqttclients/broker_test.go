package mqttclients

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/edge/broker"
	"github.com/tripod-run/tripod/test/until"
)

// server is a broker that a test may stop and start again with the same state, at the same address.
type server struct {
	port        int
	start, stop func(t testing.TB)
}

func (s *server) restart(t testing.TB) {
	s.stop(t)
	s.start(t)
}

// brokers are the brokers under test, by name. They serve MQTT over TCP or over WebSocket.
var brokers = []struct {
	name  string
	start func(t testing.TB, webSocket bool) *server
}{{"embedded", embedded}, {"mosquitto", mosquitto}}

// freePort returns a free port below the kernel's ephemeral ports, so that a restarted broker can use it again.
func freePort(t testing.TB) int {
	for range 1000 {
		l, err := net.Listen("tcp", fmt.Sprint("127.0.0.1:", 10_000+rand.IntN(20_000)))
		if err == nil {
			defer l.Close()
			return l.Addr().(*net.TCPAddr).Port
		}
	}
	require.FailNow(t, "no free port")
	return 0
}

func embedded(t testing.TB, webSocket bool) *server {
	s := &server{port: freePort(t)}
	cfg := broker.Config{Address: fmt.Sprint("127.0.0.1:", s.port), Path: filepath.Join(t.TempDir(), "broker.db")}
	if webSocket {
		cfg.Address, cfg.WebSocketAddress = "127.0.0.1:0", cfg.Address
	}
	var b broker.Broker
	s.start = func(t testing.TB) {
		// A program that another test starts holds the socket of freePort until its execve.
		until.NoError(t, patience, func() (err error) {
			if b, err = broker.New(cfg); err != nil && !errors.Is(err, unix.EADDRINUSE) {
				require.NoError(t, err)
			}
			return err
		})
	}
	s.stop = func(t testing.TB) { require.NoError(t, b.Close(patient(t))) }
	s.start(t)
	t.Cleanup(func() { s.stop(t) })
	return s
}

// mosquitto starts Debian's mosquitto with its own configuration.
func mosquitto(t testing.TB, webSocket bool) *server {
	program, err := exec.LookPath("mosquitto")
	if err != nil {
		program = "/usr/sbin/mosquitto" // not in every user's PATH
	}
	s := &server{port: freePort(t)}
	dir := t.TempDir()
	conf := filepath.Join(dir, "mosquitto.conf")
	text := fmt.Sprintf("listener %d 127.0.0.1\nallow_anonymous true\npersistence true\npersistence_location %s/\nuser root\nlog_type error\nmax_queued_messages 4096\nmax_inflight_messages 1024\n", s.port, dir)
	if webSocket {
		text += fmt.Sprintf("protocol websockets\nlistener 0 %s/socket\n", dir) // mosquitto 2.0.11 does not start without another listener
	}
	require.NoError(t, os.WriteFile(conf, []byte(text), 0o600))
	var cmd *exec.Cmd
	s.start = func(t testing.TB) {
		cmd = exec.Command(program, "-c", conf)
		cmd.Stderr = os.Stderr
		require.NoError(t, cmd.Start(), "hack/setup.sh installs mosquitto and mosquitto-clients")
		until.NoError(t, patience, func() error {
			c, err := net.DialTimeout("tcp", fmt.Sprint("127.0.0.1:", s.port), time.Second)
			if err == nil {
				c.Close()
			}
			return err
		})
	}
	s.stop = func(t testing.TB) {
		require.NoError(t, cmd.Process.Signal(os.Interrupt)) // on SIGINT it stores its sessions
		_ = cmd.Wait()
	}
	s.start(t)
	t.Cleanup(func() { s.stop(t) })
	return s
}
