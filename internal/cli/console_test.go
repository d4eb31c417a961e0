package cli

import (
	"io"
	"strings"
	"testing"
	"testing/iotest"
)

// TestEscape checks that input is passed on unchanged until the escape keys.
func TestEscape(t *testing.T) {
	for keys, cases := range map[string]map[string]string{
		consoleKeys: {"ls\r": "ls\r", "a\x03b\x1b[A": "a\x03b\x1b[A", "ab\x1dcd": "ab", "\x1d": "", "": ""},
		attachKeys: {"ls\r": "ls\r", "ab\x10\x11cd": "ab", "\x10\x11": "", "a\x10b\x11": "a\x10b\x11", "\x10\x10\x11x": "\x10", "a\x10": "a\x10",
			"": ""},
	} {
		for in, want := range cases {
			for _, wrap := range []func(io.Reader) io.Reader{func(r io.Reader) io.Reader { return r }, iotest.OneByteReader, iotest.DataErrReader} {
				left := 0
				got, err := io.ReadAll(&escape{from: wrap(strings.NewReader(in)), keys: keys, onMatch: func() { left++ }})
				if string(got) != want || err != nil || (left == 1) != strings.Contains(in, keys) {
					t.Errorf("escape of %q: got %q, %v and %d matches; want %q", in, got, err, left, want)
				}
			}
		}
	}
}
