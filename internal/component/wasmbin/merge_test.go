package wasmbin

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
)

// segmentsOf is a data section with these segments: the words "OFFSET BYTES".
func segmentsOf(segments ...string) string {
	var b strings.Builder
	b.WriteByte(byte(len(segments)))
	for _, s := range segments {
		var offset int64
		var text string
		fmt.Sscanf(s, "%d %s", &offset, &text)
		b.WriteString("\x00\x41" + string(appendSigned(nil, offset)) + "\x0b" + string([]byte{byte(len(text))}) + text)
	}
	return b.String()
}

func TestMergeData(t *testing.T) {
	module := func(change func(map[byte]string)) []byte {
		p := parts()
		delete(p, 12)
		p[11] = segmentsOf("300 ab", "302 c", "320 d", "400 e", "465 f", "531 g")
		if change != nil {
			change(p)
		}
		return moduleOf(p)
	}
	got := MergeData(module(nil))
	want := module(func(p map[byte]string) {
		zeros := func(n int) string { return strings.Repeat("\x00", n) }
		p[11] = "\x03" + segmentsOf("300 abc" + zeros(17) + "d")[1:] + segmentsOf("400 e" + zeros(64) + "f")[1:] + segmentsOf("531 g")[1:]
	})
	if !bytes.Equal(got, want) {
		t.Errorf("MergeData = %q\nwant        %q", got, want)
	}
	if again := MergeData(got); &again[0] != &got[0] {
		t.Error("MergeData of a merged module is a copy, want the module itself")
	}
	for name, change := range map[string]func(map[byte]string){
		"counted":    func(p map[byte]string) { p[12] = "\x06" },
		"overlap":    func(p map[byte]string) { p[11] = segmentsOf("300 ab", "301 c") },
		"unordered":  func(p map[byte]string) { p[11] = segmentsOf("302 c", "300 ab") },
		"passive":    func(p map[byte]string) { p[11] = "\x02\x01\x01x\x00\x41\x01\x0b\x01y" },
		"a global":   func(p map[byte]string) { p[11] = "\x02\x00\x23\x00\x0b\x01x\x00\x41\x01\x0b\x01y" },
		"imported":   func(p map[byte]string) { p[2], p[5] = "\x01"+name("m")+name("m")+"\x02\x00\x01", "\x00" },
		"two":        func(p map[byte]string) { p[5] = "\x02\x00\x01\x00\x01" },
		"truncated":  func(p map[byte]string) { p[11] = p[11][:len(p[11])-1] },
		"one":        func(p map[byte]string) { p[11] = segmentsOf("300 ab") },
		"no data":    func(p map[byte]string) { delete(p, 11) },
		"trailing":   func(p map[byte]string) { p[11] += "\x00" },
		"no section": func(p map[byte]string) { delete(p, 5) },
	} {
		if m := module(change); &MergeData(m)[0] != &m[0] {
			t.Errorf("%s: MergeData changed the module", name)
		}
	}
}
