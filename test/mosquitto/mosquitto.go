// Package mosquitto starts Debian's mosquitto for tests, which check with it what they ask of the embedded broker.
package mosquitto

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/test/until"
)

// startTime bounds the wait for the broker's address, on a busy machine.
const startTime = time.Minute

// FreeAddress returns an address on loopback with a free port below the kernel's ephemeral ports, so that a restarted
// broker can use it again.
func FreeAddress(t testing.TB) string {
	t.Helper()
	for range 1000 {
		l, err := net.Listen("tcp", fmt.Sprint("127.0.0.1:", 10_000+rand.IntN(20_000)))
		if err == nil {
			defer l.Close()
			return l.Addr().String()
		}
	}
	require.FailNow(t, "no free port")
	return ""
}

// Server is a mosquitto with a state of its own, which it keeps over restarts.
type Server struct {
	// Address is where it listens without TLS, for everybody.
	Address string
	conf    string
	cmd     *exec.Cmd
}

// New starts a mosquitto; the test's end stops it. The settings follow its listener in its configuration.
func New(t testing.TB, settings string) *Server {
	t.Helper()
	s := &Server{Address: FreeAddress(t)}
	dir := t.TempDir()
	s.conf = filepath.Join(dir, "mosquitto.conf")
	_, port, _ := net.SplitHostPort(s.Address)
	text := fmt.Sprintf("allow_anonymous true\npersistence true\npersistence_location %s/\nuser root\nlog_type error\nlistener %s 127.0.0.1\n%s\n", dir, port, settings)
	require.NoError(t, os.WriteFile(s.conf, []byte(text), 0o600))
	s.Start(t)
	t.Cleanup(func() { s.Stop(t) })
	return s
}

// Start starts it again after Stop, and waits until it accepts connections.
func (s *Server) Start(t testing.TB) {
	t.Helper()
	program, err := exec.LookPath("mosquitto")
	if err != nil {
		program = "/usr/sbin/mosquitto" // not in every user's PATH
	}
	s.cmd = exec.Command(program, "-c", s.conf)
	s.cmd.Stderr = os.Stderr
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // a test that times out does not stop it
	require.NoError(t, s.cmd.Start(), "hack/setup.sh installs mosquitto and mosquitto-clients")
	until.NoError(t, startTime, func() error {
		c, err := net.DialTimeout("tcp", s.Address, time.Second)
		if err == nil {
			c.Close()
		}
		return err
	})
}

// Stop ends it gracefully, so that it stores its sessions.
func (s *Server) Stop(t testing.TB) {
	t.Helper()
	if s.cmd == nil {
		return
	}
	require.NoError(t, s.cmd.Process.Signal(os.Interrupt)) // on SIGINT it stores them
	_ = s.cmd.Wait()
	s.cmd = nil
}

// PID returns its process.
func (s *Server) PID() int { return s.cmd.Process.Pid }
