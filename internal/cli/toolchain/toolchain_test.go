package toolchain

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/tripod-run/tripod/test/until"
)

// TestRunEndsAll: with its context, a program ends together with those that it has started.
func TestRunEndsAll(t *testing.T) {
	dir := t.TempDir()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() {
		_, err := Program{"sh", "it needs sh"}.Run(ctx, dir, nil, nil, "-c", "sleep 1000 & echo $! >new; mv new pid; wait")
		ended <- err
	}()
	var pid int
	until.Holds(t, "the program has started another", func() bool {
		text, err := os.ReadFile(filepath.Join(dir, "pid"))
		if err == nil {
			pid, err = strconv.Atoi(strings.TrimSpace(string(text)))
		}
		return err == nil
	})
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want that the context has ended", err)
	}
	until.Holds(t, "the other program has ended", func() bool {
		state, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
		return err != nil || strings.Contains(string(state), ") Z ") || errors.Is(syscall.Kill(pid, 0), syscall.ESRCH)
	})
}
