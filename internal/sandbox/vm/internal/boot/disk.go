package boot

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"

	"github.com/containerd/errdefs"
)

const (
	sector = 512
	// codeSize is the number of bytes for code in a boot sector with a partition table.
	codeSize              = 440
	tableOffset, entries  = 446, 4
	typeProtective        = 0xee
	typeEFI               = 0xef
	gptMagic              = "EFI PART"
	gptHeader             = 92
	minGPTEntry, maxTable = 128, 1 << 20
)

// guidESP is the type GUID of an EFI system partition, as stored on disk.
var guidESP = []byte{0x28, 0x73, 0x2a, 0xc1, 0x1f, 0xf8, 0xd2, 0x11, 0xba, 0x4b, 0x00, 0xa0, 0xc9, 0x3e, 0xc9, 0x3b}

// Finding is the result of Inspect.
type Finding struct {
	// Signed means that the disk's first sector is marked as a boot sector, so that a BIOS jumps to this sector. NoCode
	// means that the boot sector has no code.
	Signed, NoCode bool
	// EFI means that the disk has an EFI system partition.
	EFI bool
}

// UEFIOnly reports whether the disk boots by UEFI, but not with a BIOS.
func (f Finding) UEFIOnly() bool { return f.Signed && f.NoCode && f.EFI }

// Unbootable says why a disk that a BIOS considers bootable cannot be booted. It returns "" if the disk may be
// bootable, or if the BIOS reports the defect itself.
func (f Finding) Unbootable() string {
	switch {
	case !f.Signed || !f.NoCode:
		return ""
	case f.UEFIOnly():
		return "the disk's boot sector has no code, and there is an EFI system partition: it boots by UEFI only, but this machine has a BIOS"
	default:
		return "the disk's boot sector has no code"
	}
}

// Inspect inspects a disk of the given size in bytes. If a partition reaches beyond the disk's end, Inspect returns
// errdefs.ErrInvalidArgument. It returns errors from reading the disk unchanged.
func Inspect(disk io.ReaderAt, size uint64) (Finding, error) {
	var boot [sector]byte
	if err := readAt(disk, boot[:], 0); err != nil {
		return Finding{}, err
	}
	f := Finding{Signed: boot[510] == 0x55 && boot[511] == 0xaa}
	if !f.Signed {
		return f, nil
	}
	f.NoCode = isZero(boot[:codeSize])
	parts := readMBR(boot[:])
	for _, p := range parts {
		if p.kind == typeProtective {
			return f, f.inspectGPT(disk, size)
		}
	}
	for _, p := range parts {
		f.EFI = f.EFI || p.kind == typeEFI
		if err := p.within(size); err != nil {
			return f, err
		}
	}
	return f, nil
}

// partition is an entry in a partition table. first is the partition's first sector, and end the first sector after the
// partition.
type partition struct {
	number     int
	kind       byte
	first, end uint64
}

func (p partition) within(size uint64) error {
	if p.end > size/sector {
		return fmt.Errorf("the disk is cut off: its partition %d ends at sector %d, but the disk has %d sectors: %w", p.number, p.end,
			size/sector, errdefs.ErrInvalidArgument)
	}
	return nil
}

// readMBR returns the partitions in a boot sector, or nil if the boot sector has code instead of a partition table.
func readMBR(boot []byte) (parts []partition) {
	for i := range entries {
		e := boot[tableOffset+16*i:][:16]
		if isZero(e) {
			continue
		}
		first, count := uint64(binary.LittleEndian.Uint32(e[8:])), uint64(binary.LittleEndian.Uint32(e[12:]))
		if e[0]&0x7f != 0 || e[4] == 0 || count == 0 {
			return nil
		}
		p := partition{number: i + 1, kind: e[4], first: first, end: first + count}
		for _, other := range parts {
			if p.first < other.end && other.first < p.end {
				return nil
			}
		}
		parts = append(parts, p)
	}
	return parts
}

// inspectGPT inspects the GUID partition table. It ignores a damaged table, which the boot loader may not need.
func (f *Finding) inspectGPT(disk io.ReaderAt, size uint64) error {
	var header [sector]byte
	if err := readAt(disk, header[:], sector); err != nil {
		return err
	}
	le := binary.LittleEndian
	length, sum := le.Uint32(header[12:]), le.Uint32(header[16:])
	if string(header[:8]) != gptMagic || length < gptHeader || length > sector {
		return nil
	}
	checked := bytes.Clone(header[:length])
	clear(checked[16:20])
	at, count, width := le.Uint64(header[72:]), le.Uint32(header[80:]), le.Uint32(header[84:])
	if crc32.ChecksumIEEE(checked) != sum || width < minGPTEntry || uint64(count)*uint64(width) > maxTable || at > size/sector {
		return nil
	}
	table := make([]byte, count*width)
	if err := readAt(disk, table, int64(at)*sector); err != nil {
		return err
	}
	if crc32.ChecksumIEEE(table) != le.Uint32(header[88:]) {
		return nil
	}
	for i := range int(count) {
		e := table[i*int(width):][:minGPTEntry]
		if isZero(e[:16]) {
			continue
		}
		f.EFI = f.EFI || bytes.Equal(e[:16], guidESP)
		if last := le.Uint64(e[40:]); last >= size/sector {
			return partition{number: i + 1, end: last + 1}.within(size)
		}
	}
	return nil
}

// readAt fills buf with the disk's content at an offset. Beyond the disk's end, it fills buf with zeros.
func readAt(disk io.ReaderAt, buf []byte, at int64) error {
	n, err := disk.ReadAt(buf, at)
	clear(buf[n:])
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

func isZero(b []byte) bool { return len(bytes.TrimLeft(b, "\x00")) == 0 }
