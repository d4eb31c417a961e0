package guestagent

import (
	"bytes"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// killPasses is the maximum number of searches for processes that were forked while others were being killed.
const killPasses = 8

// killSession kills all processes in a session. Killing the leader's process group is not enough, because a shell with
// job control puts each of its jobs into its own process group.
func killSession(leader int) {
	_ = unix.Kill(-leader, unix.SIGKILL)
	for range killPasses {
		found := false
		for _, pid := range processes() {
			if sessionOf(pid) == leader {
				found = unix.Kill(pid, unix.SIGKILL) == nil || found
			}
		}
		if !found {
			return
		}
	}
}

func processes() (pids []int) {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(-1)
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// sessionOf returns the ID of a process's session (field 6 of /proc/PID/stat), or 0 if the process is dead or gone.
func sessionOf(pid int) int {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0
	}
	// The process's name, in parentheses, may contain any characters, so begin after the last parenthesis.
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) < 4 || len(fields[0]) != 1 || fields[0][0] == 'Z' || fields[0][0] == 'X' {
		return 0
	}
	session, _ := strconv.Atoi(string(fields[3]))
	return session
}
