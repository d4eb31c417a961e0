package bootdisk

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
	// codeSize is how many bytes of a boot sector are code where there is a partition table behind it.
	codeSize              = 440
	tableOffset, entries  = 446, 4
	typeProtective        = 0xee
	typeEFI               = 0xef
	gptMagic              = "EFI PART"
	gptHeader             = 92
	minGPTEntry, maxTable = 128, 1 << 20
)

// guidESP is the type of an EFI system partition, as it is on the disk.
var guidESP = []byte{0x28, 0x73, 0x2a, 0xc1, 0x1f, 0xf8, 0xd2, 0x11, 0xba, 0x4b, 0x00, 0xa0, 0xc9, 0x3e, 0xc9, 0x3b}

// Finding is what there is on a disk.
type Finding struct {
	// Signed says that there is a boot sector, which a BIOS jumps to; NoCode, that there is nothing to jump to.
	Signed, NoCode bool
	// EFI says that there is an EFI system partition.
	EFI bool
}

// Unbootable says why a disk that a BIOS takes for bootable cannot be booted; "" when nothing speaks against it.
func (f Finding) Unbootable() string {
	switch {
	case !f.Signed || !f.NoCode:
		return ""
	case f.EFI:
		return "the disk's boot sector holds no code, and there is an EFI system partition: it boots by UEFI only, and a machine has a BIOS; use an image that boots by BIOS, too"
	default:
		return "the disk's boot sector holds no code"
	}
}

// Inspect looks at a disk of size bytes. A disk whose partitions reach beyond its end is errdefs.ErrInvalidArgument; errors of disk
// are returned as they are.
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

// partition is one of a table; first and end are sectors, end is the first behind it.
type partition struct {
	number     int
	kind       byte
	first, end uint64
}

func (p partition) within(size uint64) error {
	if p.end > size/sector {
		return fmt.Errorf("the disk is cut off: its partition %d reaches to sector %d, and there are %d: %w", p.number, p.end, size/sector, errdefs.ErrInvalidArgument)
	}
	return nil
}

// readMBR reads the partition table of a boot sector; nil when it has none but code in its place.
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

// inspectGPT reads the GUID partition table. One that is damaged says nothing: a boot loader may not need it.
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

// readAt reads all of buf; what is behind the end is zero.
func readAt(disk io.ReaderAt, buf []byte, at int64) error {
	n, err := disk.ReadAt(buf, at)
	clear(buf[n:])
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

func isZero(b []byte) bool { return len(bytes.TrimLeft(b, "\x00")) == 0 }
