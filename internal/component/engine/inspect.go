package engine

// #include "tw.h"
import "C"

import (
	"fmt"
	"strings"
	"unsafe"

	"github.com/tripod-run/tripod/internal/component/wasmbin"
	"github.com/tripod-run/tripod/internal/component/wit"
)

// inspection is the description of the guest in a code image.
type inspection struct {
	World        World
	Component    bool
	Imports      []Item
	Exports      []Item
	Resources    []resourceItem // only imported resources
	MinMemory    uint64         // total bytes of memory that the guest's core modules declare
	InstanceSize uint64         // of an instance of the guest, as instanceSize
	Memories     int            // number of memories that the guest's core modules define
	Plan         *wasmbin.Plan  // of the core path, without its Module; nil if the first core module suffices
	Start        bool           // the core path of a command calls _start
	CoreOdd      string         // why there is no core path; "" if there is one
	CoreWASI     bool           // the core module imports preview 1
	CoreWaits    bool           // the core module imports functions of preview 1 that can wait
	Snapshot     snapshotInspection
}

// charged returns the bytes that an instance takes beside its memory, as far as they are charged to a pod.
func (in *inspection) charged() uint64 {
	return max(in.InstanceSize, freeInstanceSize) - freeInstanceSize
}

// resourceItem is a resource that the guest imports as Interface#Name. Of is the resource's name in the interface that
// defines the resource.
type resourceItem struct {
	Interface, Name, Of string
}

// inspector reads the types of a component.
type inspector struct {
	engine    *C.wasm_engine_t
	resources []namedResource
	out       *inspection
	err       error
}

type namedResource struct {
	typ  *C.wasmtime_component_resource_type_t
	name string
}

func inspect(engine *C.wasm_engine_t, c *C.wasmtime_component_t, out *inspection) error {
	t := C.wasmtime_component_type(c)
	defer C.wasmtime_component_type_delete(t)
	in := &inspector{engine: engine, out: out}
	defer func() {
		for _, r := range in.resources {
			C.wasmtime_component_resource_type_delete(r.typ)
		}
	}()
	for n := range C.wasmtime_component_type_import_count(t, engine) {
		in.top(&out.Imports, true, func(name **C.char, length *C.size_t, item *C.wasmtime_component_item_t) bool {
			return bool(C.wasmtime_component_type_import_nth(t, engine, n, name, length, item))
		})
	}
	for n := range C.wasmtime_component_type_export_count(t, engine) {
		in.top(&out.Exports, false, func(name **C.char, length *C.size_t, item *C.wasmtime_component_item_t) bool {
			return bool(C.wasmtime_component_type_export_nth(t, engine, n, name, length, item))
		})
	}
	return in.err
}

type nth func(name **C.char, length *C.size_t, item *C.wasmtime_component_item_t) bool

// top adds one import or export of the component itself to the list. If the item is an interface, top adds all
// functions of the interface.
func (in *inspector) top(to *[]Item, imported bool, get nth) {
	var name *C.char
	var length C.size_t
	var item C.wasmtime_component_item_t
	if !get(&name, &length, &item) {
		return
	}
	defer C.wasmtime_component_item_delete(&item)
	iface := nameOf(name, length)
	switch item.kind {
	case C.WASMTIME_COMPONENT_ITEM_COMPONENT_FUNC:
		*to = append(*to, in.function("", iface, unionPointer[*C.wasmtime_component_func_type_t](unsafe.Pointer(&item.of))))
	case C.WASMTIME_COMPONENT_ITEM_COMPONENT_INSTANCE:
		t := unionPointer[*C.wasmtime_component_instance_type_t](unsafe.Pointer(&item.of))
		for n := range C.wasmtime_component_instance_type_export_count(t, in.engine) {
			in.member(to, imported, iface, func(name **C.char, length *C.size_t, item *C.wasmtime_component_item_t) bool {
				return bool(C.wasmtime_component_instance_type_export_nth(t, in.engine, n, name, length, item))
			})
		}
	case C.WASMTIME_COMPONENT_ITEM_TYPE:
	default: // modules, components, resources outside any interface
		if imported && in.err == nil {
			in.err = invalid("import %s: nothing provides it", iface)
		}
	}
}

// member adds one item of an interface to the list.
func (in *inspector) member(to *[]Item, imported bool, iface string, get nth) {
	var name *C.char
	var length C.size_t
	var item C.wasmtime_component_item_t
	if !get(&name, &length, &item) {
		return
	}
	defer C.wasmtime_component_item_delete(&item)
	switch item.kind {
	case C.WASMTIME_COMPONENT_ITEM_COMPONENT_FUNC:
		*to = append(*to, in.function(iface, nameOf(name, length), unionPointer[*C.wasmtime_component_func_type_t](unsafe.Pointer(&item.of))))
	case C.WASMTIME_COMPONENT_ITEM_RESOURCE:
		in.resource(iface, nameOf(name, length), imported, unionPointer[*C.wasmtime_component_resource_type_t](unsafe.Pointer(&item.of)))
	}
}

// resource records a resource under its first name, because the interface that defines the resource comes first.
func (in *inspector) resource(iface, name string, imported bool, t *C.wasmtime_component_resource_type_t) {
	of := in.find(t)
	if of == "" {
		of = compatName(iface) + "#" + name
		in.resources = append(in.resources, namedResource{C.wasmtime_component_resource_type_clone(t), of})
	}
	if imported {
		in.out.Resources = append(in.out.Resources, resourceItem{iface, name, of})
	}
}

func (in *inspector) find(t *C.wasmtime_component_resource_type_t) string {
	for _, r := range in.resources {
		if C.wasmtime_component_resource_type_equal(r.typ, t) {
			return r.name
		}
	}
	return ""
}

func (in *inspector) function(iface, name string, t *C.wasmtime_component_func_type_t) Item {
	item := Item{Interface: iface, Name: name}
	for n := range C.wasmtime_component_func_type_param_count(t) {
		var pname *C.char
		var length C.size_t
		var vt C.wasmtime_component_valtype_t
		if C.wasmtime_component_func_type_param_nth(t, n, &pname, &length, &vt) {
			item.Params = append(item.Params, in.valtype(&vt, item))
		}
	}
	var vt C.wasmtime_component_valtype_t
	if C.wasmtime_component_func_type_result(t, &vt) {
		item.Result = in.valtype(&vt, item)
	}
	return item
}

var scalarKinds = map[C.uint8_t]wit.Kind{
	C.WASMTIME_COMPONENT_VALTYPE_BOOL: wit.Bool, C.WASMTIME_COMPONENT_VALTYPE_S8: wit.S8, C.WASMTIME_COMPONENT_VALTYPE_U8: wit.U8,
	C.WASMTIME_COMPONENT_VALTYPE_S16: wit.S16,
	C.WASMTIME_COMPONENT_VALTYPE_U16: wit.U16, C.WASMTIME_COMPONENT_VALTYPE_S32: wit.S32, C.WASMTIME_COMPONENT_VALTYPE_U32: wit.U32,
	C.WASMTIME_COMPONENT_VALTYPE_S64: wit.S64,
	C.WASMTIME_COMPONENT_VALTYPE_U64: wit.U64, C.WASMTIME_COMPONENT_VALTYPE_F32: wit.F32, C.WASMTIME_COMPONENT_VALTYPE_F64: wit.F64,
	C.WASMTIME_COMPONENT_VALTYPE_CHAR:   wit.Char,
	C.WASMTIME_COMPONENT_VALTYPE_STRING: wit.String,
}

// valtype converts a wasmtime type, and frees the wasmtime type. Errors mention the given function.
func (in *inspector) valtype(t *C.wasmtime_component_valtype_t, where Item) *wit.Type {
	defer C.wasmtime_component_valtype_delete(t)
	if k, ok := scalarKinds[t.kind]; ok {
		return &wit.Type{Kind: k}
	}
	var sub C.wasmtime_component_valtype_t
	switch t.kind {
	case C.WASMTIME_COMPONENT_VALTYPE_LIST:
		C.wasmtime_component_list_type_element(unionPointer[*C.wasmtime_component_list_type_t](unsafe.Pointer(&t.of)), &sub)
		return &wit.Type{Kind: wit.List, Elem: in.valtype(&sub, where)}
	case C.WASMTIME_COMPONENT_VALTYPE_OPTION:
		C.wasmtime_component_option_type_ty(unionPointer[*C.wasmtime_component_option_type_t](unsafe.Pointer(&t.of)), &sub)
		return &wit.Type{Kind: wit.Option, Elem: in.valtype(&sub, where)}
	case C.WASMTIME_COMPONENT_VALTYPE_OWN:
		return &wit.Type{Kind: wit.Own, Name: in.find(unionPointer[*C.wasmtime_component_resource_type_t](unsafe.Pointer(&t.of)))}
	case C.WASMTIME_COMPONENT_VALTYPE_BORROW:
		return &wit.Type{Kind: wit.Borrow, Name: in.find(unionPointer[*C.wasmtime_component_resource_type_t](unsafe.Pointer(&t.of)))}
	}
	return in.compound(t, where)
}

func (in *inspector) compound(t *C.wasmtime_component_valtype_t, where Item) *wit.Type {
	var sub C.wasmtime_component_valtype_t
	var name *C.char
	var length C.size_t
	switch t.kind {
	case C.WASMTIME_COMPONENT_VALTYPE_RECORD:
		r, out := unionPointer[*C.wasmtime_component_record_type_t](unsafe.Pointer(&t.of)), &wit.Type{Kind: wit.Record}
		for n := range C.wasmtime_component_record_type_field_count(r) {
			C.wasmtime_component_record_type_field_nth(r, n, &name, &length, &sub)
			out.Fields = append(out.Fields, wit.Field{Name: nameOf(name, length), Type: in.valtype(&sub, where)})
		}
		return out
	case C.WASMTIME_COMPONENT_VALTYPE_TUPLE:
		r, out := unionPointer[*C.wasmtime_component_tuple_type_t](unsafe.Pointer(&t.of)), &wit.Type{Kind: wit.Tuple}
		for n := range C.wasmtime_component_tuple_type_types_count(r) {
			C.wasmtime_component_tuple_type_types_nth(r, n, &sub)
			out.Fields = append(out.Fields, wit.Field{Type: in.valtype(&sub, where)})
		}
		return out
	case C.WASMTIME_COMPONENT_VALTYPE_RESULT:
		r, out := unionPointer[*C.wasmtime_component_result_type_t](unsafe.Pointer(&t.of)), &wit.Type{Kind: wit.Result}
		if C.wasmtime_component_result_type_ok(r, &sub) {
			out.Ok = in.valtype(&sub, where)
		}
		if C.wasmtime_component_result_type_err(r, &sub) {
			out.Err = in.valtype(&sub, where)
		}
		return out
	}
	return in.named(t, where)
}

// named converts a variant, enum or flags type.
func (in *inspector) named(t *C.wasmtime_component_valtype_t, where Item) *wit.Type {
	var sub C.wasmtime_component_valtype_t
	var name *C.char
	var length C.size_t
	out := &wit.Type{}
	switch t.kind {
	case C.WASMTIME_COMPONENT_VALTYPE_VARIANT:
		out.Kind = wit.Variant
		v := unionPointer[*C.wasmtime_component_variant_type_t](unsafe.Pointer(&t.of))
		for n := range C.wasmtime_component_variant_type_case_count(v) {
			var has C.bool
			C.wasmtime_component_variant_type_case_nth(v, n, &name, &length, &has, &sub)
			c := wit.Case{Name: nameOf(name, length)}
			if has {
				c.Type = in.valtype(&sub, where)
			}
			out.Cases = append(out.Cases, c)
		}
	case C.WASMTIME_COMPONENT_VALTYPE_ENUM:
		out.Kind = wit.Enum
		v := unionPointer[*C.wasmtime_component_enum_type_t](unsafe.Pointer(&t.of))
		for n := range C.wasmtime_component_enum_type_names_count(v) {
			C.wasmtime_component_enum_type_names_nth(v, n, &name, &length)
			out.Cases = append(out.Cases, wit.Case{Name: nameOf(name, length)})
		}
	case C.WASMTIME_COMPONENT_VALTYPE_FLAGS:
		out.Kind = wit.Flags
		v := unionPointer[*C.wasmtime_component_flags_type_t](unsafe.Pointer(&t.of))
		for n := range C.wasmtime_component_flags_type_names_count(v) {
			C.wasmtime_component_flags_type_names_nth(v, n, &name, &length)
			out.Cases = append(out.Cases, wit.Case{Name: nameOf(name, length)})
		}
	default:
		if in.err == nil {
			in.err = invalid("function %v has a type that is not supported (futures, streams, error contexts)", where)
		}
	}
	return out
}

// compatName returns an interface's name with its version cut to the compatible part: 0.2 for 0.2.12, 1 for 1.4.0. This
// is how the component model applies semantic versioning (https://semver.org) when it links.
func compatName(iface string) string {
	base, version, ok := strings.Cut(iface, "@")
	if !ok || strings.ContainsAny(version, "-+") {
		return iface
	}
	parts := strings.Split(version, ".")
	switch {
	case len(parts) != 3:
		return iface
	case parts[0] != "0":
		return base + "@" + parts[0]
	case parts[1] != "0":
		return fmt.Sprintf("%s@0.%s", base, parts[1])
	}
	return iface
}

// engineProvides reports whether the engine itself provides an interface.
func engineProvides(iface string) bool {
	base, ok := strings.CutSuffix(compatName(iface), "@0.2")
	if !ok {
		return false
	}
	pkg, name, _ := strings.Cut(base, "/")
	switch pkg {
	case "wasi:cli":
		return name != "run" && name != "command"
	case "wasi:io", "wasi:clocks", "wasi:filesystem", "wasi:random":
		return true
	case "wasi:sockets":
		return true // but it allows no addresses
	}
	return false
}
