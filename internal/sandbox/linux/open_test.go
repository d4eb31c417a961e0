package linux

import (
	"os"
	"path/filepath"
	"runtime/debug"
	"testing"

	"github.com/containerd/errdefs"
)

// TestOpenFails: without a monitor, Open keeps no descriptor of the runtime that it has found.
func TestOpenFails(t *testing.T) {
	r := newRig(t, "crun")
	program, err := os.Stat(r.runtime.Path)
	if err != nil {
		t.Fatal(err)
	}
	count := func() (n int) {
		files, err := filepath.Glob("/proc/self/fd/*")
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range files {
			if f, err := os.Stat(name); err == nil && os.SameFile(f, program) {
				n++
			}
		}
		return n
	}
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // the collector closes lost files
	before := count()
	c := r.cfg
	c.Conmon = "/nowhere/conmon"
	if _, err := Open(t.Context(), c, Services{Images: r.images}); !errdefs.IsUnavailable(err) {
		t.Fatalf("got %v, want ErrUnavailable", err)
	}
	if now := count(); now != before || before == 0 {
		t.Errorf("got %d descriptors of %s, want %d", now, r.runtime.Path, before)
	}
}
