package oci

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
)

// Joins makes containers join their cgroups without delay. To move a process, the kernel takes a lock against forks. The
// first to take it after a while waits some 10 ms for an RCU grace period; those who follow soon do not wait. So we take
// it while a container is being prepared: we move our main thread to the cgroup in which it is, which changes nothing.
type Joins struct {
	// file is the list of the threads (v1) or processes (v2) of our own cgroup, or "" if it was not found.
	file    string
	pending atomic.Bool
}

// NewJoins finds our own cgroup in the tree.
func NewJoins(g cgroup.Tree) *Joins {
	raw, _ := os.ReadFile("/proc/self/cgroup")
	return &Joins{file: ownTasks(g, string(raw))}
}

// ownTasks finds the file among the lines of /proc/self/cgroup.
func ownTasks(g cgroup.Tree, lines string) string {
	name := "tasks"
	if g.V2 {
		name = "cgroup.procs"
	}
	for line := range strings.Lines(lines) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3) // cgroups(7): number:controllers:path
		if len(fields) != 3 {
			continue
		}
		root, ok := g.Roots[strings.TrimPrefix(fields[1], "name=")]
		if file := filepath.Join(root, fields[2], name); ok && ledger.Exists(file) {
			return file
		}
	}
	return ""
}

// Expect announces that a process will join a cgroup soon.
func (j *Joins) Expect() {
	if j.file == "" || !j.pending.CompareAndSwap(false, true) {
		return
	}
	go func() {
		defer j.pending.Store(false)
		// An error costs the container's start the delay, no more.
		_ = os.WriteFile(j.file, []byte(strconv.Itoa(os.Getpid())), 0)
	}()
}
