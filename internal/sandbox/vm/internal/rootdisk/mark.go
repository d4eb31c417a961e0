package rootdisk

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash/crc32"

	"github.com/containerd/errdefs"
)

// Offset is the offset of the guest's disk on the device, in bytes.
const Offset = 1 << 20

const (
	markSize = 512
	version  = 1
	maxImage = 256
)

// magic is the first field of every mark.
var magic = [16]byte([]byte("TRIPOD ROOT DISK"))

// stage is the progress of the copy.
type stage uint32

const (
	stageWriting  stage = 1
	stageComplete stage = 2
)

// mark is the first sector of a root disk, in little-endian order. Its fields are followed by zeros. The sector's last
// four bytes are the CRC-32C of its other bytes.
type mark struct {
	Magic   [16]byte
	Version uint32
	Stage   stage
	// ID is random for every copy.
	ID [16]byte
	// Image is the ID of the image, padded with NUL bytes. ImageSize is the size of its disk in bytes.
	ImageSize uint64
	Image     [maxImage]byte
	// VarsSize is the size of the UEFI variables at VarsOffset in bytes, or 0 if there are none. Releases that do not
	// know the field write 0.
	VarsSize uint64
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func (m mark) encode() []byte {
	raw, err := binary.Append(make([]byte, 0, markSize), binary.LittleEndian, m)
	if err != nil {
		panic(err) // impossible for fixed-size fields
	}
	raw = raw[:markSize]
	binary.LittleEndian.PutUint32(raw[markSize-4:], crc32.Checksum(raw[:markSize-4], castagnoli))
	return raw
}

// decode decodes a mark. The second result is false if the bytes do not begin with magic. The error is
// errdefs.ErrDataLoss for a damaged mark and errdefs.ErrFailedPrecondition for an unknown version.
func decode(raw []byte) (m mark, found bool, err error) {
	if !bytes.HasPrefix(raw, magic[:]) {
		return m, false, nil
	}
	if crc32.Checksum(raw[:markSize-4], castagnoli) != binary.LittleEndian.Uint32(raw[markSize-4:markSize]) {
		return m, true, fmt.Errorf("the mark of its root disk is damaged: %w", errdefs.ErrDataLoss)
	}
	if _, err := binary.Decode(raw, binary.LittleEndian, &m); err != nil {
		return m, true, err
	}
	if m.Version != version || m.Stage != stageWriting && m.Stage != stageComplete {
		return m, true, fmt.Errorf("the mark of its root disk has the unknown version %d or stage %d: %w", m.Version, m.Stage,
			errdefs.ErrFailedPrecondition)
	}
	return m, true, nil
}

func (m mark) id() string    { return hex.EncodeToString(m.ID[:]) }
func (m mark) image() string { return string(bytes.TrimRight(m.Image[:], "\x00")) }
