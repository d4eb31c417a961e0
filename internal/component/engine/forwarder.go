package engine

// #include "tw.h"
import "C"

import (
	"encoding/binary"
	"fmt"
	"sync"
)

// forwarder lets wasmtime's WASI answer calls of preview 1 functions. Guests with directories need it (p1pass.c).
type forwarder struct {
	linker *C.wasmtime_linker_t
	module *C.wasmtime_module_t
}

// forwarders holds one forwarder for each engine. Each forwarder is compiled on first use.
type forwarders struct {
	mu   sync.Mutex
	made map[*C.wasm_engine_t]forwarder
}

// preview1Funcs returns the names of the functions of preview 1.
var preview1Funcs = sync.OnceValue(func() (all []string) {
	for n := C.uint32_t(0); ; n++ {
		var params *C.char
		var fds C.uint32_t
		name := C.tw_preview1(n, &params, &fds)
		if name == nil {
			return all
		}
		all = append(all, C.GoString(name))
	}
})

// forEngine returns the forwarder of an engine. The forwarder is never freed, because engines are never freed.
func (p *forwarders) forEngine(engine *C.wasm_engine_t) (forwarder, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	made, ok := p.made[engine]
	if ok {
		return made, nil
	}
	made.linker = C.wasmtime_linker_new(engine)
	err := failure(C.wasmtime_linker_define_wasi(made.linker))
	if err == nil {
		code := forwarderModule()
		err = failure(C.wasmtime_module_new(engine, bytePtr(code), C.size_t(len(code)), &made.module))
	}
	if err != nil {
		C.wasmtime_linker_delete(made.linker)
		return forwarder{}, fmt.Errorf("forward WASI: %w", err)
	}
	if p.made == nil {
		p.made = map[*C.wasm_engine_t]forwarder{}
	}
	p.made[engine] = made
	return made, nil
}

// forwarderModule returns a module that imports a memory and the functions of preview 1 that take descriptors. The
// module exports the memory. For each imported function, it exports a function of the same name that calls the imported
// function. The binary format is described in webassembly.github.io/spec/core/binary.
func forwarderModule() []byte {
	const (
		i32, i64     = 0x7f, 0x7e
		kindFunction = 0
		kindMemory   = 2
	)
	name := func(b []byte, s string) []byte { return append(binary.AppendUvarint(b, uint64(len(s))), s...) }
	types, imports := []byte{}, append(name(name(nil, "guest"), "memory"), kindMemory, 0, 0) // minimum of 0 pages
	var functions, codes []byte
	exports := append(name(nil, "memory"), kindMemory, 0)
	n := 0
	each := func(f func(fname, params string)) {
		for k := C.uint32_t(0); ; k++ {
			var params *C.char
			var fds C.uint32_t
			fname := C.tw_preview1(k, &params, &fds)
			if fname == nil {
				return
			}
			if fds != 0 {
				f(C.GoString(fname), C.GoString(params))
			}
		}
	}
	each(func(fname, params string) {
		types = append(types, 0x60, byte(len(params)))
		for _, p := range params {
			types = append(types, map[rune]byte{'i': i32, 'l': i64}[p])
		}
		types = append(types, 1, i32)
		imports = append(name(name(imports, preview1), fname), kindFunction, byte(n))
		n++
	})
	k := 0
	each(func(fname, params string) {
		functions = append(functions, byte(k))
		exports = append(name(exports, fname), kindFunction, byte(n+k))
		body := []byte{0} // no locals
		for p := range params {
			body = append(body, 0x20, byte(p)) // local.get
		}
		body = append(body, 0x10, byte(k), 0x0b) // call, end
		codes = append(append(codes, byte(len(body))), body...)
		k++
	})
	module := []byte("\x00asm\x01\x00\x00\x00")
	for _, s := range []struct {
		id, count int
		entries   []byte
	}{{1, n, types}, {2, n + 1, imports}, {3, n, functions}, {7, n + 1, exports}, {10, n, codes}} {
		body := append([]byte{byte(s.count)}, s.entries...) // each count is below 128
		module = append(binary.AppendUvarint(append(module, byte(s.id)), uint64(len(body))), body...)
	}
	return module
}
