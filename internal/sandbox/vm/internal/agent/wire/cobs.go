package wire

import (
	"bytes"
	"errors"
)

// Consistent overhead byte stuffing (Cheshire and Baker, 1997): what is stuffed contains no 0. Each block begins with its
// length, and but for those of the greatest length and the last one, the block's end stands for a 0.
const (
	cobsBlock = 254
	cobsFull  = cobsBlock + 1
)

var errStuffing = errors.New("the stuffing is broken")

// stuff appends src, stuffed, to dst.
func stuff(dst, src []byte) []byte {
	for {
		block := src[:min(len(src), cobsBlock)]
		if zero := bytes.IndexByte(block, 0); zero >= 0 {
			dst = append(dst, byte(zero+1))
			dst = append(dst, block[:zero]...)
			src = src[zero+1:]
			continue // a last 0 is followed by an empty block
		}
		dst = append(dst, byte(len(block)+1))
		dst = append(dst, block...)
		if src = src[len(block):]; len(src) == 0 {
			return dst
		}
	}
}

// unstuff undoes stuff in b's own memory.
func unstuff(b []byte) ([]byte, error) {
	out := b[:0]
	for len(b) > 0 {
		length := int(b[0])
		if length == 0 || length > len(b) {
			return nil, errStuffing
		}
		out = append(out, b[1:length]...) // never ahead of what is read
		b = b[length:]
		if length != cobsFull && len(b) > 0 {
			out = append(out, 0)
		}
	}
	return out, nil
}
