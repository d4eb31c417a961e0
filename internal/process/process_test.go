package process_test

import (
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/process"
)

// TestLifeAndDeath checks that a process's end is noticed, and that the process can then no longer be adopted.
func TestLifeAndDeath(t *testing.T) {
	c := exec.Command("sleep", "60")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	p, err := process.Open(c.Process.Pid)
	if err != nil || !p.Alive() || p.Ending() {
		t.Fatalf("Open of a running process = %+v, %v, want it to be alive", p, err)
	}
	adopted, err := process.Adopt(p.ID)
	if err != nil {
		t.Fatal(err)
	}
	if parent, err := process.ParentOf(p.Pid); err != nil || parent != os.Getpid() {
		t.Errorf("ParentOf = %d, %v, want %d", parent, err, os.Getpid())
	}
	if age := time.Since(process.StartedAt(p.Start)); age < -time.Second || age > time.Minute {
		t.Errorf("StartedAt is %s ago, want less than a minute", age)
	}
	if err := p.Signal(unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if !adopted.WaitFor(10*time.Second) || !p.WaitFor(10*time.Second) || !p.Ending() {
		t.Error("the end of the process was not noticed within 10 s")
	}
	_ = c.Wait()
	if _, err := process.Adopt(p.ID); !errdefs.IsNotFound(err) {
		t.Errorf("Adopt of a dead process = %v, want not found", err)
	}
	if err := p.Signal(unix.SIGKILL); err != nil {
		t.Errorf("Signal to a dead process = %v, want nil", err)
	}
}

// TestOthersAreNotAdopted (N10) checks that Adopt refuses another process with the same PID.
func TestOthersAreNotAdopted(t *testing.T) {
	self, err := process.Open(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	self.Close()
	for _, other := range []process.ID{{Pid: self.Pid, Start: self.Start + 1}, {}, {Pid: 1 << 22}} {
		if _, err := process.Adopt(other); !errdefs.IsNotFound(err) {
			t.Errorf("Adopt(%v) = %v, want not found", other, err)
		}
	}
	if process.Ended(self.ID).Alive() {
		t.Error("Ended returned a process that is alive")
	}
}
