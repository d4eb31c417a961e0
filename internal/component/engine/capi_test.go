package engine

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// layouts prints the layouts of the types that are passed by value or whose members are accessed.
const layouts = `
#include <stdio.h>
#define SIZE(t) printf(#t " %zu %zu\n", sizeof(t), _Alignof(t))
#define AT(t, m) printf(#t "." #m " %zu %zu\n", offsetof(t, m), sizeof(((t *)0)->m))
int main(void) {
  SIZE(wasm_byte_vec_t); AT(wasm_byte_vec_t, size); AT(wasm_byte_vec_t, data);
  SIZE(wasm_valtype_vec_t); AT(wasm_valtype_vec_t, data);
  SIZE(wasm_exporttype_vec_t); AT(wasm_exporttype_vec_t, data);
  SIZE(wasmtime_func_t); SIZE(wasmtime_instance_t); SIZE(wasmtime_memory_t); SIZE(wasmtime_val_raw_t);
  SIZE(wasmtime_extern_t); AT(wasmtime_extern_t, kind); AT(wasmtime_extern_t, of.func); AT(wasmtime_extern_t, of.memory);
  AT(wasmtime_extern_t, of.global); AT(wasmtime_extern_t, of.table); SIZE(wasmtime_global_t); SIZE(wasmtime_table_t);
  SIZE(wasmtime_val_t); AT(wasmtime_val_t, kind); AT(wasmtime_val_t, of); AT(wasmtime_val_t, of.funcref); AT(wasmtime_val_t, of.i64);
  AT(wasmtime_val_raw_t, i32); AT(wasmtime_val_raw_t, i64); AT(wasmtime_val_raw_t, f32); AT(wasmtime_val_raw_t, f64);
  SIZE(wasmtime_component_instance_t); SIZE(wasmtime_component_func_t);
  SIZE(wasmtime_component_val_t); AT(wasmtime_component_val_t, kind); AT(wasmtime_component_val_t, of);
  AT(wasmtime_component_val_t, of.string); AT(wasmtime_component_val_t, of.list.data);
  AT(wasmtime_component_val_t, of.record.data); AT(wasmtime_component_val_t, of.tuple.data);
  AT(wasmtime_component_val_t, of.variant.discriminant); AT(wasmtime_component_val_t, of.variant.val);
  AT(wasmtime_component_val_t, of.enumeration); AT(wasmtime_component_val_t, of.option);
  AT(wasmtime_component_val_t, of.result.is_ok); AT(wasmtime_component_val_t, of.result.val);
  AT(wasmtime_component_val_t, of.flags.data); AT(wasmtime_component_val_t, of.resource);
  SIZE(wasmtime_component_valrecord_entry_t); AT(wasmtime_component_valrecord_entry_t, val);
  SIZE(wasmtime_component_valtype_t); AT(wasmtime_component_valtype_t, of); AT(wasmtime_component_valtype_t, of.own);
  SIZE(wasmtime_linear_memory_t); AT(wasmtime_linear_memory_t, get_memory); AT(wasmtime_linear_memory_t, grow_memory);
  AT(wasmtime_linear_memory_t, finalizer); SIZE(wasmtime_memory_creator_t); AT(wasmtime_memory_creator_t, new_memory);
  SIZE(wasmtime_component_item_t); AT(wasmtime_component_item_t, of); AT(wasmtime_component_item_t, of.type);
}
`

// constants checks wasmtime's numbers, which capi.h repeats.
const constants = `
_Static_assert(TW_EXTERN_FUNC == WASMTIME_EXTERN_FUNC && TW_EXTERN_MEMORY == WASMTIME_EXTERN_MEMORY, "externs");
_Static_assert(TW_EXTERN_GLOBAL == WASMTIME_EXTERN_GLOBAL && TW_EXTERN_TABLE == WASMTIME_EXTERN_TABLE, "externs");
_Static_assert(TW_VALUE_FUNCREF == WASMTIME_FUNCREF, "values of core types");
_Static_assert(TW_WASM_I32 == WASM_I32 && TW_WASM_F64 == WASM_F64, "core types");
_Static_assert(TW_ITEM_INSTANCE == WASMTIME_COMPONENT_ITEM_COMPONENT_INSTANCE, "items");
_Static_assert(TW_ITEM_FUNC == WASMTIME_COMPONENT_ITEM_COMPONENT_FUNC, "items");
_Static_assert(TW_ITEM_RESOURCE == WASMTIME_COMPONENT_ITEM_RESOURCE && TW_ITEM_TYPE == WASMTIME_COMPONENT_ITEM_TYPE, "items");
_Static_assert(TW_VAL_BOOL == WASMTIME_COMPONENT_BOOL && TW_VAL_S8 == WASMTIME_COMPONENT_S8, "values");
_Static_assert(TW_VAL_U8 == WASMTIME_COMPONENT_U8 && TW_VAL_F64 == WASMTIME_COMPONENT_F64, "values");
_Static_assert(TW_VAL_STRING == WASMTIME_COMPONENT_STRING && TW_VAL_LIST == WASMTIME_COMPONENT_LIST, "values");
_Static_assert(TW_VAL_TUPLE == WASMTIME_COMPONENT_TUPLE && TW_VAL_ENUM == WASMTIME_COMPONENT_ENUM, "values");
_Static_assert(TW_VAL_FLAGS == WASMTIME_COMPONENT_FLAGS && TW_VAL_RESOURCE == WASMTIME_COMPONENT_RESOURCE, "values");
_Static_assert(TW_TYPE_BOOL == WASMTIME_COMPONENT_VALTYPE_BOOL && TW_TYPE_S16 == WASMTIME_COMPONENT_VALTYPE_S16, "types");
_Static_assert(TW_TYPE_U8 == WASMTIME_COMPONENT_VALTYPE_U8 && TW_TYPE_U64 == WASMTIME_COMPONENT_VALTYPE_U64, "types");
_Static_assert(TW_TYPE_STRING == WASMTIME_COMPONENT_VALTYPE_STRING && TW_TYPE_LIST == WASMTIME_COMPONENT_VALTYPE_LIST, "types");
_Static_assert(TW_TYPE_VARIANT == WASMTIME_COMPONENT_VALTYPE_VARIANT && TW_TYPE_ENUM == WASMTIME_COMPONENT_VALTYPE_ENUM, "types");
_Static_assert(TW_TYPE_FLAGS == WASMTIME_COMPONENT_VALTYPE_FLAGS && TW_TYPE_BORROW == WASMTIME_COMPONENT_VALTYPE_BORROW, "types");
_Static_assert(TW_OPT_SPEED == WASMTIME_OPT_LEVEL_SPEED && TW_STRATEGY_CRANELIFT == WASMTIME_STRATEGY_CRANELIFT, "compiler");
`

// TestDeclarations compares capi.h with the library's headers. The compiler checks prototypes and numbers; two programs
// print the layouts of the types. The test also checks the version in Fingerprint.
func TestDeclarations(t *testing.T) {
	dir := module(t, "{{.Dir}}")
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	theirs := "#include <wasm.h>\n#include <wasi.h>\n#include <wasmtime.h>\n#include <wasmtime/component.h>\n#define TW_CHECK\n" +
		"#include \"capi.h\"\n" + constants
	include := []string{"-I" + here, "-I" + filepath.Join(dir, "build", "include")}
	want := runC(t, theirs+layouts, include...)
	got := runC(t, "#include \"capi.h\"\n"+layouts, include[0])
	if got != want {
		t.Errorf("capi.h has types with other layouts:\n%s\nthe library's:\n%s", got, want)
	}
	if got := module(t, "{{.Version}}"); got != "v"+wasmtimeVersion {
		t.Errorf("the library is wasmtime-go %s, but Fingerprint says %s", got, wasmtimeVersion)
	}
}

// module queries the Go module that contains the library.
func module(t *testing.T, format string) string {
	t.Helper()
	out, err := exec.Command("go", "list", "-m", "-f", format, "github.com/bytecodealliance/wasmtime-go/v39").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	return strings.TrimSpace(string(out))
}

// runC compiles and runs a program, and returns its output.
func runC(t *testing.T, program string, flags ...string) string {
	t.Helper()
	src, exe := filepath.Join(t.TempDir(), "check.c"), filepath.Join(t.TempDir(), "check")
	if err := os.WriteFile(src, []byte(program), 0o600); err != nil {
		t.Fatal(err)
	}
	args := append([]string{"-std=gnu11", "-Wall", "-Wno-unused", "-Wno-enum-compare", "-Werror", "-o", exe, src}, flags...)
	if out, err := exec.Command("cc", args...).CombinedOutput(); err != nil {
		t.Fatalf("cc: %v\n%s", err, out)
	}
	out, err := exec.Command(exe).Output()
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}
