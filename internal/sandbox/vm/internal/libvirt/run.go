package libvirt

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/atomicfile"
	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// runFile is the record of a machine's run, in StateDir. It holds what libvirt does not know, or forgets when it
// restarts.
const runFile = "libvirt.json"

// runVersion is the version of runFile. Other versions are refused.
const runVersion = 1

// run is a run of a machine, in progress or ended. The zero value means that there was no run.
type run struct {
	Version int `json:"version"`
	// Process is the QEMU process. It is valid only until the node reboots; see Boot.
	Process process.ID `json:"process"`
	// Shares are the virtiofsd processes. They are valid as long as Process is.
	Shares    []process.ID `json:"shares,omitempty"`
	Boot      string       `json:"boot"`
	StartedAt time.Time    `json:"startedAt"`
	// OOMKills is the cgroup's OOM kill count when QEMU was started.
	OOMKills uint64 `json:"oomKills,omitempty"`
	// Killing is set before the daemon kills the machine. Panicked is set if the guest panicked.
	Killing  bool `json:"killing,omitempty"`
	Panicked bool `json:"panicked,omitempty"`
	// Lost is a message about a virtiofsd that ended too early, so that the daemon had to end the machine.
	Lost string `json:"lost,omitempty"`
	// Ended is the final state, or nil until it is known.
	Ended *machine.State `json:"ended,omitempty"`
}

// save writes the record atomically.
func (r run) save(stateDir string) error {
	r.Version = runVersion
	raw, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if err := atomicfile.Replace(filepath.Join(stateDir, runFile), raw, 0o600); err != nil {
		return fmt.Errorf("write the record of the machine's run: %w", err)
	}
	return nil
}

// loadRun reads the record. It returns the zero run if there is no record, and errdefs.ErrDataLoss if the record is
// unusable.
func loadRun(stateDir string) (run, error) {
	path := filepath.Join(stateDir, runFile)
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return run{}, nil
	}
	if err != nil {
		return run{}, err
	}
	var r run
	if err := json.Unmarshal(raw, &r); err != nil {
		return run{}, fmt.Errorf("%s: %w: %w", path, err, errdefs.ErrDataLoss)
	}
	if r.Version != runVersion {
		return run{}, fmt.Errorf("%s has version %d, but this tripod supports version %d: %w", path, r.Version, runVersion, errdefs.ErrDataLoss)
	}
	return r, nil
}

func removeRun(stateDir string) error {
	err := os.Remove(filepath.Join(stateDir, runFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// processEnded reports whether the recorded process has ended without a record of its end.
func (r run) processEnded() bool {
	if r.Process.Pid == 0 || r.Ended != nil {
		return false
	}
	proc, err := r.adopt()
	proc.Close()
	return errdefs.IsNotFound(err)
}

// adopt opens the recorded process. It returns errdefs.ErrNotFound if the process has ended.
func (r run) adopt() (*process.Process, error) {
	if r.Boot != machine.BootID() {
		return nil, fmt.Errorf("process %d belongs to an earlier boot: %w", r.Process.Pid, errdefs.ErrNotFound)
	}
	return process.Adopt(r.Process)
}
