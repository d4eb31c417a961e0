package boot

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
)

const size = 64 << 20

// code returns a disk whose boot sector jumps to itself and has no partition table.
func code() []byte {
	disk := make([]byte, 1<<20)
	copy(disk, []byte{0xeb, 0xfe})
	disk[510], disk[511] = 0x55, 0xaa
	return disk
}

// entry puts a partition into a boot sector.
func entry(disk []byte, n int, kind byte, first, count uint32) {
	e := disk[tableOffset+16*n:]
	e[4] = kind
	binary.LittleEndian.PutUint32(e[8:], first)
	binary.LittleEndian.PutUint32(e[12:], count)
}

// gpt returns a disk with a protective MBR and an EFI system partition that ends at the sector last.
func gpt(last uint64) []byte {
	disk := make([]byte, 1<<20)
	disk[510], disk[511] = 0x55, 0xaa
	entry(disk, 0, typeProtective, 1, size/sector-1)
	table := disk[2*sector:][:128*128]
	copy(table, guidESP)
	binary.LittleEndian.PutUint64(table[32:], 2048)
	binary.LittleEndian.PutUint64(table[40:], last)
	header := disk[sector:][:gptHeader]
	copy(header, gptMagic)
	for at, v := range map[int]uint32{8: 0x10000, 12: gptHeader, 80: 128, 84: 128, 88: crc32.ChecksumIEEE(table)} {
		binary.LittleEndian.PutUint32(header[at:], v)
	}
	binary.LittleEndian.PutUint64(header[72:], 2)
	binary.LittleEndian.PutUint32(header[16:], crc32.ChecksumIEEE(header))
	return disk
}

func change(disk []byte, f func([]byte)) []byte { f(disk); return disk }

func TestInspect(t *testing.T) {
	for name, test := range map[string]struct {
		disk []byte
		want Finding
		why  string // part of Unbootable
		cut  bool
	}{
		"zeros":        {make([]byte, 1<<20), Finding{}, "", false},
		"nothing":      {nil, Finding{}, "", false},
		"no signature": {code()[:500], Finding{}, "", false},
		"code":         {code(), Finding{Signed: true}, "", false},
		"MBR":          {change(code(), func(d []byte) { entry(d, 0, 0x83, 2048, 4096) }), Finding{Signed: true}, "", false},
		"MBR, cut off": {change(code(), func(d []byte) { entry(d, 0, 0x83, 2048, size/sector) }), Finding{Signed: true}, "", true},
		"code, no table": {change(code(), func(d []byte) { copy(d[446:510], strings.Repeat("\xf4\xeb", 32)) }), Finding{Signed: true}, "",
			false},
		"overlapping": {change(code(), func(d []byte) { entry(d, 0, 0x83, 1, size); entry(d, 1, 0x83, 2, size) }), Finding{Signed: true}, "",
			false},
		"UEFI only": {gpt(4095), Finding{Signed: true, NoCode: true, EFI: true}, "UEFI", false},
		"UEFI, by MBR": {change(code(), func(d []byte) { clear(d[:2]); entry(d, 0, typeEFI, 2048, 4096) }),
			Finding{Signed: true, NoCode: true, EFI: true}, "UEFI", false},
		"both":             {change(gpt(4095), func(d []byte) { d[0] = 0xeb }), Finding{Signed: true, EFI: true}, "", false},
		"no code":          {change(code(), func(d []byte) { clear(d[:2]) }), Finding{Signed: true, NoCode: true}, "no code", false},
		"GPT, last sector": {gpt(size/sector - 1), Finding{Signed: true, NoCode: true, EFI: true}, "UEFI", false},
		"GPT, cut off":     {gpt(size / sector), Finding{Signed: true, NoCode: true, EFI: true}, "UEFI", true},
		"GPT, damaged":     {change(gpt(size), func(d []byte) { d[2*sector+60] = 1 }), Finding{Signed: true, NoCode: true}, "no code", false},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := Inspect(bytes.NewReader(test.disk), size)
			if got != test.want || test.cut != errdefs.IsInvalidArgument(err) || !test.cut && err != nil {
				t.Errorf("Inspect = %+v, %v; want %+v, cut off: %t", got, err, test.want, test.cut)
			}
			if only := got.UEFIOnly(); only != (test.why == "UEFI") {
				t.Errorf("UEFIOnly = %t, want %t", only, !only)
			}
			if why := got.Unbootable(); (why == "") != (test.why == "") || !strings.Contains(why, test.why) {
				t.Errorf("Unbootable = %q, want %q", why, test.why)
			}
		})
	}
}

// FuzzInspect: whatever a disk contains, Inspect returns a finding or ErrInvalidArgument.
func FuzzInspect(f *testing.F) {
	for _, disk := range [][]byte{code(), gpt(4095), gpt(1 << 40), nil} {
		f.Add(disk[:min(len(disk), 40<<10)], uint64(size))
	}
	f.Fuzz(func(t *testing.T, disk []byte, size uint64) {
		if _, err := Inspect(bytes.NewReader(disk), size); err != nil && !errdefs.IsInvalidArgument(err) {
			t.Errorf("Inspect error = %v, want none or ErrInvalidArgument", err)
		}
	})
}
