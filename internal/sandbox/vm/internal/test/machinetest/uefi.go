package machinetest

import (
	"bytes"
	"encoding/binary"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/firmware"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/test/harness/gptdisk"
)

// uefiText is what uefiCode prints.
const uefiText = "STARTED-BY-UEFI\r\n"

// uefiCode is a program for UEFI. It prints uefiText on the serial console and turns the machine off. The firmware passes
// the address of its system table in rdx. The table has the address of the runtime services at offset 0x58, and the
// services have the address of ResetSystem at offset 0x68.
var uefiCode = slices.Concat(
	[]byte{
		0x48, 0x89, 0xd3, // 00       mov  rbx, rdx
		0x48, 0x8d, 0x35, 0x31, 0x00, 0x00, 0x00, // 03       lea  rsi, [rip+text]
		0xac,       // 0a next: lodsb
		0x84, 0xc0, // 0b       test al, al
		0x74, 0x14, // 0d       jz   off
		0x88, 0xc4, // 0f       mov  ah, al
		0x66, 0xba, 0xfd, 0x03, // 11       mov  dx, 0x3fd
		0xec,       // 15 wait: in   al, dx
		0xa8, 0x20, // 16       test al, 0x20      (the port can take a byte)
		0x74, 0xfb, // 18       jz   wait
		0x66, 0xba, 0xf8, 0x03, // 1a       mov  dx, 0x3f8
		0x88, 0xe0, // 1e       mov  al, ah
		0xee,       // 20       out  dx, al
		0xeb, 0xe7, // 21       jmp  next
		0x48, 0x8b, 0x43, 0x58, // 23 off:  mov  rax, [rbx+0x58]
		0xb9, 0x02, 0x00, 0x00, 0x00, // 27       mov  ecx, 2        (EfiResetShutdown)
		0x31, 0xd2, // 2c       xor  edx, edx
		0x45, 0x31, 0xc0, // 2e       xor  r8d, r8d
		0x45, 0x31, 0xc9, // 31       xor  r9d, r9d
		0x48, 0x83, 0xec, 0x28, // 34       sub  rsp, 0x28
		0xff, 0x50, 0x68, // 38       call [rax+0x68]
	},
	[]byte(uefiText+"\x00"), // 3b text
)

const (
	uefiSector = 512
	// uefiPartition is the size of the EFI system partition in sectors.
	uefiPartition = gptdisk.PartitionSize / uefiSector
)

// bootsByUEFI checks that the machine boots a disk for UEFI, that the firmware keeps its variables in the machine's own
// file, and that the machine boots again with that file.
func bootsByUEFI(t *testing.T, s Subject) {
	l, d := s.Begin(t), s.uefiDefinition(t, uefiDisk())
	defer l.Close()
	code, err := os.Stat(d.UEFI.Code.Path)
	must(t, err)
	l.mustDefine(t, d)
	for run := range 2 {
		must(t, l.Start(t.Context(), d.Name))
		if end := l.End(d.Name); end.Cause != machine.CausePowerOff {
			t.Errorf("end of run %d = %+v, want a power-off", run, end)
		}
		AwaitLog(t, d, uefiText, run+1)
	}
	vars, err := os.ReadFile(d.UEFI.Vars.Path)
	must(t, err)
	if name := []byte("B\x00o\x00o\x00t\x00O\x00r\x00d\x00e\x00r\x00"); !bytes.Contains(vars, name) {
		t.Error("the machine's UEFI variables lack BootOrder, which the firmware sets")
	}
	if after, err := os.Stat(d.UEFI.Code.Path); err != nil || !after.ModTime().Equal(code.ModTime()) {
		t.Errorf("the firmware's file changed, or Stat failed: %v", err)
	}
	must(t, l.Undefine(t.Context(), d.Name))
}

// noBootByUEFI checks that the console of a machine with an empty disk shows that UEFI finds nothing to boot.
func noBootByUEFI(t *testing.T, s Subject) {
	l, d := s.Begin(t), s.uefiDefinition(t, make([]byte, gptdisk.Size))
	defer l.Close()
	l.mustDefine(t, d)
	must(t, l.Start(t.Context(), d.Name))
	Await(t, "the firmware's shell waits for input", func() bool {
		output, err := os.ReadFile(d.SerialLog)
		must(t, err)
		return len(output) <= firmware.ConsoleSize && firmware.OfConsole(string(output)).Failed
	})
	must(t, l.Undefine(t.Context(), d.Name))
}

// uefiDefinition returns a machine that boots the given raw disk by UEFI.
func (s Subject) uefiDefinition(t *testing.T, disk []byte) machine.Definition {
	t.Helper()
	found, err := firmware.Find()
	must(t, err)
	d := s.Definition(t)
	root, vars := filepath.Join(d.StateDir, "uefi.raw"), filepath.Join(d.StateDir, "nvram.fd")
	template, err := os.ReadFile(found.Vars)
	must(t, err)
	must(t, os.WriteFile(vars, template, 0o600))
	must(t, os.WriteFile(root, disk, 0o600))
	d.Kernel, d.Initrd, d.Cmdline = nil, nil, ""
	d.UEFI = &machine.UEFI{Code: machine.File{Path: found.Code}, Vars: machine.FilePart{File: machine.File{Path: vars}}}
	d.Disks = []machine.Disk{{ID: "root", File: machine.File{Path: root}, Format: "raw", Bus: machine.BusVirtio}}
	return d
}

// uefiDisk returns a raw disk that boots by UEFI only. Its EFI system partition has uefiCode as \EFI\BOOT\BOOTX64.EFI.
func uefiDisk() []byte { return gptdisk.Build(uefiFiles(uefiProgram())) }

// uefiFiles returns a FAT12 file system of uefiPartition sectors with one program. Each cluster is one sector.
func uefiFiles(program []byte) []byte {
	const fatSectors, rootEntries = 6, 16
	le := binary.LittleEndian
	fs := make([]byte, uefiPartition*uefiSector)
	copy(fs, "\xeb\x3c\x90TRIPOD  \x00\x02\x01\x01\x00\x02")
	le.PutUint16(fs[17:], rootEntries)
	le.PutUint16(fs[19:], uefiPartition)
	fs[21] = 0xf8 // a fixed disk
	le.PutUint16(fs[22:], fatSectors)
	copy(fs[36:], "\x80\x00\x29\x01\x00\x00\x00TEST       FAT12   ")
	fs[510], fs[511] = 0x55, 0xaa
	const root = (1 + 2*fatSectors) * uefiSector
	cluster := func(n int) []byte { return fs[root+uefiSector+(n-2)*uefiSector:] }
	entry := func(at []byte, name string, kind byte, first, size int) {
		copy(at, name)
		at[11] = kind
		le.PutUint16(at[26:], uint16(first))
		le.PutUint32(at[28:], uint32(size))
	}
	const directory, archive = 0x10, 0x20
	entry(fs[root:], "EFI        ", directory, 2, 0)
	entry(cluster(2), ".          ", directory, 2, 0)
	entry(cluster(2)[32:], "..         ", directory, 0, 0)
	entry(cluster(2)[64:], "BOOT       ", directory, 3, 0)
	entry(cluster(3), ".          ", directory, 3, 0)
	entry(cluster(3)[32:], "..         ", directory, 2, 0)
	entry(cluster(3)[64:], "BOOTX64 EFI", archive, 4, len(program))
	copy(cluster(4), program)
	// Clusters 0 and 1 do not exist. The program has the clusters 4 and 5; each directory has one.
	for i, next := range []int{0xff8, 0xfff, 0xfff, 0xfff, 5, 0xfff} {
		for fat := range 2 {
			at := fs[(1+fat*fatSectors)*uefiSector+i*3/2:]
			le.PutUint16(at, le.Uint16(at)|uint16(next<<(i%2*4)))
		}
	}
	return fs
}

// uefiProgram returns uefiCode as a PE32+ file of two sectors, one for the headers and one for the code.
func uefiProgram() []byte {
	const header, optional, codeAt = 64, 64 + 4 + 20, 0x1000
	le := binary.LittleEndian
	file := make([]byte, 2*uefiSector)
	copy(file, "MZ")
	le.PutUint32(file[60:], header)
	copy(file[header:], "PE\x00\x00\x64\x86\x01\x00") // x86-64, one section
	const dirs = 6
	le.PutUint16(file[header+20:], 112+8*dirs) // the size of the optional header
	le.PutUint16(file[header+22:], 0x0022)     // executable, large addresses
	for offset, value := range map[int]uint32{
		0: 0x20b, 4: uefiSector, 16: codeAt, 20: codeAt, 32: codeAt, 36: uefiSector, 56: 2 * codeAt, 60: uefiSector, 68: 10, 108: dirs,
	} {
		le.PutUint32(file[optional+offset:], value)
	}
	section := file[optional+112+8*dirs:]
	copy(section, ".text")
	for i, value := range []uint32{uefiSector, codeAt, uefiSector, uefiSector} {
		le.PutUint32(section[8+4*i:], value)
	}
	le.PutUint32(section[36:], 0x60000020) // code, readable, executable
	copy(file[uefiSector:], uefiCode)
	return file
}
