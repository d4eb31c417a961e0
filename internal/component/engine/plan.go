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
	return planned{plan, odd}, err
}

// memoryModule returns the index of the only module of a plan that has a memory, if the plan makes one instance of it and
// functions are called on this memory, or -1.
func memoryModule(p planned) int {
	if p.Memory == nil || p.Memory.From != wasmbin.FromInstance {
		return -1
	}
	own := p.Steps[p.Memory.Instance].Module
	for n, s := range p.Steps {
		if memories := len(p.Modules[s.Module].Memories); memories != 0 && s.Module != own || n != p.Memory.Instance && s.Module == own {
			return -1
		}
	}
	if len(p.Modules[own].Memories) != 1 {
		return -1
	}
	return own
}

// planImports returns why the engine cannot follow a plan, as far as the plan's imports tell, or "" if it can.
func planImports(p *wasmbin.Plan, host func(string) bool) string {
	for _, s := range p.Steps {
		for _, i := range s.Imports {
			if (i.From == wasmbin.FromHost || i.From == wasmbin.FromDrop) && (host == nil || !host(i.Interface)) {
				return fmt.Sprintf("the component imports %s, which only the component path provides", i.Interface)
			}
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
	name, post                        string
	instance, postInstance, allocator uint32
	sig, postSig                      string // the types in the form of coreType; postSig is "" if there is no post
}

// noAllocator is the number of the allocator of a function that needs none.
const noAllocator = uint32(C.TW_NONE)

// coreExport returns the core function that implements item. It must exist, if the inspection is right.
func (l *link) coreExport(img *image, item Item) coreExport {
	if img.Plan == nil {
		e := coreExport{name: item.String(), sig: l.sigs[0][item.String()]}
		if sig, ok := l.sigs[0][postReturn(item)]; ok {
			e.post, e.postSig = postReturn(item), sig
		}
		return e
	}
	lift := img.Plan.Exports[item.String()]
	e := coreExport{name: lift.Func.Name, instance: uint32(lift.Func.Instance), allocator: l.allocator(lift.Realloc)}
	e.sig = l.sigOf(img.Plan, lift.Func)
	if lift.Post != nil {
		e.post, e.postInstance, e.postSig = lift.Post.Name, uint32(lift.Post.Instance), l.sigOf(img.Plan, *lift.Post)
	}
	return e
}

// sigOf returns the type of an exported function of an instance, or "?" if there is none.
func (l *link) sigOf(p *wasmbin.Plan, c wasmbin.Core) string {
	if c.From == wasmbin.FromInstance {
		if sig, ok := l.sigs[p.Steps[c.Instance].Module][c.Name]; ok {
			return sig
		}
	}
	return "?"
}

// allocator returns the number of an allocator of the plan.
func (l *link) allocator(c *wasmbin.Core) uint32 {
	if c == nil {
		return noAllocator
	}
	return uint32(slices.Index(l.allocators, *c))
}

// linkPlan makes the C half's form of the plan.
func (c *Code) linkPlan(l *link) error {
	p := c.img.Plan
	if err := c.findAllocators(l); err != nil {
		return err
	}
	linker := C.wasmtime_linker_new(l.c.engine)
	c.frees = append(c.frees, func() { C.wasmtime_linker_delete(linker) })
	plan, err := callocOne[C.tw_plan]()
	if err != nil {
		return err
	}
	c.frees = append(c.frees, func() { C.free(unsafe.Pointer(plan)) })
	plan.hosts = linker
	steps, err := callocMany[C.tw_step](c, len(p.Steps))
	if err != nil {
		return err
	}
	hosted := 0
	for n, s := range p.Steps {
		imports, err := callocMany[C.tw_core](c, len(s.Imports))
		if err != nil {
			return err
		}
		for k, i := range s.Imports {
			if i.From == wasmbin.FromInstance {
				c.setCore(&imports[k], i)
				continue
			}
			imports[k] = C.tw_core{hosted: true, name: c.cName(strconv.Itoa(hosted))}
			hosted++
			if err := c.defineHosted(l, linker, imports[k].name, s, k); err != nil {
				return err
			}
		}
		steps[n] = C.tw_step{module: l.modules[s.Module], nimports: C.uint32_t(len(imports)), imports: unsafe.SliceData(imports)}
	}
	plan.nsteps, plan.steps = C.uint32_t(len(steps)), unsafe.SliceData(steps)
	allocators, err := callocMany[C.tw_core](c, len(l.allocators)+1)
	if err != nil {
		return err
	}
	for k, a := range l.allocators {
		c.setCore(&allocators[k], a)
	}
	plan.nallocators, plan.allocators = C.uint32_t(len(l.allocators)), unsafe.SliceData(allocators)
	if p.Memory != nil {
		memory := &allocators[len(l.allocators)]
		c.setCore(memory, *p.Memory)
		plan.memory = memory
	}
	l.c.plan = plan
	if c.img.Snapshot.Detached {
		return c.linkDetached(l)
	}
	return nil
}

// findAllocators lists the allocators of the plan and checks their types, because calls of them are unchecked.
func (c *Code) findAllocators(l *link) error {
	add := func(a *wasmbin.Core) error {
		if a == nil || slices.Contains(l.allocators, *a) {
			return nil
		}
		if got := l.sigOf(c.img.Plan, *a); got != allocatorType {
			return invalid("the core module's allocator %s has type %s, not %s", a.Name, got, allocatorType)
		}
		l.allocators = append(l.allocators, *a)
		return nil
	}
	for _, s := range c.img.Plan.Steps {
		for _, i := range s.Imports {
			if err := add(i.Realloc); err != nil {
				return err
			}
		}
	}
	for _, e := range c.img.Plan.Exports {
		if err := add(e.Realloc); err != nil {
			return err
		}
	}
	return nil
}

// defineHosted defines the host's function for import k of a step, under a name of its own.
func (c *Code) defineHosted(l *link, linker *C.wasmtime_linker_t, name *C.char, s wasmbin.Step, k int) error {
	i := s.Imports[k]
	none, free := cString("")
	defer free()
	if i.From == wasmbin.FromTrap {
		return defineTrap(linker, name, l.modules[s.Module], k)
	}
	known, err := c.host.hosted(i)
	if err != nil {
		return err
	}
	fn, err := c.hostfn(int(known.index))
	if err != nil {
		return err
	}
	fn.prog, fn.drop, fn.role, fn.allocator = known.prog, known.drop, known.role, C.uint32_t(l.allocator(i.Realloc))
	if text := takeString(C.tw_define_core(linker, none, name, fn)); text != "" {
		return invalid("import %s#%s: %s", i.Interface, i.Item, text)
	}
	return nil
}

// hosted returns the C record of a function or resource that a plan refers to.
func (h *hostTable) hosted(c wasmbin.Core) (*C.tw_hostfn, error) {
	if c.From == wasmbin.FromHost {
		if n, ok := h.names[[2]string{compatName(c.Interface), c.Item}]; ok && h.cfuncs[n] != nil {
			return h.cfuncs[n], nil
		}
	}
	for _, r := range h.img.Resources {
		if n, ok := h.resources[r.Of]; ok && c.From == wasmbin.FromDrop && r.Interface == c.Interface && r.Name == c.Item {
			return h.cdrops[n], nil
		}
	}
	return nil, invalid("import %s#%s: nothing provides it", c.Interface, c.Item)
}

// defineTrap defines a function that traps, with the type of the module's import k.
func defineTrap(linker *C.wasmtime_linker_t, name *C.char, m *C.wasmtime_module_t, k int) error {
	var v C.wasm_importtype_vec_t
	C.wasmtime_module_imports(m, &v)
	defer C.wasm_importtype_vec_delete(&v)
	imports := unsafe.Slice(v.data, int(v.size))
	if k >= len(imports) || C.wasm_externtype_kind(C.wasm_importtype_type(imports[k])) != C.WASMTIME_EXTERN_FUNC {
		return invalid("import %d of a core module is not a function", k)
	}
	text := takeString(C.tw_define_trap(linker, name, C.wasm_externtype_as_functype_const(C.wasm_importtype_type(imports[k]))))
	if text != "" {
		return invalid("import %d of a core module: %s", k, text)
	}
	return nil
}

func (c *Code) setCore(to *C.tw_core, from wasmbin.Core) {
	*to = C.tw_core{instance: C.uint32_t(from.Instance), name: c.cName(from.Name)}
}

// cName copies a string to C memory, which is freed with the code.
func (c *Code) cName(s string) *C.char {
	p, free := cString(s)
	c.frees = append(c.frees, free)
	return p
}

// callocMany allocates n zeroed elements in C memory, which are freed with the code.
func callocMany[T any](c *Code, n int) ([]T, error) {
	var t T
	p := C.tw_zeroed(C.size_t(n) * C.size_t(unsafe.Sizeof(t)))
	if p == nil {
		return nil, ErrStarved
	}
	c.frees = append(c.frees, func() { C.free(p) })
	return unsafe.Slice((*T)(p), n), nil
}
