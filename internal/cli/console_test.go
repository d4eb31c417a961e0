package cli

import (
	"io"
	"strings"
	"testing"
	"testing/iotest"
)

// TestEscape holds that input is passed on as it is until the key that leaves the console.
func TestEscape(t *testing.T) {
	for in, want := range map[string]string{
		"ls\r": "ls\r", "a\x03b\x1b[A": "a\x03b\x1b[A", "ab\x1dcd": "ab", "\x1d": "", "": "",
	} {
		for _, wrap := range []func(io.Reader) io.Reader{func(r io.Reader) io.Reader { return r }, iotest.OneByteReader, iotest.DataErrReader} {
			left := 0
			got, err := io.ReadAll(&escape{from: wrap(strings.NewReader(in)), left: func() { left++ }})
			if string(got) != want || err != nil || (left == 1) != strings.Contains(in, "\x1d") {
				t.Errorf("%q: %q, %v, left %d times; want %q", in, got, err, left, want)
			}
		}
	}
}
