package machinetest

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tripod-run/tripod/internal/image/disk/qcow2"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// Patience bounds each wait for a guest, because guests without KVM on a busy host are slow.
const Patience = 2 * time.Minute

// ready is the prefix of the line that the guest prints once it has booted.
const ready = "TRIPOD-GUEST-READY"

// Guest is the test guest (hack/images/guest): a kernel and an initrd with a shell on the serial console, and a
// bootable qcow2 image that contains both.
type Guest struct{ Kernel, Initrd, Disk string }

// Subject is a driver under test.
type Subject struct {
	// New returns a driver with Taps as its Opener. After Close, New can be called again. The new driver then plays the
	// part of the next daemon's driver and finds what the previous driver left.
	New   func(t testing.TB) machine.Driver
	Guest Guest
	// NewCgroup creates a machine's cgroup with a memory limit in bytes (0 means no limit) and returns the cgroup's
	// path.
	NewCgroup func(t testing.TB, name string, memory int64) string
	// UID and GID are the user and group of the hypervisor.
	UID, GID int
}

// Life is a driver during one life of the daemon, with the events that the driver has sent.
type Life struct {
	machine.Driver
	Found map[string]machine.State

	t      testing.TB
	mu     sync.Mutex
	events []machine.Event
	more   chan struct{}
}

// Begin makes a driver and lets it recover the named machines.
func (s Subject) Begin(t testing.TB, names ...string) *Life {
	t.Helper()
	l := &Life{t: t, Driver: s.New(t), more: make(chan struct{}, 1)}
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	found, err := l.Recover(ctx, names, l.sink)
	if err != nil {
		t.Fatalf("recover: %v", err)
	}
	l.Found = found
	return l
}

func (l *Life) sink(e machine.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.events = append(l.events, e)
	select {
	case l.more <- struct{}{}:
	default:
	}
}

// Events returns the events that End has not consumed yet.
func (l *Life) Events() []machine.Event {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]machine.Event(nil), l.events...)
}

// End waits for the event that reports the end of a machine, consumes that event, and compares the event with State.
func (l *Life) End(name string) machine.State {
	l.t.Helper()
	deadline := time.After(Patience)
	for {
		l.mu.Lock()
		for i, e := range l.events {
			if e.Name == name {
				l.events = append(l.events[:i], l.events[i+1:]...)
				l.mu.Unlock()
				if s := l.MustState(name); s.Phase != machine.Ended || s.Cause != e.State.Cause || s.ExitCode != e.State.ExitCode {
					l.t.Errorf("State after the event = %+v, want the event's %+v", s, e.State)
				}
				return e.State
			}
		}
		l.mu.Unlock()
		select {
		case <-l.more:
		case <-deadline:
			l.t.Fatalf("no event reported the end of machine %.8s; its state is %+v", name, l.MustState(name))
		}
	}
}

// MustState returns the state of a machine, which must be defined.
func (l *Life) MustState(name string) machine.State {
	l.t.Helper()
	s, err := l.State(l.t.Context(), name)
	if err != nil {
		l.t.Fatalf("state of %.8s: %v", name, err)
	}
	return s
}

// Definition returns a machine with the test guest and its own directories, cgroup and writable disk. The driver must
// remove everything that it makes itself; the test's namespaces check this.
func (s Subject) Definition(t testing.TB) machine.Definition {
	t.Helper()
	name := randomName(t)
	dir := t.TempDir()
	d := machine.Definition{
		Name: name, UUID: formatUUID(name), Dir: filepath.Join(dir, "run", name), StateDir: filepath.Join(dir, "state"),
		CPUs: 1, Memory: 128 << 20, Cmdline: "console=ttyS0 quiet no_timer_check",
		Kernel: &machine.File{Path: s.Guest.Kernel}, Initrd: &machine.File{Path: s.Guest.Initrd},
		UID: s.UID, GID: s.GID, Cgroup: s.NewCgroup(t, name, 0),
	}
	d.SerialLog = filepath.Join(d.StateDir, "serial.log")
	for _, sub := range []string{filepath.Dir(d.Dir), d.StateDir} {
		must(t, os.MkdirAll(sub, 0o700))
	}
	base, overlay := filepath.Join(d.StateDir, "base.raw"), filepath.Join(d.StateDir, "root.qcow2")
	content := append([]byte("the base of the root disk\n"), make([]byte, 1<<20)...)
	must(t, os.WriteFile(base, content, 0o400))
	must(t, qcow2.CreateOverlay(t.Context(), overlay, 1<<20, qcow2.Overlay{}))
	d.Disks = []machine.Disk{{
		ID: "root", File: machine.File{Path: overlay}, Format: "qcow2", Bus: machine.BusVirtio,
		Base: &machine.Base{File: machine.File{Path: base}, Format: "raw"},
	}}
	return d
}

// mustDefine defines a machine and fails the test on error.
func (l *Life) mustDefine(t testing.TB, d machine.Definition) {
	t.Helper()
	if err := l.Define(t.Context(), d); err != nil {
		t.Fatalf("define: %v", err)
	}
}

// Boot defines and starts a machine, waits until its guest is ready, and attaches to its console.
func (l *Life) Boot(t testing.TB, d machine.Definition) *Console {
	t.Helper()
	l.mustDefine(t, d)
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	if err := l.Start(ctx, d.Name); err != nil {
		t.Fatalf("start: %v", err)
	}
	c := Attach(t, d)
	AwaitLog(t, d, ready, 1)
	return c
}

// AwaitLog waits until the serial log contains text at least the given number of times.
func AwaitLog(t testing.TB, d machine.Definition, text string, times int) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(Patience)
	for {
		raw, _ := os.ReadFile(d.SerialLog)
		if bytes.Count(raw, []byte(text)) >= times {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("%q does not occur %d times in the serial log, which ends with %q", text, times, raw[max(0, len(raw)-2000):])
		}
	}
}

// Console types lines at the serial console.
type Console struct {
	t    testing.TB
	pipe *os.File
}

// Attach opens the input of a running machine's serial console.
func Attach(t testing.TB, d machine.Definition) *Console {
	t.Helper()
	pipe, err := machine.OpenPipe(filepath.Join(d.Dir, machine.SerialInput))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pipe.Close() })
	return &Console{t: t, pipe: pipe}
}

// Type types a line, which the guest's shell executes.
func (c *Console) Type(format string, a ...any) {
	c.t.Helper()
	if _, err := fmt.Fprintf(c.pipe, format+"\n", a...); err != nil {
		c.t.Fatalf("type at the console: %v", err)
	}
}

// Close closes the console's input.
func (c *Console) Close() { c.pipe.Close() }

func randomName(t testing.TB) string {
	raw := make([]byte, 32)
	if _, err := rand.Read(raw); err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(raw)
}

func formatUUID(name string) string {
	return strings.Join([]string{name[:8], name[8:12], name[12:16], name[16:20], name[20:32]}, "-")
}
