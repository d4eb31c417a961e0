package wire

import (
	"bytes"
	"errors"
)

// Consistent overhead byte stuffing (COBS; Cheshire and Baker, 1997) encodes bytes so that the result contains no
// zeros. Each block begins with its length. The end of a block stands for a 0, unless the block is the last or has the
// maximum length.
const (
	cobsBlock = 254
	cobsFull  = cobsBlock + 1
)

var errStuffing = errors.New("invalid byte stuffing")

// stuff appends the encoded src to dst.
func stuff(dst, src []byte) []byte {
	for {
		block := src[:min(len(src), cobsBlock)]
		if zero := bytes.IndexByte(block, 0); zero >= 0 {
			dst = append(dst, byte(zero+1))
			dst = append(dst, block[:zero]...)
			src = src[zero+1:]
			continue // after a 0 at the end of src, this appends an empty block
		}
		dst = append(dst, byte(len(block)+1))
		dst = append(dst, block...)
		if src = src[len(block):]; len(src) == 0 {
			return dst
		}
	}
}

// unstuff decodes b in place.
func unstuff(b []byte) ([]byte, error) {
	out := b[:0]
	for len(b) > 0 {
		length := int(b[0])
		if length == 0 || length > len(b) {
			return nil, errStuffing
		}
		out = append(out, b[1:length]...) // never overtakes b
		b = b[length:]
		if length != cobsFull && len(b) > 0 {
			out = append(out, 0)
		}
	}
	return out, nil
}
