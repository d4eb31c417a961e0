package harness

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Systemd starts the daemon as systemd starts a service with a file descriptor store (sd_notify(3)): what a daemon
// stores is passed to the next one.
func Systemd(t testing.TB) Option {
	t.Helper()
	return func(d *Daemon) {
		path := d.State + ".notify"
		socket, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
		if err != nil {
			t.Fatal(err)
		}
		d.systemd = &serviceManager{path: path, socket: socket}
		t.Cleanup(func() {
			d.systemd.receive()
			d.systemd.drop()
			socket.Close()
		})
	}
}

// serviceManager keeps the files that a daemon stores. Messages wait in its socket until the next start.
type serviceManager struct {
	path   string
	socket *net.UnixConn
	stored []*os.File
}

func (m *serviceManager) drop() {
	for _, f := range m.stored {
		f.Close()
	}
	m.stored = nil
}

// prepare adds to a daemon's command what systemd passes to a service.
func (m *serviceManager) prepare(c *exec.Cmd) {
	m.receive()
	c.Env = append(c.Env, "NOTIFY_SOCKET="+m.path)
	if len(m.stored) == 0 {
		return
	}
	// LISTEN_PID is the daemon's PID, which nobody knows before the fork.
	c.Args = append([]string{"sh", "-c", `export LISTEN_PID=$$; exec "$0" "$@"`, c.Path}, c.Args[1:]...)
	c.Path, c.ExtraFiles = "/bin/sh", m.stored
	c.Env = append(c.Env, fmt.Sprint("LISTEN_FDS=", len(m.stored)), "LISTEN_FDNAMES=tripod")
}

// receive reads the messages that have arrived. A store of one file is enough (FileDescriptorStoreMax=1).
func (m *serviceManager) receive() {
	text, rights := make([]byte, 4096), make([]byte, unix.CmsgSpace(4))
	for {
		_ = m.socket.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
		n, oobn, _, _, err := m.socket.ReadMsgUnix(text, rights)
		if err != nil {
			return
		}
		if strings.HasPrefix(string(text[:n]), "FDSTORE") { // also FDSTOREREMOVE
			m.drop()
		}
		messages, _ := unix.ParseSocketControlMessage(rights[:oobn])
		for i := range messages {
			fds, _ := unix.ParseUnixRights(&messages[i])
			for _, fd := range fds {
				m.stored = append(m.stored, os.NewFile(uintptr(fd), "tripod"))
			}
		}
	}
}
