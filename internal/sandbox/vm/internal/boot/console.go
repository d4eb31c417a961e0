package boot

import (
	"slices"
	"strings"

	"github.com/tripod-run/tripod/internal/lazyregexp"
)

// ConsoleSize is the number of bytes at the beginning of a run's serial output that OfConsole needs. A UEFI firmware that
// finds nothing to boot writes about 3 KiB.
const ConsoleSize = 16 << 10

const (
	// uefiLine is the prefix of the lines with which OVMF reports its progress, and uefiStart the prefix of the line
	// before it starts a boot entry.
	uefiLine, uefiStart = "BdsDxe: ", "BdsDxe: starting "
	uefiNoBoot          = "BdsDxe: No bootable option or device was found"
	// uefiShell is the name of the firmware's own shell, which it starts if no other boot entry works.
	uefiShell, uefiPrompt = "EFI Internal Shell", "Shell> "
)

// escape matches a control sequence of a terminal.
var escape = lazyregexp.New(`\x1b\[[0-9;=?]*[A-Za-z]`)

// OfConsole returns the report of a UEFI firmware, which writes to the serial console. The output is the beginning of the
// console's output in a run, at most ConsoleSize bytes. The firmware has failed if its last words say so, or if its own
// shell waits for input.
func OfConsole(output string) (r Report) {
	text := escape().ReplaceAllString(output, "")
	shell := false
	for line := range strings.Lines(text) {
		line = printable(strings.TrimRight(line, "\n"))
		switch {
		case !strings.HasPrefix(line, uefiLine):
			if strings.TrimSpace(line) != "" {
				r.Failed = false // what writes this is no firmware that has given up
			}
			continue
		case strings.HasPrefix(line, uefiNoBoot):
			r.Failed, r.HandedOver = true, false
		case strings.HasPrefix(line, uefiStart):
			shell = strings.Contains(line, uefiShell)
			r.Failed, r.HandedOver = false, !shell
		}
		if len(r.Lines) < maxLines && !slices.Contains(r.Lines, line) {
			r.Lines = append(r.Lines, line)
		}
	}
	if shell && strings.HasSuffix(text, uefiPrompt) {
		r.Failed = true
	}
	return r
}
