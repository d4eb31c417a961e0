package atomicfile

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

func TestWriteReplacesAndLeavesNothingBehind(t *testing.T) {
	for name, write := range map[string]func(string, []byte, fs.FileMode) error{"Replace": Replace, "Write": Write} {
		dir := t.TempDir()
		path := filepath.Join(dir, "file")
		// A draft that a killed process left is no obstacle.
		if err := os.WriteFile(path+".new", []byte("a draft that is longer than either content"), 0o644); err != nil {
			t.Fatal(err)
		}
		for _, content := range []string{"the first, longer one", "the second"} {
			if err := write(path, []byte(content), 0o640); err != nil {
				t.Fatal(err)
			}
			if got, err := os.ReadFile(path); err != nil || string(got) != content {
				t.Errorf("%s: the file has %q (%v), want %q", name, got, err, content)
			}
		}
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o640 {
			t.Errorf("%s: the file has the mode %v (%v), want 0640", name, info.Mode().Perm(), err)
		}
		if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
			t.Errorf("%s: the directory has %d entries (%v), want the file alone", name, len(entries), err)
		}
	}
}

func TestFailureKeepsTheOldContent(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(path, "inside"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Write(path, []byte("content"), 0o600); err == nil {
		t.Error("Write replaced a directory")
	}
	if err := Write(filepath.Join(path, "missing", "file"), nil, 0o600); err == nil {
		t.Error("Write into a missing directory succeeded")
	}
	if _, err := os.Stat(path + ".new"); !os.IsNotExist(err) {
		t.Errorf("the draft was left behind: %v", err)
	}
	if _, err := os.Stat(filepath.Join(path, "inside")); err != nil {
		t.Errorf("the directory lost its file: %v", err)
	}
}
