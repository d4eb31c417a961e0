package wasmbin

import (
	"bytes"
	"os"
	"strings"
	"testing"
)

// TestPlans plans components of common tools: each becomes one module, and the same one each time.
func TestPlans(t *testing.T) {
	for file, c := range map[string]struct {
		imports int // functions of the host
		export  string
	}{
		"greeter-c":    {35, "proto:greet-v1/greeter#say-hello"},
		"hello-http-c": {22, "wasi:http/incoming-handler@0.2.0#handle"},
		"greeter-js":   {42, "proto:greet-v1/greeter#say-hello"},
	} {
		data, err := os.ReadFile("../../../examples/wasm/" + file + "/" + file + ".wasm")
		if err != nil {
			t.Fatal(err)
		}
		p, why, err := NewPlan(data)
		if err != nil || why != "" {
			t.Errorf("%s: %q, %v", file, why, err)
			continue
		}
		if again, _, _ := NewPlan(data); !bytes.Equal(again.Module.Code, p.Module.Code) {
			t.Errorf("%s: the second plan has another module", file)
		}
		m, l := p.Module, p.Exports[c.export]
		if len(p.Imports) != c.imports || len(m.Imports) != c.imports || !m.HasExport(l.Func, Func) || len(m.Memories) != 1 {
			t.Errorf("%s: %d imports %v, %s is %+v of %v", file, len(m.Imports), p.Imports, c.export, l, m.Exports)
		}
	}
}

// TestNoPlan checks what the planner refuses, and that its reasons are useful.
func TestNoPlan(t *testing.T) {
	module := sec(1, moduleHead+sec(1, "\x01\x60\x00\x00")+sec(3, "\x01\x00")+sec(7, "\x01"+name("f")+"\x00\x00")+sec(10,
		"\x01\x03\x00\x01\x0b"))
	started := module + sec(2, "\x01\x00\x00\x00") + sec(6, "\x01\x00\x00\x01\x00"+name("f")) + sec(7, "\x01\x40\x00\x01\x00")
	lifted := started + sec(8, "\x01\x00\x00\x00\x00\x00")
	// 20 components, each of which makes two instances of the next one.
	bomb := ""
	for range 20 {
		bomb = sec4(componentHead+bomb) + sec(5, "\x02\x00\x00\x00\x00\x00\x00")
	}
	// A module with 5000 imports, and 20 instances of it.
	imports := append([]byte("\x88\x27"), strings.Repeat("\x00\x01f\x00\x00", 5000)...)
	wide := started + string(appendSection(nil, 1, appendSection([]byte(moduleHead+sec(1, "\x01\x60\x00\x00")), moduleImports, imports)))
	wide += sec(2, "\x14"+strings.Repeat("\x00\x01\x01\x00\x12\x00", 20))
	// A second core module, which starts, beside one with a memory and data.
	beside := func(sections string) string {
		first := moduleHead + sec(5, "\x01\x00\x01") + sec(11, "\x01\x00\x41\x00\x0b\x01x")
		return sec(1, first) + sec(1, moduleHead+sec(1, "\x01\x60\x00\x00")+sec(3, "\x01\x00")+sections) + sec(2, "\x02\x00\x00\x00\x00\x01\x00")
	}
	const empty = "\x01\x02\x00\x0b"
	for name, c := range map[string]struct{ text, why string }{
		"a store without a memory": {beside(sec(8, "\x00") + sec(10, "\x01\x09\x00\x41\x00\x41\x2a\x36\x02\x00\x0b")),
			"there is no item 0 of kind 2"},
		"data without a memory":    {beside(sec(10, empty) + sec(11, "\x01\x00\x41\x00\x0b\x04evil")), "there is no item 0 of kind 2"},
		"elements without a table": {beside(sec(9, "\x01\x00\x41\x00\x0b\x01\x00") + sec(10, empty)), "there is no item 0 of kind 1"},
		"a segment of another": {beside(sec(8, "\x00") + sec(12, "\x00") + sec(10, "\x01\x05\x00\xfc\x09\x00\x0b")),
			"there is no segment 0"},
		"a function of another":      {beside(sec(8, "\x00") + sec(10, "\x01\x04\x00\x10\x01\x0b")), "there is no item 1 of kind 0"},
		"an unknown instruction":     {beside(sec(8, "\x00") + sec(10, "\x01\x03\x00\x06\x0b")), "the instruction 0x6"},
		"a type of a structure":      {beside(sec(8, "\x00") + sec(10, "\x01\x04\x00\xd0\x6b\x0b")), "values of the type 0x6b"},
		"a start without a function": {beside(sec(8, "\x07") + sec(10, empty)), "the start function"},
		"code that is cut off":       {beside(sec(8, "\x00") + sec(10, "\x01\x03\x00\x41\x80")), "cannot become one"},
		"a bomb of imports":          {wide, "more than 100000 definitions and imports"},
		"a bomb of instances":        {bomb, "more than 32 instances of components"},
		"a bomb of definitions":      {sec(7, "\xff\xff\xff\xff\x0f"), "more than 100000 definitions"},
		"many core instances":        {module + sec(2, "\x21"+strings.Repeat("\x00\x00\x00", 33)), "more than 32 core instances"},
		"another component's": {sec4(componentHead+lifted+sec(11, "\x01\x00"+name("f")+"\x01\x00\x00")) + sec(5, "\x01\x00\x00\x00") +
			sec(6, "\x01\x01\x00\x00"+name("f")) + sec(8, "\x01\x01\x00\x00\x00"), "a component instance calls another one"},
		"a resource of the guest":  {sec(7, "\x01\x3f\x7f\x00") + sec(8, "\x01\x03\x00"), "defines resources"},
		"a start function":         {sec(9, "\x01\x00\x00\x00"), "section 9"},
		"an alias out of the file": {sec(6, "\x01\x03\x02\x05\x00"), "leads out of the component"},
		"an index beyond the end":  {sec(8, "\x01\x01\x00\x07\x00"), "item 7 of 0"},
		"a module from elsewhere":  {sec(10, "\x01\x00"+name("m")+"\x00\x11\x00"), "neither an interface nor a function"},
		"strings in UTF-16":        {started + sec(8, "\x01\x00\x00\x00\x01\x01\x00"), "UTF-16"},
		"an asynchronous function": {started + sec(8, "\x01\x00\x00\x00\x01\x06\x00"), "canonical option 0x6"},
		"an import that is missing": {sec(1, moduleHead+sec(1, "\x01\x60\x00\x00")+sec(2, "\x01"+name("m")+name("f")+"\x00\x00")) +
			sec(2, "\x01\x00\x00\x00"), "nothing is passed"},
		"a reexport of the host's": {sec(10, "\x01\x00"+name("f")+"\x01\x00") + sec(11, "\x01\x00"+name("g")+"\x01\x00\x00"),
			"which it imports"},
		"an exported component": {sec4(componentHead) + sec(11, "\x01\x00"+name("c")+"\x04\x00\x00"), "exports a component"},
		"an instance of its imports": {sec(10, "\x01\x00"+name("a:b/c")+"\x05\x00") + sec(11, "\x01\x00"+name("a:b/c")+"\x05\x00\x00"),
			"exports the imported interface"},
	} {
		p, why, err := NewPlan([]byte(componentHead + c.text))
		if p != nil || err != nil || !strings.Contains(why, c.why) {
			t.Errorf("%s: NewPlan = %v, %q, %v; want %q", name, p != nil, why, err, c.why)
		}
	}
	if p, why, err := NewPlan([]byte(componentHead + lifted + sec(11, "\x01\x00"+name("f")+"\x01\x00\x00"))); err != nil || why != "" ||
		len(p.Module.Exports) != 1 || p.Exports["f"].Func != "0" {
		t.Errorf("a simple component: %+v, %q, %v", p, why, err)
	}
}

// sec4 is a section with a nested component of any size.
func sec4(component string) string {
	n := len(component)
	return "\x04" + string([]byte{byte(n) | 0x80, byte(n>>7) | 0x80, byte(n >> 14)}) + component
}

func FuzzPlan(f *testing.F) {
	for _, file := range []string{"../../../examples/wasm/greeter-c/greeter-c.wasm", "../../../examples/wasm/hello-http-c/hello-http-c.wasm",
		"../engine/testdata/parts.wasm"} {
		data, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(_ *testing.T, data []byte) {
		if p, _, err := NewPlan(data); err == nil && p != nil && len(p.Module.Code) > 4*len(data)+2*maxFused {
			panic("too large")
		}
	})
}
