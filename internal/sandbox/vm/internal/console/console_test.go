package console_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/crilog"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/console"
	"github.com/tripod-run/tripod/test/races"
	"github.com/tripod-run/tripod/test/until"
)

const patience = 60 * time.Second

// daemonVariable makes the test's program run daemon, with the directory that the variable names.
const daemonVariable = "TRIPOD_TEST_CONSOLE"

func TestMain(m *testing.M) {
	if dir := os.Getenv(daemonVariable); dir != "" {
		os.Exit(daemon(dir))
	}
	os.Exit(races.Run(m.Run))
}

// daemon serves a console until it is killed. At SIGUSR1 it reopens the log and prints a line. At SIGTERM it drains the
// console.
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
		Input:     filepath.Join(dir, "serial.in"),
		StateFile: filepath.Join(dir, "console.state"),
		OpenLog: func() (*os.File, error) {
			return os.OpenFile(filepath.Join(dir, "log", "0.log"), os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o640)
		},
		Logger: slog.New(slog.NewTextHandler(log, nil)),
	}
}

// newDir makes a directory with a short path, for sockets.
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

// serialPort appends to the serial log, like QEMU.
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

// logged returns the output in a log and its rotated files, whose names are 0.log.001 …
func logged(t *testing.T, dir string) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "log", "0.log*"))
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(files)
	if len(files) > 1 { // the file without a number is the newest
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
				t.Errorf("bad entry: %d bytes on %s at %v", len(l.Content), l.Stream, l.Time)
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
	t.Errorf("the log has %d bytes, want %d; they differ from byte %d:\n got %q\nwant %q", len(got), len(want), at, show(got), show(want))
}

// TestRelay: the relay logs long and empty lines, carriage returns, binary data, and an unfinished line.
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
	c = open(t, dir) // the machine is started again
	p.write("and on\n")
	if err := c.Drain(deadline(t)); err != nil {
		t.Fatal(err)
	}
	compare(t, logged(t, dir), strings.Replace(p.all.String(), "login: ", "login: \n", 1))
}

// TestPromptness: a line is in the log soon after it was written.
func TestPromptness(t *testing.T) {
	dir := newDir(t)
	p := newPort(t, dir)
	open(t, dir)
	for i := range 20 {
		p.write(fmt.Sprintln("line", i))
		until.Within(t, patience, fmt.Sprintf("line %d is in the log", i), func() bool { return logged(t, dir) == p.all.String() })
	}
}

// TestPromptOnATerminal: of a container with a terminal, an unfinished line is in the log as well.
func TestPromptOnATerminal(t *testing.T) {
	dir := newDir(t)
	p := newPort(t, dir)
	config := configOf(dir, t.Output())
	config.TTY = true
	c, err := console.Open(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	for _, text := range []string{"login: ", "root\n", "# "} {
		p.write(text)
		until.Within(t, patience, fmt.Sprintf("%q is in the log", &p.all), func() bool { return logged(t, dir) == p.all.String() })
	}
	if err := c.Drain(deadline(t)); err != nil {
		t.Fatal(err)
	}
	compare(t, logged(t, dir), p.all.String())
}

// TestNoLog: the serial log is freed even if the container has no log.
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
		t.Errorf("the serial log takes %d bytes, want at most 64 KiB", kept)
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

// TestRotation: no output is lost when the log is rotated many times, and the logged part of the serial log is freed.
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
		t.Errorf("the serial log takes %d bytes, want at most 64 KiB", kept)
	}
}

// TestForeignFiles: Open refuses links and special files in place of its own files.
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
				t.Errorf("Open accepts a %s as %s", kind, name)
			}
		}
	}
}
