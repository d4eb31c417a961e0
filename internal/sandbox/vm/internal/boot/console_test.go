package boot

import (
	"slices"
	"strings"
	"testing"
)

// The output of OVMF 2022.11 in Debian 12, shortened.
const (
	uefiClear  = "\x1b[2J\x1b[01;01H\x1b[=3h\x1b[2J\x1b[01;01H"
	uefiFails  = "BdsDxe: failed to load Boot0001 \"UEFI Misc Device\" from PciRoot(0x0)/Pci(0x1,0x0): Not Found\r\n"
	uefiLoads  = "BdsDxe: loading Boot0001 \"UEFI Misc Device\" from PciRoot(0x0)/Pci(0x1,0x0)\r\n"
	uefiStarts = "BdsDxe: starting Boot0001 \"UEFI Misc Device\" from PciRoot(0x0)/Pci(0x1,0x0)\r\n"
	ownShell   = "BdsDxe: loading Boot0002 \"EFI Internal Shell\" from Fv(7CB8)/FvFile(7C04)\r\nBdsDxe: starting Boot0002 \"EFI Internal Shell\" from Fv(7CB8)/FvFile(7C04)\r\n" +
		uefiClear + "UEFI Interactive Shell v2.2\r\nEDK II\r\n\x1b[07;01HPress \x1b[1m\x1b[37m\x1b[40mESC\x1b[0m in 1 seconds to skip startup.nsh or any other key to continue.\r\n"
	ownPrompt = "\x1b[08;01H\x1b[1m\x1b[33m\x1b[40mShell> \x1b[0m\x1b[37m\x1b[40m"
	noOption  = "BdsDxe: No bootable option or device was found.\r\nBdsDxe: Press any key to enter the Boot Manager Menu.\r\n"
)

func TestOfConsole(t *testing.T) {
	for name, test := range map[string]struct {
		output         string
		failed, handed bool
		lines          int
	}{
		"nothing":                     {"", false, false, 0},
		"only begun":                  {uefiClear, false, false, 0},
		"handed over":                 {uefiClear + uefiLoads + uefiStarts + "Linux version 6.1\r\n", false, true, 2},
		"no entry":                    {uefiClear + uefiFails + noOption, true, false, 3},
		"the shell begins":            {uefiClear + uefiFails + ownShell, false, false, 3},
		"the shell waits":             {uefiClear + uefiFails + ownShell + ownPrompt, true, false, 3},
		"the shell runs startup.nsh":  {uefiClear + uefiFails + ownShell + ownPrompt + "FS0:\\linux.efi\r\n", false, false, 3},
		"handed over, and given back": {uefiClear + uefiLoads + uefiStarts + ownShell + ownPrompt, true, false, 4},
		"a guest's own prompt":        {uefiClear + uefiLoads + uefiStarts + "Shell> ", false, true, 2},
		"a guest's log of a firmware": {uefiClear + uefiLoads + uefiStarts + "log:\r\n" + noOption + "login: ", false, false, 4},
		"no firmware":                 {"Shell> ", false, false, 0},
	} {
		t.Run(name, func(t *testing.T) {
			if r := OfConsole(test.output); r.Failed != test.failed || r.HandedOver != test.handed || len(r.Lines) != test.lines {
				t.Errorf("report = %+v, want failed %t, handed over %t, %d lines", r, test.failed, test.handed, test.lines)
			}
		})
	}
}

// FuzzOfConsole: whatever a guest writes to its console, the report is bounded and printable.
func FuzzOfConsole(f *testing.F) {
	for _, seed := range []string{uefiFails + ownShell + ownPrompt, uefiStarts, noOption, noOption + uefiStarts,
		strings.Repeat("BdsDxe: \x1b[2\x00\n", 99), "BdsDxe: " + strings.Repeat("x", 999)} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, output string) {
		r := OfConsole(output)
		if len(r.Lines) > maxLines || r.Failed && r.HandedOver {
			t.Errorf("report has %d lines, failed %t, handed over %t", len(r.Lines), r.Failed, r.HandedOver)
		}
		for _, line := range r.Lines {
			if len(line) > 3*maxLine || slices.ContainsFunc([]rune(line), func(c rune) bool { return c < ' ' }) {
				t.Errorf("line %q is too long or not printable", line)
			}
		}
	})
}
