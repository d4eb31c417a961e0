package engine

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// rawModule is a server in a core module whose handle returns a constant, with other imports and exports.
func rawModule(imports []coreFn, funcs ...coreFn) coreMod {
	return coreMod{imports: imports,
		funcs: append(funcs, coreFn{name: rawHandler + ".0#handle", params: 1, results: 1, body: *new(bin).i32(7)})}
}

// rawOptions are what a server in a core module gets, and must export.
func rawOptions() CompileOptions {
	return CompileOptions{
		Provided: func(string) bool { return true },
		ModuleHost: Host{Funcs: []HostFunc{{
			Interface: "tripod:grpc/raw@0.1.0", Name: "twice", Params: []*wit.Type{tU32}, Result: tU32,
			Call: func(_ *HostCall, args []byte) ([]byte, error) { return u32s(2 * wit.NewReader(args).U32()), nil },
		}}},
		ModuleExports: []Signature{{Interface: rawHandler + ".0", Name: "handle", Params: []*wit.Type{tU32}, Result: tU32}},
	}
}

// loadedServer compiles and loads a server, and returns its handle function.
func loadedServer(t *testing.T, m coreMod, opts CompileOptions) (*Code, *Func) {
	t.Helper()
	e := testEngine(t)
	image, err := e.Compile(t.Context(), m.bytes(), opts)
	if err != nil {
		t.Fatal(err)
	}
	c, err := e.Load(image, opts.ModuleHost)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	f, err := c.Func(opts.ModuleExports[0])
	if err != nil {
		t.Fatal(err)
	}
	return c, f
}

// TestServerModule: a core module with exports and imports of the canonical ABI is called like a component.
func TestServerModule(t *testing.T) {
	var body bin
	body.u8(0x20, 0, 0x10, 0) // twice(parameter)
	m := coreMod{
		imports: []coreFn{{module: "tripod:grpc/raw@0.1.0", name: "twice", params: 1, results: 1}},
		funcs:   []coreFn{{name: rawHandler + ".0#handle", params: 1, results: 1, body: body}},
	}
	opts := rawOptions()
	c, f := loadedServer(t, m, opts)
	if c.World() != WorldRaw || c.Component() || c.Path() != PathCore {
		t.Errorf("World, Component, Path = %v, %v, %v; want raw, false, core", c.World(), c.Component(), c.Path())
	}
	if out, err := instance(t, c, InstanceOptions{}).Call(t.Context(), f, u32s(21), nil); err != nil || string(out) != string(u32s(42)) {
		t.Errorf("handle(21) = %x, %v; want 42", out, err)
	}
	if _, err := c.Func(Signature{Interface: rawHandler + ".0", Name: "handle", Params: []*wit.Type{tStr}, Result: tU32}); err == nil {
		t.Error("Func accepted a signature with other core types")
	}
}

// TestServerModuleResources: a core module gets resources of the host and drops them.
func TestServerModuleResources(t *testing.T) {
	const iface = "test:guest/host@0.1.0-draft"
	var body bin
	body.u8(0x10, 0, 0x10, 1).i32(7) // drop(constructor())
	m := coreMod{
		imports: []coreFn{{module: iface, name: "[constructor]thing", results: 1}, {module: iface, name: "[resource-drop]thing", params: 1}},
		funcs:   []coreFn{{name: rawHandler + ".0#handle", params: 1, results: 1, body: body}},
	}
	var made, dropped uint32
	e, opts := testEngine(t), rawOptions()
	opts.ModuleHost.Funcs = append(opts.ModuleHost.Funcs, HostFunc{
		Interface: iface, Name: "[constructor]thing", Result: &wit.Type{Kind: wit.Own, Name: iface + "#thing"},
		Call: func(*HostCall, []byte) ([]byte, error) { made++; return u32s(41 + made), nil },
	})
	opts.ModuleHost.Resources = []HostResource{{Interface: iface, Name: "thing", Drop: func(_ any, rep uint32) { dropped = rep }}}
	c, f := loadedServer(t, m, opts)
	if _, err := instance(t, c, InstanceOptions{}).Call(t.Context(), f, u32s(1), nil); err != nil {
		t.Fatal(err)
	}
	if made != 1 || dropped != 42 {
		t.Errorf("%d resources were made, and %d dropped; want 1 and number 42", made, dropped)
	}
	opts.ModuleHost.Resources = nil
	if _, err := e.Compile(t.Context(), m.bytes(), opts); err == nil || !strings.Contains(err.Error(), "thing") {
		t.Errorf("a resource that the host does not have: %v", err)
	}
}

// TestLargeResultIsFreed: an instance does not keep the memory of a host function's large result.
func TestLargeResultIsFreed(t *testing.T) {
	const iface, kept = "tripod:grpc/raw@0.1.0", 64 << 10
	var body bin
	body.i32(64).u8(0x10, 0).i32(68).u8(0x28, 2, 0) // the length of blob's result
	m := coreMod{
		imports: []coreFn{{module: iface, name: "blob", params: 1}},
		funcs:   []coreFn{{name: rawHandler + ".0#handle", params: 1, results: 1, body: body}},
	}
	opts, size := rawOptions(), 0
	opts.ModuleHost.Funcs = append(opts.ModuleHost.Funcs, HostFunc{Interface: iface, Name: "blob", Result: tBytes,
		Call: func(*HostCall, []byte) ([]byte, error) { return wit.AppendBytes(nil, make([]byte, size)), nil },
	})
	c, f := loadedServer(t, m, opts)
	i := instance(t, c, InstanceOptions{})
	for _, size = range []int{10, 16 * kept, 10} {
		if out, err := i.Call(t.Context(), f, u32s(0), nil); err != nil || string(out) != string(u32s(uint32(size))) {
			t.Fatalf("handle = %x, %v; want %d", out, err, size)
		}
		if n := int(i.c.scratch.cap); n > kept {
			t.Errorf("the instance keeps %d bytes", n)
		}
	}
}

// TestServerModuleRefused: a core module that is no server, or needs what core modules do not get, is refused by name,
// when it is compiled and not only when it is loaded.
func TestServerModuleRefused(t *testing.T) {
	imports := func(module, name string) []coreFn {
		return []coreFn{{module: module, name: name, params: 1, results: 1}}
	}
	seven := func(name string, params, results int) coreFn {
		f := coreFn{name: name, params: params, results: results}
		if results > 0 {
			f.body = *new(bin).i32(7)
		}
		return f
	}
	many := slices.Repeat(imports("tripod:grpc/raw@0.1.0", "twice"), maxImports+1)
	for want, m := range map[string]coreMod{
		"a core module has 4097 imports, at most 4096 are supported":     rawModule(many),
		"import wasi:http/types@0.2.0.f: not supported in a core module": rawModule(imports("wasi:http/types@0.2.0", "f")),
		"import env.f: not supported in a core module":                   rawModule(imports("env", "f")),
		"import tripod:grpc/raw@0.1.0#trice: nothing provides it":        rawModule(imports("tripod:grpc/raw@0.1.0", "trice")),
		"incompatible import type": rawModule([]coreFn{{module: "tripod:grpc/raw@0.1.0", name: "twice",
			params: 2, results: 1}}),
		"unknown import: `wasi_snapshot_preview1::fd_frob`":                rawModule(imports(preview1, "fd_frob")),
		"the core module exports neither _start nor tripod:grpc/handler@0": {funcs: []coreFn{seven("f", 1, 1)}},
		"but also _start; build it as a library":                           rawModule(nil, seven("_start", 0, 0)),
		`its core function has type "ii>i", not "i>i"`:                     {funcs: []coreFn{seven(rawHandler+".0#handle", 2, 1)}},
	} {
		if _, err := testEngine(t).Compile(t.Context(), m.bytes(), rawOptions()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error = %v; want %q", err, want)
		}
	}
}

// TestManyImports: a core module with as many imports as are allowed runs.
func TestManyImports(t *testing.T) {
	var body bin
	body.u8(0x20, 0, 0x10).u32(maxImports - 1) // the last import, with the parameter
	m := coreMod{funcs: []coreFn{{name: rawHandler + ".0#handle", params: 1, results: 1, body: body}}}
	opts := rawOptions()
	twice := opts.ModuleHost.Funcs[0]
	opts.ModuleHost.Funcs = nil
	for n := range maxImports {
		twice.Name = fmt.Sprint("twice-", n)
		opts.ModuleHost.Funcs = append(opts.ModuleHost.Funcs, twice)
		m.imports = append(m.imports, coreFn{module: twice.Interface, name: twice.Name, params: 1, results: 1})
	}
	c, f := loadedServer(t, m, opts)
	if out, err := instance(t, c, InstanceOptions{}).Call(t.Context(), f, u32s(21), nil); err != nil || string(out) != string(u32s(42)) {
		t.Errorf("Call = %v, %v; want 42", out, err)
	}
}
