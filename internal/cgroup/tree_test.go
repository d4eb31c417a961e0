package cgroup

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

// TestMemoryLimit reads files as the kernel writes them. They are fake, because a machine has only one cgroup version.
func TestMemoryLimit(t *testing.T) {
	for _, c := range []struct {
		v2         bool
		file, text string
		want       uint64
	}{
		{false, "memory.limit_in_bytes", "67108864\n", 64 << 20},
		{false, "memory.limit_in_bytes", "9223372036854771712\n", 0},
		{true, "memory.max", "67108864\n", 64 << 20},
		{true, "memory.max", "max\n", 0},
	} {
		root := t.TempDir()
		tree := Tree{V2: c.v2, Roots: map[string]string{"": root, "memory": root}}
		if err := os.MkdirAll(filepath.Join(root, "pod"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, "pod", c.file), []byte(c.text), 0o644); err != nil {
			t.Fatal(err)
		}
		if got, err := tree.MemoryLimit("/pod"); err != nil || got != c.want {
			t.Errorf("MemoryLimit with %s %q = %d, %v, want %d", c.file, c.text, got, err, c.want)
		}
		if _, err := tree.MemoryLimit("/gone"); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("MemoryLimit of a missing cgroup = %v, want ErrNotExist", err)
		}
	}
}
