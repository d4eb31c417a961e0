package oci

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

// TestExecInDyingContainer: an exec that fails because the container ends reports the end, rather than an internal
// error or an invalid request, even if the backend has not noticed the end yet.
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
		time.Sleep(time.Millisecond) // pacing: until the kernel has finished
	}
	soon := unnoticed(os.Getpid())
	for _, c := range []struct {
		name, log string
		init      *process.Process
	}{
		{"the runtime reports the end", `{"msg":"the container is not running"}`, unnoticed(zombie.Process.Pid)},
		{"the runtime was killed too", "", soon},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.WriteFile(filepath.Join(dir, "log"), []byte(c.log), 0o600); err != nil {
				t.Fatal(err)
			}
			if c.init == soon {
				time.AfterFunc(50*time.Millisecond, func() { close(soon.Dead) })
			}
			x := &execution{dir: dir, init: c.init}
			if _, err := x.result(errors.New("exit status 1")); !errdefs.IsFailedPrecondition(err) {
				t.Errorf("result: got error %v, want ErrFailedPrecondition", err)
			}
		})
	}
}

// TestExecInLivingContainer: the runtime's message about a running container determines the error's class, which is
// never Unknown.
func TestExecInLivingContainer(t *testing.T) {
	for _, c := range []struct {
		log string
		is  func(error) bool
	}{
		{`{"msg":"executable file ` + "`none`" + ` not found in $PATH: No such file or directory"}`, errdefs.IsInvalidArgument},
		{`{"msg":"fork: Resource temporarily unavailable"}`, errdefs.IsResourceExhausted},
		{`{"level":"error","msg":"exec failed: unable to start container process: error executing setns process: resource temporarily unavailable"}`, errdefs.IsResourceExhausted},
		{`{"msg":"write to sync socket: Broken pipe"}`, errdefs.IsUnavailable},
		{"", errdefs.IsUnavailable}, // killed by a process in the container
	} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "log"), []byte(c.log), 0o600); err != nil {
			t.Fatal(err)
		}
		x := &execution{dir: dir, init: &process.Process{ID: process.ID{Pid: os.Getpid()}, Dead: make(chan struct{})}}
		if _, err := x.result(errors.New("exit status 1")); !c.is(err) {
			t.Errorf("result after the message %q: error %v has the wrong class", c.log, err)
		}
	}
}
