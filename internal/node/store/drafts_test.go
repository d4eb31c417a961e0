package store

import (
	"bytes"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// drafting opens a store with drafts in a test directory.
func drafting(t *testing.T, dir string) *Store {
	t.Helper()
	s, err := Open(filepath.Join(dir, "node.db"))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.KeepDrafts(filepath.Join(dir, "drafts")); err != nil {
		t.Fatal(err)
	}
	return s
}

// kill ends a store as SIGKILL does: nothing is settled.
func kill(t *testing.T, s *Store) {
	t.Helper()
	s.drafts.dir = ""
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantAll(t *testing.T, s *Store, want map[string]string) {
	t.Helper()
	if got := records(t, s, "pod"); !maps.Equal(got, want) {
		t.Errorf("All = %v, want %v", got, want)
	}
}

func TestDraftsSurviveAKill(t *testing.T) {
	dir := t.TempDir()
	s := drafting(t, dir)
	must(t, s.Put("pod", "old", []byte("created")))
	must(t, s.Draft("pod", "old", []byte("starting")))
	must(t, s.Draft("pod", "a#1/b", []byte("making")))
	must(t, s.Draft("image", "new", []byte("of another kind")))
	must(t, s.Put("pod", "done", []byte("created")))
	must(t, s.Draft("pod", "done", []byte("starting")))
	must(t, s.Put("pod", "done", []byte("running")))
	must(t, s.Draft("pod", "gone", []byte("making")))
	must(t, s.Delete("pod", "gone"))
	want := map[string]string{"old": "starting", "a#1/b": "making", "done": "running"}
	wantAll(t, s, want)
	kill(t, s)
	s = drafting(t, dir)
	wantAll(t, s, want)
	must(t, s.Close())
	// A store that is closed has settled its drafts, so a version without drafts finds the same.
	s, err := Open(filepath.Join(dir, "node.db"))
	must(t, err)
	wantAll(t, s, want)
	must(t, s.Close())
	if left, err := os.ReadDir(filepath.Join(dir, "drafts")); len(left) > 0 || err != nil {
		t.Errorf("drafts left after Close: %v, %v", left, err)
	}
}

// TestStaleDraftsAreVoid: a process that is killed between a Put and the removal of the draft leaves a draft behind.
func TestStaleDraftsAreVoid(t *testing.T) {
	dir := t.TempDir()
	s := drafting(t, dir)
	file := s.drafts.path("pod", "p")
	must(t, s.Put("pod", "p", []byte("created")))
	must(t, s.Draft("pod", "p", []byte("starting")))
	raw, err := os.ReadFile(file)
	must(t, err)
	must(t, s.Put("pod", "p", []byte("running")))
	for name, c := range map[string]struct {
		content []byte
		want    map[string]string
	}{
		"stale": {raw, map[string]string{"p": "running"}},
		"of another boot": {bytes.Replace(raw, []byte(s.drafts.boot), []byte("00000000-0000-0000-0000-000000000000"), 1),
			map[string]string{"p": "running"}},
		"of another file": {bytes.Replace(raw, []byte(s.ID()), []byte("X"), 1), map[string]string{"p": "running"}},
		"torn":            {raw[:20], map[string]string{"p": "running"}},
		"empty":           {nil, map[string]string{"p": "running"}},
	} {
		must(t, os.WriteFile(file, c.content, 0o600))
		t.Run(name, func(t *testing.T) { wantAll(t, s, c.want) })
	}
	must(t, s.Delete("pod", "p"))
	must(t, os.WriteFile(file, raw, 0o600))
	wantAll(t, s, nil)
	must(t, s.Close())
}

// TestVoidDraftsAreRemoved: what a killed process left behind is gone after the next start, and drafts that count are not.
func TestVoidDraftsAreRemoved(t *testing.T) {
	dir := t.TempDir()
	s := drafting(t, dir)
	counts := s.drafts.path("pod", "counts")
	deleted, replaced := s.drafts.path("pod", "deleted"), s.drafts.path("pod", "replaced")
	for _, key := range []string{"deleted", "replaced", "counts"} {
		must(t, s.Put("pod", key, []byte("created")))
		must(t, s.Draft("pod", key, []byte("starting")))
	}
	left := map[string][]byte{counts + ".new": []byte("incompl")}
	for _, path := range []string{deleted, replaced} {
		raw, err := os.ReadFile(path)
		must(t, err)
		left[path] = raw
	}
	must(t, s.Delete("pod", "deleted"))
	must(t, s.Put("pod", "replaced", []byte("running")))
	for path, raw := range left {
		must(t, os.WriteFile(path, raw, 0o600))
	}
	kill(t, s)
	s = drafting(t, dir)
	files, err := filepath.Glob(filepath.Join(dir, "drafts", "*"))
	must(t, err)
	if want := []string{counts}; !slices.Equal(files, want) {
		t.Errorf("drafts after the next start: got %v, want %v", files, want)
	}
	wantAll(t, s, map[string]string{"counts": "starting", "replaced": "running"})
	must(t, s.Close())
}

// TestDraftsWithoutADirectory: if the directory is lost, a draft is as durable as any other value.
func TestDraftsWithoutADirectory(t *testing.T) {
	dir := t.TempDir()
	s := drafting(t, dir)
	must(t, os.Remove(filepath.Join(dir, "drafts")))
	must(t, s.Draft("pod", "p", []byte("making")))
	kill(t, s)
	s, err := Open(filepath.Join(dir, "node.db"))
	must(t, err)
	wantAll(t, s, map[string]string{"p": "making"})
	must(t, s.Close())
}

// TestDraftNeedsAWritableRecord: nothing may begin whose end could not be recorded.
func TestDraftNeedsAWritableRecord(t *testing.T) {
	dir := t.TempDir()
	s := drafting(t, dir)
	defer s.Close()
	must(t, os.Rename(filepath.Join(dir, "node.db"), filepath.Join(dir, "elsewhere")))
	if err := s.Draft("pod", "p", []byte("making")); err == nil {
		t.Error("Draft succeeded although the record file cannot be written")
	}
}
