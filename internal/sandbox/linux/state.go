package linux

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// stateVersion is the version of the files below. A file of another version stays untouched: this program cannot manage its
// container, and Recover says so.
const stateVersion = 1

// phase is how far the container has come. Except for the last, a phase is written before its step begins.
type phase string

const (
	phaseCreated  phase = "created"
	phaseStarting phase = "starting"
	phaseRunning  phase = "running"
	phaseExited   phase = "exited"
)

// state is what recovery needs of a container: <bundle>/state.json. It is replaced atomically and not synced: the page cache
// survives a crash of the daemon, and after a crash of the machine nothing of the container runs.
type state struct {
	Version int    `json:"version"`
	Phase   phase  `json:"phase"`
	BootID  string `json:"bootID,omitempty"`
	// Init and Conmon are the two processes of a running container.
	Init   process.ID `json:"init,omitzero"`
	Conmon process.ID `json:"conmon,omitzero"`
	// OwnPID means that the container has its own PID namespace, which ends with its first process.
	OwnPID bool `json:"ownPID"`
	// Cgroup is the container's cgroup, relative to the hierarchies' roots.
	Cgroup string `json:"cgroup"`
	// LogPath is the CRI log file, empty for none.
	LogPath string `json:"logPath,omitempty"`
	TTY     bool   `json:"tty,omitempty"`

	Resolved resolved `json:"resolved"`

	StartedAt  time.Time `json:"startedAt,omitzero"`
	FinishedAt time.Time `json:"finishedAt,omitzero"`
	ExitCode   int32     `json:"exitCode,omitempty"`
	Reason     string    `json:"reason,omitempty"`
	Message    string    `json:"message,omitempty"`
}

// podState is what the removal of an unrecorded pod needs: <run dir>/pod.json.
type podState struct {
	Version int    `json:"version"`
	BootID  string `json:"bootID"`
	// Cgroup is the pod's own cgroup, the parent of its containers'.
	Cgroup string `json:"cgroup"`
	// Pause is the init process of the pod's shared PID namespace.
	Pause process.ID `json:"pause,omitzero"`
}

func (s state) status() sandbox.Status {
	st := sandbox.Status{StartedAt: s.StartedAt}
	switch s.Phase {
	case phaseRunning:
		st.State, st.Pid = sandbox.StateRunning, s.Init.Pid
	case phaseExited:
		st.State = sandbox.StateExited
		st.FinishedAt, st.ExitCode, st.Reason, st.Message = s.FinishedAt, s.ExitCode, s.Reason, s.Message
	default:
		st.State = sandbox.StateCreated
	}
	return st
}

// readJSON reads one of our files into v. A missing file, or one damaged by a crash of the machine, is ErrNotFound.
func readJSON(path string, v any, version func() int) error {
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s: %w", path, errdefs.ErrNotFound)
	}
	if err != nil {
		return err
	}
	if err := json.Unmarshal(raw, v); err != nil {
		return fmt.Errorf("%s is damaged (%v): %w", path, err, errdefs.ErrNotFound)
	}
	if got := version(); got != stateVersion {
		return fmt.Errorf("%s has version %d, this program supports version %d: %w", path, got, stateVersion, errdefs.ErrFailedPrecondition)
	}
	return nil
}

func readState(bundle string) (s state, err error) {
	err = readJSON(filepath.Join(bundle, "state.json"), &s, func() int { return s.Version })
	return s, err
}

func (s state) write(bundle string) error {
	s.Version = stateVersion
	return writeJSON(filepath.Join(bundle, "state.json"), s)
}

func readPodState(runDir string) (s podState, err error) {
	err = readJSON(filepath.Join(runDir, "pod.json"), &s, func() int { return s.Version })
	return s, err
}

func (s podState) write(runDir string) error {
	s.Version = stateVersion
	return writeJSON(filepath.Join(runDir, "pod.json"), s)
}

func writeJSON(path string, v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return writeFile(path, raw, 0o600)
}

// writeFile replaces a file atomically: readers, also after a crash of this process, see the old content or the new one.
func writeFile(path string, content []byte, mode fs.FileMode) error {
	tmp := path + ".new"
	if err := os.WriteFile(tmp, content, mode); err != nil {
		return err
	}
	if err := os.Chmod(tmp, mode); err != nil { // regardless of our umask
		return err
	}
	return os.Rename(tmp, path)
}

// bootID identifies one run of the kernel.
var bootID = sync.OnceValue(func() string {
	raw, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(raw))
})
