package boot

import (
	"bytes"
	"encoding/binary"
	"io"
	"slices"
)

// Parts of an ISO 9660 image with an El Torito boot catalog.
const (
	cdSector = 2048
	// cdFirst is the first sector with a volume descriptor, and cdLast the last one that is searched.
	cdFirst, cdLast = 16, 80
	cdBootRecord    = "\x00CD001\x01EL TORITO SPECIFICATION"
	cdEnd           = "\xffCD001"
	catalogOffset   = 0x47
	catalogEntry    = 32
	catalogBootable = 0x88
	platformBIOS    = 0x00
	platformEFI     = 0xef
)

// UEFIOnlyCD reports whether an ISO 9660 image has a boot loader for UEFI, but none for a BIOS. It returns errors from
// reading the image unchanged.
func UEFIOnlyCD(image io.ReaderAt) (bool, error) {
	catalog, err := bootCatalog(image)
	if err != nil || catalog == nil {
		return false, err
	}
	var platforms []byte // of the bootable entries
	platform := catalog[1]
	for entry := range slices.Chunk(catalog[catalogEntry:], catalogEntry) {
		switch entry[0] {
		case 0x90, 0x91: // the header of the entries for another platform; 0x91 is the last header
			platform = entry[1]
		case catalogBootable:
			platforms = append(platforms, platform)
		}
	}
	return slices.Contains(platforms, platformEFI) && !slices.Contains(platforms, platformBIOS), nil
}

// bootCatalog returns the first sector of the boot catalog, or nil if there is no catalog.
func bootCatalog(image io.ReaderAt) ([]byte, error) {
	sector := make([]byte, cdSector)
	for n := int64(cdFirst); n <= cdLast; n++ {
		if err := readAt(image, sector, n*cdSector); err != nil {
			return nil, err
		}
		switch {
		case bytes.HasPrefix(sector, []byte(cdBootRecord)):
			at := int64(binary.LittleEndian.Uint32(sector[catalogOffset:]))
			return sector, readAt(image, sector, at*cdSector)
		case bytes.HasPrefix(sector, []byte(cdEnd)):
			return nil, nil
		}
	}
	return nil, nil
}
