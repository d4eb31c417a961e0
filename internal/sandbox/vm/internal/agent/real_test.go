package agent_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent/wire"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/test/machinetest"
	"github.com/tripod-run/tripod/internal/unixsocket"
)

func TestMain(m *testing.M) { machinetest.Main(m) }

// bootTime bounds the boot of a guest, emulated on a busy host.
const bootTime = 2 * time.Minute

// realGuest boots a guest with the agent's disk, and returns the agent's socket.
func realGuest(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "agent")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	program := filepath.Join(dir, agent.ProgramName)
	build := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w -X main.version=test", "-o", program,
		"github.com/tripod-run/tripod/cmd/tripod-agent")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the guest's program: %v: %s", err, out)
	}
	st, err := os.Stat(program)
	if err != nil || st.Size() > 2_500_000 {
		t.Errorf("the guest's program has %d bytes, error %v; want at most 2500000", st.Size(), err)
	}
	disk, err := agent.Disk(filepath.Join(dir, "disks"), program)
	if err != nil {
		t.Fatal(err)
	}
	image := machinetest.FindGuest(t, false)
	socket, serial := filepath.Join(dir, machine.AgentSocket), filepath.Join(dir, "serial.log")
	qemu := exec.Command("qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none", "-machine", "q35", "-accel",
		"tcg,tb-size=32", "-m", "128",
		"-kernel", image.Kernel, "-initrd", image.Initrd, "-append", "console=ttyS0 quiet no_timer_check", "-serial", "file:"+serial,
		"-drive", "file="+disk+",format=raw,if=virtio,readonly=on", "-device", "virtio-serial-pci",
		"-chardev", "socket,id=agent,path="+socket+",server=on,wait=off", "-device", "virtserialport,chardev=agent,name="+wire.PortName)
	qemu.Stderr = t.Output()
	if err := qemu.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = qemu.Process.Kill()
		_ = qemu.Wait()
		if t.Failed() {
			output, _ := os.ReadFile(serial)
			t.Logf("console output: %s", output)
		}
	})
	return socket
}

// TestRealGuest tests the agent in a real guest, over a real virtio-serial port.
func TestRealGuest(t *testing.T) {
	socket := realGuest(t)
	a := openReal(t, socket)
	for _, test := range []struct {
		name string
		run  func(*testing.T, *agent.Agent, string)
	}{
		{"identity and figures", realReports},
		{"round trip", realRoundTrip},
		{"10 MB of stdin", realStdin},
		{"terminal", realTerminal},
		{"cancelled", realCancel},
		{"connections", realDial},
		{"the host restarts", realHostRestart},
		{"the agent restarts", realAgentRestart},
		{"the guest restarts", realReboot},
	} {
		if !t.Run(test.name, func(t *testing.T) { test.run(t, a, socket) }) {
			return
		}
	}
}

func openReal(t *testing.T, socket string) *agent.Agent {
	t.Helper()
	a := agent.Open(socket, quiet())
	t.Cleanup(func() { a.Close() })
	awaitReady(t, a)
	return a
}

func awaitReady(t *testing.T, a *agent.Agent) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), bootTime)
	defer cancel()
	if err := a.Wait(ctx); err != nil {
		t.Fatal(err)
	}
}

// output runs a shell command, which must succeed, and returns its output.
func output(t *testing.T, a *agent.Agent, script string) string {
	t.Helper()
	var out, errOut bytes.Buffer
	code, err := a.Exec(deadline(t), command(nil, &out, &errOut, "sh", "-c", script))
	if err != nil || code != 0 {
		t.Fatalf("Exec(%s) = %d, %v; stderr: %s", script, code, err, errOut.String())
	}
	return strings.TrimSpace(out.String())
}

func realReports(t *testing.T, a *agent.Agent, _ string) {
	info, err := a.Info(deadline(t))
	if err != nil || info.Program != "test" || info.Kernel == "" || info.Machine != "x86_64" || len(info.BootID) != 36 || info.Uptime <= 0 {
		t.Errorf("Info = %+v, %v; want program test, a kernel, x86_64, a boot ID and an uptime", info, err)
	}
	if !slices.ContainsFunc(info.Interfaces, func(i agent.Interface) bool {
		return i.Name == "lo" && len(i.Addresses) > 0 && i.Addresses[0].String() == "127.0.0.1/8"
	}) {
		t.Errorf("interfaces = %v, want lo with 127.0.0.1/8", info.Interfaces)
	}
	stats, err := a.Stats(deadline(t))
	if err != nil || stats.MemoryTotal < 64<<20 || stats.MemoryTotal > 128<<20 || stats.MemoryAvailable == 0 ||
		stats.MemoryAvailable > stats.MemoryTotal || len(stats.Filesystems) == 0 {
		t.Errorf("Stats = %+v, %v; want 64 to 128 MiB of memory and file systems", stats, err)
	}
	t.Logf("%+v\n%+v\nthe agent's memory: %s", info, stats, output(t, a, "grep VmRSS /proc/$PPID/status"))
}

func realRoundTrip(t *testing.T, a *agent.Agent, _ string) {
	var all []time.Duration
	for range 30 {
		begin := time.Now()
		if got := output(t, a, "echo hello"); got != "hello" {
			t.Fatalf("echo hello printed %q", got)
		}
		all = append(all, time.Since(begin))
	}
	slices.Sort(all)
	t.Logf("exec of a shell: p50 %v, best %v, worst %v", all[len(all)/2], all[0], all[len(all)-1])
}

func realStdin(t *testing.T, a *agent.Agent, _ string) {
	data := make([]byte, 10_000_000)
	rand.NewChaCha8([32]byte{2}).Read(data)
	begin := time.Now()
	hash := sha256.New()
	code, err := a.Exec(deadline(t), command(bytes.NewReader(data), hash, nil, "cat"))
	if want := sha256.Sum256(data); err != nil || code != 0 || !bytes.Equal(hash.Sum(nil), want[:]) {
		t.Errorf("Exec = %d, %v, or the output differs from stdin", code, err)
	}
	t.Logf("round trip of 10 MB in %v", time.Since(begin))
}

func realTerminal(t *testing.T, a *agent.Agent, _ string) {
	in, feed := io.Pipe()
	lines := make(chan string, 100)
	sizes := make(chan sandbox.TermSize)
	cmd := command(in, lineWriter(lines), nil, "sh", "-c", "tty; read l; stty size; exit 6")
	cmd.TTY, cmd.Resize = true, sizes
	codes := make(chan int32, 1)
	go func() {
		code, err := a.Exec(deadline(t), cmd)
		if err != nil {
			t.Error(err)
		}
		codes <- code
	}()
	next := func() string {
		select {
		case line := <-lines:
			return line
		case <-time.After(patience):
			t.Fatal("the program prints nothing")
			return ""
		}
	}
	if line := next(); !strings.HasPrefix(line, "/dev/pts/") {
		t.Errorf("the terminal is %q, want one in /dev/pts", line)
	}
	sizes <- sandbox.TermSize{Width: 101, Height: 37}
	io.WriteString(feed, "\n")
	line := next()
	for line == "" { // the echo of the input
		line = next()
	}
	if line != "37 101" {
		t.Errorf("the terminal's size is %q, want 37 101", line)
	}
	if code := <-codes; code != 6 {
		t.Errorf("Exec = %d, want 6", code)
	}
}

// running starts a program and its child in the guest, which run until they are killed. ended receives the error of
// Exec.
func running(ctx context.Context, t *testing.T, a *agent.Agent) (pids string, ended chan error) {
	t.Helper()
	lines := make(chan string, 1)
	ended = make(chan error, 1)
	go func() {
		_, err := a.Exec(ctx, command(nil, lineWriter(lines), nil, "sh", "-c", "sleep 1000 & echo $$ $!; wait"))
		ended <- err
	}()
	select {
	case pids = <-lines:
	case err := <-ended:
		t.Fatal(err)
	}
	return pids, ended
}

func awaitDead(t *testing.T, a *agent.Agent, pids string) {
	t.Helper()
	// A killed child is a zombie until the guest's init has reaped it.
	output(t, a, fmt.Sprintf("for p in %s; do while grep -qs 'State:.[RSDT]' /proc/$p/status; do usleep 10000; done; done", pids))
}

func realCancel(t *testing.T, a *agent.Agent, _ string) {
	ctx, cancel := context.WithCancel(deadline(t))
	pids, ended := running(ctx, t, a)
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled Exec: error = %v, want context.Canceled", err)
	}
	awaitDead(t, a, pids)
}

func realDial(t *testing.T, a *agent.Agent, _ string) {
	client := http.Client{Timeout: patience,
		Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return a.DialTCP(ctx, 80) }}}
	defer client.CloseIdleConnections()
	response, err := client.Get("http://guest/")
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if body, err := io.ReadAll(response.Body); err != nil || !strings.Contains(string(body), "hello from") {
		t.Errorf("response body = %q, %v; want \"hello from\"", body, err)
	}
	if _, err := a.DialTCP(deadline(t), 4); !errdefs.IsUnavailable(err) {
		t.Errorf("DialTCP to a closed port: error = %v, want ErrUnavailable", err)
	}
}

// realHostRestart: if a daemon dies, leaving a program and half a frame, the next one gets a session immediately and
// the program is killed.
func realHostRestart(t *testing.T, a *agent.Agent, socket string) {
	pids, ended := running(deadline(t), t, a)
	a.Close()
	if err := <-ended; !errdefs.IsUnavailable(err) {
		t.Errorf("Exec of a closed agent: error = %v, want ErrUnavailable", err)
	}
	for _, rest := range []string{"\x05half a frame", "\x00\x01\x02\x03\x00", strings.Repeat("x", 100_000)} {
		c, err := unixsocket.Dial(t.Context(), socket)
		if err != nil {
			t.Fatal(err)
		}
		c.SetDeadline(time.Now().Add(patience))
		if _, err := c.Write([]byte(rest)); err != nil {
			t.Fatal(err)
		}
		c.Close()
		begin := time.Now()
		next := openReal(t, socket)
		t.Logf("ready again after %v", time.Since(begin))
		awaitDead(t, next, pids)
		next.Close()
	}
}

func realAgentRestart(t *testing.T, _ *agent.Agent, socket string) {
	a := openReal(t, socket)
	if _, err := a.Exec(deadline(t), command(nil, nil, nil, "sh", "-c", "kill -9 $PPID; sleep 1000")); !errdefs.IsUnavailable(err) {
		t.Errorf("Exec of a program that kills the agent: error = %v, want ErrUnavailable", err)
	}
	awaitReady(t, a)
	if got := output(t, a, "echo back"); got != "back" {
		t.Errorf("echo back printed %q", got)
	}
}

func realReboot(t *testing.T, _ *agent.Agent, socket string) {
	a := openReal(t, socket)
	before, err := a.Info(deadline(t))
	if err != nil {
		t.Fatal(err)
	}
	_, err = a.Exec(deadline(t), command(nil, nil, nil, "reboot", "-f"))
	t.Logf("Exec of a program that reboots the guest: error = %v", err)
	for end := time.Now().Add(bootTime); ; time.Sleep(10 * time.Millisecond) {
		awaitReady(t, a)
		if after, err := a.Info(deadline(t)); err == nil && after.BootID != before.BootID {
			return
		}
		if time.Now().After(end) {
			t.Fatal("the agent does not answer after the guest's reboot")
		}
	}
}
