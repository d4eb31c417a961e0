package mqtt

import (
	"bufio"
	"bytes"
	"testing"
)

// FuzzReadPacket: no bytes from a broker make the client panic or use more memory than the limit.
func FuzzReadPacket(f *testing.F) {
	for _, seed := range []string{
		"\x20\x02\x00\x00", "\x30\x03\x00\x01a", "\x32\x06\x00\x01a\x00\x01m", "\x40\x02\x00\x01", "\x90\x03\x00\x01\x00", "\xb0\x02\x00\x01",
		"\xd0\x00", "\xe0\x02\x8b\x00",
		"\x20\x06\x00\x00\x03\x21\x00\x14", "\x30\x08\x00\x01a\x03\x23\x00\x01m", "\x20\xff\xff\xff\x7f", "\x90\x04\x00\x01\x00\x87",
	} {
		f.Add([]byte(seed), byte(4))
		f.Add([]byte(seed), byte(5))
	}
	f.Fuzz(func(t *testing.T, data []byte, version byte) {
		r := bufio.NewReader(bytes.NewReader(data))
		for {
			if _, err := readPacket(r, version, 1<<16); err != nil {
				return
			}
		}
	})
}
