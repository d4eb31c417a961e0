package rootdisk

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash/crc32"

	"github.com/containerd/errdefs"
)

// Offset is where on the device the guest's disk begins, in bytes.
const Offset = 1 << 20

const (
	markSize = 512
	version  = 1
	maxImage = 256
)

// magic begins every mark.
var magic = [16]byte([]byte("TRIPOD ROOT DISK"))

// stage is how far a device has come.
type stage uint32

const (
	stageWriting  stage = 1
	stageComplete stage = 2
)

// mark is the first sector of a device of ours, little endian, with the CRC-32C of all before it as its last four bytes.
type mark struct {
	Magic   [16]byte
	Version uint32
	Stage   stage
	// ID is new for every copy.
	ID [16]byte
	// Image is the ID of the image, padded with NUL bytes, ImageSize its disk's size in bytes.
	ImageSize uint64
	Image     [maxImage]byte
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func (m mark) encode() []byte {
	raw, err := binary.Append(make([]byte, 0, markSize), binary.LittleEndian, m)
	if err != nil {
		panic(err) // a struct of numbers
	}
	raw = raw[:markSize]
	binary.LittleEndian.PutUint32(raw[markSize-4:], crc32.Checksum(raw[:markSize-4], castagnoli))
	return raw
}

// decode reads a mark; there is none where the first bytes are not its magic. A damaged one is errdefs.ErrDataLoss, one of
// another version errdefs.ErrFailedPrecondition.
func decode(raw []byte) (m mark, there bool, err error) {
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
		return m, true, fmt.Errorf("the mark of its root disk is of version %d, stage %d, which this program does not know: %w", m.Version, m.Stage, errdefs.ErrFailedPrecondition)
	}
	return m, true, nil
}

func (m mark) id() string    { return hex.EncodeToString(m.ID[:]) }
func (m mark) image() string { return string(bytes.TrimRight(m.Image[:], "\x00")) }
