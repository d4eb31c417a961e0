package wasmbin

import (
	"bytes"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
)

const (
	moduleHead    = "\x00asm\x01\x00\x00\x00"
	componentHead = "\x00asm\x0d\x00\x01\x00"
)

func name(s string) string { return string(rune(len(s))) + s }

func sec(id byte, content string) string { return string(rune(id)) + name(content) }

func read(text string) (*Outline, error) {
	return Read(strings.NewReader(text), int64(len(text)))
}

func TestModule(t *testing.T) {
	o, err := read(moduleHead +
		sec(0, name("note")+"anything") +
		sec(2, "\x05"+
			name("wasi")+name("f")+"\x00\x07"+
			name("env")+name("table")+"\x01\x70\x01\x02\x03"+
			name("env")+name("memory")+"\x02\x00\x80\x80\x04"+
			name("env")+name("global")+"\x03\x7f\x01"+
			name("env")+name("tag")+"\x04\x00\x01") +
		sec(7, "\x02"+name("_start")+"\x00\x01"+name("memory")+"\x02\x00"))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"wasi f", "env table", "env memory", "env global", "env tag"}
	if o.Component || !slices.Equal(o.Imports, want) || !o.HasExport("_start") || !o.HasExport("memory") || o.HasExport("f") ||
		!slices.Equal(o.Custom, []string{"note"}) {
		t.Errorf("%+v", o)
	}
}

func TestComponent(t *testing.T) {
	o, err := read(componentHead +
		sec(10, "\x07"+
			"\x00"+name("wasi:io/error@0.2.0")+"\x05\x00"+
			"\x01"+name("f")+"\x01\x01"+
			"\x00"+name("m")+"\x00\x11\x02"+
			"\x00"+name("v")+"\x02\x01\x7f"+
			"\x00"+name("t")+"\x03\x00\x02"+
			"\x00"+name("r")+"\x03\x01"+
			"\x02"+name("s")+"\x01\x00"+name("1.2.3")+"\x04\x00") +
		sec(11, "\x01\x00"+name("a:b/c")+"\x05\x03\x00") +
		sec(11, "\x02\x00"+name("run")+"\x01\x03\x01\x01\x04"+"\x00"+name("core")+"\x00\x11\x03\x00"))
	if err != nil {
		t.Fatal(err)
	}
	if !o.Component || !slices.Equal(o.Imports, []string{"wasi:io/error@0.2.0", "f", "m", "v", "t", "r", "s"}) ||
		!slices.Equal(o.Exports, []string{"a:b/c", "run", "core"}) {
		t.Errorf("%+v", o)
	}
}

func TestBadBinaries(t *testing.T) {
	for text, words := range map[string]string{
		"":                                      "not WebAssembly",
		"\x00asm\x01":                           "not WebAssembly",
		"\x7fELF\x02\x01\x01\x00":               `"\x7fELF`,
		"\x00asm\x0c\x00\x01\x00":               "version 12, layer 1",
		moduleHead + "\x01":                     "no length",
		moduleHead + "\x01\xff":                 "no length",
		moduleHead + "\x01\x05abcd":             "cut off",
		moduleHead + "\x01\xff\xff\xff\xff\x0f": "cut off",
		moduleHead + sec(2, "\x01"+name("env")): "section 2 cannot be read",
		moduleHead + sec(2, "\x01"+name("env")+name("x")+"\x09"):     "section 2 cannot be read",
		moduleHead + sec(7, "\xff\xff\xff\xff\x0f"+name("x")+"\x00"): "section 7 cannot be read",
		componentHead + sec(10, "\x01\x07"+name("x")+"\x01\x00"):     "section 10 cannot be read",
		componentHead + sec(11, "\x01\x00"+name("x")+"\x01"):         "section 11 cannot be read",
	} {
		_, err := read(text)
		if !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), words) {
			t.Errorf("Read(%q): error %v, want %q", text, err, words)
		}
	}
}

func TestCustom(t *testing.T) {
	text := componentHead + sec(0, name("na")+"no") + sec(0, name("name")+"content") + sec(0, name("name")+"second") + sec(0, name("empty"))
	custom := func(name string, limit int64) ([]byte, error) {
		return Custom(strings.NewReader(text), int64(len(text)), name, limit)
	}
	for want, content := range map[string]string{"name": "content", "na": "no", "empty": ""} {
		if got, err := custom(want, 100); err != nil || got == nil || string(got) != content {
			t.Errorf("Custom(%s) = %q, %v; want %q", want, got, err, content)
		}
	}
	if got, err := custom("nam", 100); err != nil || got != nil {
		t.Errorf("Custom of a missing name = %q, %v; want nil", got, err)
	}
	if _, err := custom("name", 10); !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), `"name"`) {
		t.Errorf("Custom of a section above the limit: %v", err)
	}
}

// TestExample reads the output of real tools.
func TestExample(t *testing.T) {
	data, err := os.ReadFile("../../../examples/wasm/greeter-c/greeter-c.wasm")
	if err != nil {
		t.Fatal(err)
	}
	o, err := Read(bytes.NewReader(data), int64(len(data)))
	if err != nil {
		t.Fatal(err)
	}
	if !o.Component || !o.HasExport("proto:greet-v1/greeter") || !slices.Contains(o.Imports, "proto:greet-v1/greeter-streams") {
		t.Errorf("%+v", o)
	}
	for cut := range len(data) {
		if cut > 4096 && cut%997 != 0 {
			continue
		}
		o, err := Read(bytes.NewReader(data[:cut]), int64(cut))
		if err == nil && o.HasExport("proto:greet-v1/greeter") && cut < 40000 {
			t.Fatalf("Read of a file cut off at %d of %d bytes found the export and no error", cut, len(data))
		}
	}
}

func FuzzRead(f *testing.F) {
	f.Add([]byte(moduleHead + sec(2, "\x01"+name("env")+name("t")+"\x01\x70\x01\x02\x03") + sec(7, "\x01"+name("_start")+"\x00\x01")))
	f.Add([]byte(componentHead + sec(10, "\x01\x00"+name("x")+"\x05\x00") + sec(11, "\x01\x00"+name("y")+"\x01\x03\x01\x01\x04")))
	f.Fuzz(func(t *testing.T, data []byte) {
		o, err := Read(bytes.NewReader(data), int64(len(data)))
		if err != nil {
			if !errdefs.IsInvalidArgument(err) {
				t.Errorf("error of a bad file: %v, want errdefs.ErrInvalidArgument", err)
			}
			return
		}
		if n := len(o.Imports) + len(o.Exports) + len(o.Custom); n > len(data) {
			t.Errorf("Read found %d names in %d bytes", n, len(data))
		}
		for _, name := range o.Custom[:min(3, len(o.Custom))] {
			if _, err := Custom(bytes.NewReader(data), int64(len(data)), name, 1<<20); err != nil {
				t.Errorf("Custom of an existing section: %v", err)
			}
		}
	})
}

// TestSkeleton checks that a skeleton has the structure of its component, at any depth, and none of its code and data.
func TestSkeleton(t *testing.T) {
	module := moduleHead +
		sec(0, name("name")+"anything") +
		sec(1, "\x01\x60\x00\x00") + sec(3, "\x02\x00\x00") + sec(5, "\x01\x00\x01") + sec(7, "\x01"+name("f")+"\x00\x00") + sec(12, "\x01") +
		sec(10, "\x02"+"\x05\x01\x01\x7f\x01\x0b"+"\x02\x00\x0b") + sec(11, "\x01\x01\x04data")
	bare := moduleHead +
		sec(1, "\x01\x60\x00\x00") + sec(3, "\x02\x00\x00") + sec(5, "\x01\x00\x01") + sec(7, "\x01"+name("f")+"\x00\x00") +
		sec(10, "\x02"+trap+trap)
	note := sec(0, name("note")+"kept")
	inner, bareInner := componentHead+sec(1, module), componentHead+sec(1, bare)
	got, err := Skeleton([]byte(componentHead + note + sec(1, module) + sec(4, inner)))
	if want := componentHead + note + sec(1, bare) + sec(4, bareInner); err != nil || string(got) != want {
		t.Errorf("Skeleton = %q, %v; want %q", got, err, want)
	}
	for what, bad := range map[string]string{
		"a module":            module,
		"truncated":           componentHead + "\x01\x7f",
		"more functions":      componentHead + sec(1, moduleHead+sec(10, "\xff\xff\xff\xff\x0f\x02\x00\x0b")),
		"a short module":      componentHead + sec(1, "\x00asm"),
		"a short component":   componentHead + sec(4, ""),
		"a truncated section": componentHead + sec(1, moduleHead+"\x0a\x7f"),
		"no count":            componentHead + sec(1, moduleHead+sec(10, "")),
	} {
		if _, err := Skeleton([]byte(bad)); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%s: Skeleton = %v, want ErrInvalidArgument", what, err)
		}
	}
	for _, file := range []string{"greeter-c", "greeter-js", "hello-http-c"} {
		data, err := os.ReadFile("../../../examples/wasm/" + file + "/" + file + ".wasm")
		if err != nil {
			t.Fatal(err)
		}
		bare, err := Skeleton(data)
		if err != nil {
			t.Fatal(err)
		}
		before, err := Read(bytes.NewReader(data), int64(len(data)))
		if err != nil {
			t.Fatal(err)
		}
		after, err := Read(bytes.NewReader(bare), int64(len(bare)))
		if err != nil || !slices.Equal(before.Imports, after.Imports) || !slices.Equal(before.Exports, after.Exports) || len(bare) > len(data)/2 {
			t.Errorf("the skeleton of %s has %d of %d bytes, %+v, %v; want the imports and exports of %+v", file, len(bare), len(data), after, err,
				before)
		}
	}
}
