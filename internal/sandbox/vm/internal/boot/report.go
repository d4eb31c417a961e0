package boot

import (
	"strings"
	"time"
	"unicode"

	"github.com/tripod-run/tripod/internal/lazyregexp"
)

// Parameters of the debug port, for drivers.
const (
	// Port is the I/O port for SeaBIOS's messages.
	Port = 0x402
	// RingSize is the size of the ring buffer in bytes, a power of two. One boot writes about 4 KiB.
	RingSize = 64 << 10
	// RetryTime is the time between the firmware's searches for a boot device.
	RetryTime = 30 * time.Second
)

const (
	// maxLine is the maximum length of a line in bytes, and maxLines the maximum number of lines kept for a boot.
	maxLine, maxLines = 200, 16
	// bootStart is the prefix of a boot's first line.
	bootStart = "SeaBIOS (version"
	noBoot    = "No bootable device."
)

// bootLines are the prefixes of lines about the progress of a boot.
var bootLines = []string{"Booting from", "Boot failed", "Could not read", noBoot}

// handOver matches the last line before the firmware jumps to the boot sector.
var handOver = lazyregexp.New(`^Booting from [0-9a-fA-F]{4}:[0-9a-fA-F]{4}$`)

// Report is a summary of the firmware's output for the current or last boot.
type Report struct {
	// Lines are the lines about the boot, printable and bounded.
	Lines []string
	// Failed means that the firmware found nothing to boot. HandedOver means that the firmware has jumped to a boot
	// sector.
	Failed, HandedOver bool

	rest string // an incomplete line
}

// Read parses the firmware's output since the last Read. It reports whether a new boot has begun.
func (r *Report) Read(output string) (rebooted bool) {
	lines := strings.Split(r.rest+output, "\n")
	r.rest = lines[len(lines)-1]
	if len(r.rest) > maxLine {
		r.rest = r.rest[:maxLine]
	}
	for _, line := range lines[:len(lines)-1] {
		rebooted = r.line(printable(line)) || rebooted
	}
	return rebooted
}

func (r *Report) line(line string) (rebooted bool) {
	if strings.HasPrefix(line, bootStart) {
		rebooted = len(r.Lines) > 0
		r.Lines, r.Failed, r.HandedOver = nil, false, false
		return rebooted
	}
	for _, prefix := range bootLines {
		if strings.HasPrefix(line, prefix) && len(r.Lines) < maxLines {
			r.Lines = append(r.Lines, line)
		}
	}
	switch {
	case strings.HasPrefix(line, noBoot):
		r.Failed, r.HandedOver = true, false
	case handOver().MatchString(line):
		r.HandedOver = true
	}
	return false
}

// printable replaces unprintable characters in a line, and cuts the line to maxLine bytes.
func printable(line string) string {
	line = strings.TrimRight(line, "\r ")
	if len(line) > maxLine {
		line = line[:maxLine]
	}
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, line)
}
