package qemu

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
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/confine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// The files of a machine, in Root/NAME; logFile is elsewhere, by logPath.
const (
	definitionFile = "machine.json"
	stateFile      = "state.json"
	logFile        = "qemu.log"
)

// recordVersion is that of both files. Newer ones are refused.
const recordVersion = 1

// step is how far a run has come; it says more than a phase.
type step string

const (
	stepDefined  step = ""
	stepStarting step = "starting" // QEMU may be there; Process says which it is, if it was written yet
	stepRunning  step = "running"
	stepEnded    step = "ended"
)

// record is what is written down of a machine's run.
type record struct {
	Version int  `json:"version"`
	Step    step `json:"step"`
	// Process is QEMU, in the boot of the node that Boot names.
	Process process.ID `json:"process"`
	// Shares are the virtiofsd of its shares, in that boot too.
	Shares []process.ID `json:"shares,omitempty"`
	Boot   string       `json:"boot,omitempty"`
	// OOMKills is the cgroup's count when QEMU was started.
	OOMKills uint64 `json:"oomKills,omitempty"`
	// Killing says that we have decided to kill it, and Verdict why it ends when that is known before it does.
	Killing bool          `json:"killing,omitempty"`
	Verdict machine.Cause `json:"verdict,omitempty"`
	// Lost says what of the machine has ended before QEMU, which was killed for it.
	Lost string `json:"lost,omitempty"`

	StartedAt  time.Time     `json:"startedAt,omitzero"`
	FinishedAt time.Time     `json:"finishedAt,omitzero"`
	Cause      machine.Cause `json:"cause,omitempty"`
	ExitCode   int32         `json:"exitCode,omitempty"`
	Message    string        `json:"message,omitempty"`
}

func (r record) state() machine.State {
	s := machine.State{Phase: machine.Defined, StartedAt: r.StartedAt, FinishedAt: r.FinishedAt, Cause: r.Cause, ExitCode: r.ExitCode, Message: r.Message}
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

// writeJSON replaces a file, so that a reader sees the old one or the new one. With durable it is on the disk then: after
// a power loss a state may be older, but a definition is never cut off.
func writeJSON(path string, v any, durable bool) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return err
	}
	tmp := path + ".new"
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(raw)
	if durable {
		err = errors.Join(err, f.Sync())
	}
	if err := errors.Join(err, f.Close()); err != nil {
		if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
			return fmt.Errorf("%w (%w)", err, errdefs.ErrResourceExhausted)
		}
		return err
	}
	return os.Rename(tmp, path)
}

// readJSON reads a file of ours: fs.ErrNotExist when it is not there, errdefs.ErrDataLoss when it cannot be used.
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
		return fmt.Errorf("%s is of version %d, this tripod knows %d: %w", path, head.Version, recordVersion, errdefs.ErrDataLoss)
	}
	return nil
}

// bootID names this boot of the node: PIDs and start times of another one mean nothing.
var bootID = sync.OnceValue(func() string {
	raw, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(raw))
})

// logPath is the file with what QEMU says: beside the serial log, where there is a bound to it while nobody trims it.
func logPath(def machine.Definition) string {
	return filepath.Join(filepath.Dir(def.SerialLog), logFile)
}

// lastWords is what QEMU said last, for a person.
func lastWords(path string) string { return confine.LastWords(path, ProgramName) }

func notThere(err error) bool { return errors.Is(err, fs.ErrNotExist) }
