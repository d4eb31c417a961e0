package harness

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/tripod-run/tripod/test/until"
)

// Carriers returns the process IDs of the daemon's session carriers: at most one that accepts sessions, and those that
// an earlier daemon has left.
func (d *Daemon) Carriers() (pids []int) { return carriers(d.State) }

func carriers(state string) (pids []int) {
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range files {
		line, err := os.ReadFile(file)
		if err != nil || !bytes.HasPrefix(line, []byte("tripod\x00sessions\x00")) || !bytes.Contains(line, []byte(`"`+state+`/sessions/`)) {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file))); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// Carrier returns the process ID of the daemon's only session carrier.
func (d *Daemon) Carrier() int {
	d.t.Helper()
	pids := d.Carriers()
	if len(pids) != 1 {
		d.t.Fatalf("session carriers: got %v, want one", pids)
	}
	return pids[0]
}

// EndCarriers ends the session carriers, which otherwise stay for a while without sessions.
func (d *Daemon) EndCarriers() {
	if err := EndCarriers(d.State); err != nil {
		d.t.Error(err)
	}
}

// EndCarriers ends the session carriers of the daemon with this state directory.
func EndCarriers(state string) error {
	for _, pid := range carriers(state) {
		_ = syscall.Kill(pid, syscall.SIGTERM)
	}
	return until.Poll(10*time.Second, func() error {
		if pids := carriers(state); len(pids) > 0 {
			return fmt.Errorf("session carriers %v do not end after SIGTERM", pids)
		}
		return nil
	})
}
