package e2e

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"k8s.io/client-go/tools/remotecommand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// TestVMConsole: the serial console of a machine is its log, and attach connects to it: with input, with several
// clients, over restarts of the daemon, and while the log is rotated.
func TestVMConsole(t *testing.T) {
	d := harness.StartDaemon(t, harness.VM(t))
	c := d.RunVM(t, &harness.PodSpec{Image: harness.Guest, Container: []harness.ContainerOption{terminal}})
	c.WaitGuest()
	converse := func(t *testing.T, p harness.Protocol, word string) {
		t.Helper()
		s := startSession(t, p, c.AttachURL(true, true), true)
		s.send("\n")
		awaitPrompt(t, &s.stdout)
		s.send("echo " + word + "-$((6*7))\n")
		awaitSaid(t, s, word+"-42\r\n")
		c.WaitConsole(word + "-42\r\n")
	}
	for _, p := range harness.Protocols {
		t.Run(string(p), func(t *testing.T) { converse(t, p, "said-over-"+string(p)) })
	}
	for _, p := range harness.HalfClosing {
		t.Run("the end of the client's input is the end of the session/"+string(p), func(t *testing.T) {
			s := startSession(t, p, c.AttachURL(true, true), true)
			s.send("\n")
			awaitPrompt(t, &s.stdout)
			s.stdin.Close()
			s.wait(0)
		})
	}
	t.Run("two clients", func(t *testing.T) {
		one, two := startSession(t, harness.SPDY, c.AttachURL(true, true), true),
			startSession(t, harness.WebSocket, c.AttachURL(true, true), true)
		one.send("echo from-$((1+0))\n")
		awaitSaid(t, one, "from-1\r\n")
		awaitPrompt(t, &one.stdout)
		two.send("echo from-$((1+1))\n")
		awaitSaid(t, two, "from-2\r\n")
		awaitSaid(t, one, "from-2\r\n")
	})
	t.Run("N1 the daemon is killed", func(t *testing.T) {
		d.Kill()
		d.Start()
		converse(t, harness.WebSocket, "after-the-kill")
	})
	t.Run("rotation", func(t *testing.T) {
		s := startSession(t, harness.WebSocket, c.AttachURL(true, true), true)
		s.send("\n")
		awaitPrompt(t, &s.stdout)
		s.send("i=0; while [ ! -e /tmp/enough ]; do echo count $i; i=$((i+1)); done; echo counted-$((2+1))\n")
		var files []string
		for i := range 5 {
			c.WaitConsole("count ")
			files = append(files, fmt.Sprintf("%s.%d", c.LogFile(), i))
			if err := os.Rename(c.LogFile(), files[i]); err != nil {
				t.Fatal(err)
			}
			if i%2 == 1 {
				d.Restart()
			}
			if err := d.Runtime().ReopenContainerLog(t.Context(), c.ID); err != nil {
				t.Fatal(err)
			}
		}
		files = append(files, c.LogFile())
		c.WaitConsole("count ")
		waitAgent(t, d, c)
		if _, stderr, code := c.ExecSync("touch", "/tmp/enough"); code != 0 {
			t.Fatalf("touch /tmp/enough: code %d, stderr %s", code, stderr)
		}
		c.WaitConsole("counted-3") // in the text: a terminal's unfinished line is in the file in pieces
		var all strings.Builder
		for _, file := range files {
			all.WriteString(harness.Text(harness.ReadLog(t, file), ""))
		}
		next := 0
		for line := range strings.Lines(all.String()) {
			if n, ok := strings.CutPrefix(strings.TrimRight(line, "\r\n"), "count "); ok {
				if n != fmt.Sprint(next) {
					t.Fatalf("next count in the log: got %s, want %d", n, next)
				}
				next++
			}
		}
		if next == 0 {
			t.Error("the log has no counts")
		}
	})
	t.Run("the machine ends", func(t *testing.T) {
		s := startSession(t, harness.SPDY, c.AttachURL(true, true), true)
		s.send("\n")
		awaitPrompt(t, &s.stdout)
		s.send("echo -n last $((1+1)) words; poweroff -f\n")
		awaitSaid(t, s, "last 2 words")
		s.wait(0)
		c.WaitExit(0)
		if text := harness.Text(c.Logs(), ""); !strings.Contains(text, "last 2 words") {
			t.Errorf("end of the log: got %q, want \"last 2 words\"", text[max(0, len(text)-200):])
		}
	})
}

func terminal(c *runtimeapi.ContainerConfig) { c.Stdin, c.Tty = true, true }

// awaitPrompt waits until the guest's shell reads its input, because earlier input is lost.
func awaitPrompt(t *testing.T, screen *buffer) {
	t.Helper()
	harness.Eventually(t, time.Minute, func() error {
		if said := strings.TrimSuffix(screen.String(), "\x1b[6n"); !strings.HasSuffix(said, "# ") {
			return fmt.Errorf("output: got %q, want a prompt at its end", said)
		}
		return nil
	})
}

func awaitSaid(t *testing.T, s *session, want string) {
	t.Helper()
	harness.Eventually(t, time.Minute, func() error {
		if said := s.stdout.String(); !strings.Contains(said, want) {
			return fmt.Errorf("output: got %q, want %q in it", said, want)
		}
		return nil
	})
}

// TestVMExec: programs in a guest have stdin, a terminal and exit codes, and end when their client disconnects.
func TestVMExec(t *testing.T) {
	d := harness.StartDaemon(t, harness.VM(t))
	c := d.RunVM(t, &harness.PodSpec{Image: harness.Guest})
	waitAgent(t, d, c)
	data := make([]byte, 10_000_000)
	rand.NewChaCha8([32]byte{4}).Read(data)
	want := fmt.Sprintf("%x  -\n", sha256.Sum256(data))
	for _, p := range harness.Protocols {
		t.Run(string(p), func(t *testing.T) {
			if r := c.Exec(p, nil, false, "sh", "-c", "echo out; echo err >&2; exit 7"); r.Stdout != "out\n" || r.Stderr != "err\n" || r.Code != 7 {
				t.Errorf("exec: got %+v, want out, err and code 7", r)
			}
			s := startSession(t, p, execURL(t, d, c, true, "sh", "-c", "tty; until stty size | grep 33; do read -t 1 l; done; exit 5"), true)
			awaitSaid(t, s, "/dev/pts/")
			s.sizes <- &remotecommand.TerminalSize{Width: 101, Height: 33}
			s.send("\n")
			awaitSaid(t, s, "33 101")
			s.wait(5)
		})
	}
	t.Run("10 MB of stdin", func(t *testing.T) { // over SPDY, because the other protocol's version cannot signal the end of stdin
		if r := c.Exec(harness.SPDY, bytes.NewReader(data), false, "sha256sum"); r.Stdout != want || r.Code != 0 {
			t.Errorf("exec of sha256sum: got %+v, want %s", r, want)
		}
	})
	t.Run("its time is over", func(t *testing.T) {
		_, err := d.CRI().ExecSync(t.Context(),
			&runtimeapi.ExecSyncRequest{ContainerId: c.ID, Cmd: []string{"sh", "-c", "sleep 4321 & wait"}, Timeout: 1})
		if err == nil || !strings.Contains(err.Error(), "timed out") {
			t.Errorf("ExecSync beyond its timeout: got error %v, want \"timed out\"", err)
		}
		harness.Eventually(t, time.Minute, func() error {
			if out, _, _ := c.ExecSync("sh", "-c", "ps | grep '[s]leep 4321'"); out != "" {
				return fmt.Errorf("programs left in the guest: %s", out)
			}
			return nil
		})
	})
	t.Run("N1 the daemon is killed", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go d.CRI().ExecSync(ctx, &runtimeapi.ExecSyncRequest{ContainerId: c.ID, Cmd: []string{"sh", "-c", "sleep 5432 & wait"}})
		harness.Eventually(t, time.Minute, func() error {
			if out, _, _ := c.ExecSync("sh", "-c", "ps | grep '[s]leep 5432'"); out == "" {
				return fmt.Errorf("the program does not run yet")
			}
			return nil
		})
		d.Kill()
		d.Start()
		if out := c.Must("echo", "at once"); out != "at once\n" { // a probe must not fail because of the restart
			t.Errorf("ExecSync right after the restart: got %q, want \"at once\"", out)
		}
		harness.Eventually(t, time.Minute, func() error {
			if out, _, _ := c.ExecSync("sh", "-c", "ps | grep '[s]leep 5432'"); out != "" {
				return fmt.Errorf("programs left in the guest: %s", out)
			}
			return nil
		})
	})
}

// TestVMExecPowersOff: a program that turns the machine off ends with a sentence, through both doors, and the container ends
// with it.
func TestVMExecPowersOff(t *testing.T) {
	d := harness.StartDaemon(t, harness.VM(t))
	c := d.RunVM(t, &harness.PodSpec{Image: harness.Guest})
	c.WaitGuest()
	waitAgent(t, d, c)
	s := startSession(t, harness.SPDY, execURL(t, d, c, false, "sh", "-c", "echo begun; sleep 1000"), false)
	awaitSaid(t, s, "begun")
	_, err := d.CRI().ExecSync(t.Context(), &runtimeapi.ExecSyncRequest{ContainerId: c.ID, Cmd: []string{"sh", "-c", "poweroff; sleep 1000"}})
	const sentence = "the machine went off while the program ran"
	if wantCode(t, err, codes.FailedPrecondition); !strings.Contains(err.Error(), sentence) {
		t.Errorf("ExecSync: got error %v, want %q", err, sentence)
	}
	receive(t, s.done)
	if s.err == nil || !strings.Contains(s.err.Error(), sentence) {
		t.Errorf("exec: got error %v, want %q", s.err, sentence)
	}
	c.WaitExit(0)
}

// TestC10VMFiles: all files that QEMU can write, except its disks, are on a tmpfs that is not larger than the console's
// buffer.
func TestC10VMFiles(t *testing.T) {
	const room = 2 << 20
	d := tinyVM(t, harness.Set("vm.console_buffer", room))
	c := d.RunVM(t, &harness.PodSpec{Image: harness.TinyGuest})
	c.WaitConsole("tick 00001")
	dir := fmt.Sprintf("/proc/%d/fd", mainPid(t, d, c))
	fds, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]bool{}
	for _, fd := range fds {
		path := filepath.Join(dir, fd.Name())
		link, err := os.Lstat(path)
		if err != nil || link.Mode().Perm()&0o200 == 0 { // not open for writing
			continue
		}
		target, _ := os.Readlink(path)
		if info, err := os.Stat(path); err != nil || !info.Mode().IsRegular() || strings.HasSuffix(target, ".qcow2") || !filepath.IsAbs(target) ||
			strings.HasPrefix(target, "/memfd:") {
			continue
		}
		var st unix.Statfs_t
		if err := unix.Statfs(path, &st); err != nil || st.Type != unix.TMPFS_MAGIC || st.Blocks*uint64(st.Bsize) > room {
			t.Errorf("file system of %s: got type %#x, %d bytes, error %v; want a tmpfs of at most %d bytes", target, st.Type,
				st.Blocks*uint64(st.Bsize), err, room)
		}
		found[filepath.Base(target)] = true
	}
	if !found["serial.log"] || !found["qemu.log"] {
		t.Errorf("files open for writing: got %v, want serial.log and qemu.log", found)
	}
}
