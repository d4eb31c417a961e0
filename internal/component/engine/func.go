package engine

// #include "tw.h"
// #include <stdlib.h>
import "C"

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"sync"
	"unsafe"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// Func is an exported function, bound to its caller's types. It belongs to a Code and works with all instances of that
// Code.
type Func struct {
	code *Code
	item Item
	prog *C.tw_prog

	mu    sync.Mutex
	bound map[*link]*C.tw_func
}

// String returns the function's full name.
func (f *Func) String() string { return f.item.String() }

// Func binds an exported function. If the function does not exist, the error is errdefs.ErrNotFound. If it has another
// type, the error is errdefs.ErrInvalidArgument and says where the two types differ.
func (c *Code) Func(sig Signature) (*Func, error) {
	item, err := c.export(sig)
	if err != nil {
		return nil, err
	}
	params, result := normalizedTypes(sig.Params, sig.Result)
	if c.img.Component { // a core module has only the core types that coreFunc checks
		if err := sameTypes(item, params, result); err != nil {
			return nil, fmt.Errorf("exported function %w", err)
		}
	}
	if c.path == PathCore && !c.img.Start {
		if err := c.coreFunc(item, params, result); err != nil {
			return nil, err
		}
	}
	prog, err := c.host.program(item, params, result)
	if err != nil {
		return nil, err
	}
	f := &Func{code: c, item: item, prog: prog, bound: map[*link]*C.tw_func{}}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.frees, c.funcs = append(c.frees, func() { C.tw_prog_free(prog) }), append(c.funcs, f)
	return f, nil
}

func (c *Code) export(sig Signature) (Item, error) {
	var names []string
	for _, i := range c.img.Exports {
		if compatName(i.Interface) == compatName(sig.Interface) {
			if i.Name == sig.Name {
				return i, nil
			}
			names = append(names, i.Name)
		}
	}
	want := Item{Interface: sig.Interface, Name: sig.Name}
	if len(names) > 0 {
		return want, fmt.Errorf("the guest does not export %v, but only %s of that interface: %w",
			want, strings.Join(names, ", "), errdefs.ErrNotFound)
	}
	return want, fmt.Errorf("the guest does not export %v; it exports %s: %w", want, c.interfaces(), errdefs.ErrNotFound)
}

func (c *Code) interfaces() string {
	var all []string
	for _, i := range c.img.Exports {
		if !slices.Contains(all, i.Interface) {
			all = append(all, i.Interface)
		}
	}
	return strings.Join(all, ", ")
}

// sameTypes checks that the guest's function has the expected types.
func sameTypes(item Item, params []*wit.Type, result *wit.Type) error {
	if len(item.Params) != len(params) {
		return invalid("%v has %d parameters, not %d", item, len(item.Params), len(params))
	}
	for n, p := range item.Params {
		if err := wit.Equal(p, params[n]); err != nil {
			return invalid("%v: parameter %d: %v", item, n+1, err)
		}
	}
	if err := wit.Equal(item.Result, result); err != nil {
		return invalid("%v: result: %v", item, err)
	}
	return nil
}

// coreFunc checks the types of the core functions that implement item, because calls on the core path are unchecked.
func (c *Code) coreFunc(item Item, params []*wit.Type, result *wit.Type) error {
	l, err := c.linked(PathCore, c.pooled(PathCore))
	if err != nil {
		return err
	}
	e, want := l.coreExport(c.img, item), coreType(params, result)
	if e.sig != want {
		return invalid("%v: its core function has type %q, not %q", item, e.sig, want)
	}
	if _, out, _ := strings.Cut(want, ">"); e.post != "" && e.postSig != out+">" {
		return invalid("%v: its core function has type %q, not %q", postReturn(item), e.postSig, out+">")
	}
	return nil
}

func postReturn(item Item) string { return "cabi_post_" + item.String() }

// bind returns the C record of the function for one link. It makes the record on first use.
func (f *Func) bind(l *link) (*C.tw_func, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if b := f.bound[l]; b != nil {
		return b, nil
	}
	b, err := callocOne[C.tw_func]()
	if err != nil {
		return nil, err
	}
	b.prog = f.prog
	if l.module != nil {
		e := l.coreExport(f.code.img, f.item)
		b.name, b.allocator = C.CString(e.name), C.uint32_t(e.allocator)
		if e.post != "" {
			b.post = C.CString(e.post)
		}
	} else if b.index = exportIndex(l.c.component, f.item); b.index == nil {
		C.free(unsafe.Pointer(b))
		return nil, fmt.Errorf("the guest does not export %v: %w", f.item, errdefs.ErrNotFound)
	}
	f.bound[l] = b
	return b, nil
}

// unbind frees the record of the function for a link without instances, if there is one.
func (f *Func) unbind(l *link) {
	f.mu.Lock()
	defer f.mu.Unlock()
	b := f.bound[l]
	if b == nil {
		return
	}
	delete(f.bound, l)
	C.free(unsafe.Pointer(b.name))
	C.free(unsafe.Pointer(b.post))
	if b.index != nil {
		C.wasmtime_component_export_index_delete((*C.wasmtime_component_export_index_t)(b.index))
	}
	C.free(unsafe.Pointer(b))
}

func exportIndex(c *C.wasmtime_component_t, item Item) *C.wasmtime_component_export_index_t {
	var iface *C.wasmtime_component_export_index_t
	if item.Interface != "" {
		name, free := cString(item.Interface)
		defer free()
		if iface = C.wasmtime_component_get_export_index(c, nil, name, C.size_t(len(item.Interface))); iface == nil {
			return nil
		}
		defer C.wasmtime_component_export_index_delete(iface)
	}
	name, free := cString(item.Name)
	defer free()
	return C.wasmtime_component_get_export_index(c, iface, name, C.size_t(len(item.Name)))
}

// maxTypeDepth limits how deeply types may be nested, because the C half is recursive.
const maxTypeDepth = 64

// program makes a function's type table for the C half. The table includes the numbers of the resources.
func (h *hostTable) program(item Item, params []*wit.Type, result *wit.Type) (*C.tw_prog, error) {
	for _, t := range append([]*wit.Type{result}, params...) {
		if d := depth(t, make(map[*wit.Type]int)); d > maxTypeDepth {
			return nil, invalid("%v: its types are nested more than %d deep", item, maxTypeDepth)
		}
	}
	table := wit.Program(params, result)
	resources, err := h.resourceNumbers(item, table)
	if err != nil {
		return nil, err
	}
	prog := C.tw_prog_new(bytePtr(table), C.size_t(len(table)), (*C.uint32_t)(unsafe.SliceData(resources)))
	if prog == nil {
		return nil, fmt.Errorf("%v: no memory for the table of its types: %w", item, ErrStarved)
	}
	return prog, nil
}

func depth(t *wit.Type, seen map[*wit.Type]int) int {
	if t == nil {
		return 0
	}
	if d, ok := seen[t]; ok {
		return d
	}
	deepest := max(depth(t.Elem, seen), depth(t.Ok, seen), depth(t.Err, seen))
	for _, f := range t.Fields {
		deepest = max(deepest, depth(f.Type, seen))
	}
	for _, c := range t.Cases {
		deepest = max(deepest, depth(c.Type, seen))
	}
	seen[t] = deepest + 1
	return deepest + 1
}

// resourceNumbers returns one number for each node of a type table. If the node is a resource, this is the host's
// number of the resource, otherwise 0.
func (h *hostTable) resourceNumbers(item Item, table []byte) ([]uint32, error) {
	const headerWords, nodeWords, childWords = 8, 10, 3
	word := func(n int) int { return int(binary.LittleEndian.Uint32(table[4*n:])) }
	nodes, names := word(2), len(table)-word(5)
	all := make([]uint32, nodes)
	for n := range nodes {
		at := headerWords + word(6) + n*nodeWords
		if kind := wit.Kind(word(at)); kind != wit.Own && kind != wit.Borrow {
			continue
		}
		name, _, _ := strings.Cut(string(table[names+word(at+1):]), "\x00")
		number, ok := h.resources[name]
		if !ok {
			return nil, invalid("%v: the host does not define the resource %q", item, name)
		}
		all[n] = uint32(number)
	}
	return all, nil
}
