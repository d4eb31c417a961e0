package boot

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/tripod-run/tripod/test/harness/cdimage"
)

// efi stands for a file system with a boot loader for UEFI.
var efi = make([]byte, cdSector)

func TestUEFIOnlyCD(t *testing.T) {
	for name, test := range map[string]struct {
		image []byte
		want  bool
	}{
		"BIOS":         {cdimage.Build(true, nil), false},
		"both":         {cdimage.Build(true, efi), false},
		"UEFI":         {cdimage.Build(false, efi), true},
		"not bootable": {cdimage.Build(false, nil), false},
		"no catalog":   {change(cdimage.Build(false, efi), func(d []byte) { clear(d[17*cdSector:][:40]) }), false},
		"far catalog": {change(cdimage.Build(false, efi), func(d []byte) {
			binary.LittleEndian.PutUint32(d[17*cdSector+catalogOffset:], 1<<32-1)
		}), false},
		"cut off": {cdimage.Build(false, efi)[:17*cdSector+100], false},
		"empty":   {nil, false},
	} {
		if got, err := UEFIOnlyCD(bytes.NewReader(test.image)); got != test.want || err != nil {
			t.Errorf("%s: UEFIOnlyCD = %t, %v; want %t", name, got, err, test.want)
		}
	}
}

// FuzzUEFIOnlyCD: whatever an image contains, UEFIOnlyCD returns without an error.
func FuzzUEFIOnlyCD(f *testing.F) {
	for _, image := range [][]byte{cdimage.Build(true, efi), cdimage.Build(false, efi), nil} {
		f.Add(image)
	}
	f.Fuzz(func(t *testing.T, image []byte) {
		if _, err := UEFIOnlyCD(bytes.NewReader(image)); err != nil {
			t.Errorf("UEFIOnlyCD error = %v, want none", err)
		}
	})
}
