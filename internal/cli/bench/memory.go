package bench

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// process identifies a process by PID and start time (proc(5), stat field 22), because PIDs are reused.
type process struct {
	pid   int
	start string
}

// processes maps the running processes to the names of their programs.
func processes(proc string) (map[process]string, error) {
	entries, err := os.ReadDir(proc)
	if err != nil {
		return nil, err
	}
	all := map[process]string{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		stat, err := os.ReadFile(filepath.Join(proc, e.Name(), "stat"))
		if err != nil {
			continue // the process has ended
		}
		// The name is in parentheses and can contain any character, including parentheses.
		open, end := bytes.IndexByte(stat, '('), bytes.LastIndexByte(stat, ')')
		fields := strings.Fields(string(stat[end+1:]))
		if open < 0 || end < open || len(fields) < 20 {
			return nil, fmt.Errorf("%s/%d/stat: %q", proc, pid, stat)
		}
		all[process{pid, fields[19]}] = string(stat[open+1 : end])
	}
	return all, nil
}

// pss returns the proportional set size of a process in bytes (smaps_rollup), or 0 if the process has ended.
func pss(proc string, pid int) int64 {
	f, err := os.Open(filepath.Join(proc, strconv.Itoa(pid), "smaps_rollup"))
	if err != nil {
		return 0
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if len(fields) == 3 && fields[0] == "Pss:" {
			kib, _ := strconv.ParseInt(fields[1], 10, 64)
			return kib << 10
		}
	}
	return 0
}

// inContainer reports whether a process runs inside a container, that is, with a root directory other than ours.
func inContainer(proc string, pid int) bool {
	ours, err1 := os.Stat(filepath.Join(proc, "self", "root") + "/")
	theirs, err2 := os.Stat(filepath.Join(proc, strconv.Itoa(pid), "root") + "/")
	return err1 == nil && err2 == nil && !os.SameFile(ours, theirs)
}

// daemons are the programs that serve all pods of a node and need more memory for more pods.
var daemons = []string{"tripod", "tripod-wasm", "containerd"}

// DaemonsPSS returns the total PSS of the daemons in bytes, as the mounted proc file system has it (proc(5), smaps_rollup). It
// leaves out this process, whose name may be that of a daemon.
func DaemonsPSS(proc string) (total int64, err error) {
	now, err := processes(proc)
	for p, name := range now {
		if slices.Contains(daemons, name) && p.pid != os.Getpid() {
			total += pss(proc, p.pid)
		}
	}
	return total, err
}

// Memory is a runtime's memory use while pods are idle.
type Memory struct {
	Pods int `json:"pods"`
	// DaemonGrowth is the growth of the daemons' PSS per pod.
	DaemonGrowth int64 `json:"daemon_growth_bytes_per_pod"`
	// HelperPSS is the PSS per pod of the processes that appeared with the pods and are neither daemons nor the
	// containers' own processes.
	HelperPSS int64 `json:"helper_pss_bytes_per_pod"`
	// Helpers counts these processes by name.
	Helpers map[string]int `json:"helpers"`
}

// helpers measures the processes that did not exist before the pods. It leaves out programs inside containers, except
// the runtime's own (see isPause).
func helpers(proc string, before map[process]string, pods int) (Memory, error) {
	m := Memory{Pods: pods, Helpers: map[string]int{}}
	now, err := processes(proc)
	if err != nil {
		return m, err
	}
	var total int64
	for p, name := range now {
		if _, old := before[p]; old {
			continue
		}
		if inContainer(proc, p.pid) && !isPause(name) || slices.Contains(daemons, name) {
			continue
		}
		if size := pss(proc, p.pid); size > 0 {
			total += size
			m.Helpers[name]++
		}
	}
	if pods > 0 {
		m.HelperPSS = total / int64(pods)
	}
	return m, nil
}

// isPause reports whether name is a program that the runtime itself runs inside a pod.
func isPause(name string) bool { return name == "pause" || name == "catatonit" }
