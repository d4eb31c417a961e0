package linux

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/process"
)

// TestExecInDyingContainer: an exec that fails because the container ends is the container's end, not a fault and not a
// wrong request, also when the end has not been noticed yet.
func TestExecInDyingContainer(t *testing.T) {
	zombie := exec.Command("true")
	if err := zombie.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = zombie.Wait() })
	unnoticed := func(pid int) *process.Process {
		return &process.Process{ID: process.ID{Pid: pid}, Dead: make(chan struct{})}
	}
	for init := unnoticed(zombie.Process.Pid); !init.Ending(); {
		time.Sleep(time.Millisecond) // until the kernel is through with it
	}
	soon := unnoticed(os.Getpid())
	for _, c := range []struct {
		name, said string
		init       *process.Process
	}{
		{"the runtime says so", `{"msg":"the container is not running"}`, unnoticed(zombie.Process.Pid)},
		{"the runtime was killed, too", "", soon},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.WriteFile(filepath.Join(dir, "log"), []byte(c.said), 0o600); err != nil {
				t.Fatal(err)
			}
			if c.init == soon {
				time.AfterFunc(50*time.Millisecond, func() { close(soon.Dead) })
			}
			x := &execution{dir: dir, container: &life{launched: launched{init: c.init}}}
			if _, err := x.result(errors.New("exit status 1")); !errdefs.IsFailedPrecondition(err) {
				t.Error(err)
			}
		})
	}
}
