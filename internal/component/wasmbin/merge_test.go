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
	merged := func(code []byte) []byte {
		m, err := parseModule(code)
		if err != nil {
			m.Code = code
		}
		m.MergeData()
		return m.Code
	}
	got := merged(module(nil))
	want := module(func(p map[byte]string) {
		zeros := func(n int) string { return strings.Repeat("\x00", n) }
		p[11] = "\x03" + segmentsOf("300 abc" + zeros(17) + "d")[1:] + segmentsOf("400 e" + zeros(64) + "f")[1:] + segmentsOf("531 g")[1:]
	})
	if !bytes.Equal(got, want) {
		t.Errorf("MergeData = %q\nwant        %q", got, want)
	}
	// Many empty segments at the end of a long one, and one byte: this takes no longer than reading them.
	long := strings.Repeat("x", 1<<20)
	data := []Data{{0, []byte(long)}}
	for range maxSegments - 2 {
		data = append(data, Data{1 << 20, nil})
	}
	data = append(data, Data{1 << 20, []byte("y")})
	alone := func(data []Data) []byte {
		out := appendSection([]byte(ModuleHeader), moduleMemories, []byte{1, 0, 17})
		return appendData(out, data)
	}
	if got, want := merged(alone(data)), alone([]Data{{0, []byte(long + "y")}}); !bytes.Equal(got, want) {
		t.Errorf("MergeData of empty segments: %d bytes, want %d", len(got), len(want))
	}
	if many := alone(append(data, Data{1<<20 + 1, nil})); &merged(many)[0] != &many[0] {
		t.Error("MergeData changed a module with more segments than an engine takes")
	}
	if again := merged(got); &again[0] != &got[0] {
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
		"flags":      func(p map[byte]string) { p[11] = strings.Replace(p[11], "\x00\x41\xae\x02", "\x02\x00\x41\xae\x02", 1) },
		"long":       func(p map[byte]string) { p[11] = strings.Replace(p[11], "\xae\x02", "\xae\x82\x80\x80\x80\x00", 1) },
		"one":        func(p map[byte]string) { p[11] = segmentsOf("300 ab") },
		"no data":    func(p map[byte]string) { delete(p, 11) },
		"trailing":   func(p map[byte]string) { p[11] += "\x00" },
		"no section": func(p map[byte]string) { delete(p, 5) },
	} {
		if m := module(change); &merged(m)[0] != &m[0] {
			t.Errorf("%s: MergeData changed the module", name)
		}
	}
}

// TestPassiveElements checks the number of elements in passive segments, in each format of a segment.
func TestPassiveElements(t *testing.T) {
	const offset, function, null = "\x41\x00\x0b", "\xd2\x00\x0b", "\xd0\x70\x0b"
	segments := "\x08" +
		"\x00" + offset + "\x02\x00\x00" +
		"\x01\x00\x03\x00\x00\x00" + // three
		"\x02\x00" + offset + "\x00\x01\x00" +
		"\x03\x00\x04\x00\x00\x00\x00" +
		"\x04" + offset + "\x01" + function +
		"\x05\x70\x02" + null + function + // two
		"\x06\x00" + offset + "\x70\x01" + function +
		"\x07\x70\x01" + function
	for section, want := range map[string]uint64{
		segments:                       5,
		"\x01\x05\x70\x01\x6a\x0b":     1, // with an instruction that is not known
		"\x02\x01\x00\x7f" + "rest":    127,
		"\x01\x01\x00\xff\xff\xff\x7f": 1<<28 - 1, // truncated
	} {
		m, err := parseModule(moduleOf(map[byte]string{9: section}))
		if err != nil || m.Elements < want || section == segments && m.Elements != want {
			t.Errorf("Elements of %q = %d, %v; want %d", section, m.Elements, err, want)
		}
	}
}
