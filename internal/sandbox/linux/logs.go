package linux

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/stream"
)

// reopenTime limits how long conmon can take to reopen its log.
const reopenTime = 10 * time.Second

// logPath returns the path of the container's CRI log file (log_path below the pod's log_directory), or "" if the
// container has none.
func logPath(p *sandbox.Pod, c *sandbox.Container) (string, error) {
	full, err := stream.LogPath(p.Config.GetLogDirectory(), c.Config.GetLogPath())
	if err == nil && strings.Contains(full, ":") {
		return "", fmt.Errorf("log file %q: the path must not contain a colon, which conmon uses as a separator: %w",
			full, errdefs.ErrInvalidArgument)
	}
	return full, err
}

// openLog creates the log file and returns its path. conmon opens that path again, as root, so anyone who can write to
// the log directory must be trusted with the node's files.
func openLog(p *sandbox.Pod, c *sandbox.Container) (string, error) {
	full, err := logPath(p, c)
	if err != nil || full == "" {
		return "", err
	}
	file, err := stream.OpenLogFile(p.Config.GetLogDirectory(), c.Config.GetLogPath())
	if err != nil {
		return "", err
	}
	return full, file.Close()
}

// ReopenLog implements sandbox.LogReopener: conmon replaces the file and writes to the new one. If the file was not
// moved away, ReopenLog does nothing, because conmon would discard the file's content.
func (b *Backend) ReopenLog(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) error {
	h, l, err := b.ledger.GetRun(p.ID, c.ID)
	if err != nil {
		return err
	}
	s, _ := h.Snapshot()
	if s.LogPath == "" || holdsFile(l.conmon.Pid, s.LogPath) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, reopenTime)
	defer cancel()
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return err
	}
	defer watcher.Close()
	if err := watcher.Add(filepath.Dir(s.LogPath)); err != nil {
		return fmt.Errorf("log directory: %w", err)
	}
	if err := control(b.bundleOf(h), "2 0 0\n"); err != nil {
		return err
	}
	for !holdsFile(l.conmon.Pid, s.LogPath) {
		select {
		case <-watcher.Events:
		case err := <-watcher.Errors:
			return err
		case <-l.conmon.Dead:
			return fmt.Errorf("container %s has ended: %w", c.ID, errdefs.ErrFailedPrecondition)
		case <-ctx.Done():
			return fmt.Errorf("wait for conmon to reopen the log %s: %w", s.LogPath, ctx.Err())
		}
	}
	return nil
}

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
