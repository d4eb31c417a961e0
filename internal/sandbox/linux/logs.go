package linux

import (
	"context"
	"fmt"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/oci"
	"github.com/tripod-run/tripod/internal/stream"
)

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

// ReopenLog implements sandbox.LogReopener.
func (b *Backend) ReopenLog(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) error {
	h, l, err := b.ledger.GetRun(p.ID, c.ID)
	if err != nil {
		return err
	}
	s, _ := h.Snapshot()
	if s.LogPath == "" {
		return nil
	}
	return oci.ReopenLog(ctx, c.ID, b.bundleOf(h), s.LogPath, l.Conmon)
}
