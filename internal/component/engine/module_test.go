package engine

import (
	"strings"
	"testing"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// rawModule is a server in a core module whose handle returns a constant, with other imports and exports.
func rawModule(imports []coreFn, funcs ...coreFn) coreMod {
	return coreMod{imports: imports, funcs: append(funcs, coreFn{name: rawHandler + ".0#handle", params: 1, results: 1, body: *new(bin).i32(7)})}
}

func compileRaw(t *testing.T, m coreMod) (*Code, error) {
	t.Helper()
	e := testEngine(t)
	image, err := e.Compile(t.Context(), m.bytes(), CompileOptions{
		Provided: func(string) bool { return true }, ProvidedToModule: func(i string) bool { return i == "tripod:grpc/raw@0.1.0" },
	})
	if err != nil {
		return nil, err
	}
	c, err := e.Load(image, Host{Funcs: []HostFunc{{
		Interface: "tripod:grpc/raw@0.1.0", Name: "twice", Params: []*wit.Type{tU32}, Result: tU32,
		Call: func(_ *HostCall, args []byte) ([]byte, error) { return u32s(2 * wit.NewReader(args).U32()), nil },
	}}})
	if err == nil {
		t.Cleanup(c.Close)
	}
	return c, err
}

// TestServerModule: a core module with exports and imports of the canonical ABI is called like a component.
func TestServerModule(t *testing.T) {
	var body bin
	body.u8(0x20, 0, 0x10, 0) // twice(parameter)
	m := coreMod{
		imports: []coreFn{{module: "tripod:grpc/raw@0.1.0", name: "twice", params: 1, results: 1}},
		funcs:   []coreFn{{name: rawHandler + ".0#handle", params: 1, results: 1, body: body}},
	}
	c, err := compileRaw(t, m)
	if err != nil {
		t.Fatal(err)
	}
	if c.World() != WorldRaw || c.Component() || c.Path() != PathCore {
		t.Errorf("World, Component, Path = %v, %v, %v; want raw, false, core", c.World(), c.Component(), c.Path())
	}
	f, err := c.Func(Signature{Interface: rawHandler + ".0", Name: "handle", Params: []*wit.Type{tU32}, Result: tU32})
	if err != nil {
		t.Fatal(err)
	}
	if out, err := instance(t, c, InstanceOptions{}).Call(t.Context(), f, u32s(21), nil); err != nil || string(out) != string(u32s(42)) {
		t.Errorf("handle(21) = %x, %v; want 42", out, err)
	}
	if _, err := c.Func(Signature{Interface: rawHandler + ".0", Name: "handle", Params: []*wit.Type{tStr}, Result: tU32}); err == nil {
		t.Error("Func accepted a signature with other core types")
	}
}

// TestServerModuleRefused: a core module that is no server, or needs what core modules do not get, is refused by name.
func TestServerModuleRefused(t *testing.T) {
	imports := func(module, name string) []coreFn {
		return []coreFn{{module: module, name: name, params: 1, results: 1}}
	}
	start := coreFn{name: "f", params: 1, results: 1, body: *new(bin).i32(7)}
	for want, m := range map[string]coreMod{
		"import wasi:http/types@0.2.0.f: not supported in a core module":   rawModule(imports("wasi:http/types@0.2.0", "f")),
		"import env.f: not supported in a core module":                     rawModule(imports("env", "f")),
		"import tripod:grpc/raw@0.1.0#trice: nothing provides it":          rawModule(imports("tripod:grpc/raw@0.1.0", "trice")),
		"incompatible import type":                                         rawModule([]coreFn{{module: "tripod:grpc/raw@0.1.0", name: "twice", params: 2, results: 1}}),
		"unknown import: `wasi_snapshot_preview1::fd_frob`":                rawModule(imports(preview1, "fd_frob")),
		"the core module exports neither _start nor tripod:grpc/handler@0": {funcs: []coreFn{start}},
	} {
		if _, err := compileRaw(t, m); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error = %v; want %q", err, want)
		}
	}
}
