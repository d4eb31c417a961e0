package e2e

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// foreground is a `tripod run` that stays in the foreground.
type foreground struct {
	*exec.Cmd
	t              *testing.T
	d              *harness.Daemon
	name, logs     string
	stdout, stderr *buffer
}

// newForeground prepares `tripod run FLAGS IMAGE WORDS`. Whatever stays of its pod is removed at the end of the test.
func newForeground(t *testing.T, d *harness.Daemon, name string, flags []string, words ...string) *foreground {
	f := &foreground{t: t, d: d, name: name, logs: t.TempDir(), stdout: &buffer{}, stderr: &buffer{}}
	f.Cmd = tripod(t, d, append([]string{"run", "--name", name, "--log-dir", f.logs}, flags...)...)
	f.Args = append(f.Args, words...)
	f.Stdout, f.Stderr = f.stdout, f.stderr
	t.Cleanup(func() {
		if f.pods() > 0 {
			if out, err := tripod(t, d, "rmp", "-f", name).CombinedOutput(); err != nil {
				t.Errorf("tripod rmp -f %s: %v\n%s", name, err, out)
			}
		}
	})
	return f
}

func (f *foreground) pods() (n int) {
	resp, err := f.d.CRI().ListPodSandbox(context.Background(), &runtimeapi.ListPodSandboxRequest{})
	if err != nil {
		f.t.Error(err)
	}
	for _, p := range resp.GetItems() {
		if p.GetMetadata().GetName() == f.name {
			n++
		}
	}
	return n
}

// ends waits for the command's end. With rm, nothing may be left of the pod.
func (f *foreground) ends(code int, stdout string, rm bool) {
	f.t.Helper()
	_ = f.Wait()
	if got := f.ProcessState.ExitCode(); got != code || f.stdout.String() != stdout {
		f.t.Errorf("%v: got exit code %d and %q, stderr %q; want %d and %q", f.Args[1:], got, f.stdout, f.stderr, code, stdout)
	}
	if !rm {
		return
	}
	if n := f.pods(); n > 0 {
		f.t.Errorf("%d pods are left", n)
	}
	if left, err := os.ReadDir(f.logs); err != nil || len(left) > 0 {
		f.t.Errorf("logs that are left: %v, error %v", left, err)
	}
}

// TestRunForeground: `tripod run --rm`, -i and -t do what their users know from `docker run` and `kubectl run`, with each kind of pod.
func TestRunForeground(t *testing.T) {
	d := harness.StartDaemon(t)
	sh := func(script string) []string { return []string{harness.Busybox, "sh", "-c", script} }
	start := func(t *testing.T, f *foreground) *foreground {
		t.Helper()
		if err := f.Start(); err != nil {
			t.Fatal(err)
		}
		return f
	}
	t.Run("output and exit code", func(t *testing.T) {
		f := start(t, newForeground(t, d, "code", []string{"--rm"}, sh("echo out; echo err >&2; printf rest; exit 7")...))
		f.ends(7, "out\nrest", true)
		if got := f.stderr.String(); got != "err\n" {
			t.Errorf("stderr: got %q", got)
		}
	})
	t.Run("a component", func(t *testing.T) {
		start(t, newForeground(t, d, "component", []string{"--rm", "-r", "wasm"}, harness.CommandGo, "--", "out", "hello", "exit", "3")).ends(3,
			"hello\n", true)
	})
	t.Run("the pod stays without --rm", func(t *testing.T) {
		f := start(t, newForeground(t, d, "stays", []string{"--wait"}, sh("echo out")...))
		f.ends(0, "out\n", false)
		if n := f.pods(); n != 1 {
			t.Errorf("%d pods are left, want 1", n)
		}
	})
	t.Run("input", func(t *testing.T) {
		text := strings.Repeat("some input that has many lines\n", 30_000)
		f := newForeground(t, d, "input", []string{"--rm", "-i"}, harness.Busybox, "cat")
		f.Stdin = strings.NewReader(text)
		start(t, f)
		_ = f.Wait()
		if got := f.stdout.String(); f.ProcessState.ExitCode() != 0 || got != text {
			t.Errorf("cat: got exit code %d and %d bytes, stderr %q; want the %d bytes of its input", f.ProcessState.ExitCode(), len(got), f.stderr,
				len(text))
		}
		f = newForeground(t, d, "input-wasm", []string{"--rm", "-i", "-r", "wasm"}, harness.CommandGo, "--", "stdin")
		f.Stdin = bytes.NewReader([]byte("to a component\n"))
		start(t, f)
		_ = f.Wait()
		if got := f.stdout.String(); f.ProcessState.ExitCode() != 0 || !strings.Contains(got, "to a component") {
			t.Errorf("stdin: got exit code %d and %q, stderr %q", f.ProcessState.ExitCode(), got, f.stderr)
		}
	})
	t.Run("an interrupt stops it", func(t *testing.T) {
		f := start(t, newForeground(t, d, "interrupt", []string{"--rm"},
			sh("trap 'echo bye; exit 5' TERM; echo ready; while :; do sleep 0.1; done")...))
		f.stdout.wait(t, "ready")
		_ = f.Process.Signal(unix.SIGINT)
		f.ends(5, "ready\nbye\n", true)
	})
	t.Run("another interrupt kills it", func(t *testing.T) {
		f := start(t, newForeground(t, d, "kill", []string{"--rm"}, sh("trap 'echo no' TERM; echo ready; while :; do sleep 0.1; done")...))
		f.stdout.wait(t, "ready")
		_ = f.Process.Signal(unix.SIGTERM)
		f.stdout.wait(t, "no")
		began := time.Now()
		_ = f.Process.Signal(unix.SIGTERM)
		f.ends(137, "ready\nno\n", true)
		if took := time.Since(began); took > 9*time.Second {
			t.Errorf("the end took %v: the container got its grace period", took)
		}
	})
	t.Run("a terminal", func(t *testing.T) {
		f := newForeground(t, d, "terminal", []string{"--rm", "-it"}, harness.Busybox, "sh")
		command, keys, screen := onTerminal(t, f.Cmd)
		screen.wait(t, "# ") // a prompt is no whole line
		_, _ = keys.Write([]byte("stty size; echo $((40+2))-$(tty)\n"))
		screen.wait(t, "42-/dev/pts/")
		screen.wait(t, "30 120")
		_, _ = keys.Write([]byte("echo $((50+2)); sleep 1000\n"))
		screen.wait(t, "\r\n52")
		_, _ = keys.Write([]byte{3}) // for the container, not for the command
		_, _ = keys.Write([]byte("echo $((60+2)); exit\n"))
		screen.wait(t, "\r\n62")
		waitSuccess(t, command, screen)
		if n := f.pods(); n > 0 {
			t.Errorf("%d pods are left", n)
		}
	})
	t.Run("the keys leave it alone", func(t *testing.T) {
		f := newForeground(t, d, "leave", []string{"--rm", "-it"}, harness.Busybox, "sh")
		command, keys, screen := onTerminal(t, f.Cmd)
		screen.wait(t, "# ")
		_, _ = keys.Write([]byte{0x10, 0x11})
		waitSuccess(t, command, screen)
		screen.wait(t, "goes on")
		if n := f.pods(); n != 1 {
			t.Errorf("%d pods, want the one that goes on", n)
		}
	})
	t.Run("detached", func(t *testing.T) {
		f := start(t, newForeground(t, d, "detached", []string{"-d", "-it"}, harness.Busybox, "sh"))
		_ = f.Wait()
		if id := strings.TrimSpace(f.stdout.String()); f.ProcessState.ExitCode() != 0 || len(id) != 64 || f.pods() != 1 {
			t.Errorf("run -d: got %q, stderr %q; want the ID of a running container", id, f.stderr)
		}
	})
	t.Run("a directory of the node", func(t *testing.T) {
		dir := t.TempDir()
		if err := os.WriteFile(dir+"/a", []byte("from the node\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		start(t, newForeground(t, d, "volume", []string{"--rm", "-v", dir + ":/data:ro"},
			sh("cat /data/a; touch /data/b 2>/dev/null || echo read-only")...)).ends(0, "from the node\nread-only\n", true)
	})
	t.Run("user, directory and program", func(t *testing.T) {
		flags := []string{"--rm", "-u", "1000:1001", "-w", "/tmp", "--entrypoint", "sh"}
		start(t, newForeground(t, d, "flags", flags, harness.Busybox, "--", "-c", "echo $(id -u) $(id -g) $PWD")).ends(0, "1000 1001 /tmp\n",
			true)
	})
	t.Run("a program that does not exist", func(t *testing.T) {
		f := start(t, newForeground(t, d, "none", []string{"--rm"}, harness.Busybox, "no-such-program"))
		_ = f.Wait()
		if f.ProcessState.ExitCode() == 0 || !strings.Contains(f.stderr.String(), "no-such-program") || f.pods() > 0 {
			t.Errorf("got exit code %d, stderr %q and %d pods; want the reason and no pod", f.ProcessState.ExitCode(), f.stderr, f.pods())
		}
	})
}

// TestVMRunForeground: with a machine, the terminal is its console, from the first line and with prompts.
func TestVMRunForeground(t *testing.T) {
	d := harness.StartDaemon(t, harness.VM(t))
	f := newForeground(t, d, "machine", []string{"--rm", "-it", "-r", "vm"}, harness.Guest)
	command, keys, screen := onTerminal(t, f.Cmd)
	awaitPrompt(t, screen)
	_, _ = keys.Write([]byte("echo $((40+2))-in-the-guest; poweroff -f\n"))
	screen.wait(t, "42-in-the-guest")
	waitSuccess(t, command, screen)
	if n := f.pods(); n > 0 {
		t.Errorf("%d pods are left", n)
	}
}
