package main

import (
	"bytes"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestKeptSocket: a client that connects between two daemons is served by the second one, if systemd keeps the socket.
// If it is no longer the one at the configured path, the daemon drops it and listens on another.
func TestKeptSocket(t *testing.T) {
	systemd := systemdSocket(t)
	notify := os.Getenv("NOTIFY_SOCKET")
	dir := t.TempDir()
	path := filepath.Join(dir, "s")
	first, err := listenKept(t.Context(), path, newNotifier(quiet), quiet)
	if err != nil {
		t.Fatal(err)
	}
	kept := receiveStored(t, systemd)
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	early, err := net.Dial("unix", path)
	if err != nil {
		t.Fatalf("connect while no daemon runs: %v", err)
	}
	defer early.Close()

	t.Setenv("NOTIFY_SOCKET", notify)
	second := listenAgain(t, path, duplicate(t, kept))
	wantServed(t, second, early)
	expectNothing(t, systemd) // systemd still has it, and would complain about a full store
	if err := second.Close(); err != nil {
		t.Fatal(err)
	}

	if err := os.Rename(path, filepath.Join(dir, "elsewhere")); err != nil {
		t.Fatal(err)
	}
	t.Setenv("NOTIFY_SOCKET", notify)
	third := listenAgain(t, path, kept)
	defer third.Close()
	expect(t, systemd, "FDSTOREREMOVE=1\nFDNAME=tripod")
	receiveStored(t, systemd).Close()
	late, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer late.Close()
	wantServed(t, third, late)
}

// TestSocketWithoutSystemd: nobody keeps the socket, so its file goes with the daemon.
func TestSocketWithoutSystemd(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", "")
	path := filepath.Join(t.TempDir(), "s")
	l := listenAgain(t, path)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Errorf("socket after the daemon: got error %v, want none there", err)
	}
}

// listenAgain listens like a daemon that gets these files from systemd.
func listenAgain(t *testing.T, path string, kept ...*os.File) *privateListener {
	t.Helper()
	n := newNotifier(quiet)
	n.kept = kept
	l, err := listenKept(t.Context(), path, n, quiet)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// duplicate returns a second descriptor of a file, as systemd passes one of what it keeps.
func duplicate(t *testing.T, f *os.File) *os.File {
	t.Helper()
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return os.NewFile(uintptr(fd), f.Name())
}

// expectNothing checks that systemd has got no message. Messages arrive before the call that sends them returns.
func expectNothing(t *testing.T, systemd *net.UnixConn) {
	t.Helper()
	_ = systemd.SetReadDeadline(time.Now().Add(time.Millisecond))
	text := make([]byte, 1024)
	if n, err := systemd.Read(text); err == nil {
		t.Errorf("systemd got %q, want nothing", text[:n])
	}
}

// receiveStored returns the file that a daemon stores.
func receiveStored(t *testing.T, systemd *net.UnixConn) *os.File {
	t.Helper()
	_ = systemd.SetReadDeadline(time.Now().Add(10 * time.Second))
	text, rights := make([]byte, 1024), make([]byte, unix.CmsgSpace(4))
	n, oobn, _, _, err := systemd.ReadMsgUnix(text, rights)
	if err != nil {
		t.Fatal(err)
	}
	if want := "FDSTORE=1\nFDNAME=tripod"; string(text[:n]) != want {
		t.Fatalf("systemd got %q, want %q", text[:n], want)
	}
	messages, err := unix.ParseSocketControlMessage(rights[:oobn])
	if err != nil || len(messages) != 1 {
		t.Fatalf("control messages: got %d, error %v; want one", len(messages), err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		t.Fatalf("files: got %d, error %v; want one", len(fds), err)
	}
	return os.NewFile(uintptr(fds[0]), "tripod")
}

// wantServed checks that the client's connection is the next one of the listener.
func wantServed(t *testing.T, l net.Listener, client net.Conn) {
	t.Helper()
	served, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := served.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	_ = served.Close()
	if got, err := io.ReadAll(client); err != nil || !bytes.Equal(got, []byte("hello")) {
		t.Errorf("the client got %q, error %v; want hello", got, err)
	}
}
