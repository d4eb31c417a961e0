// Package idle gives memory back to the system while the process has nothing to do.
//
// The start of a program, and each burst of work, leaves behind memory that is not used afterwards: free heap that the
// collector keeps for the next burst, and pages of the program's own file that were read once. The system itself takes
// them back only when memory runs short. A node of 64 MiB has better uses for them before that.
package idle

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"runtime/debug"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/process"
)

// The process is idle if it used less than 5 % of one CPU during an interval. On a fast machine it needs a fiftieth of that.
const (
	interval = 10 * time.Second
	quiet    = interval / 20
)

// Watch gives memory back until ctx ends: in the first interval in which the process is idle, and then whenever it is
// idle and twice as large as right after the last time. So memory that the process uses even when idle stays.
func Watch(ctx context.Context, log *slog.Logger) {
	var used time.Duration
	var least int64
	go guard.Every(ctx, log, "idle memory", interval, func() {
		before := used
		used = cpuTime()
		held, err := process.Resident()
		if err != nil || !due(used-before, held, least) {
			return
		}
		if err := Release(); err != nil {
			log.Warn("cannot give back memory of the program's file", "err", err)
		}
		least, _ = process.Resident()
	})()
}

// due reports whether a process that has used this CPU time during an interval is to give memory back. held is the size
// of its resident set in bytes, and least the size right after the last time, or 0.
func due(used time.Duration, held, least int64) bool { return used < quiet && held > 2*least }

// Release gives back the free heap and the unmodified pages of the program's file. Pages that are used again are mapped
// from the system's page cache, 16 or more at a time, in a microsecond.
func Release() error {
	debug.FreeOSMemory()
	program, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return err
	}
	return unmap(program)
}

// unmap removes the file's pages from memory, except in mappings that can be written to or that somebody, such as a
// debugger or the dynamic linker, has modified: the file does not have their content. The source is proc_pid_smaps(5).
func unmap(file string) error {
	smaps, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		return err
	}
	var start, end uintptr
	var of bool // whether the lines are those of such a mapping, as far as they have been read
	for line := range bytes.Lines(smaps) {
		var from, to uintptr
		var mode string
		if n, _ := fmt.Sscanf(string(line), "%x-%x %s", &from, &to, &mode); n == 3 {
			start, end = from, to
			of = (mode == "r-xp" || mode == "r--p") && bytes.HasSuffix(line, []byte(" "+file+"\n"))
			continue
		}
		if !of {
			continue
		}
		switch key, value, _ := bytes.Cut(line, []byte(":")); string(key) {
		case "Anonymous", "Swap":
			of = string(bytes.TrimSpace(value)) == "0 kB"
		case "VmFlags": // the last line
			// unix.Madvise takes a slice, but this memory is none of Go's.
			if _, _, errno := unix.Syscall(unix.SYS_MADVISE, start, end-start, unix.MADV_DONTNEED); errno != 0 {
				return fmt.Errorf("madvise %#x-%#x: %w", start, end, errno)
			}
		}
	}
	return nil
}

func cpuTime() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
