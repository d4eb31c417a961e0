package oci

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"
	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// maxSide is the largest height or width that conmon accepts.
const maxSide = 1000

// reopenTime limits how long conmon can take to reopen its log.
const reopenTime = 10 * time.Second

// holdsFile reports whether a process has the file at the given path open.
func holdsFile(pid int, name string) bool {
	want, err := os.Lstat(name)
	if err != nil {
		return false
	}
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if have, err := os.Stat(filepath.Join(dir, e.Name())); err == nil && os.SameFile(have, want) {
			return true
		}
	}
	return false
}

// Resize sets the size of the terminal of a container with conmon.
func Resize(bundle string, size sandbox.TermSize) error {
	return control(bundle, fmt.Sprintf("1 %d %d\n", min(size.Height, maxSide), min(size.Width, maxSide)))
}

// ReopenLog makes conmon replace the log file and write to the new one. If the file was not moved away, ReopenLog does
// nothing, because conmon would discard the file's content.
func ReopenLog(ctx context.Context, id, bundle, logPath string, conmon *process.Process) error {
	if holdsFile(conmon.Pid, logPath) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, reopenTime)
	defer cancel()
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return err
	}
	defer watcher.Close()
	if err := watcher.Add(filepath.Dir(logPath)); err != nil {
		return fmt.Errorf("log directory: %w", err)
	}
	if err := control(bundle, "2 0 0\n"); err != nil {
		return err
	}
	for !holdsFile(conmon.Pid, logPath) {
		select {
		case <-watcher.Events:
		case err := <-watcher.Errors:
			return err
		case <-conmon.Dead:
			return fmt.Errorf("container %s has ended: %w", id, errdefs.ErrFailedPrecondition)
		case <-ctx.Done():
			return fmt.Errorf("wait for conmon to reopen the log %s: %w", logPath, ctx.Err())
		}
	}
	return nil
}

// control writes one line to conmon's control fifo: "1 HEIGHT WIDTH" resizes the terminal, "2 0 0" reopens the log.
func control(bundle, line string) error {
	// With O_NONBLOCK, opening a fifo without a reader fails instead of waiting.
	fd, err := unix.Open(filepath.Join(bundle, "ctl"), unix.O_WRONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("conmon's control fifo: %w: %w", err, errdefs.ErrUnavailable)
	}
	defer unix.Close(fd)
	if _, err := unix.Write(fd, []byte(line)); err != nil {
		return fmt.Errorf("conmon's control fifo: %w: %w", err, errdefs.ErrUnavailable)
	}
	return nil
}
