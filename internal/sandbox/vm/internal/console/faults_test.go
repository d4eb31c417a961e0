package console_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/crilog"
	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/console"
)

// TestKilledDaemon (N1): every byte is logged once, even if daemons are killed at any moment and the log is rotated.
func TestKilledDaemon(t *testing.T) {
	dir := newDir(t)
	p := newPort(t, dir)
	random := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 1))
	stop := make(chan struct{})
	var writing sync.WaitGroup
	writing.Go(func() {
		source := rand.New(rand.NewPCG(1, 2))
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			length := source.IntN(300)
			if source.IntN(50) == 0 {
				length = source.IntN(3 * crilog.MaxPiece)
			}
			line := fmt.Sprintf("%d %s\n", i, strings.Repeat(string(rune('a'+i%26)), length))
			cut := source.IntN(len(line))
			p.write(line[:cut])
			p.write(line[cut:])
			if i%20 == 0 {
				time.Sleep(time.Millisecond) // pacing: limits the amount of output
			}
		}
	})
	// Half of the daemons die at a fail point, if they are not killed before.
	points := []string{"", "", "", "console.relay.append=kill", "console.relay.vouch=kill", "console.relay.resume=kill"}
	rotated := 0
	for range 80 {
		lateRotation := random.IntN(4) == 0
		point := points[random.IntN(len(points))]
		cmd, awaitLine := startDaemon(t, dir, point)
		if point == "" && random.IntN(2) == 0 {
			awaitLine("open")
		}
		if random.IntN(3) == 0 {
			rename(dir, rotated)
			rotated++
			cmd.Process.Signal(unix.SIGUSR1)
		}
		time.Sleep(time.Duration(random.IntN(40)) * time.Millisecond) // pacing: the daemon is killed at a random moment
		cmd.Process.Kill()
		cmd.Wait()
		if lateRotation {
			rename(dir, rotated)
			rotated++
		}
	}
	close(stop)
	writing.Wait()
	p.write("the end\n")
	cmd, awaitLine := startDaemon(t, dir, "")
	awaitLine("open")
	cmd.Process.Signal(unix.SIGTERM)
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	compare(t, logged(t, dir), p.all.String())
	t.Logf("%d bytes, rotated %d times", p.all.Len(), rotated)
}

func rename(dir string, n int) {
	log := filepath.Join(dir, "log", "0.log")
	os.Rename(log, fmt.Sprintf("%s.%03d", log, n)) // fails if the log does not exist yet
}

// startDaemon starts a daemon. The returned function waits for a line of its output.
func startDaemon(t *testing.T, dir, points string) (*exec.Cmd, func(string)) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), daemonVariable+"="+dir, failpoint.Variable+"="+points)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	cmd.Stdout, cmd.Stderr = w, os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w.Close()
	return cmd, func(want string) {
		t.Helper()
		line := make([]byte, 200)
		n, err := r.Read(line)
		if got := strings.TrimSpace(string(line[:n])); err != nil || got != want {
			t.Fatalf("the daemon prints %q, %v; want %q", got, err, want)
		}
	}
}

// TestFullDisk (N5): while the log's disk is full, no output is lost and no incomplete entry stays. Then logging
// continues.
func TestFullDisk(t *testing.T) {
	dir := newDir(t)
	small := filepath.Join(dir, "log")
	if err := unix.Mount("tmpfs", small, "tmpfs", 0, "size=256k"); err != nil {
		t.Fatalf("needs root in its own mount namespace (hack/testns.sh): %v", err)
	}
	defer unix.Unmount(small, unix.MNT_DETACH)
	ballast := filepath.Join(small, "ballast")
	if err := os.WriteFile(ballast, make([]byte, 200<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	p := newPort(t, dir)
	c := open(t, dir)
	for i := range 1000 {
		p.write(fmt.Sprintf("line %d %s\n", i, strings.Repeat("-", 100)))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2500*time.Millisecond)
	defer cancel()
	if err := c.Drain(ctx); err == nil {
		t.Fatal("Drain succeeded on a full disk")
	} else {
		t.Log(err)
	}
	if part := logged(t, dir); !strings.HasPrefix(p.all.String(), part) {
		t.Errorf("the log's %d bytes are not the beginning of the output", len(part))
	}
	os.Remove(ballast)
	if err := c.Drain(deadline(t)); err != nil {
		t.Fatal(err)
	}
	compare(t, logged(t, dir), p.all.String())
}

// TestLogIsAway (N5): if the log cannot be opened, a machine's first console fails. A later console waits until the log
// can be opened.
func TestLogIsAway(t *testing.T) {
	dir := newDir(t)
	p := newPort(t, dir)
	cfg := configOf(dir, t.Output())
	openLog, away := cfg.OpenLog, atomic.Bool{}
	cfg.OpenLog = func() (*os.File, error) {
		if away.Load() {
			return nil, unix.ENOSPC
		}
		return openLog()
	}
	away.Store(true)
	if c, err := console.Open(cfg); err == nil {
		c.Close()
		t.Fatal("the first Open succeeded without the log")
	}
	away.Store(false)
	c, err := console.Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	p.write("one\ntwo")
	for logged(t, dir) != "one\n" {
		time.Sleep(time.Millisecond)
	}
	c.Close()
	away.Store(true)
	if c, err = console.Open(cfg); err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	p.write("\nthree\n")
	if err := c.ReopenLog(); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("ReopenLog error = %v, want ENOSPC", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := c.Drain(ctx); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("Drain error = %v, want ENOSPC", err)
	}
	away.Store(false)
	if err := c.Drain(deadline(t)); err != nil {
		t.Fatal(err)
	}
	compare(t, logged(t, dir), p.all.String())
}

// TestFaultC10ConsoleFlood: output beyond the log's maximum size is dropped, and the serial log is still freed. After a
// rotation, output is logged again.
func TestFaultC10ConsoleFlood(t *testing.T) {
	dir := newDir(t)
	p := newPort(t, dir)
	const most = 256 << 10
	cfg := configOf(dir, t.Output())
	cfg.LogSizeMax = most
	c, err := console.Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	line := strings.Repeat("x", 99) + "\n"
	for range 20 {
		p.write(strings.Repeat(line, 1000))
	}
	if err := c.Drain(deadline(t)); err != nil {
		t.Fatal(err)
	}
	log := filepath.Join(dir, "log", "0.log")
	if info, err := os.Stat(log); err != nil || info.Size() > most || info.Size() < most/2 {
		t.Errorf("the log has %d bytes, error %v; want between %d and %d", info.Size(), err, most/2, most)
	}
	var serial unix.Stat_t
	if err := unix.Stat(cfg.SerialLog, &serial); err != nil || serial.Blocks*512 > 1<<20 {
		t.Errorf("the serial log takes %d bytes, error %v; want at most 1 MiB", serial.Blocks*512, err)
	}
	if err := os.Rename(log, log+".001"); err != nil {
		t.Fatal(err)
	}
	if err := c.ReopenLog(); err != nil {
		t.Fatal(err)
	}
	p.write("after the rotation\n")
	if err := c.Drain(deadline(t)); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(log); err != nil || !strings.HasSuffix(string(text), "after the rotation\n") {
		t.Errorf("the new log is %q, %v; want the last line", text, err)
	}
}
