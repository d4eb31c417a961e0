// Package gptdisk makes small disks that boot by UEFI only, for tests of machines. Begin reading with Build.
//
// A disk has the GUID partition table that firmware reads, and no boot code for a BIOS. The package must not know about
// Tripod.
//
// Source: UEFI Specification 2.10, chapter 5.
package gptdisk

import (
	"encoding/binary"
	"hash/crc32"
)

const (
	sector = 512
	// Size is the size of a disk in bytes, and PartitionSize that of its partition.
	Size, PartitionSize = 2 << 20, 1 << 20
	// first is the partition's first sector. The partition tables are before and behind the partition.
	first = 1024
)

// Build returns a raw disk. Its only partition is an EFI system partition that begins with the given content, and is zero
// behind it. The content has at most PartitionSize bytes.
func Build(content []byte) []byte {
	const sectors = Size / sector
	disk := make([]byte, Size)
	le := binary.LittleEndian
	disk[450], disk[510], disk[511] = 0xee, 0x55, 0xaa // the protective partition
	le.PutUint32(disk[454:], 1)
	le.PutUint32(disk[458:], sectors-1)
	table := disk[2*sector:][:128*128]
	copy(table, []byte{0x28, 0x73, 0x2a, 0xc1, 0x1f, 0xf8, 0xd2, 0x11, 0xba, 0x4b, 0x00, 0xa0, 0xc9, 0x3e, 0xc9, 0x3b})
	table[16] = 1 // the partition's GUID
	le.PutUint64(table[32:], first)
	le.PutUint64(table[40:], first+PartitionSize/sector-1)
	// The last sector has a copy of the header. Both headers name the sector of the other one, and share the table.
	for _, at := range []uint64{1, sectors - 1} {
		header := disk[at*sector:][:92]
		copy(header, "EFI PART\x00\x00\x01\x00\x5c\x00\x00\x00")
		for offset, value := range map[int]uint64{24: at, 32: sectors - at, 40: 34, 48: sectors - 34, 56: 1, 72: 2} {
			le.PutUint64(header[offset:], value)
		}
		le.PutUint32(header[80:], 128)
		le.PutUint32(header[84:], 128)
		le.PutUint32(header[88:], crc32.ChecksumIEEE(table))
		le.PutUint32(header[16:], crc32.ChecksumIEEE(header))
	}
	copy(disk[first*sector:][:PartitionSize], content)
	return disk
}
