package engine

// #include "tw.h"
// #include <stdlib.h>
import "C"

import (
	"cmp"
	"unsafe"
)

// hostTable is a Host as seen by one guest: checked against the guest's types, and indexed by the numbers that C uses.
type hostTable struct {
	img       *image
	funcs     []HostFunc
	drops     []func(host any, rep uint32)
	ifaces    map[string]bool   // by compatName
	names     map[[2]string]int // compatName of the interface, name → index in funcs
	resources map[string]int    // "compatName of the interface#name" → index in drops
	cfuncs    []*C.tw_hostfn    // C records of funcs; nil if the guest does not import the function
	cdrops    []*C.tw_hostfn    // C records of drops
}

func newHostTable(c *Code, host Host) (*hostTable, error) {
	h := &hostTable{
		img: c.img, funcs: host.Funcs, ifaces: make(map[string]bool), names: make(map[[2]string]int),
		resources: make(map[string]int), cfuncs: make([]*C.tw_hostfn, len(host.Funcs)),
	}
	for n, f := range host.Funcs {
		h.ifaces[compatName(f.Interface)] = true
		h.names[[2]string{compatName(f.Interface), f.Name}] = n
	}
	for n, r := range host.Resources {
		h.ifaces[compatName(r.Interface)] = true
		h.resources[compatName(r.Interface)+"#"+r.Name] = n
		h.drops = append(h.drops, r.Drop)
		fn, err := hostfn(n, &c.frees)
		if err != nil {
			return nil, err
		}
		fn.drop = true
		h.cdrops = append(h.cdrops, fn)
	}
	for _, item := range c.img.Imports {
		if err := h.bind(c, item); err != nil {
			return nil, err
		}
	}
	for _, r := range c.img.Resources {
		if _, ok := h.resources[r.Of]; !ok && (!engineProvides(r.Interface) || h.provides(r.Interface)) {
			return nil, invalid("import %s#%s: nothing provides the resource %s", r.Interface, r.Name, r.Of)
		}
	}
	return h, nil
}

// hostfn allocates the C half's record of a function or resource, which is freed with the owner of frees.
func hostfn(n int, frees *[]func()) (*C.tw_hostfn, error) {
	fn, err := callocOne[C.tw_hostfn]()
	if err != nil {
		return nil, err
	}
	fn.index = C.uint32_t(n)
	*frees = append(*frees, func() { C.free(unsafe.Pointer(fn)) })
	return fn, nil
}

func (h *hostTable) provides(iface string) bool { return h.ifaces[compatName(iface)] }

// bind checks one import and prepares the C record of the function.
func (h *hostTable) bind(c *Code, item Item) error {
	n, ok := h.names[[2]string{compatName(item.Interface), item.Name}]
	if !ok {
		if item.Interface == preview1 || c.img.Component && engineProvides(item.Interface) && !h.provides(item.Interface) {
			return nil // the engine provides the import, or refuses it while linking
		}
		return invalid("import %v: nothing provides it", item)
	}
	params, result := normalizedTypes(h.funcs[n].Params, h.funcs[n].Result)
	if c.img.Component { // for a core module, the linker checks the core types
		if err := sameTypes(item, params, result); err != nil {
			return invalid("import %v", err)
		}
	}
	prog, err := h.program(item, params, result)
	if err != nil {
		return err
	}
	c.frees = append(c.frees, func() { C.tw_prog_free(prog) })
	if h.cfuncs[n], err = hostfn(n, &c.frees); err != nil {
		return err
	}
	h.cfuncs[n].prog, h.cfuncs[n].role = prog, C.uint32_t(h.funcs[n].Role)
	return nil
}

func (h *hostTable) defineCore(l *C.wasmtime_linker_t) error {
	return h.each(func(iface, name string, fn *C.tw_hostfn) error {
		if fn.drop {
			name = "[resource-drop]" + name
		}
		ciface, freeIface := cString(cmp.Or(iface, rootModule))
		defer freeIface()
		cname, freeName := cString(name)
		defer freeName()
		if text := takeString(C.tw_define_core(l, ciface, cname, fn)); text != "" {
			return invalid("import %s#%s: %s", iface, name, text)
		}
		return nil
	})
}

// each calls f for each function and resource that the guest imports from the host. It passes the names that the guest
// uses.
func (h *hostTable) each(f func(iface, name string, fn *C.tw_hostfn) error) error {
	for _, item := range h.img.Imports {
		if n, ok := h.names[[2]string{compatName(item.Interface), item.Name}]; ok {
			if err := f(item.Interface, item.Name, h.cfuncs[n]); err != nil {
				return err
			}
		}
	}
	for _, r := range h.img.Resources {
		if n, ok := h.resources[r.Of]; ok && h.provides(r.Interface) {
			if err := f(r.Interface, r.Name, h.cdrops[n]); err != nil {
				return err
			}
		}
	}
	return nil
}

func (h *hostTable) defineComponent(l *C.wasmtime_component_linker_t) error {
	root := C.wasmtime_component_linker_root(l)
	defer C.wasmtime_component_linker_instance_delete(root)
	byIface := make(map[string][]func(*C.wasmtime_component_linker_instance_t) error)
	err := h.each(func(iface, name string, fn *C.tw_hostfn) error {
		byIface[iface] = append(byIface[iface], func(li *C.wasmtime_component_linker_instance_t) error {
			cname, free := cString(name)
			defer free()
			define := func() *C.char { return C.tw_define_comp(li, cname, fn) }
			if fn.drop {
				define = func() *C.char { return C.tw_define_resource(li, cname, fn) }
			}
			if text := takeString(define()); text != "" {
				return invalid("import %s#%s: %s", iface, name, text)
			}
			return nil
		})
		return nil
	})
	if err != nil {
		return err
	}
	for iface, defines := range byIface {
		if err := defineInterface(root, iface, defines); err != nil {
			return err
		}
	}
	return nil
}

func defineInterface(root *C.wasmtime_component_linker_instance_t, iface string,
	defines []func(*C.wasmtime_component_linker_instance_t) error) error {
	li := root
	if iface != "" {
		name, free := cString(iface)
		defer free()
		if err := failure(C.wasmtime_component_linker_instance_add_instance(root, name, C.size_t(len(iface)), &li)); err != nil {
			return invalid("import %s: %v", iface, err)
		}
		defer C.wasmtime_component_linker_instance_delete(li)
	}
	for _, define := range defines {
		if err := define(li); err != nil {
			return err
		}
	}
	return nil
}
