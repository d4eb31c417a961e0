package engine

// #include "tw.h"
// #include <stdlib.h>
import "C"

import (
	"fmt"
	"slices"
	"strconv"
	"unsafe"

	"github.com/tripod-run/tripod/internal/component/wasmbin"
)

// planned is a component's plan, and why the engine cannot follow it, or "".
type planned struct {
	*wasmbin.Plan
	odd string
}

func planOf(wasm []byte, host func(string) bool) (planned, error) {
	plan, odd, err := wasmbin.NewPlan(wasm)
	if odd == "" && err == nil {
		odd = planImports(plan, host)
	}
	if odd == "" && err == nil && len(plan.Module.Tables) > maxTables {
		odd = fmt.Sprintf("its core modules have %d tables", len(plan.Module.Tables))
	}
	return planned{plan, odd}, err
}

// planImports returns why the engine cannot follow a plan, as far as the plan's imports tell, or "" if it can.
func planImports(p *wasmbin.Plan, host func(string) bool) string {
	for _, i := range p.Imports {
		if host == nil || !host(i.Interface) {
			return fmt.Sprintf("the component imports %s, which only the component path provides", i.Interface)
		}
	}
	return ""
}

// planExports returns why the component's functions cannot be called by the plan, or "" if they can.
func (i *inspection) planExports() string {
	for _, item := range i.Exports {
		if _, ok := i.Plan.Exports[item.String()]; !ok {
			return fmt.Sprintf("no core function implements %v", item)
		}
	}
	return ""
}

// coreExport is the core function that implements an exported function on the core path.
type coreExport struct {
	name, post   string
	allocator    uint32
	sig, postSig string // the types in the form of coreType; postSig is "" if there is no post
}

// noAllocator is the number of the allocator of a function that needs none.
const noAllocator = uint32(C.TW_NONE)

// coreExport returns the core function that implements item. It must exist, if the inspection is right.
func (l *link) coreExport(img *image, item Item) coreExport {
	e := coreExport{name: item.String(), post: postReturn(item)}
	if img.Plan != nil {
		lift := img.Plan.Exports[item.String()]
		e = coreExport{name: lift.Func, post: lift.Post, allocator: l.allocator(lift.Realloc)}
	}
	e.sig, e.postSig = l.sigs[e.name], l.sigs[e.post]
	if img.Plan == nil && e.postSig == "" {
		e.post = ""
	}
	return e
}

// allocator returns the number of an allocator, which is the name of an export, or "".
func (l *link) allocator(name string) uint32 {
	if name == "" {
		return noAllocator
	}
	return uint32(slices.Index(l.allocators, name))
}

// findAllocators lists the allocators of a plan and checks their types, because calls of them are unchecked.
func (l *link) findAllocators(p *wasmbin.Plan) error {
	for _, i := range p.Imports {
		l.allocators = append(l.allocators, i.Realloc)
	}
	for _, e := range p.Exports {
		l.allocators = append(l.allocators, e.Realloc)
	}
	slices.Sort(l.allocators)
	l.allocators = slices.DeleteFunc(slices.Compact(l.allocators), func(name string) bool { return name == "" })
	for _, name := range l.allocators {
		if got := l.sigs[name]; got != allocatorType {
			return invalid("a core module's allocator has type %s, not %s", got, allocatorType)
		}
	}
	return nil
}

// bindPlan defines the functions of the host that the plan's module imports.
func (c *Code) bindPlan(l *link, linker *C.wasmtime_linker_t) error {
	if err := l.findAllocators(c.img.Plan); err != nil {
		return err
	}
	none, free := cString("")
	defer free()
	for n, i := range c.img.Plan.Imports {
		known, err := c.host.planned(i)
		if err != nil {
			return err
		}
		fn, err := hostfn(int(known.index), &l.frees)
		if err != nil {
			return err
		}
		fn.prog, fn.drop, fn.role, fn.allocator = known.prog, known.drop, known.role, C.uint32_t(l.allocator(i.Realloc))
		name, free := cString(strconv.Itoa(n))
		text := takeString(C.tw_define_core(linker, none, name, fn))
		if free(); text != "" {
			return invalid("import %s#%s: %s", i.Interface, i.Name, text)
		}
	}
	return nil
}

// planned returns the C record of a function that a plan imports.
func (h *hostTable) planned(f wasmbin.HostFunc) (*C.tw_hostfn, error) {
	if !f.Drop {
		if n, ok := h.names[[2]string{compatName(f.Interface), f.Name}]; ok && h.cfuncs[n] != nil {
			return h.cfuncs[n], nil
		}
	}
	for _, r := range h.img.Resources {
		if n, ok := h.resources[r.Of]; ok && f.Drop && r.Interface == f.Interface && r.Name == f.Name {
			return h.cdrops[n], nil
		}
	}
	return nil, invalid("import %s#%s: nothing provides it", f.Interface, f.Name)
}

// cNames copies strings to C memory, which is freed with the link.
func (l *link) cNames(names []string) (**C.char, error) {
	size := C.size_t(len(names)) * C.size_t(unsafe.Sizeof((*C.char)(nil)))
	p := (**C.char)(C.tw_zeroed(size))
	if p == nil {
		return nil, ErrStarved
	}
	l.frees = append(l.frees, func() { C.free(unsafe.Pointer(p)) })
	for n, name := range names {
		s, free := cString(name)
		l.frees = append(l.frees, free)
		unsafe.Slice(p, len(names))[n] = s
	}
	return p, nil
}
