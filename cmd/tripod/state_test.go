package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

var quiet = slog.New(slog.DiscardHandler)

func TestPrivateDirC7(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	if err := privateDir(dir, rootMode, quiet); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ is, want os.FileMode }{{0o755, rootMode}, {0o700, stateMode}, {0o777, stateMode}} {
		if err := os.Chmod(dir, c.is); err != nil {
			t.Fatal(err)
		}
		if err := privateDir(dir, c.want, quiet); err != nil {
			t.Fatal(err)
		}
		if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != c.want {
			t.Errorf("mode %v became %v, %v; want %v", c.is, info.Mode(), err, c.want)
		}
	}
	if err := os.Chown(dir, 65534, 65534); err != nil {
		t.Fatal(err)
	}
	if err := privateDir(dir, rootMode, quiet); err == nil || !strings.Contains(err.Error(), "chown") {
		t.Errorf("a directory of somebody else: %v; want a refusal with its remedy", err)
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := privateDir(file, rootMode, quiet); err == nil {
		t.Error("a file was taken for a directory")
	}
}

func TestLockDir(t *testing.T) {
	dir := t.TempDir()
	first, err := lockDir(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*lockInterval)
	defer cancel()
	if _, err := lockDir(ctx, dir); err == nil || !strings.Contains(err.Error(), "another process (pid ") {
		t.Errorf("a second lock: %v", err)
	}
	time.AfterFunc(2*lockInterval, func() { _ = first.Close() })
	second, err := lockDir(t.Context(), dir)
	if err != nil {
		t.Fatalf("the lock was let go while we waited: %v", err)
	}
	_ = second.Close()
}

// TestFileLimit checks fileLimit's assumption: we have the hard limit, and children have our original soft limit.
func TestFileLimit(t *testing.T) {
	// Run this program again with a soft limit below the hard one.
	again := exec.Command("/bin/bash", "-c", "ulimit -Hn; ulimit -Sn 512; exec /proc/"+strconv.Itoa(os.Getpid())+"/exe")
	again.Env = append(os.Environ(), limitVariable+"=1")
	out, err := again.Output()
	if err != nil {
		t.Fatal(err)
	}
	var hard, own, child uint64
	if _, err := fmt.Sscan(string(out), &hard, &own, &child); err != nil {
		t.Fatalf("the program printed %q: %v", out, err)
	}
	if own+1 < hard || child != 512 { // the Go runtime stays one below, to recognise its own limit
		t.Errorf("with a soft limit of 512 and a hard one of %d we have %d and a child %d", hard, own, child)
	}
}

func TestRefuseLostRecordN7(t *testing.T) {
	dir := t.TempDir()
	record, pods := filepath.Join(dir, "root", "record.db"), filepath.Join(dir, "pods")
	if err := os.MkdirAll(filepath.Dir(record), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := refuseLostRecord(record, pods); err != nil {
		t.Errorf("a first start: %v", err)
	}
	if err := os.MkdirAll(filepath.Join(pods, "abc"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := refuseLostRecord(record, pods); !errors.Is(err, errRecordGone) || !strings.Contains(err.Error(), "mounted") {
		t.Errorf("pods without a record: %v", err)
	}
	if err := os.WriteFile(record, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := refuseLostRecord(record, pods); err != nil {
		t.Errorf("pods with a record: %v", err)
	}
}

func TestListenPrivate(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := listenPrivate(t.Context(), path, quiet)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if _, err := listenPrivate(t.Context(), path, quiet); err == nil || !strings.Contains(err.Error(), "another program") {
		t.Errorf("a socket in use: %v", err)
	}
	l.SetUnlinkOnClose(false)
	_ = l.Close()
	l, err = listenPrivate(t.Context(), path, quiet)
	if err != nil {
		t.Fatalf("a leftover socket is in the way: %v", err)
	}
	_ = l.Close()
	if err := os.WriteFile(path, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := listenPrivate(t.Context(), path, quiet); err == nil {
		t.Error("a file that is no socket was removed")
	}
}

// TestPeerCredentials connects as another user to a socket whose file mode is too open by mistake.
func TestPeerCredentials(t *testing.T) {
	dir, err := os.MkdirTemp("/var/tmp", "tripod-peer-") // other users cannot enter t.TempDir
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "s")
	l, err := listenPrivate(t.Context(), path, quiet)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for p, mode := range map[string]os.FileMode{dir: 0o755, path: 0o666} {
		if err := os.Chmod(p, mode); err != nil {
			t.Fatal(err)
		}
	}
	accepted := make(chan net.Conn, 2)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				close(accepted)
				return
			}
			accepted <- c
		}
	}()
	other, err := otherUser(path)
	if err != nil {
		t.Fatal(err)
	}
	if out, err := other.CombinedOutput(); err != nil || strings.TrimSpace(string(out)) != "closed" {
		t.Fatalf("the other user's client: %q, %v; want its connection closed", out, err)
	}
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	served := <-accepted
	peer, err := peerOf(served.(*net.UnixConn))
	if err != nil || int(peer.Pid) != os.Getpid() {
		t.Errorf("the first connection served is of %+v, %v; want this process's", peer, err)
	}
	_ = served.Close()
}

// limitVariable makes TestMain print its own limit of open files and a child's.
const limitVariable = "TRIPOD_TEST_LIMIT"

// clientVariable turns the test program into a client of the socket that it names.
const clientVariable = "TRIPOD_TEST_CLIENT"

// otherUser runs this test program as nobody, as a client of the socket, from a copy that nobody can read.
func otherUser(socket string) (*exec.Cmd, error) {
	program := filepath.Join(filepath.Dir(socket), "client")
	text, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(program, text, 0o755); err != nil {
		return nil, err
	}
	c := exec.Command(program)
	c.Dir, c.Env = "/", []string{clientVariable + "=" + socket}
	c.SysProcAttr = &unix.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	return c, nil
}

func TestMain(m *testing.M) {
	if os.Getenv(limitVariable) != "" {
		limit, _ := fileLimit()
		child, _ := exec.Command("/bin/bash", "-c", "ulimit -Sn").Output()
		fmt.Printf("%d\n%s", limit, child)
		os.Exit(0)
	}
	if socket := os.Getenv(clientVariable); socket != "" {
		c, err := net.Dial("unix", socket)
		if err == nil {
			_ = c.SetDeadline(time.Now().Add(10 * time.Second))
			if _, err = c.Read(make([]byte, 1)); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
				os.Stdout.WriteString("closed\n")
				os.Exit(0)
			}
		}
		os.Stdout.WriteString("not closed\n")
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// TestFaultC10RunDirectoryOfItsOwn: from the first start on, the state directory is a separate file system, mounted
// once and never over existing files.
func TestFaultC10RunDirectoryOfItsOwn(t *testing.T) {
	device := func(dir string) uint64 {
		t.Helper()
		var st unix.Stat_t
		if err := unix.Stat(dir, &st); err != nil {
			t.Fatal(err)
		}
		return st.Dev
	}
	base := t.TempDir()
	empty, used := filepath.Join(base, "empty"), filepath.Join(base, "used")
	for _, dir := range []string{empty, filepath.Join(used, "pods")} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		if err := unix.Unmount(empty, 0); err != nil {
			t.Error(err)
		}
		if err := unix.Unmount(empty, 0); err == nil {
			t.Error("it was mounted twice")
		}
	})
	for range 2 {
		for _, dir := range []string{empty, used} {
			if err := mountRunDir(dir, quiet); err != nil {
				t.Fatal(err)
			}
		}
	}
	info, err := os.Stat(empty)
	if err != nil || device(empty) == device(base) || info.Mode().Perm() != stateMode {
		t.Errorf("want a directory of mode 0711 on a file system of its own, got %v (%v), on its parent's: %t", info, err,
			device(empty) == device(base))
	}
	if device(used) != device(base) {
		t.Error("mounted over what is in use")
	}
}
