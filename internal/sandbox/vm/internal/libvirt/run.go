package libvirt

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
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// runFile is what is written down, in StateDir, of a machine's run: what libvirt does not know, or forgets.
const runFile = "libvirt.json"

// runVersion is the version of runFile; others are refused.
const runVersion = 1

// run is a run of a machine, under way or ended. The zero run is none.
type run struct {
	Version int `json:"version"`
	// Process is QEMU, in the boot of the node that Boot names.
	Process process.ID `json:"process"`
	// Shares are the virtiofsd of its shares, in that boot too.
	Shares    []process.ID `json:"shares,omitempty"`
	Boot      string       `json:"boot"`
	StartedAt time.Time    `json:"startedAt"`
	// OOMKills is the cgroup's count when QEMU was started.
	OOMKills uint64 `json:"oomKills,omitempty"`
	// Killing says that we have decided to kill it, Panicked that its guest has.
	Killing  bool `json:"killing,omitempty"`
	Panicked bool `json:"panicked,omitempty"`
	// Lost says what of the machine has ended before QEMU, which was ended for it.
	Lost string `json:"lost,omitempty"`
	// Ended is the end, once it is known.
	Ended *machine.State `json:"ended,omitempty"`
}

// save replaces the record.
func (r run) save(stateDir string) error {
	r.Version = runVersion
	raw, err := json.Marshal(r)
	if err != nil {
		return err
	}
	path := filepath.Join(stateDir, runFile)
	if err := os.WriteFile(path+".new", raw, 0o600); err != nil {
		return fmt.Errorf("record of the machine's run: %w", err)
	}
	return os.Rename(path+".new", path)
}

// loadRun reads the record; the zero run when there is none. One that cannot be used is errdefs.ErrDataLoss.
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
		return run{}, fmt.Errorf("%s is of version %d, this tripod knows %d: %w", path, r.Version, runVersion, errdefs.ErrDataLoss)
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

// bootID names this boot of the node: PIDs and start times of another one mean nothing.
var bootID = sync.OnceValue(func() string {
	raw, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(raw))
})

// dead tells whether the run's process is known and has ended, though nobody has seen why.
func (r run) dead() bool {
	if r.Process.Pid == 0 || r.Ended != nil {
		return false
	}
	proc, err := r.adopt()
	proc.Close()
	return errdefs.IsNotFound(err)
}

// adopt watches the run's process again. It is errdefs.ErrNotFound when that has ended.
func (r run) adopt() (*process.Process, error) {
	if r.Boot != bootID() {
		return nil, fmt.Errorf("process %d was of another boot: %w", r.Process.Pid, errdefs.ErrNotFound)
	}
	return process.Adopt(r.Process)
}
