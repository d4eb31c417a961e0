// Package cdimage makes small CD-ROM images that boot, for tests of machines. Begin reading with Build.
//
// An image has no files, only the parts of ISO 9660 and of the El Torito boot catalog that firmware reads. The package
// must not know about Tripod.
//
// Source: "El Torito" Bootable CD-ROM Format Specification 1.0.
package cdimage

import (
	"encoding/binary"
	"slices"
)

// Text is what a BIOS program made by Build prints.
const Text = "STARTED-FROM-CD\r\n"

// biosCode is a program for a BIOS, which loads it at any address that is a multiple of 16. It prints the text behind it
// on the first serial port, and turns a q35 machine off.
var biosCode = []byte{
	0xe8, 0x00, 0x00, // 00       call here
	0x5e,             // 03 here: pop  si
	0x83, 0xc6, 0x26, // 04       add  si, text-here
	0x2e, 0xac, // 07 next: lodsb cs:
	0x84, 0xc0, // 09       test al, al
	0x74, 0x12, // 0b       jz   off
	0x88, 0xc4, // 0d       mov  ah, al
	0xba, 0xfd, 0x03, // 0f       mov  dx, 0x3fd
	0xec,       // 12 wait: in   al, dx
	0xa8, 0x20, // 13       test al, 0x20      (the port can take a byte)
	0x74, 0xfb, // 15       jz   wait
	0xba, 0xf8, 0x03, // 17       mov  dx, 0x3f8
	0x88, 0xe0, // 1a       mov  al, ah
	0xee,       // 1c       out  dx, al
	0xeb, 0xe8, // 1d       jmp  next
	0xba, 0x04, 0x06, // 1f off:  mov  dx, 0x604      (the ACPI register PM1a_CNT)
	0xb8, 0x00, 0x20, // 22       mov  ax, 0x2000     (sleep, state S5)
	0xef,       // 25       out  dx, ax
	0xf4,       // 26 halt: hlt
	0xeb, 0xfd, // 27       jmp  halt
} // 29 text

const (
	sector = 2048
	// The sectors of the image's parts.
	primaryAt, recordAt, endAt, catalogAt, biosAt, efiAt = 16, 17, 18, 19, 20, 21
)

// Build returns an image. If bios is set, a BIOS starts a program that prints Text and turns the machine off. The other
// argument is a FAT file system of whole sectors with a boot loader for UEFI, or nil.
func Build(bios bool, efi []byte) []byte {
	image := make([]byte, efiAt*sector, efiAt*sector+len(efi))
	image = append(image, efi...)
	le, be := binary.LittleEndian, binary.BigEndian
	part := func(n int) []byte { return image[n*sector:][:sector] }
	primary := part(primaryAt)
	copy(primary, "\x01CD001\x01")
	both16 := func(at int, value uint16) { le.PutUint16(primary[at:], value); be.PutUint16(primary[at+2:], value) }
	le.PutUint32(primary[80:], uint32(len(image)/sector))
	be.PutUint32(primary[84:], uint32(len(image)/sector))
	both16(120, 1) // volumes in the set
	both16(124, 1) // this volume's number
	both16(128, sector)
	copy(part(recordAt), "\x00CD001\x01EL TORITO SPECIFICATION")
	le.PutUint32(part(recordAt)[0x47:], catalogAt)
	copy(part(endAt), "\xffCD001\x01")
	catalog := part(catalogAt)
	const platformEFI = 0xef
	if bios {
		copy(part(biosAt), slices.Concat(biosCode, []byte(Text)))
		head(catalog, 0)
		entry(catalog[32:], biosAt, 4)
		catalog[64], catalog[65], catalog[66] = 0x91, platformEFI, 1 // the last section, with one entry
		catalog = catalog[64:]
	} else {
		head(catalog, platformEFI)
	}
	if efi != nil {
		entry(catalog[32:], efiAt, len(efi)/512)
	}
	return image
}

// head writes the validation entry, whose words add up to 0.
func head(catalog []byte, platform byte) {
	catalog[0], catalog[1], catalog[30], catalog[31] = 1, platform, 0x55, 0xaa
	sum := uint16(0)
	for at := 0; at < 32; at += 2 {
		sum += binary.LittleEndian.Uint16(catalog[at:])
	}
	binary.LittleEndian.PutUint16(catalog[28:], -sum)
}

// entry writes a bootable entry without emulation of a disk, for sectors of 512 bytes from the CD's given sector on.
func entry(at []byte, first, sectors int) {
	at[0] = 0x88
	binary.LittleEndian.PutUint16(at[6:], uint16(sectors))
	binary.LittleEndian.PutUint32(at[8:], uint32(first))
}
