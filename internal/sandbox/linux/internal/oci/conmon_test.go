package oci

import (
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/test/harness/testns"
)

// TestSpawnerCloses: a start that comes too late is refused.
func TestSpawnerCloses(t *testing.T) {
	groups, err := cgroup.Open(cgroup.DriverCgroupfs, filepath.Join(testns.Cgroup(), "spawner"))
	if err != nil {
		t.Fatal(err)
	}
	s, err := NewSpawner(t.Context(), groups)
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
	s.Close()
	if err := s.start(program()); err == nil {
		t.Error("a command was started after the end")
	}
}
