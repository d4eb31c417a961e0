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

// TestLifeAndDeath: a process is seen to live and to die, and its ID does not fit it any more.
func TestLifeAndDeath(t *testing.T) {
	c := exec.Command("sleep", "60")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	p, err := process.Open(c.Process.Pid)
	if err != nil || !p.Alive() || p.Ending() {
		t.Fatal(err)
	}
	again, err := process.Adopt(p.ID)
	if err != nil {
		t.Fatal(err)
	}
	if parent, err := process.ParentOf(p.Pid); err != nil || parent != os.Getpid() {
		t.Errorf("parent %d, %v", parent, err)
	}
	if age := time.Since(process.StartedAt(p.Start)); age < -time.Second || age > time.Minute {
		t.Errorf("it began %s ago", age)
	}
	if err := p.Signal(unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if !again.WaitFor(10*time.Second) || !p.WaitFor(10*time.Second) || !p.Ending() {
		t.Error("its end was not seen")
	}
	_ = c.Wait()
	if _, err := process.Adopt(p.ID); !errdefs.IsNotFound(err) {
		t.Errorf("a dead process was adopted: %v", err)
	}
	if err := p.Signal(unix.SIGKILL); err != nil {
		t.Errorf("a signal to a dead process: %v", err)
	}
}

// TestOthersAreNotAdopted (N10): another process of the same PID is not the one that was known.
func TestOthersAreNotAdopted(t *testing.T) {
	self, err := process.Open(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	self.Close()
	for _, other := range []process.ID{{Pid: self.Pid, Start: self.Start + 1}, {}, {Pid: 1 << 22}} {
		if _, err := process.Adopt(other); !errdefs.IsNotFound(err) {
			t.Errorf("%v: %v", other, err)
		}
	}
	if process.Ended(self.ID).Alive() {
		t.Error("a process that has ended lives")
	}
}
