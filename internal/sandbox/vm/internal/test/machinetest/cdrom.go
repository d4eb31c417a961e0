package machinetest

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/test/harness/cdimage"
	"github.com/tripod-run/tripod/test/harness/gptdisk"
)

// bootsFromCD checks that the machine boots a CD-ROM, by BIOS and by UEFI, and its disk if the CD-ROM does not boot.
func bootsFromCD(t *testing.T, s Subject) {
	both, empty := cdimage.Build(true, gptdisk.Files()), make([]byte, gptdisk.Size)
	for name, c := range map[string]struct {
		cd, disk []byte
		uefi     bool
		text     string
	}{
		"BIOS":          {both, empty, false, cdimage.Text},
		"UEFI":          {both, empty, true, gptdisk.Text},
		"disk after CD": {cdimage.Build(false, nil), gptdisk.Bootable(), true, gptdisk.Text},
	} {
		t.Run(name, func(t *testing.T) {
			l, d := s.Begin(t), s.uefiDefinition(t, c.disk)
			defer l.Close()
			if !c.uefi {
				d.UEFI = nil
			}
			cd := filepath.Join(d.StateDir, "cd.iso")
			must(t, os.WriteFile(cd, c.cd, 0o400))
			d.Disks = append([]machine.Disk{{ID: "cdrom", File: machine.File{Path: cd}, Format: "raw", ReadOnly: true, Bus: machine.BusCDROM}},
				d.Disks...)
			l.mustDefine(t, d)
			must(t, l.Start(t.Context(), d.Name))
			if end := l.End(d.Name); end.Cause != machine.CausePowerOff {
				t.Errorf("end = %+v, want a power-off", end)
			}
			AwaitLog(t, d, c.text, 1)
			must(t, l.Undefine(t.Context(), d.Name))
		})
	}
}
