package machinetest

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/test/harness/cdimage"
)

// bootsFromCD checks that the machine boots a CD-ROM, by BIOS and by UEFI, although it also has an empty disk.
func bootsFromCD(t *testing.T, s Subject) {
	image := cdimage.Build(true, uefiFiles(uefiProgram()))
	for text, uefi := range map[string]bool{cdimage.Text: false, uefiText: true} {
		l, d := s.Begin(t), s.uefiDefinition(t, make([]byte, uefiSize))
		if !uefi {
			d.UEFI = nil
		}
		cd := filepath.Join(d.StateDir, "cd.iso")
		must(t, os.WriteFile(cd, image, 0o400))
		d.Disks = append([]machine.Disk{{ID: "cdrom", File: machine.File{Path: cd}, Format: "raw", ReadOnly: true, Bus: machine.BusCDROM}}, d.Disks...)
		l.mustDefine(t, d)
		must(t, l.Start(t.Context(), d.Name))
		if end := l.End(d.Name); end.Cause != machine.CausePowerOff {
			t.Errorf("UEFI %t: end = %+v, want a power-off", uefi, end)
		}
		AwaitLog(t, d, text, 1)
		must(t, l.Undefine(t.Context(), d.Name))
		l.Close()
	}
}
