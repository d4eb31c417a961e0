package boot

import (
	"slices"
	"strings"
	"testing"
)

// The output of SeaBIOS 1.16.2 in Debian 12, shortened.
const (
	start   = "SeaBIOS (version 1.16.2-debian-1.16.2-1)\nBUILD: gcc\nboot order:\n1: /rom@img\nSeaBIOS (version 1.16.2-debian-1.16.2-1)\nenter handle_19:\n  NULL\n"
	empty   = start + "Booting from Hard Disk...\nBoot failed: not a bootable disk\n\nenter handle_18:\n  NULL\nNo bootable device.  Retrying in 30 seconds.\n"
	handed  = start + "Booting from Hard Disk...\nBooting from 0000:7c00\n"
	givesUp = "enter handle_18:\n  NULL\nNo bootable device.  Retrying in 30 seconds.\n"
)

func TestReport(t *testing.T) {
	for name, test := range map[string]struct {
		output         string
		failed, handed bool
		lines          int
	}{
		"nothing to boot":             {empty, true, false, 3},
		"handed over":                 {handed, false, true, 2},
		"handed over, and given back": {handed + givesUp, true, false, 3},
		"tries again":                 {empty + "Rebooting.\n" + start, false, false, 0},
		"tries again, in vain":        {empty + "Rebooting.\n" + empty, true, false, 3},
		"not done yet":                {start + "Booting from Hard Disk...\nBoot fai", false, false, 1},
		"nothing":                     {"", false, false, 0},
	} {
		t.Run(name, func(t *testing.T) {
			var whole, pieces Report
			whole.Read(test.output)
			for i := range len(test.output) {
				pieces.Read(test.output[i : i+1])
			}
			for _, r := range []Report{whole, pieces} {
				if r.Failed != test.failed || r.HandedOver != test.handed || len(r.Lines) != test.lines {
					t.Errorf("report = %+v, want failed %t, handed over %t, %d lines", r, test.failed, test.handed, test.lines)
				}
			}
		})
	}
}

func TestReboot(t *testing.T) {
	var r Report
	if r.Read(handed) {
		t.Error("Read reports the first boot as a reboot")
	}
	if !r.Read(handed) {
		t.Error("Read does not report the reboot")
	}
}

// FuzzReport: whatever a guest writes to the port, the report is bounded and printable.
func FuzzReport(f *testing.F) {
	for _, seed := range []string{empty, handed, "No bootable device.\x1b[2J\n", strings.Repeat("Boot failed\n", 99),
		strings.Repeat("x", 999)} {
		f.Add(seed, 7)
	}
	f.Fuzz(func(t *testing.T, output string, cut int) {
		cut = max(0, min(cut, len(output)))
		var r Report
		r.Read(output[:cut])
		r.Read(output[cut:])
		if len(r.Lines) > maxLines || len(r.rest) > maxLine || r.Failed && r.HandedOver {
			t.Errorf("report has %d lines, a rest of %d bytes, failed %t, handed over %t", len(r.Lines), len(r.rest), r.Failed, r.HandedOver)
		}
		for _, line := range r.Lines {
			if len(line) > 3*maxLine || slices.ContainsFunc([]rune(line), func(c rune) bool { return c < ' ' }) {
				t.Errorf("line %q is too long or not printable", line)
			}
		}
	})
}
