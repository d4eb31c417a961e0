package linux

import (
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
)

// format is the version of state.json and pod.json.
const format ledger.Format = 1

// state is a container's state for recovery, stored in <bundle>/state.json.
type state struct {
	ledger.Record
	BootID string `json:"bootID,omitempty"`
	// Init and Conmon are the two processes of a running container.
	Init   process.ID `json:"init,omitzero"`
	Conmon process.ID `json:"conmon,omitzero"`
	// OwnPID means that the container has its own PID namespace, which ends with its first process.
	OwnPID bool `json:"ownPID"`
	// Forgettable means that the OCI runtime has nothing to do after the container's end but to remove its own state and
	// the cgroup. Earlier versions did not record it, so false is safe. It does not hold with systemd, which has a unit.
	Forgettable bool `json:"forgettable,omitempty"`
	// Cgroup is the container's cgroup, relative to the hierarchies' roots.
	Cgroup string `json:"cgroup"`
	// EarlierOOMKills is how many processes of the pod the kernel had killed for lack of memory when the container was started.
	// It is 0 unless the cgroup is a scope, which systemd removes when its last process ends (see oomKilled).
	EarlierOOMKills uint64 `json:"earlierOOMKills,omitempty"`
	// LogPath is the path of the CRI log file. It is empty if the container has none.
	LogPath string `json:"logPath,omitempty"`
	TTY     bool   `json:"tty,omitempty"`

	Resolved sandbox.Resolved `json:"resolved"`
}

// podState is a pod's state, stored in <run dir>/pod.json. Recovery also uses it to remove pods without a record.
type podState struct {
	BootID string `json:"bootID"`
	// Cgroup is the pod's own cgroup, the parent of its containers' cgroups. It is "" if the cgroup is not ours.
	Cgroup string `json:"cgroup"`
	// Pause is the init process of the pod's shared PID namespace.
	Pause process.ID `json:"pause,omitzero"`
}

// Status implements ledger.State.
func (s state) Status() sandbox.Status { return s.StatusOf(s.Init.Pid) }

func podFile(runDir string) string { return filepath.Join(runDir, "pod.json") }

func readPodState(runDir string) (podState, error) {
	var s podState
	err := format.Read(podFile(runDir), &s)
	return s, err
}

func (s podState) write(runDir string) error { return format.Write(podFile(runDir), s) }

// bootID identifies one run of the kernel.
var bootID = sync.OnceValue(func() string {
	raw, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(raw))
})
