package vm

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
)

func logOf(t *testing.T, dir string, limit int64) *guestLog {
	t.Helper()
	g := unopenedLog(dir, limit)
	if err := g.open(); err != nil {
		t.Fatal(err)
	}
	return g
}

func unopenedLog(dir string, limit int64) *guestLog {
	p := &sandbox.Pod{Config: &runtimeapi.PodSandboxConfig{LogDirectory: dir}}
	c := &sandbox.Container{ID: "c", Config: &runtimeapi.ContainerConfig{LogPath: "c.log"}}
	return newGuestLog(p, c, filepath.Join(dir, "cursor"), limit, slog.New(slog.DiscardHandler))
}

func entry(n int) string { return fmt.Sprintf("2016-10-06T00:17:09.669794202Z stdout F line %d\n", n) }

// TestGuestLogContinues: a daemon that was killed at any entry, also right after a rotation, continues the log at the byte
// after those that the node has. Entries are neither lost nor doubled, also if a part of one was written.
func TestGuestLogContinues(t *testing.T) {
	const entries = 40
	var whole strings.Builder
	for n := range entries {
		whole.WriteString(entry(n))
	}
	for rotateAt := 5; rotateAt < entries; rotateAt += 7 {
		dir := t.TempDir()
		tear := func(name string, n int) { // the write of an entry is cut off
			file, err := os.OpenFile(filepath.Join(dir, name), os.O_WRONLY|os.O_APPEND, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer file.Close()
			if _, err := file.WriteString(entry(n)[:n%len(entry(n))]); err != nil {
				t.Fatal(err)
			}
		}
		g := logOf(t, dir, 0)
		for at, n := 0, 0; at < whole.Len(); n++ {
			if n%3 == 0 { // killed: nothing is closed, and the cursor is as old as it happens to be
				tear("c.log", n)
				g = logOf(t, dir, 0)
				if int(g.offset) != at {
					t.Fatalf("rotation at entry %d, offset after a restart at entry %d: got %d, want %d", rotateAt, n, g.offset, at)
				}
			}
			if n == rotateAt {
				if err := os.Rename(filepath.Join(dir, "c.log"), filepath.Join(dir, "c.log.1")); err != nil {
					t.Fatal(err)
				}
				if n%2 == 0 { // the daemon is killed between the kubelet's two steps
					tear("c.log.1", n)
					g = logOf(t, dir, 0)
				} else if err := g.reopen(); err != nil {
					t.Fatal(err)
				}
			}
			if err := g.add(nil, []byte(entry(n))); err != nil {
				t.Fatal(err)
			}
			at += len(entry(n))
		}
		var got string
		for _, name := range []string{"c.log.1", "c.log"} {
			raw, err := os.ReadFile(filepath.Join(dir, name))
			if err != nil {
				t.Fatal(err)
			}
			got += string(raw)
		}
		if got != whole.String() {
			t.Errorf("rotation at entry %d: got\n%s", rotateAt, got)
		}
	}
}

// TestGuestLogReopens: a kubelet can rotate a log that the daemon has not opened yet after its start, and one that has ended.
func TestGuestLogReopens(t *testing.T) {
	dir := t.TempDir()
	if err := logOf(t, dir, 0).add(nil, []byte(entry(0))); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(filepath.Join(dir, "c.log"), filepath.Join(dir, "c.log.1")); err != nil {
		t.Fatal(err)
	}
	g := unopenedLog(dir, 0)
	if err := errors.Join(g.reopen(), g.open()); err != nil {
		t.Fatal(err)
	}
	if int(g.offset) != len(entry(0)) {
		t.Errorf("offset after a rotation before the log was opened: got %d, want %d", g.offset, len(entry(0)))
	}
	g.close()
	if err := g.reopen(); !errdefs.IsFailedPrecondition(err) || g.file != nil {
		t.Errorf("rotation of a closed log: got error %v and file %v, want a failed precondition and none", err, g.file)
	}
	if g = logOf(t, dir, 0); int(g.offset) != len(entry(0)) {
		t.Errorf("offset after a restart: got %d, want %d", g.offset, len(entry(0)))
	}
	g = unopenedLog(dir, 0)
	g.close()
	if err := g.open(); !errdefs.IsFailedPrecondition(err) || g.file != nil {
		t.Errorf("open after close: got error %v and file %v, want a failed precondition and none", err, g.file)
	}
}

// TestGuestLogDropsWhatIsNoEntry: a guest cannot write anything but entries into the node's file, nor more than the limit.
// The position in the guest's log goes on, also across a restart.
func TestGuestLogDropsWhatIsNoEntry(t *testing.T) {
	dir := t.TempDir()
	limit := int64(3 * len(entry(0)))
	g := logOf(t, dir, limit)
	sent := 0
	for _, line := range []string{entry(0), "no entry\n", "\n", entry(1), "2016-10-06T00:17:09Z neither F x\n", entry(2), entry(3)} {
		if err := g.add(nil, []byte(line)); err != nil {
			t.Fatal(err)
		}
		sent += len(line)
	}
	raw, err := os.ReadFile(filepath.Join(dir, "c.log"))
	if want := entry(0) + entry(1) + entry(2); err != nil || string(raw) != want {
		t.Errorf("log: got %q, error %v; want %q", raw, err, want)
	}
	if g = logOf(t, dir, limit); int(g.offset) != sent {
		t.Errorf("offset after a restart: got %d, want %d", g.offset, sent)
	}
}

// TestGuestLogRefusesLateEntries: what a call sends after it has ended is not added, because the next call sends it again.
func TestGuestLogRefusesLateEntries(t *testing.T) {
	dir := t.TempDir()
	g := logOf(t, dir, 0)
	first, second := new(logCopy), new(logCopy)
	g.begin(first)
	if err := g.add(first, []byte(entry(0))); err != nil {
		t.Fatal(err)
	}
	if at := g.begin(second); int(at) != len(entry(0)) {
		t.Errorf("offset of the next call: got %d, want %d", at, len(entry(0)))
	}
	if err := g.add(first, []byte(entry(1))); err == nil {
		t.Error("an entry of a call that has ended was added")
	}
	if err := g.add(second, []byte(entry(1))); err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(filepath.Join(dir, "c.log"))
	if want := entry(0) + entry(1); err != nil || string(raw) != want {
		t.Errorf("log: got %q, error %v; want %q", raw, err, want)
	}
}

// TestLines: lines arrive whole, whatever the pieces in which they were sent. A guest that never ends a line is stopped.
func TestLines(t *testing.T) {
	var got []string
	l := &lines{limit: 10, line: func(b []byte) error { got = append(got, string(b)); return nil }}
	for _, piece := range []string{"one\ntw", "o", "\n\nthree\n", "0123456789"} {
		if n, err := l.Write([]byte(piece)); n != len(piece) || err != nil {
			t.Fatalf("Write(%q) = %d, %v", piece, n, err)
		}
	}
	if want := []string{"one\n", "two\n", "\n", "three\n"}; strings.Join(got, "|") != strings.Join(want, "|") {
		t.Errorf("lines: got %q, want %q", got, want)
	}
	if _, err := l.Write([]byte("x")); err == nil {
		t.Error("a line longer than the limit was accepted")
	}
}
