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

// reopenTime is how long conmon may take to open its log again.
const reopenTime = 10 * time.Second

// logPath is the container's CRI log file, "" for none: log_path below the pod's log_directory.
func logPath(p *sandbox.Pod, c *sandbox.Container) (string, error) {
	full, err := stream.LogPath(p.Config.GetLogDirectory(), c.Config.GetLogPath())
	if err == nil && strings.Contains(full, ":") {
		return "", fmt.Errorf("log file %q: a colon separates things on conmon's command line and cannot be in the path: %w",
			full, errdefs.ErrInvalidArgument)
	}
	return full, err
}

// openLog makes the log file and gives its path. conmon, which opens the file again by its path, runs as we do; whoever
// can write to the log directory between the two is trusted with the node's logs.
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

// ReopenLog implements sandbox.LogReopener: conmon makes the file anew and writes to it from then on. When the file was
// not moved away there is nothing to do, and asking conmon, which replaces it, would lose what is in it.
func (b *Backend) ReopenLog(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) error {
	h, s, l, err := b.runningContainer(p, c)
	if err != nil {
		return err
	}
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
	if err := control(h.bundle, "2 0 0\n"); err != nil {
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
			return fmt.Errorf("conmon opens the log %s again: %w", s.LogPath, ctx.Err())
		}
	}
	return nil
}

// holdsFile tells whether a process has the file at this path open.
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

// control writes one line to conmon's control fifo: "1 HEIGHT WIDTH" sizes the terminal, "2 0 0" opens the log again.
func control(bundle, line string) error {
	// Without blocking: a fifo that nobody reads is an error, not a wait.
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

// runningContainer gives a container that runs; any other is ErrFailedPrecondition.
func (b *Backend) runningContainer(p *sandbox.Pod, c *sandbox.Container) (*handle, state, *life, error) {
	h, err := b.lookup(p.ID, c.ID)
	if err != nil && !errdefs.IsNotFound(err) {
		return nil, state{}, nil, err
	}
	if err == nil {
		if s, l := h.snapshot(); l != nil {
			return h, s, l, nil
		}
	}
	return nil, state{}, nil, fmt.Errorf("container %s does not run: %w", c.ID, errdefs.ErrFailedPrecondition)
}
