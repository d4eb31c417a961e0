package wasmbin

import (
	"os"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
)

// parts are the sections of a module that can be detached.
func parts() map[byte]string {
	return map[byte]string{
		1:  "\x01\x60\x00\x00",                                 // one type
		2:  "\x01" + name("m") + name("f") + "\x00\x00",        // a function
		3:  "\x01\x00",                                         // one function
		4:  "\x01\x70\x00\x02",                                 // a table of 2 functions
		5:  "\x01\x01\x02\x08",                                 // a memory of 2 to 8 pages
		6:  "\x02\x7f\x01\x41\x7f\x0b\x7e\x00\x42\x80\x01\x0b", // a mutable i32, -1, and an i64
		7:  "\x01" + name("memory") + "\x02\x00",
		12: "\x02", // a count of data segments, so code can refer to them
		// 2 bytes at 300, and a passive segment of one byte
		11: "\x02\x00\x41\xac\x02\x0b\x02hi\x01\x01x",
	}
}

func moduleOf(sections map[byte]string) []byte {
	text := moduleHead
	for _, id := range []byte{1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 10, 11} { // as 5.5.2 orders them
		if s, ok := sections[id]; ok {
			text += sec(id, s)
		}
	}
	return []byte(text)
}

// TestDetach checks the sections of a detached module, and of its memory.
func TestDetach(t *testing.T) {
	d, reason, err := Detach(moduleOf(parts()))
	if err != nil || reason != "" {
		t.Fatal(reason, err)
	}
	if d.Globals != 1 || d.Tables != 1 {
		t.Errorf("Globals, Tables = %d, %d; want 1, 1", d.Globals, d.Tables)
	}
	want := parts()
	want[7] = "\x03" + want[7][1:] + name("tripod:global/0") + "\x03\x00" + name("tripod:table/0") + "\x01\x00"
	want[11] = "\x02\x01\x00\x01\x01x" // a dropped segment, and the passive one
	if got, want := string(d.Code), string(moduleOf(want)); got != want {
		t.Errorf("Code = %q\nwant   %q", got, want)
	}
	memory := string(moduleOf(map[byte]string{5: parts()[5], 7: parts()[7], 11: "\x01\x00\x41\xac\x02\x0b\x02hi"}))
	if got := string(d.Memory); got != memory {
		t.Errorf("Memory = %q\nwant     %q", got, memory)
	}
	uncounted := parts()
	delete(uncounted, 12)
	without, reason, err := Detach(moduleOf(uncounted))
	if err != nil || reason != "" {
		t.Fatal(reason, err)
	}
	delete(want, 12)
	delete(want, 11)
	if got, want := string(without.Code), string(moduleOf(want)); got != want {
		t.Errorf("Code of a module whose code cannot refer to its data = %q\nwant   %q", got, want)
	}
	for _, code := range [][]byte{d.Code, d.Memory, without.Code} {
		if _, err := Parse(code); err != nil {
			t.Error(err)
		}
	}
	high := string(memoryModule(1<<16, 0, []Data{{1<<32 - 1, []byte("x")}}))
	if !strings.HasSuffix(high, "\x00\x41\x7f\x0b\x01x") { // i32.const -1
		t.Errorf("data at the end of the memory: %q", high)
	}
}

// TestDetachRefused checks that modules whose state is not only memory and numbers are refused, and damaged ones are
// errors.
func TestDetachRefused(t *testing.T) {
	for want, change := range map[string]map[byte]string{
		"it defines 0 memories":              {5: ""},
		"it defines 2 memories":              {5: "\x02\x00\x01\x00\x01"},
		"its memory has the flags 0x2":       {5: "\x01\x02\x01\x01"},
		"its memory has the flags 0x4":       {5: "\x01\x04\x01"},
		"its memory is empty":                {5: "\x01\x01\x00\x00"},
		"it has no exports":                  {7: ""},
		"which is not a function":            {2: "\x01" + name("m") + name("g") + "\x03\x7f\x00"},
		"it exports tripod:global/9":         {7: "\x01" + name("tripod:global/9") + "\x02\x00"},
		"it has a start function":            {8: "\x00"},
		"a table of other values":            {4: "\x01\x6f\x00\x02"},
		"a mutable global that is not":       {6: "\x01\x70\x01\xd0\x70\x0b"},
		"with the instruction 0x6a":          {6: "\x01\x7f\x00\x41\x00\x41\x00\x6a\x0b"},
		"8192 bytes of data within 33558528": {11: "\x02\x00\x41\x00\x0b\x01x\x00\x41\x80\x80\x80\x10\x0b\x01x"},
		"of its data is not a constant":      {11: "\x01\x00\x23\x00\x0b\x00"},
	} {
		sections := parts()
		for id, s := range change {
			if sections[id] = s; s == "" {
				delete(sections, id)
			}
		}
		if d, reason, err := Detach(moduleOf(sections)); d != nil || err != nil || !strings.Contains(reason, want) {
			t.Errorf("Detach = %v, %q, %v; want %q", d, reason, err, want)
		}
	}
	for id := byte(1); id < 12; id++ {
		sections := parts()
		if id == 1 || id == 3 || sections[id] == "" {
			continue // not read
		}
		sections[id] = sections[id][:len(sections[id])-1]
		if d, reason, err := Detach(moduleOf(sections)); d != nil || !errdefs.IsInvalidArgument(err) {
			t.Errorf("section %d cut off: %v, %q, %v; want ErrInvalidArgument", id, d, reason, err)
		}
	}
}

// TestDetachData: a data section that the engine will not see is checked here.
func TestDetachData(t *testing.T) {
	for want, more := range map[string]string{
		"a second data section":               sec(11, "\x00"),
		"1 bytes after the last data segment": "",
	} {
		sections := parts()
		delete(sections, 12)
		if more == "" {
			sections[11] += "x"
		}
		if d, _, err := Detach(append(moduleOf(sections), more...)); d != nil || err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error = %v; want %q", err, want)
		}
	}
}

// TestDetachExample checks that a guest made by a C compiler can be detached, and its parts can be read.
func TestDetachExample(t *testing.T) {
	wasm, err := os.ReadFile("../../../examples/wasm/raw-c/raw-c.wasm")
	if err != nil {
		t.Fatal(err)
	}
	d, reason, err := Detach(wasm)
	if err != nil || reason != "" || d.Globals == 0 {
		t.Fatal(reason, err)
	}
	code, err := Parse(d.Code)
	if err != nil || len(code.Modules[0].Memories) != 1 || code.Modules[0].Exports["tripod:global/0"] != Global {
		t.Errorf("Code has %d memories, %v", len(code.Modules[0].Memories), err)
	}
}

func FuzzDetach(f *testing.F) {
	f.Add(moduleOf(parts()))
	f.Fuzz(func(t *testing.T, b []byte) {
		d, reason, err := Detach(b)
		if (d != nil) == (reason != "" || err != nil) {
			t.Errorf("Detach = %v, %q, %v", d, reason, err)
		}
		if d != nil {
			if _, err := Parse(d.Memory); err != nil {
				t.Error(err)
			}
		}
	})
}
