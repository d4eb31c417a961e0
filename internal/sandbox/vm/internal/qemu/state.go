package qemu

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/atomicfile"
	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/confine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// Files of a machine, in Root/NAME. Only logFile is elsewhere; see logPath.
const (
	definitionFile = "machine.json"
	stateFile      = "state.json"
	logFile        = "qemu.log"
)

// recordVersion is the version of machine.json and state.json. Other versions are refused.
const recordVersion = 1

// step is the stage of a run. It is finer than machine.Phase.
type step string

const (
	stepDefined  step = ""
	stepStarting step = "starting" // QEMU may already be running; Process may not be recorded yet
	stepRunning  step = "running"
	stepEnded    step = "ended"
)

// record is the state of a machine's run, state.json.
type record struct {
	Version int  `json:"version"`
	Step    step `json:"step"`
	// Process is the QEMU process. It is valid only until the node reboots; see Boot.
	Process process.ID `json:"process"`
	// Shares are the virtiofsd processes. They are valid as long as Process is.
	Shares []process.ID `json:"shares,omitempty"`
	// Boot is the node's boot ID when QEMU was started.
	Boot string `json:"boot,omitempty"`
	// OOMKills is the cgroup's OOM kill count when QEMU was started.
	OOMKills uint64 `json:"oomKills,omitempty"`
	// Killing is set before the daemon kills QEMU. Verdict is the cause of the guest's end, if the cause is known
	// before QEMU ends.
	Killing bool          `json:"killing,omitempty"`
	Verdict machine.Cause `json:"verdict,omitempty"`
	// Lost is a message about a virtiofsd that ended too early, so that the daemon had to kill QEMU.
	Lost string `json:"lost,omitempty"`

	StartedAt  time.Time     `json:"startedAt,omitzero"`
	FinishedAt time.Time     `json:"finishedAt,omitzero"`
	Cause      machine.Cause `json:"cause,omitempty"`
	ExitCode   int32         `json:"exitCode,omitempty"`
	Message    string        `json:"message,omitempty"`
}

func (r record) state() machine.State {
	s := machine.State{Phase: machine.Defined, StartedAt: r.StartedAt, FinishedAt: r.FinishedAt, Cause: r.Cause, ExitCode: r.ExitCode,
		Message: r.Message}
	switch r.Step {
	case stepRunning:
		s.Phase, s.Pid = machine.Running, r.Process.Pid
	case stepEnded:
		s.Phase = machine.Ended
	case stepDefined, stepStarting:
		return machine.State{Phase: machine.Defined}
	}
	return s
}

// definition is machine.json.
type definition struct {
	Version int `json:"version"`
	machine.Definition
}

func (d *Driver) dirOf(name string) string { return filepath.Join(d.cfg.Root, name) }

// writeJSON replaces the file. If durable is set, writeJSON syncs the new file, so that a power loss cannot truncate
// it. State files are not synced, because an older state is acceptable after a power loss.
func writeJSON(path string, v any, durable bool) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return err
	}
	write := atomicfile.Replace
	if durable {
		write = atomicfile.Write
	}
	if err = write(path, raw, 0o600); errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return fmt.Errorf("%w (%w)", err, errdefs.ErrResourceExhausted)
	}
	return err
}

// readJSON reads a file that writeJSON wrote. It returns fs.ErrNotExist for a missing file and errdefs.ErrDataLoss for
// a file that is damaged or has another version.
func readJSON(path string, v any) error {
	raw, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var head struct {
		Version int `json:"version"`
	}
	if err := errors.Join(json.Unmarshal(raw, &head), json.Unmarshal(raw, v)); err != nil {
		return fmt.Errorf("%s: %w (%w)", path, err, errdefs.ErrDataLoss)
	}
	if head.Version != recordVersion {
		return fmt.Errorf("%s has version %d, but this tripod supports version %d: %w", path, head.Version, recordVersion, errdefs.ErrDataLoss)
	}
	return nil
}

// logPath returns the path of QEMU's log, beside the serial log. While no daemon runs to trim QEMU's log, only the size
// of the file system limits it.
func logPath(def machine.Definition) string {
	return filepath.Join(filepath.Dir(def.SerialLog), logFile)
}

// lastWords returns the last lines of QEMU's log, for error messages.
func lastWords(path string) string { return confine.LastWords(path, ProgramName) }

func isNotExist(err error) bool { return errors.Is(err, fs.ErrNotExist) }
