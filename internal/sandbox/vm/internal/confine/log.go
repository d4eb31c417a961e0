package confine

import (
	"os"
	"strings"
	"unicode"

	"github.com/tripod-run/tripod/internal/process"
)

const (
	maxLog  = 1 << 20
	keepLog = 64 << 10
)

// OpenLog makes an empty log file for a process, and opens the file for appending.
func OpenLog(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|os.O_APPEND, 0o600)
}

// TrimLog truncates a log of more than 1 MiB to its last 64 KiB, because a guest can make the processes write a lot.
func TrimLog(path string) { _ = process.TrimLog(path, maxLog, keepLog) }

// LastWords returns at most the last three lines of a program's log, without the program's name at the start of each.
func LastWords(path, program string) string {
	lines := strings.Split(strings.TrimSpace(string(process.LogTail(path, 2<<10))), "\n")
	lines = lines[max(0, len(lines)-3):]
	for i, line := range lines {
		lines[i] = strings.TrimPrefix(strings.TrimSpace(line), program+": ")
	}
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) { // a guest may control the text
			return '?'
		}
		return r
	}, strings.Join(lines, "; "))
}
