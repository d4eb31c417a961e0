package linux

import (
	"os/exec"
	"testing"
)

// TestSpawnerCloses: a start that comes too late is refused.
func TestSpawnerCloses(t *testing.T) {
	r := newRig(t, "crun")
	s, err := newSpawner(t.Context(), r.cgroups)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/bin/true")
	if err := s.start(cmd); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	s.close()
	if err := s.start(exec.Command("/bin/true")); err == nil {
		t.Error("a command was started after the end")
	}
}
