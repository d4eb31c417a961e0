package firmware

import (
	"regexp"
	"strings"
	"time"
	"unicode"
)

// How a driver makes the port.
const (
	// Port is the I/O port that SeaBIOS writes its messages to.
	Port = 0x402
	// RingSize is the size of the ring buffer in bytes, a power of two. One boot says about 4 KiB.
	RingSize = 64 << 10
	// RetryTime is how long the firmware waits before it looks for something to boot again.
	RetryTime = 30 * time.Second
)

const (
	// maxLine bounds a line in bytes, and maxLines the lines of one boot: a guest may write what it likes.
	maxLine, maxLines = 200, 16
	// begins is how each boot begins.
	begins = "SeaBIOS (version"
	noBoot = "No bootable device."
)

// told are the lines that say what becomes of a boot.
var told = []string{"Booting from", "Boot failed", "Could not read", noBoot}

// handOver is the line before the firmware jumps to what it has loaded.
var handOver = regexp.MustCompile(`^Booting from [0-9a-fA-F]{4}:[0-9a-fA-F]{4}$`)

// Report is what the firmware has said of the boot that is under way, or of the last one.
type Report struct {
	// Lines are those about the boot, printable and bounded.
	Lines []string
	// Failed says that there is nothing to boot, HandedOver that a boot sector was loaded and given control.
	Failed, HandedOver bool

	rest string // a line that has not ended yet
}

// Read takes what the firmware has said since the last Read. It tells whether a new boot began.
func (r *Report) Read(said string) (rebooted bool) {
	lines := strings.Split(r.rest+said, "\n")
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
	if strings.HasPrefix(line, begins) {
		rebooted = len(r.Lines) > 0
		r.Lines, r.Failed, r.HandedOver = nil, false, false
		return rebooted
	}
	for _, prefix := range told {
		if strings.HasPrefix(line, prefix) && len(r.Lines) < maxLines {
			r.Lines = append(r.Lines, line)
		}
	}
	switch {
	case strings.HasPrefix(line, noBoot):
		r.Failed, r.HandedOver = true, false
	case handOver.MatchString(line):
		r.HandedOver = true
	}
	return false
}

// printable is a line without what a terminal would obey, and bounded.
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
