package guestagent

import (
	"bytes"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// killPasses is how often it is looked for processes that came while others were killed.
const killPasses = 8

// killSession kills the process that leads a session, and all that are in it: a shell with job control puts each of its
// programs into a process group of its own.
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

// sessionOf reads a process's session, field 6 of /proc/PID/stat; 0 when it is dead or gone.
func sessionOf(pid int) int {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0
	}
	// The name, in parentheses, may contain anything.
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) < 4 || len(fields[0]) != 1 || fields[0][0] == 'Z' || fields[0][0] == 'X' {
		return 0
	}
	session, _ := strconv.Atoi(string(fields[3]))
	return session
}
