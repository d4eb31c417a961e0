package console_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/crilog"
	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/vm/console"
)

const patience = 60 * time.Second

// daemonVariable has the test's program play a daemon with a console, in the directory that it names.
const daemonVariable = "TRIPOD_TEST_CONSOLE"

func TestMain(m *testing.M) {
	if dir := os.Getenv(daemonVariable); dir != "" {
		os.Exit(daemon(dir))
	}
	os.Exit(m.Run())
}

// daemon serves a console until it is killed. It reopens the log at SIGUSR1, and says so by a line; at SIGTERM it drains.
func daemon(dir string) int {
	signals := make(chan os.Signal, 10)
	signal.Notify(signals, unix.SIGUSR1, unix.SIGTERM)
	c, err := console.Open(configOf(dir, os.Stderr))
	if err != nil {
		fmt.Println("open:", err)
		return 1
	}
	fmt.Println("open")
	for s := range signals {
		if s == unix.SIGUSR1 {
			if err := c.ReopenLog(); err != nil {
				fmt.Println("reopen:", err)
				return 1
			}
			fmt.Println("reopened")
			continue
		}
		if err := c.Drain(context.Background()); err != nil {
			fmt.Println("drain:", err)
			return 1
		}
		return 0
	}
	return 1
}

func configOf(dir string, log io.Writer) console.Config {
	return console.Config{
		SerialLog: filepath.Join(dir, "serial.log"),
		Socket:    filepath.Join(dir, "serial.sock"),
		StateFile: filepath.Join(dir, "console.state"),
		OpenLog: func() (*os.File, error) {
			return os.OpenFile(filepath.Join(dir, "log", "0.log"), os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o640)
		},
		Logger: slog.New(slog.NewTextHandler(log, nil)),
	}
}

// newDir is short, for sockets.
func newDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "con")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	os.Mkdir(filepath.Join(dir, "log"), 0o755)
	return dir
}

func open(t *testing.T, dir string) *console.Console {
	t.Helper()
	c, err := console.Open(configOf(dir, t.Output()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func deadline(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// serialPort plays QEMU: it appends to the serial log.
type serialPort struct {
	t    *testing.T
	file *os.File
	all  bytes.Buffer
}

func newPort(t *testing.T, dir string) *serialPort {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(dir, "serial.log"), os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return &serialPort{t: t, file: f}
}

func (p *serialPort) write(s string) {
	if _, err := p.file.WriteString(s); err != nil {
		p.t.Error(err)
	}
	p.all.WriteString(s)
}

// logged is what a log says was the output, rotated files first. Files are named 0.log.001 …
func logged(t *testing.T, dir string) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "log", "0.log*"))
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(files)
	if len(files) > 1 { // the one without a number is the last
		files = append(files[1:], files[0])
	}
	var out strings.Builder
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(content)) {
			if !strings.HasSuffix(line, "\n") {
				t.Fatalf("%s ends in half an entry: %.100q", file, line)
			}
			l, err := crilog.Parse([]byte(line))
			if err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			if len(l.Content) > crilog.MaxPiece || l.Stream != crilog.Stdout || time.Since(l.Time) > time.Hour {
				t.Errorf("an entry of %d bytes on %s at %v", len(l.Content), l.Stream, l.Time)
			}
			out.Write(l.Content)
			if !l.Partial {
				out.WriteByte('\n')
			}
		}
	}
	return out.String()
}

func compare(t *testing.T, got, want string) {
	t.Helper()
	if got == want {
		return
	}
	at := 0
	for at < min(len(got), len(want)) && got[at] == want[at] {
		at++
	}
	show := func(s string) string { return s[max(0, at-60):min(len(s), at+60)] }
	t.Errorf("%d bytes are logged of %d; from byte %d on\n got %q\nwant %q", len(got), len(want), at, show(got), show(want))
}

// TestRelay: lines, long ones in pieces, empty ones, carriage returns, bytes that are no text, and an unfinished one.
func TestRelay(t *testing.T) {
	dir := newDir(t)
	p := newPort(t, dir)
	p.write("before\r\n")
	c := open(t, dir)
	p.write("\n\xff\x00\x1b[2J\n" + strings.Repeat("x", crilog.MaxPiece) + "\n" + strings.Repeat("y", 3*crilog.MaxPiece+5) + "\nlog")
	p.write("in: ")
	if err := c.Drain(deadline(t)); err != nil {
		t.Fatal(err)
	}
	compare(t, logged(t, dir), p.all.String()+"\n")
	if err := c.Drain(deadline(t)); err != nil {
		t.Fatal(err)
	}
	c.Close()
	again := open(t, dir) // the machine is started again
	p.write("and on\n")
	if err := again.Drain(deadline(t)); err != nil {
		t.Fatal(err)
	}
	compare(t, logged(t, dir), strings.Replace(p.all.String(), "login: ", "login: \n", 1))
}

// TestPromptness: a line is in the log soon after it was written, without anybody's asking.
func TestPromptness(t *testing.T) {
	dir := newDir(t)
	p := newPort(t, dir)
	open(t, dir)
	for i := range 20 {
		p.write(fmt.Sprintln("line", i))
		begin := time.Now()
		for logged(t, dir) != p.all.String() {
			if time.Since(begin) > patience {
				t.Fatalf("line %d is not in the log", i)
			}
			time.Sleep(time.Millisecond)
		}
	}
}

// TestNoLog: without a log the serial log is consumed all the same.
func TestNoLog(t *testing.T) {
	dir := newDir(t)
	p := newPort(t, dir)
	cfg := configOf(dir, t.Output())
	cfg.OpenLog = func() (*os.File, error) { return nil, nil }
	c, err := console.Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	p.write(strings.Repeat(strings.Repeat("z", 99)+"\n", 100000))
	if err := c.Drain(deadline(t)); err != nil {
		t.Fatal(err)
	}
	if kept := allocated(t, p.file); kept > 64<<10 {
		t.Errorf("%d bytes are kept of the serial log", kept)
	}
}

func allocated(t *testing.T, f *os.File) int64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks * 512
}

// TestRotation: the log is rotated again and again while output flows; and what is logged takes no room in the serial log.
func TestRotation(t *testing.T) {
	dir := newDir(t)
	p := newPort(t, dir)
	c := open(t, dir)
	var writing sync.WaitGroup
	writing.Go(func() {
		for i := range 20000 {
			p.write(fmt.Sprintf("line %d %s\n", i, strings.Repeat("-", i%200)))
		}
	})
	log := filepath.Join(dir, "log", "0.log")
	for i := range 30 {
		if err := os.Rename(log, fmt.Sprintf("%s.%03d", log, i)); err != nil {
			t.Fatal(err)
		}
		if err := c.ReopenLog(); err != nil {
			t.Fatal(err)
		}
	}
	writing.Wait()
	if err := c.Drain(deadline(t)); err != nil {
		t.Fatal(err)
	}
	compare(t, logged(t, dir), p.all.String())
	if kept := allocated(t, p.file); kept > 64<<10 {
		t.Errorf("%d bytes are kept of the serial log", kept)
	}
}

// TestKilledDaemon (N1): daemons are killed at any moment, while the log is rotated too; every byte is logged once.
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
				time.Sleep(time.Millisecond) // so that there is an end to it
			}
		}
	})
	// Half of them die at a point that is worth it, if not before.
	points := []string{"", "", "", "console.relay.append=kill", "console.relay.vouch=kill", "console.relay.resume=kill"}
	rotated := 0
	for range 80 {
		lateRotation := random.IntN(4) == 0
		point := points[random.IntN(len(points))]
		cmd, said := startDaemon(t, dir, point)
		if point == "" && random.IntN(2) == 0 {
			said("open")
		}
		if random.IntN(3) == 0 {
			rename(dir, rotated)
			rotated++
			cmd.Process.Signal(unix.SIGUSR1)
		}
		time.Sleep(time.Duration(random.IntN(40)) * time.Millisecond) // the moment is what is random here
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
	cmd, said := startDaemon(t, dir, "")
	said("open")
	cmd.Process.Signal(unix.SIGTERM)
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	compare(t, logged(t, dir), p.all.String())
	t.Logf("%d bytes, rotated %d times", p.all.Len(), rotated)
}

func rename(dir string, n int) {
	log := filepath.Join(dir, "log", "0.log")
	os.Rename(log, fmt.Sprintf("%s.%03d", log, n)) // it may not be there yet
}

// startDaemon gives a function that waits for a line of it.
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
			t.Fatalf("the daemon says %q, %v; want %q", got, err, want)
		}
	}
}

// TestFullDisk (N5): while the log's disk is full nothing is dropped, and no half entry stays; then it goes on.
func TestFullDisk(t *testing.T) {
	dir := newDir(t)
	small := filepath.Join(dir, "log")
	if err := unix.Mount("tmpfs", small, "tmpfs", 0, "size=256k"); err != nil {
		t.Fatalf("needs root in a mount namespace of its own (hack/testns.sh): %v", err)
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
		t.Fatal("all is logged on a full disk")
	} else {
		t.Log(err)
	}
	if part := logged(t, dir); !strings.HasPrefix(p.all.String(), part) {
		t.Errorf("%d bytes are logged, which are not the beginning", len(part))
	}
	os.Remove(ballast)
	if err := c.Drain(deadline(t)); err != nil {
		t.Fatal(err)
	}
	compare(t, logged(t, dir), p.all.String())
}

// TestForeignFiles: nothing is followed or taken that somebody put in place of our files.
func TestForeignFiles(t *testing.T) {
	for _, name := range []string{"serial.log", "console.state"} {
		for kind, place := range map[string]func(path string) error{
			"link": func(path string) error { return os.Symlink("/etc/passwd", path) },
			"fifo": func(path string) error { return unix.Mkfifo(path, 0o600) },
		} {
			dir := newDir(t)
			if err := place(filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
			if c, err := console.Open(configOf(dir, t.Output())); err == nil {
				c.Close()
				t.Errorf("%s: a %s is taken", name, kind)
			}
		}
	}
}
