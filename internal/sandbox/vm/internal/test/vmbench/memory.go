package main

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"strings"
	"time"
)

// resident returns the resident memory of a QEMU in bytes. The first result is the part in the guest's memory, which is
// the only mapping of the given size. The second result is everything else.
func resident(pid int, memory uint64) (ram, rest uint64, err error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps", pid))
	if err != nil {
		return 0, 0, err
	}
	var total, size, rss, from, to uint64
	var mappings []uint64 // of the guest's memory
	lines := bufio.NewScanner(bytes.NewReader(data))
	for lines.Scan() {
		line := lines.Text()
		if n, _ := fmt.Sscanf(line, "%x-%x ", &from, &to); n == 2 {
			size = to - from
			continue
		}
		if n, _ := fmt.Sscanf(line, "Rss: %d kB", &rss); n == 1 && strings.HasPrefix(line, "Rss:") {
			total += rss << 10
			if size == memory {
				mappings = append(mappings, rss<<10)
			}
		}
	}
	if len(mappings) != 1 {
		return 0, 0, fmt.Errorf("QEMU %d has %d mappings of the size of the guest's memory, %d bytes", pid, len(mappings), memory)
	}
	return mappings[0], total - mappings[0], nil
}

// processorTime returns the processor time of a process, in steps of 10 ms.
func processorTime(pid int) (time.Duration, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(data), ") ")
	var skip string
	var user, system int64
	fields := strings.Fields(rest) // the first of these is the file's field 3, state; utime is field 14, and stime is field 15
	if _, err := fmt.Sscan(strings.Join(fields[10:13], " "), &skip, &user, &system); err != nil {
		return 0, fmt.Errorf("/proc/%d/stat: %w", pid, err)
	}
	return time.Duration(user+system) * 10 * time.Millisecond, nil
}

// anonymous returns the anonymous resident memory of a process in bytes.
func anonymous(pid int) (uint64, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(data)) {
		var kib uint64
		if n, _ := fmt.Sscanf(line, "RssAnon: %d kB", &kib); n == 1 {
			return kib << 10, nil
		}
	}
	return 0, fmt.Errorf("process %d has no RssAnon in its status", pid)
}
