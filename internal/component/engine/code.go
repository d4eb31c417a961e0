package engine

// #include "tw.h"
// #include <stdlib.h>
import "C"

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"sync"
	"unsafe"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// Code is a loaded guest, from which any number of instances can be made. It is safe for concurrent use.
type Code struct {
	engine *Engine
	img    *image
	host   *hostTable
	path   Path
	run    *Func // run of a component that is a command; otherwise nil

	mu     sync.Mutex
	links  [4]*link // indexed by slotOf
	users  int      // number of instances
	closed bool
	frees  []func() // destructors, called in reverse order
}

// link is the guest after it has been loaded into one engine for one path and its imports have been bound.
type link struct {
	slot int
	c    C.tw_code
	// The core path's module, and its exported functions with their types ("ii>i").
	module     *C.wasmtime_module_t
	sigs       map[string]string
	memory     *C.wasmtime_module_t // the initial memory of a detached module, until it is an image; otherwise nil
	allocators []string             // exports
}

// Load makes a guest from a code image. The image contains machine code, so it must be the unchanged result of Compile,
// with the same Fingerprint. If the image is damaged or has another fingerprint, the error is
// errdefs.ErrFailedPrecondition; compile the guest again. If neither WASI nor host provides an import with the right
// type, the error is errdefs.ErrInvalidArgument and names the import. The caller may reuse image after Load.
func (e *Engine) Load(image []byte, host Host) (*Code, error) {
	img, err := decodeImage(image)
	if err != nil {
		return nil, err
	}
	return e.load(img, host)
}

func (e *Engine) load(img *image, host Host) (*Code, error) {
	c := &Code{engine: e, img: img, path: img.path()}
	var err error
	if c.host, err = newHostTable(c, host); err != nil {
		c.Close()
		return nil, err
	}
	if _, err := c.linked(c.path, c.pooled(c.path)); err != nil {
		c.Close()
		return nil, err
	}
	if err := c.findRun(); err != nil {
		c.Close()
		return nil, err
	}
	// The link holds its own copy of the code, and the caller may reuse the image's bytes. Of these bytes, keep only a
	// copy of the component, and only if the component path could still be needed.
	if img.module, img.memory = nil, nil; c.path == PathComponent {
		img.component = nil
	}
	img.component = bytes.Clone(img.component)
	return c, nil
}

// World returns the guest's world.
func (c *Code) World() World { return c.img.World }

// Component reports whether the guest is a component. It is false for a core module. The path does not matter.
func (c *Code) Component() bool { return c.img.Component }

// Exports returns the functions that the guest exports, with their types. For a core module it returns only the names.
func (c *Code) Exports() []Item { return slices.Clone(c.img.Exports) }

// Imports returns the functions that the guest imports.
func (c *Code) Imports() []Item { return slices.Clone(c.img.Imports) }

// Path returns the path that calls take by default: PathCore or PathComponent.
func (c *Code) Path() Path { return c.path }

// WhyComponent returns why the guest cannot take the core path, or "" if it can.
func (c *Code) WhyComponent() string { return c.img.CoreOdd }

// Close releases the code once its last instance is closed.
func (c *Code) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed {
		c.closed = true
		c.release()
	}
}

// release frees everything if the code is closed and has no instances. The caller holds c.mu, except during load.
func (c *Code) release() {
	if !c.closed || c.users > 0 {
		return
	}
	for _, free := range slices.Backward(c.frees) {
		free()
	}
	c.frees = nil
}

// addUsers adds n to the number of instances. With n > 0, it fails if the code is closed.
func (c *Code) addUsers(n int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed && n > 0 {
		return fmt.Errorf("code is closed: %w", errdefs.ErrFailedPrecondition)
	}
	c.users += n
	c.release()
	return nil
}

// slotOf returns the index in Code.links for a path and engine.
func slotOf(path Path, pooled bool) int {
	slot := 2 * int(path-PathComponent)
	if pooled {
		slot++
	}
	return slot
}

// pooled reports whether instances begin in the pool.
func (c *Code) pooled(path Path) bool {
	return c.engine.pooled != nil && (path != PathCore || !c.img.Snapshot.Detached)
}

// linked returns the link for a path and engine, and makes it on first use.
func (c *Code) linked(path Path, pooled bool) (*link, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	slot := slotOf(path, pooled)
	if l := c.links[slot]; l != nil {
		return l, nil
	}
	engine := c.engine.plain
	switch {
	case pooled:
		engine = c.engine.pooled
	case path == PathCore && c.img.Snapshot.Detached:
		engine = c.engine.detached
	}
	l := &link{slot: slot}
	l.c.engine = engine
	var err error
	if path == PathCore {
		err = c.linkCore(l)
	} else {
		err = c.linkComponent(l)
	}
	if err != nil {
		return nil, err
	}
	c.links[slot] = l
	return l, nil
}

func (c *Code) linkCore(l *link) error {
	code, err := c.moduleBytes()
	if err != nil {
		return err
	}
	if l.module, err = deserialized(l.c.engine, code); err != nil {
		return err
	}
	c.frees = append(c.frees, func() { C.wasmtime_module_delete(l.module) })
	l.sigs = exportedFuncs(l.module)
	if err := checkSigs(l.sigs); err != nil {
		return err
	}
	l.c.wasi = C.bool(c.img.CoreWASI)
	return c.bindImports(l)
}

// bindImports binds the module to WASI and to the host's functions.
func (c *Code) bindImports(l *link) error {
	linker := C.wasmtime_linker_new(l.c.engine)
	c.frees = append(c.frees, func() { C.wasmtime_linker_delete(linker) })
	bind := c.bindNames
	if l.allocators = []string{"cabi_realloc"}; c.img.Plan != nil {
		bind, l.allocators = c.bindPlan, nil
	}
	err := bind(l, linker)
	if err != nil {
		return err
	}
	l.c.nallocators = C.uint32_t(len(l.allocators))
	if l.c.allocators, err = c.cNames(l.allocators); err != nil {
		return err
	}
	var pre *C.wasmtime_instance_pre_t
	if err := failure(C.wasmtime_linker_instantiate_pre(linker, l.module, &pre)); err != nil {
		return invalid("%v", err)
	}
	c.frees = append(c.frees, func() { C.wasmtime_instance_pre_delete(pre) })
	l.c.pre = pre
	if c.img.Snapshot.Detached {
		return c.linkDetached(l)
	}
	return nil
}

// bindNames binds a module whose imports have the names of functions of WASI and the host.
func (c *Code) bindNames(_ *link, linker *C.wasmtime_linker_t) error {
	if c.img.CoreWASI {
		if text := takeString(C.tw_define_preview1(linker)); text != "" {
			return fmt.Errorf("link WASI: %s", text)
		}
	}
	return c.host.defineCore(linker)
}

// moduleBytes returns a serialized module: during load the one from the image, later that of an engine that has loaded it.
func (c *Code) moduleBytes() ([]byte, error) {
	if len(c.img.module) > 0 {
		return c.img.module, nil
	}
	for _, l := range c.links {
		if l != nil && l.module != nil {
			return serialized(l.module)
		}
	}
	return nil, fmt.Errorf("the guest has no core path (%s): %w", c.img.CoreOdd, errdefs.ErrFailedPrecondition)
}

func (c *Code) componentBytes() ([]byte, error) {
	if len(c.img.component) > 0 {
		return c.img.component, nil
	}
	for _, l := range c.links {
		if l != nil && l.c.component != nil {
			var v C.wasm_byte_vec_t
			err := failure(C.wasmtime_component_serialize(l.c.component, &v))
			if err != nil {
				return nil, err
			}
			return takeBytes(&v), nil
		}
	}
	return nil, fmt.Errorf("the guest was compiled for the core path only: %w", errdefs.ErrFailedPrecondition)
}

func (c *Code) linkComponent(l *link) error {
	code, err := c.componentBytes()
	if err != nil {
		return err
	}
	var comp *C.wasmtime_component_t
	if err := failure(C.wasmtime_component_deserialize(l.c.engine, bytePtr(code), C.size_t(len(code)), &comp)); err != nil {
		return stale(err.Error())
	}
	c.frees = append(c.frees, func() { C.wasmtime_component_delete(comp) })
	linker := C.wasmtime_component_linker_new(l.c.engine)
	c.frees = append(c.frees, func() { C.wasmtime_component_linker_delete(linker) })
	C.wasmtime_component_linker_allow_shadowing(linker, true)
	for _, i := range c.img.Imports {
		if engineProvides(i.Interface) && !c.host.provides(i.Interface) {
			l.c.wasi = true
		}
	}
	if l.c.wasi {
		if err := failure(C.wasmtime_component_linker_add_wasip2(linker)); err != nil {
			return fmt.Errorf("link WASI: %w", err)
		}
	}
	l.c.linker, l.c.component = linker, comp
	return c.host.defineComponent(linker)
}

// exportedFuncs returns the types of a module's exported functions by name. The types come from wasmtime and not from
// our own parser, because calls on the core path are unchecked and a wrong type would do damage.
func exportedFuncs(m *C.wasmtime_module_t) map[string]string {
	var v C.wasm_exporttype_vec_t
	C.wasmtime_module_exports(m, &v)
	defer C.wasm_exporttype_vec_delete(&v)
	sigs := make(map[string]string)
	for _, x := range unsafe.Slice(v.data, int(v.size)) {
		t := C.wasm_exporttype_type(x)
		if C.wasm_externtype_kind(t) != C.WASMTIME_EXTERN_FUNC {
			continue
		}
		name := C.wasm_exporttype_name(x)
		f := C.wasm_externtype_as_functype_const(t)
		sigs[nameOf(name.data, name.size)] = kinds(C.wasm_functype_params(f)) + ">" + kinds(C.wasm_functype_results(f))
	}
	return sigs
}

const allocatorType = "iiii>i" // of cabi_realloc

// checkSigs checks the types of the functions of a core module that the engine calls by their names.
func checkSigs(sigs map[string]string) error {
	for name, want := range map[string]string{"cabi_realloc": allocatorType, "_initialize": ">", "_start": ">"} {
		if got, ok := sigs[name]; ok && got != want {
			return invalid("the core module's %s has type %s, not %s", name, got, want)
		}
	}
	return nil
}

func kinds(v *C.wasm_valtype_vec_t) string {
	var s strings.Builder
	for _, t := range unsafe.Slice(v.data, int(v.size)) {
		letter := byte('?')
		for k, number := range numbers() {
			if C.wasmtime_wasm_valtype_equal(t, number) {
				letter = coreLetters[k]
			}
		}
		s.WriteByte(letter)
	}
	return s.String()
}

// numbers returns the types that coreLetters names. To ask a type for its kind (wasm_valtype_kind) ends the process if it is a
// vector.
var numbers = sync.OnceValue(func() (types [len(coreLetters)]*C.wasm_valtype_t) {
	for k := range types {
		types[k] = C.wasm_valtype_new(C.wasm_valkind_t(k))
	}
	return types
})

const coreLetters = "ilfd" // indexed by wit.CoreType, whose values are wasmtime's numbers

// coreType returns the type of the core function that implements an exported component function.
func coreType(params []*wit.Type, result *wit.Type) string {
	var p strings.Builder
	n := 0
	for _, t := range params {
		flat, ok := t.Flatten()
		if n += len(flat); !ok || n > wit.MaxFlat {
			n = wit.MaxFlat + 1
			break
		}
		for _, k := range flat {
			p.WriteByte(coreLetters[k])
		}
	}
	in, out := p.String(), ""
	if n > wit.MaxFlat {
		in = "i"
	}
	if result != nil {
		out = "i"
		if flat, ok := result.Flatten(); ok && len(flat) == 1 {
			out = coreLetters[flat[0] : flat[0]+1]
		}
	}
	return in + ">" + out
}
