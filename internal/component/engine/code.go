package engine

// #include "tw.h"
// #include <stdlib.h>
import "C"

import (
	"bytes"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
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
	funcs  []*Func
	users  int // number of instances
	closed bool
	frees  []func() // destructors, called in reverse order
}

// link is the guest after it has been loaded into one engine for one path and its imports have been bound. Code.Replace
// replaces it; until then, it belongs to Code.links.
type link struct {
	code *Code
	slot int
	// users is the number of instances, and frees are destructors, called in reverse order. Both are guarded by code.mu.
	users    int
	frees    []func()
	replaced atomic.Bool

	c C.tw_code
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
	img.forget(c.path)
	return c, nil
}

// forget releases what a link has its own copy of, because the caller may reuse the image's bytes. What is left is a copy of
// the component, if the component path could still be needed.
func (i *image) forget(path Path) {
	if i.module, i.memory = nil, nil; path == PathComponent {
		i.component = nil
	}
	i.component = bytes.Clone(i.component)
}

// Replace makes instances that begin from now on run the machine code of another image of the same guest, such as one that
// was compiled without Config.Quick. Instances that exist keep theirs. Functions and snapshots remain valid. If the image is
// of another guest, or of an engine with another fingerprint, the error is errdefs.ErrFailedPrecondition, and nothing changes.
func (c *Code) Replace(image []byte) error {
	img, err := decodeImage(image)
	if err != nil {
		return err
	}
	if !reflect.DeepEqual(img.inspection, c.img.inspection) {
		return fmt.Errorf("the image is of another guest: %w", errdefs.ErrFailedPrecondition)
	}
	made := &Code{engine: c.engine, img: img, path: c.path, host: c.host} // beside the requests, which need c.mu
	next, err := made.linked(c.path, c.pooled(c.path))
	if err != nil {
		return err
	}
	if err = made.initialMemory(next); err == nil {
		img.forget(c.path)
		err = c.exchange(next, img)
	}
	if err != nil {
		next.free()
	}
	return err
}

// exchange makes next, of another image of the guest, the only link. Others follow when they are needed.
func (c *Code) exchange(next *link, img *image) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return errClosed
	}
	for _, l := range c.links { // calls on the core path are unchecked
		if l != nil && l.path() == next.path() && !maps.Equal(next.sigs, l.sigs) {
			return fmt.Errorf("its functions have other types: %w", errdefs.ErrFailedPrecondition)
		}
	}
	old := c.links
	next.code, c.links = c, [4]*link{}
	c.links[next.slot] = next
	c.img.quick, c.img.component, c.img.memory, c.img.module = img.quick, img.component, img.memory, img.module
	for _, l := range old {
		if l != nil {
			l.retire()
		}
	}
	return nil
}

// errClosed is the error of calls on closed code.
var errClosed = fmt.Errorf("code is closed: %w", errdefs.ErrFailedPrecondition)

// retire frees a link that was replaced once it has no instances. The caller holds code.mu.
func (l *link) retire() {
	if l.replaced.Store(true); l.users == 0 {
		l.free()
	}
}

// free frees a link without instances. The caller holds code.mu.
func (l *link) free() {
	for _, f := range l.code.funcs {
		f.unbind(l)
	}
	for _, free := range slices.Backward(l.frees) {
		free()
	}
	l.frees = nil
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
	for _, l := range c.links {
		if l != nil {
			l.free()
		}
	}
	for _, free := range slices.Backward(c.frees) {
		free()
	}
	c.links, c.frees = [4]*link{}, nil
}

// acquire returns the link for one more instance, which drop gives back. It fails if the code is closed.
func (c *Code) acquire(path Path, pooled bool) (*link, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, errClosed
	}
	l, err := c.link(path, pooled)
	if err == nil {
		err = c.initialMemory(l)
	}
	if err != nil {
		return nil, err
	}
	c.users++
	l.users++
	return l, nil
}

// drop gives back what acquire has returned.
func (l *link) drop() {
	c := l.code
	c.mu.Lock()
	defer c.mu.Unlock()
	c.users--
	if l.users--; l.replaced.Load() && l.users == 0 {
		l.free()
	}
	c.release()
}

// slotOf returns the index in Code.links for a path and engine.
func slotOf(path Path, pooled bool) int {
	slot := 2 * int(path-PathComponent)
	if pooled {
		slot++
	}
	return slot
}

func (l *link) path() Path   { return PathComponent + Path(l.slot/2) }
func (l *link) pooled() bool { return l.slot%2 == 1 }

// pooled reports whether instances begin in the pool, unless their code is quick.
func (c *Code) pooled(path Path) bool {
	return c.engine.pooled != nil && (path != PathCore || !c.img.Snapshot.Detached)
}

// linked returns the link for a path and engine, and makes it on first use.
func (c *Code) linked(path Path, pooled bool) (*link, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.link(path, pooled)
}

// link implements linked. The caller holds c.mu.
func (c *Code) link(path Path, pooled bool) (*link, error) {
	slot := slotOf(path, pooled && !c.img.quick)
	if l := c.links[slot]; l != nil {
		return l, nil
	}
	l := &link{code: c, slot: slot}
	engines, err := c.engine.engines, error(nil)
	if c.img.quick {
		engines, err = c.engine.quick()
	}
	switch {
	case err != nil:
		return nil, err
	case l.pooled():
		l.c.engine = c.engine.pooled
	case path == PathCore && c.img.Snapshot.Detached:
		l.c.engine = engines.detached
	default:
		l.c.engine = engines.plain
	}
	if path == PathCore {
		err = c.linkCore(l)
	} else {
		err = c.linkComponent(l)
	}
	if err != nil {
		l.free()
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
	l.frees = append(l.frees, func() { C.wasmtime_module_delete(l.module) })
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
	l.frees = append(l.frees, func() { C.wasmtime_linker_delete(linker) })
	bind := c.bindNames
	if l.allocators = []string{"cabi_realloc"}; c.img.Plan != nil {
		bind, l.allocators = c.bindPlan, nil
	}
	err := bind(l, linker)
	if err != nil {
		return err
	}
	l.c.nallocators = C.uint32_t(len(l.allocators))
	if l.c.allocators, err = l.cNames(l.allocators); err != nil {
		return err
	}
	var pre *C.wasmtime_instance_pre_t
	if err := failure(C.wasmtime_linker_instantiate_pre(linker, l.module, &pre)); err != nil {
		return invalid("%v", err)
	}
	l.frees = append(l.frees, func() { C.wasmtime_instance_pre_delete(pre) })
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
	l.frees = append(l.frees, func() { C.wasmtime_component_delete(comp) })
	linker := C.wasmtime_component_linker_new(l.c.engine)
	l.frees = append(l.frees, func() { C.wasmtime_component_linker_delete(linker) })
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
