package engine

import (
	"bytes"
	"context"
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/wasmbin"
	"github.com/tripod-run/tripod/internal/component/wit"
)

// start returns a command that does nothing, with additional sections.
func start(sections func(m *bin)) []byte {
	m := bin(wasmbin.ModuleHeader)
	m.section(1, 1, []byte{0x60, 0, 0})
	if sections != nil {
		sections(&m)
	}
	return m
}

func startBody(m *bin, before func()) {
	var x bin
	m.section(3, 1, []byte{0})
	if before != nil {
		before()
	}
	x.str("_start").u8(0, 0)
	m.section(7, 1, x)
	m.section(10, 1, []byte{2, 0, 0x0b})
}

// TestBadGuests is row I6: bad guests are refused when they are compiled, and the error says what is wrong.
func TestBadGuests(t *testing.T) {
	e, err := New(Config{MaxMemory: 1 << 30, MaxTableElements: 5000})
	if err != nil {
		t.Fatal(err)
	}
	whole := read(t, "guest.wasm")
	imported := func(module, name string) []byte {
		return start(func(m *bin) {
			var i bin
			i.str(module).str(name).u8(0, 0)
			m.section(2, 1, i)
			var x bin
			x.str("_start").u8(0, 0)
			m.section(7, 1, x)
		})
	}
	memory := func(pages int) []byte {
		return start(func(m *bin) {
			startBody(m, func() { m.section(5, 1, *new(bin).u8(0).u32(pages)) })
		})
	}
	u32 := &wit.Type{Kind: wit.U32}
	for name, c := range map[string]struct {
		wasm []byte
		says string
	}{
		"nothing":          {nil, "not WebAssembly"},
		"empty component":  {[]byte(wasmbin.ComponentHeader), "exports nothing that could be served"},
		"text":             {[]byte("(module)"), `not WebAssembly: the file begins with "(module)"`},
		"ELF":              {[]byte("\x7fELF\x02\x01\x01"), "not WebAssembly"},
		"another version":  {[]byte("\x00asm\x02\x00\x00\x00"), "version 2, layer 0"},
		"truncated":        {whole[:len(whole)/2], "it is cut off"},
		"truncated header": {whole[:6], "not WebAssembly"},
		"damaged":          {append(bytes.Clone(whole[:5000]), bytes.Repeat([]byte{0xff}, len(whole)-5000)...), ""},
		"no _start":        {start(nil), "_start"},
		"import of a module": {imported("env", "magic"),
			"import env.magic: nothing provides it"},
		"import that WASI does not have": {imported(preview1, "fd_magic"), "fd_magic"},
		"import of another type":         {imported(preview1, "fd_write"), "fd_write"},
		"4 GiB of memory":                {memory(65536), "declares 4 GiB of memory, limit 1 GiB"},
		"2 GiB of memory":                {memory(32768), "declares 2 GiB of memory, limit 1 GiB"},
		"two memories": {start(func(m *bin) {
			startBody(m, func() { m.section(5, 2, []byte{0, 1, 0, 1}) })
		}), "2 memories, limit 1"},
		"a large table": {start(func(m *bin) {
			startBody(m, func() { m.section(4, 1, *new(bin).u8(0x70, 0).u32(5001)) })
		}), "table of 5001 elements, limit 5000"},
		"no exports": {wrapped(coreMod{}, nil, "", signature{}), "exports nothing that could be served"},
		"WASI 0.3": {bytes.ReplaceAll(whole, []byte("test:guest/host@1.2.0"), []byte("wasi:http/types@0.3.0")),
			"the component is of WASI 0.3 (wasi:http/types@0.3.0), which Tripod does not run; build it for WASI 0.2"},
		"import of a component": {whole, "import test:guest/host@1.2.0#[constructor]thing"},
		"a memory within a component": {wrapped(coreMod{pages: 65536, funcs: []coreFn{{name: "f", results: 1, body: []byte{0x41, 0}}}},
			map[string]signature{"f": {nil, u32}}, "", signature{}), "declares 4 GiB"},
	} {
		img, err := e.Compile(t.Context(), c.wasm, CompileOptions{})
		if !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), c.says) || strings.Contains(err.Error(), "Stack backtrace") {
			t.Errorf("%s: Compile returned %d bytes, %v; want %q", name, len(img), err, c.says)
		}
	}
	if img, err := e.Compile(t.Context(), memory(16384), CompileOptions{}); err != nil || len(img) == 0 {
		t.Errorf("Compile with 1 GiB of memory: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := e.Compile(ctx, memory(1), CompileOptions{}); !errors.Is(err, context.Canceled) {
		t.Errorf("Compile with a cancelled context: error %v, want context.Canceled", err)
	}
}

// TestHostsThatDoNotFit: the host must provide what the guest imports, with its type.
func TestHostsThatDoNotFit(t *testing.T) {
	e := testEngine(t)
	img, err := e.Compile(t.Context(), read(t, "guest.wasm"), CompileOptions{Provided: func(string) bool { return true }})
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		change func(h *Host)
		says   string
	}{
		"a function is missing":    {func(h *Host) { h.Funcs = h.Funcs[1:] }, "[constructor]thing: nothing provides it"},
		"a resource is missing":    {func(h *Host) { h.Resources = nil }, "thing"},
		"another interface":        {func(h *Host) { h.Funcs[3].Interface = "test:guest/host@2.0.0" }, "wait: nothing provides it"},
		"another parameter":        {func(h *Host) { h.Funcs[3].Params = []*wit.Type{tStr} }, "wait: parameter 1: u32, not string"},
		"another result":           {func(h *Host) { h.Funcs[3].Result = tStr }, "wait: result: u32, not string"},
		"more parameters":          {func(h *Host) { h.Funcs[3].Params = []*wit.Type{tU32, tU32} }, "wait has 1 parameters, not 2"},
		"another kind of resource": {func(h *Host) { h.Funcs[0].Result = tLend }, "thing"},
	} {
		h := thingsHost()
		c.change(&h)
		if _, err := e.Load(img, h); !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: Load: error %v, want %q", name, err, c.says)
		}
	}
}

func TestFuncsThatDoNotFit(t *testing.T) {
	c := theGuest(t)
	for name, k := range map[string]struct {
		sig  Signature
		is   func(error) bool
		says string
	}{
		"no such function":  {Signature{Interface: "test:guest/api@1.0.0", Name: "nope"}, errdefs.IsNotFound, "but only mixed, sum"},
		"no such interface": {Signature{Interface: "test:guest/more@1.0.0", Name: "sum"}, errdefs.IsNotFound, "it exports test:guest/api@1.2.0"},
		"another version":   {Signature{Interface: "test:guest/api@2.0.0", Name: "sum"}, errdefs.IsNotFound, "exports test:guest/api@1.2.0"},
		"another parameter": {Signature{"test:guest/api@1.0.0", "sum", []*wit.Type{tStr}, tU32}, errdefs.IsInvalidArgument,
			"test:guest/api@1.2.0#sum: parameter 1: list<u8>, not string"},
		"another field": {Signature{"test:guest/api@1.0.0", "mixed", []*wit.Type{tU8, {Kind: wit.Variant, Cases: append(
			[]wit.Case{{Name: "nothing"}, {Name: "dot", Type: &wit.Type{Kind: wit.Record, Fields: []wit.Field{
				{Name: "x", Type: tU32}, tPoint.Fields[1], tPoint.Fields[2]}}}}, tShape.Cases[2:]...)}, tColours, tBool, tF32}, tShape},
			errdefs.IsInvalidArgument, "parameter 2: dot.x: s16, not u32"},
	} {
		if _, err := c.Func(k.sig); !k.is(err) || !strings.Contains(err.Error(), k.says) {
			t.Errorf("%s: Func: error %v, want %q", name, err, k.says)
		}
	}
}

// TestDamagedImages is row I7: Load refuses images that Compile did not make.
func TestDamagedImages(t *testing.T) {
	e := testEngine(t)
	img, err := e.Compile(t.Context(), read(t, "command.wasm"), CompileOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if w, err := Inspect(img); err != nil || w.World != WorldCommand {
		t.Errorf("Inspect = %+v, %v; want the world %q", w, err, WorldCommand)
	}
	flipped := func(at int) []byte {
		b := bytes.Clone(img)
		b[at] ^= 1
		return b
	}
	other := bytes.Replace(img, []byte("wasmtime-"+wasmtimeVersion()), []byte("wasmtime-39.0.1"), 1)
	for name, b := range map[string][]byte{
		"nothing": nil, "magic": flipped(0), "sum": flipped(20), "fingerprint": flipped(50), "middle": flipped(len(img) / 2),
		"end": flipped(len(img) - 1), "truncated": img[:len(img)-1], "half": img[:len(img)/2], "longer": append(bytes.Clone(img), 0),
		"another engine": other, "wasm": read(t, "command.wasm"),
	} {
		if _, err := e.Load(b, Host{}); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "compile the guest again") {
			t.Errorf("%s: Load: error %v, want errdefs.ErrFailedPrecondition", name, err)
		}
	}
	c, err := e.Load(img, Host{})
	if err != nil {
		t.Fatal(err)
	}
	clear(img) // Load must have copied what it needs
	i := instance(t, c, InstanceOptions{Args: []string{"prog", "exit", "3"}})
	if code, err := i.Run(t.Context()); code != 3 || err != nil {
		t.Errorf("Run = %d, %v; want 3", code, err)
	}
	i.Close()
	c.Close()
	if _, err := c.Instantiate(t.Context(), InstanceOptions{}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("Instantiate of closed code: error %v, want errdefs.ErrFailedPrecondition", err)
	}
}

func TestCompatName(t *testing.T) {
	for in, want := range map[string]string{
		"wasi:http/types@0.2.12": "wasi:http/types@0.2", "a:b/c@1.4.0": "a:b/c@1", "a:b/c@0.0.3": "a:b/c@0.0.3", "a:b/c": "a:b/c",
		"a:b/c@0.2.0-rc": "a:b/c@0.2.0-rc", "a:b/c@x": "a:b/c@x",
	} {
		if got := compatName(in); got != want {
			t.Errorf("compatName(%q) = %q, want %q", in, got, want)
		}
	}
}

// FuzzParseBinary: our own parser of guests never panics or loops.
func FuzzParseBinary(f *testing.F) {
	// Use small inputs, because the fuzzer takes long to shrink large ones.
	sig := echoOf(tShape)
	f.Add(wrapped(coreMod{
		imports: []coreFn{{module: rootModule, name: "ask", params: 2}},
		funcs:   []coreFn{{name: "echo", params: 1, results: 1, body: []byte{0x20, 0}}},
	}, map[string]signature{"echo": sig}, "ask", sig))
	f.Add([]byte(wasmbin.ModuleHeader + "\x05\x04\x01\x09\x01\x02"))
	f.Fuzz(func(_ *testing.T, b []byte) {
		if bin, err := wasmbin.Parse(b); err == nil {
			_ = coreShape(bin)
			for _, m := range append(bin.Modules, bin.Nested...) {
				_ = checkDeclared(m, Config{MaxMemory: 1 << 30, MaxTableElements: 100})
			}
		}
	})
}

// TestCoreOnlyImage checks that a guest that is compiled for the core path only, whose types come from its skeleton, is
// described as by the compilation of the whole component, and has the same code.
func TestCoreOnlyImage(t *testing.T) {
	e := testEngine(t)
	compiled := func(both bool) *image {
		raw, err := e.Compile(context.Background(), read(t, "guest.wasm"),
			CompileOptions{Provided: func(string) bool { return true }, Both: both})
		if err != nil {
			t.Fatal(err)
		}
		img, err := decodeImage(raw)
		if err != nil {
			t.Fatal(err)
		}
		return img
	}
	whole, core := compiled(true), compiled(false)
	if len(core.component) != 0 || len(core.module) == 0 || !bytes.Equal(core.module, whole.module) {
		t.Errorf("code of the core path: got %d bytes of a component and %d of a module, want 0 and the %d of the other image",
			len(core.component), len(core.module), len(whole.module))
	}
	if !reflect.DeepEqual(core.inspection, whole.inspection) {
		t.Errorf("inspection of the skeleton: got %+v, want %+v", core.inspection, whole.inspection)
	}
}
