package gptdisk

import (
	"encoding/binary"
	"slices"
)

// What the program of a bootable disk prints on the serial console: Kept, if it finds the variable that it has set when
// it ran for the first time, and then Text.
const (
	Kept = "KEPT-VARIABLE "
	Text = "STARTED-BY-UEFI\r\n"
)

// Bootable returns a raw disk whose EFI system partition is Files.
func Bootable() []byte { return Build(Files()) }

// Files returns a file system with a program for UEFI, which sets a variable, prints Text on the serial console and turns
// the machine off.
func Files() []byte { return fat(portableExecutable()) }

// code is the program. The firmware passes the address of its system table in rdx. The table has the address of the
// runtime services at offset 0x58, and the services have the addresses of GetVariable at offset 0x48, of SetVariable at
// 0x58, and of ResetSystem at 0x68.
var code = slices.Concat(
	[]byte{
		0x48, 0x83, 0xec, 0x38, // 00       sub  rsp, 0x38
		0x48, 0x8b, 0x5a, 0x58, // 04       mov  rbx, [rdx+0x58]
		0x48, 0x8d, 0x0d, 0x97, 0x00, 0x00, 0x00, // 08       lea  rcx, [rip+name]
		0x48, 0x8d, 0x15, 0x80, 0x00, 0x00, 0x00, // 0f       lea  rdx, [rip+guid]
		0x45, 0x31, 0xc0, // 16       xor  r8d, r8d
		0x4c, 0x8d, 0x4c, 0x24, 0x28, // 19       lea  r9, [rsp+0x28]
		0x49, 0xc7, 0x01, 0x01, 0x00, 0x00, 0x00, // 1e       mov  [r9], 1
		0x48, 0x8d, 0x44, 0x24, 0x30, // 25       lea  rax, [rsp+0x30]
		0x48, 0x89, 0x44, 0x24, 0x20, // 2a       mov  [rsp+0x20], rax
		0xff, 0x53, 0x48, // 2f       call [rbx+0x48]       (GetVariable)
		0x48, 0x8d, 0x35, 0x73, 0x00, 0x00, 0x00, // 32       lea  rsi, [rip+kept]
		0x48, 0x85, 0xc0, // 39       test rax, rax
		0x74, 0x2e, // 3c       jz   next
		0x48, 0x8d, 0x0d, 0x61, 0x00, 0x00, 0x00, // 3e       lea  rcx, [rip+name]
		0x48, 0x8d, 0x15, 0x4a, 0x00, 0x00, 0x00, // 45       lea  rdx, [rip+guid]
		0x41, 0xb8, 0x07, 0x00, 0x00, 0x00, // 4c       mov  r8d, 7           (nonvolatile, boot services, runtime)
		0x41, 0xb9, 0x01, 0x00, 0x00, 0x00, // 52       mov  r9d, 1
		0x48, 0x8d, 0x44, 0x24, 0x30, // 58       lea  rax, [rsp+0x30]
		0x48, 0x89, 0x44, 0x24, 0x20, // 5d       mov  [rsp+0x20], rax
		0xff, 0x53, 0x58, // 62       call [rbx+0x58]       (SetVariable)
		0x48, 0x8d, 0x35, 0x4e, 0x00, 0x00, 0x00, // 65       lea  rsi, [rip+text]
		0xac,       // 6c next: lodsb
		0x84, 0xc0, // 6d       test al, al
		0x74, 0x14, // 6f       jz   off
		0x88, 0xc4, // 71       mov  ah, al
		0x66, 0xba, 0xfd, 0x03, // 73       mov  dx, 0x3fd
		0xec,       // 77 wait: in   al, dx
		0xa8, 0x20, // 78       test al, 0x20         (the port can take a byte)
		0x74, 0xfb, // 7a       jz   wait
		0x66, 0xba, 0xf8, 0x03, // 7c       mov  dx, 0x3f8
		0x88, 0xe0, // 80       mov  al, ah
		0xee,       // 82       out  dx, al
		0xeb, 0xe7, // 83       jmp  next
		0xb9, 0x02, 0x00, 0x00, 0x00, // 85 off:  mov  ecx, 2           (EfiResetShutdown)
		0x31, 0xd2, // 8a       xor  edx, edx
		0x45, 0x31, 0xc0, // 8c       xor  r8d, r8d
		0x45, 0x31, 0xc9, // 8f       xor  r9d, r9d
		0xff, 0x53, 0x68, // 92       call [rbx+0x68]       (ResetSystem)
		0xf4, // 95       hlt                        (so that the name has an even address)
	},
	[]byte("TRIPOD TEST GUID"),   // 96 guid
	[]byte("T\x00K\x00\x00\x00"), // a6 name
	[]byte(Kept+Text+"\x00"),     // ac kept, ba text
)

// fat returns a FAT12 file system that fills the partition and has one program, \EFI\BOOT\BOOTX64.EFI. Each cluster is one
// sector.
func fat(program []byte) []byte {
	const sectors, fatSectors, rootEntries = PartitionSize / sector, 6, 16
	le := binary.LittleEndian
	fs := make([]byte, sectors*sector)
	copy(fs, "\xeb\x3c\x90TRIPOD  \x00\x02\x01\x01\x00\x02")
	le.PutUint16(fs[17:], rootEntries)
	le.PutUint16(fs[19:], sectors)
	fs[21] = 0xf8 // a fixed disk
	le.PutUint16(fs[22:], fatSectors)
	copy(fs[36:], "\x80\x00\x29\x01\x00\x00\x00TEST       FAT12   ")
	fs[510], fs[511] = 0x55, 0xaa
	const root = (1 + 2*fatSectors) * sector
	cluster := func(n int) []byte { return fs[root+sector+(n-2)*sector:] }
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
		for table := range 2 {
			at := fs[(1+table*fatSectors)*sector+i*3/2:]
			le.PutUint16(at, le.Uint16(at)|uint16(next<<(i%2*4)))
		}
	}
	return fs
}

// portableExecutable returns code as a PE32+ file of two sectors, one for the headers and one for the code.
func portableExecutable() []byte {
	const header, optional, codeAt = 64, 64 + 4 + 20, 0x1000
	le := binary.LittleEndian
	file := make([]byte, 2*sector)
	copy(file, "MZ")
	le.PutUint32(file[60:], header)
	copy(file[header:], "PE\x00\x00\x64\x86\x01\x00") // x86-64, one section
	const dirs = 6
	le.PutUint16(file[header+20:], 112+8*dirs) // the size of the optional header
	le.PutUint16(file[header+22:], 0x0022)     // executable, large addresses
	for offset, value := range map[int]uint32{
		0: 0x20b, 4: sector, 16: codeAt, 20: codeAt, 32: codeAt, 36: sector, 56: 2 * codeAt, 60: sector, 68: 10, 108: dirs,
	} {
		le.PutUint32(file[optional+offset:], value)
	}
	section := file[optional+112+8*dirs:]
	copy(section, ".text")
	for i, value := range []uint32{sector, codeAt, sector, sector} {
		le.PutUint32(section[8+4*i:], value)
	}
	le.PutUint32(section[36:], 0x60000020) // code, readable, executable
	copy(file[sector:], code)
	return file
}
