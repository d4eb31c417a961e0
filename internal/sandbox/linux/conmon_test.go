package linux

import (
	"os/exec"
	"syscall"
	"testing"
)

// TestSpawnerCloses: a start that comes too late is refused.
func TestSpawnerCloses(t *testing.T) {
	r := newRig(t, "crun")
	s, err := newSpawner(t.Context(), r.cgroups)
	if err != nil {
		t.Fatal(err)
	}
	program := func() *exec.Cmd {
		cmd := exec.Command("/bin/true")
		cmd.SysProcAttr = &syscall.SysProcAttr{}
		return cmd
	}
	cmd := program()
	if err := s.start(cmd); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	s.close()
	if err := s.start(program()); err == nil {
		t.Error("a command was started after the end")
	}
}
