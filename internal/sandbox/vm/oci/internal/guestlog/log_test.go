package guestlog

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
)

func logOf(t *testing.T, dir string, limit int64) *Log {
	t.Helper()
	g := unopenedLog(dir, limit)
	if err := g.Open(); err != nil {
		t.Fatal(err)
	}
	return g
}

func unopenedLog(dir string, limit int64) *Log {
	p := &sandbox.Pod{Config: &runtimeapi.PodSandboxConfig{LogDirectory: dir}}
	c := &sandbox.Container{ID: "c", Config: &runtimeapi.ContainerConfig{LogPath: "c.log"}}
	return New(p, c, filepath.Join(dir, "cursor"), limit, slog.New(slog.DiscardHandler))
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
				} else if err := g.Reopen(); err != nil {
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
	if err := errors.Join(g.Reopen(), g.Open()); err != nil {
		t.Fatal(err)
	}
	if int(g.offset) != len(entry(0)) {
		t.Errorf("offset after a rotation before the log was opened: got %d, want %d", g.offset, len(entry(0)))
	}
	g.Close()
	if err := g.Reopen(); !errdefs.IsFailedPrecondition(err) || g.file != nil {
		t.Errorf("rotation of a closed log: got error %v and file %v, want a failed precondition and none", err, g.file)
	}
	if g = logOf(t, dir, 0); int(g.offset) != len(entry(0)) {
		t.Errorf("offset after a restart: got %d, want %d", g.offset, len(entry(0)))
	}
	g = unopenedLog(dir, 0)
	g.Close()
	if err := g.Open(); !errdefs.IsFailedPrecondition(err) || g.file != nil {
		t.Errorf("open after close: got error %v and file %v, want a failed precondition and none", err, g.file)
	}
}

// TestGuestLogDropsWhatIsNoEntry: a guest cannot write anything but entries into the node's file, nor more than the limit.
// The position in the guest's log goes on, also if the daemon is killed at any line: the next one reads dropped lines again at
// most, and the guest still has them.
func TestGuestLogDropsWhatIsNoEntry(t *testing.T) {
	sent := []string{entry(0), "no entry\n", "\n", entry(1), "2016-10-06T00:17:09Z neither F x\n", entry(2), entry(3), "\n", entry(3)}
	const want = 3 // entries in the file
	at := func(offset int64) int {
		for n := range sent {
			if offset == 0 {
				return n
			}
			offset -= int64(len(sent[n]))
		}
		if offset != 0 {
			t.Fatalf("the log continues within a line, %d bytes before its end", -offset)
		}
		return len(sent)
	}
	for killedAt := range sent {
		dir := t.TempDir()
		limit := int64(want * len(entry(0)))
		g := logOf(t, dir, limit)
		for n := 0; n < len(sent); n++ {
			if n == killedAt {
				freed := g.kept
				g = logOf(t, dir, limit)
				if killedAt, n = -1, at(g.offset); g.offset < freed {
					t.Errorf("offset after a restart: got %d, less than the %d that the guest has freed", g.offset, freed)
				}
			}
			if err := g.add(nil, []byte(sent[n])); err != nil {
				t.Fatal(err)
			}
		}
		raw, err := os.ReadFile(filepath.Join(dir, "c.log"))
		if want := entry(0) + entry(1) + entry(2); err != nil || string(raw) != want {
			t.Errorf("log: got %q, error %v; want %q", raw, err, want)
		}
		g.Close()
		if g = logOf(t, dir, limit); at(g.offset) != len(sent) {
			t.Errorf("offset after the log was closed: got that of line %d, want %d", at(g.offset), len(sent))
		}
	}
}

// TestGuestLogDropsQuickly: a line that is dropped costs no write of the cursor.
func TestGuestLogDropsQuickly(t *testing.T) {
	dir := t.TempDir()
	g := logOf(t, dir, 0)
	cursor := func() (inode uint64) { // each write is a new file
		var st unix.Stat_t
		if err := unix.Stat(filepath.Join(dir, "cursor"), &st); err != nil {
			t.Fatal(err)
		}
		return st.Ino
	}
	writes := 0
	const lines, line = 1_000, "no entry, but as long as one of a program that logs much and at length: no entry, no entry, no entry\n"
	for last, n := cursor(), 0; n < lines; n++ {
		if err := g.add(nil, []byte(line)); err != nil {
			t.Fatal(err)
		}
		if now := cursor(); now != last {
			last = now
			writes++
		}
	}
	if most := lines*len(line)/markStep + 1; writes > most {
		t.Errorf("writes of the cursor for %d lines: got %d, want at most %d", lines, writes, most)
	}
	if int(g.offset) != lines*len(line) || g.kept > g.offset || g.offset-g.kept > markStep {
		t.Errorf("offsets: got %d and %d for a next daemon, want %d and at most %d less", g.offset, g.kept, lines*len(line), markStep)
	}
}

// TestGuestLogRefusesLateEntries: what a call sends after it has ended is not added, because the next call sends it again.
func TestGuestLogRefusesLateEntries(t *testing.T) {
	dir := t.TempDir()
	g := logOf(t, dir, 0)
	first, second := new(call), new(call)
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
