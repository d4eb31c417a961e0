package qemu

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

var update = flag.Bool("update", false, "write the golden files")

// plain returns a minimal definition.
func plain() machine.Definition {
	name := strings.Repeat("0123456789abcdef", 4)
	return machine.Definition{
		Name: name, UUID: "01234567-89ab-cdef-0123-456789abcdef", Dir: "/run/vm/" + name, StateDir: "/var/lib/vm/" + name,
		CPUs: 1, Memory: 128 << 20, SerialLog: "/var/lib/vm/" + name + "/serial.log", UID: 200007, GID: 200007, Cgroup: "/tripod/tripod-" + name,
		Disks: []machine.Disk{{ID: "root", File: machine.File{Path: "/root.qcow2"}, Format: "qcow2", Bus: machine.BusVirtio}},
	}
}

// TestGoldenCommands: the command lines match the golden files. Review every change, because running machines still
// have the old command line.
func TestGoldenCommands(t *testing.T) {
	host := hostSetup{Accel: AccelTCG, Block: func(path string) bool { return strings.HasPrefix(path, "/dev/") }}
	for name, c := range map[string]struct {
		change func(d *machine.Definition)
		host   hostSetup
	}{
		"plain": {func(*machine.Definition) {}, host},
		"kernel": {func(d *machine.Definition) {
			d.Disks = nil
			d.Kernel, d.Initrd, d.Cmdline = &machine.File{Path: "/vmlinux"}, &machine.File{Path: "/initrd"}, "console=ttyS0 a,b=c"
			d.Memory = 1<<30 + 1
		}, host},
		"disks": {func(d *machine.Definition) {
			d.Disks[0].Base = &machine.Base{File: machine.File{Path: "/base.img"}, Format: "raw"}
			d.Disks[0].Bus = machine.BusSCSI
			d.Disks = append(d.Disks,
				machine.Disk{ID: "cidata", File: machine.File{Path: "/cidata.iso"}, Format: "raw", ReadOnly: true, Bus: machine.BusVirtio},
				machine.Disk{ID: "disk0", File: machine.File{Path: "/dev/vdz"}, Format: "raw", Bus: machine.BusSCSI, LogicalBlock: 512,
					PhysicalBlock: 4096},
				machine.Disk{ID: "part", File: machine.File{Path: "/dev/vdy"}, Format: "raw", Offset: 1 << 20, Size: 7 << 20, Bus: machine.BusVirtio},
				machine.Disk{
					ID: "disk1", File: machine.File{Path: "/a,b.qcow2"}, Format: "qcow2", ReadOnly: true, Bus: machine.BusVirtio,
					Base: &machine.Base{File: machine.File{Path: "/b.qcow2"}, Format: "qcow2"},
				})
		}, host},
		"plug": {func(d *machine.Definition) { d.Plug = true }, host},
		"hotplug": {func(d *machine.Definition) {
			d.Hotplug, d.VNC = true, true
			d.NICs = []machine.NIC{{MAC: "52:54:00:12:34:56", Netns: "/run/netns/a", Tap: "tap0"}}
		}, host},
		"saved": {func(d *machine.Definition) {
			d.Plug, d.Saved = true, "/templates/one"
			d.NICs = []machine.NIC{{MAC: "0a:00:00:00:00:01", MTU: 1450, Netns: "/netns", Tap: "tap0"},
				{MAC: "0a:00:00:00:00:02", Netns: "/netns", Tap: "tap1"}}
			d.Shares = []machine.Share{{Tag: "share0", Path: "/shared", Driver: machine.ShareVirtiofs}}
		}, host},
		"saved2": {func(d *machine.Definition) {
			d.Plug, d.Saved = true, "/templates/two"
			d.NICs = []machine.NIC{{MAC: "0a:00:00:00:00:01", Netns: "/netns", Tap: "tap0"}}
			d.Shares = []machine.Share{{Tag: "share0", Path: "/a", Driver: machine.ShareVirtiofs},
				{Tag: "share1", Path: "/b", Driver: machine.ShareVirtiofs}}
		}, host},
		"growth": {func(d *machine.Definition) {
			d.Plug, d.Memory, d.Growth = true, 259<<20, &machine.Growth{Boot: 128 << 20, Memory: 4<<30 + 1<<20, CPUs: 8}
		}, host},
		"growth-saved": {func(d *machine.Definition) {
			d.Plug, d.CPUs, d.Memory, d.Saved = true, 2, 512<<20, "/templates/three"
			d.Growth = &machine.Growth{Boot: 128 << 20, Memory: 4 << 30, CPUs: 8}
		}, host},
		"uefi": {func(d *machine.Definition) {
			d.UEFI = &machine.UEFI{Code: machine.File{Path: "/code.fd"}, Vars: machine.FilePart{File: machine.File{Path: "/vars.fd"}}}
		}, host},
		"uefi-device": {varsAt(256<<10, 540672), host},
		"cdrom": {func(d *machine.Definition) {
			d.Disks = []machine.Disk{
				{ID: "cdrom", File: machine.File{Path: "/installer.iso"}, Format: "raw", ReadOnly: true, Bus: machine.BusCDROM},
				{ID: "scratch0", File: machine.File{Path: "/scratch.qcow2"}, Format: "qcow2", Bus: machine.BusSCSI},
				{ID: "cidata", File: machine.File{Path: "/cidata.iso"}, Format: "raw", ReadOnly: true, Bus: machine.BusSCSI},
			}
		}, host},
		"everything": {func(d *machine.Definition) {
			d.CPUs, d.CPUModel, d.VNC = 4, "host-model", true
			d.NICs = []machine.NIC{{MAC: "52:54:00:12:34:56", MTU: 1450, Netns: "/run/netns/a", Tap: "tap0"},
				{MAC: "52:54:00:12:34:57", Netns: "/run/netns/a", Tap: "tap1"}}
			d.Shares = []machine.Share{
				{Tag: "data", Path: "/srv/a,b", Driver: machine.Share9p},
				{Tag: "config", Path: "/srv/config", Driver: machine.Share9pMapped, ReadOnly: true},
				{Tag: "db", Path: "/srv/db", Driver: machine.ShareVirtiofs},
				{Tag: "secret", Path: "/srv/secret", Driver: machine.ShareVirtiofs, ReadOnly: true},
			}
		}, hostSetup{Accel: AccelKVM, VhostNet: true, Block: host.Block}},
	} {
		t.Run(name, func(t *testing.T) {
			d := plain()
			c.change(&d)
			if err := Validate(d); err != nil {
				t.Fatal(err)
			}
			got := golden(t, build(d, c.host))
			path := filepath.Join("testdata", name+".golden")
			if *update {
				if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			if want, err := os.ReadFile(path); err != nil || string(want) != got {
				t.Errorf("the command differs from %s (error %v); got\n%s", path, err, got)
			}
		})
	}
}

// golden formats a command for people: one option per line, then the files, then the late devices.
func golden(t *testing.T, c command) string {
	t.Helper()
	var b strings.Builder
	for i, arg := range c.Args {
		if strings.HasPrefix(arg, "-") && i > 0 {
			b.WriteByte('\n')
		} else if i > 0 {
			b.WriteByte(' ')
		}
		b.WriteString(arg)
	}
	b.WriteString("\n\n")
	for _, f := range slices.Concat(c.Standard[:], c.Files) {
		raw, err := json.Marshal(f)
		if err != nil {
			t.Fatal(err)
		}
		b.Write(append(raw, '\n'))
	}
	for _, device := range c.Late {
		raw, err := json.Marshal(device)
		if err != nil {
			t.Fatal(err)
		}
		b.Write(append(raw, '\n'))
	}
	return b.String()
}

// TestNothingLeaksIntoOptions: the command line contains no path of ours, in which a comma would begin another option.
func TestNothingLeaksIntoOptions(t *testing.T) {
	d := plain()
	d.Disks[0].Path = "/evil,readonly=off"
	d.UEFI = &machine.UEFI{Code: machine.File{Path: "/evil,unit=1"}, Vars: machine.FilePart{File: machine.File{Path: "/evil,unit=0"}}}
	d.Shares = []machine.Share{{Tag: "x", Path: "/evil,security_model=passthrough", Driver: machine.Share9p},
		{Tag: "y", Path: "/evil,fd=0", Driver: machine.ShareVirtiofs}}
	d.SerialLog = "/evil,path=/etc/shadow"
	for _, arg := range build(d, hostSetup{Block: func(string) bool { return false }}).Args {
		if strings.Contains(arg, "evil") || strings.Contains(arg, "/run/vm") || strings.Contains(arg, "/var/lib") {
			t.Errorf("argument %q contains a path of the definition", arg)
		}
	}
}

// varsAt puts the UEFI variables and the root disk on one device, the disk from 1 MiB to 8 MiB.
func varsAt(offset, size uint64) func(d *machine.Definition) {
	return func(d *machine.Definition) {
		device := machine.File{Path: "/dev/vdz"}
		d.Disks[0] = machine.Disk{ID: "root", File: device, Format: "raw", Offset: 1 << 20, Size: 7 << 20, Bus: machine.BusVirtio}
		d.UEFI = &machine.UEFI{Code: machine.File{Path: "/code.fd"}, Vars: machine.FilePart{File: device, Offset: offset, Size: size}}
	}
}

// TestRefused: Validate refuses definitions that are nonsense or that QEMU could misunderstand.
func TestRefused(t *testing.T) {
	for what, change := range map[string]func(d *machine.Definition){
		"no UUID":                          func(d *machine.Definition) { d.UUID = "x,y" },
		"CPUs":                             func(d *machine.Definition) { d.CPUs = 256 },
		"no CPU":                           func(d *machine.Definition) { d.CPUs = 0 },
		"model":                            func(d *machine.Definition) { d.CPUModel = "-accel" },
		"libvirt":                          func(d *machine.Definition) { d.LibvirtCPU = "<cpu/>" },
		"no boot":                          func(d *machine.Definition) { d.Disks = nil },
		"variables without a size":         varsAt(256<<10, 0),
		"variables of half a sector":       varsAt(256<<10, 256),
		"variables that reach the disk":    varsAt(256<<10, 768<<10+512),
		"variables behind the disk":        varsAt(8<<20, 512),
		"variables on a device of its own": func(d *machine.Definition) { varsAt(256<<10, 512)(d); d.Disks[0].Path = "/dev/vdy" },
		"kernel by UEFI":                   func(d *machine.Definition) { d.Kernel, d.UEFI = &machine.File{Path: "/k"}, &machine.UEFI{} },
		"initrd only":                      func(d *machine.Definition) { d.Initrd = &machine.File{Path: "/initrd"} },
		"group":                            func(d *machine.Definition) { d.GID = 0 },
		"relative":                         func(d *machine.Definition) { d.SerialLog = "serial.log" },
		"cgroup":                           func(d *machine.Definition) { d.Cgroup = "/a/../b" },
		"twice":                            func(d *machine.Definition) { d.Disks = append(d.Disks, d.Disks[0]) },
		"node name":                        func(d *machine.Definition) { d.Disks[0].ID = "a-file" },
		"bus":                              func(d *machine.Definition) { d.Disks[0].Bus = "ide" },
		"writable CD":                      func(d *machine.Definition) { d.Disks[0].Format, d.Disks[0].Bus = "raw", machine.BusCDROM },
		"qcow2 on CD":                      func(d *machine.Definition) { d.Disks[0].ReadOnly, d.Disks[0].Bus = true, machine.BusCDROM },
		"CD not first": func(d *machine.Definition) {
			d.Disks = append(d.Disks, machine.Disk{ID: "cdrom", Format: "raw", ReadOnly: true, Bus: machine.BusCDROM})
		},
		"base of raw":   func(d *machine.Definition) { d.Disks[0].Format, d.Disks[0].Base = "raw", &machine.Base{Format: "raw"} },
		"base's format": func(d *machine.Definition) { d.Disks[0].Base = &machine.Base{Format: "vmdk"} },
		"part of qcow2": func(d *machine.Definition) { d.Disks[0].Size = 512 },
		"half a sector": func(d *machine.Definition) { d.Disks[0].Format, d.Disks[0].Offset, d.Disks[0].Size = "raw", 100, 512 },
		"MTU":           func(d *machine.Definition) { d.NICs = []machine.NIC{{MAC: "52:54:00:12:34:56", MTU: 10}} },
		"EUI-64":        func(d *machine.Definition) { d.NICs = []machine.NIC{{MAC: "52:54:00:12:34:56:78:9a"}} },
		"two shares": func(d *machine.Definition) {
			d.Shares = []machine.Share{{Tag: "a", Driver: machine.Share9p}, {Tag: "a", Driver: machine.Share9p}}
		},
		"65 shares": func(d *machine.Definition) {
			for i := range maxShares + 1 {
				d.Shares = append(d.Shares, machine.Share{Tag: fmt.Sprint(i), Driver: machine.ShareVirtiofs})
			}
		},
		"no driver": func(d *machine.Definition) { d.Shares = []machine.Share{{Tag: "a", Path: "/a"}} },
		"long tag": func(d *machine.Definition) {
			d.Shares = []machine.Share{{Tag: strings.Repeat("a", 32), Driver: machine.Share9p}}
		},
		"two controllers": func(d *machine.Definition) { d.Plug, d.Hotplug = true, true },
		"saved, relative": func(d *machine.Definition) { d.Plug, d.Saved = true, "saved" },
		"saved, no port":  func(d *machine.Definition) { d.Saved = "/saved" },
		"saved, 9p": func(d *machine.Definition) {
			d.Plug, d.Saved, d.Shares = true, "/saved", []machine.Share{{Tag: "a", Driver: machine.Share9p}}
		},
		"saved, UEFI": func(d *machine.Definition) { d.Plug, d.Saved, d.UEFI = true, "/saved", &machine.UEFI{} },
		"saved, nine NICs": func(d *machine.Definition) {
			d.Plug, d.Saved = true, "/saved"
			for range machine.SavedDevices + 1 {
				d.NICs = append(d.NICs, machine.NIC{MAC: "52:54:00:12:34:56"})
			}
		},
		"upper-case hex": func(d *machine.Definition) { d.Name = strings.ToUpper(d.Name) },
	} {
		d := plain()
		change(&d)
		if err := Validate(d); !errdefs.IsInvalidArgument(err) {
			t.Errorf("Validate with a wrong definition (%s): got error %v, want ErrInvalidArgument", what, err)
		}
	}
}

// TestMarks: isCommandOf recognizes the command line of the machine's QEMU, and no other.
func TestMarks(t *testing.T) {
	d := plain()
	line := []byte("/usr/bin/qemu\x00" + strings.Join(build(d, hostSetup{Block: func(string) bool { return false }}).Args, "\x00") + "\x00")
	if !isCommandOf(line, d.Name) {
		t.Error("isCommandOf(its own command line) = false, want true")
	}
	other := strings.Repeat("f", 64)
	for _, line := range []string{"", "/bin/sh\x00-c\x00echo guest=tripod-" + d.Name + ",x\x00",
		"qemu\x00-name\x00guest=tripod-" + other + ",x\x00"} {
		if isCommandOf([]byte(line), d.Name) {
			t.Errorf("isCommandOf(%q) = true, want false", line)
		}
	}
}
