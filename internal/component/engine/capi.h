// The part of wasmtime's C API that we use, declared again: cgo finds the library through its Go module, but a #cgo line
// cannot name the headers there. A test (capi_test.go) compiles this file together with the module's own headers, so that
// the compiler reports any difference. With TW_CHECK, the types come from those headers.
#ifndef TW_CAPI_H
#define TW_CAPI_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Opaque types.
typedef struct wasm_config_t wasm_config_t;
typedef struct wasm_engine_t wasm_engine_t;
typedef struct wasm_trap_t wasm_trap_t;
typedef struct wasm_valtype_t wasm_valtype_t;
typedef struct wasm_functype_t wasm_functype_t;
typedef struct wasm_externtype_t wasm_externtype_t;
typedef struct wasm_importtype_t wasm_importtype_t;
typedef struct wasm_exporttype_t wasm_exporttype_t;
typedef struct wasm_memorytype_t wasm_memorytype_t;
typedef struct wasi_config_t wasi_config_t;
typedef struct wasmtime_error wasmtime_error_t;
typedef struct wasmtime_store wasmtime_store_t;
typedef struct wasmtime_context wasmtime_context_t;
typedef struct wasmtime_caller wasmtime_caller_t;
typedef struct wasmtime_linker wasmtime_linker_t;
typedef struct wasmtime_module wasmtime_module_t;
typedef struct wasmtime_instance_pre wasmtime_instance_pre_t;
typedef struct wasmtime_pooling_allocation_config_t wasmtime_pooling_allocation_config_t;
typedef struct wasmtime_component_t wasmtime_component_t;
typedef struct wasmtime_component_linker_t wasmtime_component_linker_t;
typedef struct wasmtime_component_linker_instance_t wasmtime_component_linker_instance_t;
typedef struct wasmtime_component_export_index_t wasmtime_component_export_index_t;
typedef struct wasmtime_component_type_t wasmtime_component_type_t;
typedef struct wasmtime_component_instance_type wasmtime_component_instance_type_t;
typedef struct wasmtime_component_func_type_t wasmtime_component_func_type_t;
typedef struct wasmtime_component_resource_type wasmtime_component_resource_type_t;
typedef struct wasmtime_component_resource_any wasmtime_component_resource_any_t;
typedef struct wasmtime_component_resource_host wasmtime_component_resource_host_t;
typedef struct wasmtime_component_list_type wasmtime_component_list_type_t;
typedef struct wasmtime_component_record_type wasmtime_component_record_type_t;
typedef struct wasmtime_component_tuple_type wasmtime_component_tuple_type_t;
typedef struct wasmtime_component_variant_type wasmtime_component_variant_type_t;
typedef struct wasmtime_component_enum_type wasmtime_component_enum_type_t;
typedef struct wasmtime_component_option_type wasmtime_component_option_type_t;
typedef struct wasmtime_component_result_type wasmtime_component_result_type_t;
typedef struct wasmtime_component_flags_type wasmtime_component_flags_type_t;

#ifndef TW_CHECK

// Types that are passed by value or whose members are accessed.
typedef struct wasm_byte_vec_t { size_t size; char *data; } wasm_byte_vec_t;
typedef wasm_byte_vec_t wasm_name_t;
typedef struct wasm_valtype_vec_t { size_t size; wasm_valtype_t **data; } wasm_valtype_vec_t;
typedef struct wasm_exporttype_vec_t { size_t size; wasm_exporttype_t **data; } wasm_exporttype_vec_t;
typedef struct wasm_importtype_vec_t { size_t size; wasm_importtype_t **data; } wasm_importtype_vec_t;

typedef struct wasmtime_func { uint64_t store_id; void *inner; } wasmtime_func_t;
typedef struct wasmtime_instance { uint64_t store_id; size_t inner; } wasmtime_instance_t;
typedef struct wasmtime_memory { struct { uint64_t store_id; uint32_t inner; }; uint32_t inner2; } wasmtime_memory_t;
typedef struct wasmtime_table { struct { uint64_t store_id; uint32_t inner; }; uint32_t inner2; } wasmtime_table_t;
typedef struct wasmtime_global { uint64_t store_id; uint32_t inner, inner2, inner3; } wasmtime_global_t;
typedef union wasmtime_extern_union {
  wasmtime_func_t func;
  wasmtime_global_t global;
  wasmtime_table_t table;
  wasmtime_memory_t memory;
} wasmtime_extern_union_t;
typedef struct wasmtime_extern { uint8_t kind; wasmtime_extern_union_t of; } wasmtime_extern_t;
typedef union wasmtime_val_raw { int32_t i32; int64_t i64; float f32; double f64; uint8_t v128[16]; void *funcref; } wasmtime_val_raw_t;

typedef union wasmtime_valunion { int32_t i32; int64_t i64; float f32; double f64; wasmtime_func_t funcref; uint64_t room[3]; } wasmtime_valunion_t;
typedef struct wasmtime_val { uint8_t kind; wasmtime_valunion_t of; } wasmtime_val_t;

typedef struct wasmtime_component_instance { uint64_t store_id; uint32_t inner; } wasmtime_component_instance_t;
typedef struct wasmtime_component_func { struct { uint64_t store_id; uint32_t inner; }; uint32_t inner2; } wasmtime_component_func_t;

typedef struct wasmtime_component_val wasmtime_component_val_t;
typedef struct wasmtime_component_valrecord_entry wasmtime_component_valrecord_entry_t;
typedef struct wasmtime_component_vallist { size_t size; wasmtime_component_val_t *data; } wasmtime_component_vallist_t;
typedef struct wasmtime_component_valrecord { size_t size; wasmtime_component_valrecord_entry_t *data; } wasmtime_component_valrecord_t;
typedef struct wasmtime_component_valflags { size_t size; wasm_name_t *data; } wasmtime_component_valflags_t;
typedef union {
  bool boolean;
  uint8_t u8;
  uint16_t u16;
  uint32_t u32;
  uint64_t u64;
  uint32_t character;
  wasm_name_t string, enumeration;
  wasmtime_component_vallist_t list, tuple;
  wasmtime_component_valrecord_t record;
  struct { wasm_name_t discriminant; wasmtime_component_val_t *val; } variant;
  wasmtime_component_val_t *option;
  struct { bool is_ok; wasmtime_component_val_t *val; } result;
  wasmtime_component_valflags_t flags;
  wasmtime_component_resource_any_t *resource;
} wasmtime_component_valunion_t;
struct wasmtime_component_val { uint8_t kind; wasmtime_component_valunion_t of; };
struct wasmtime_component_valrecord_entry { wasm_name_t name; wasmtime_component_val_t val; };

typedef struct wasmtime_component_valtype_t {
  uint8_t kind;
  union {
    wasmtime_component_list_type_t *list;
    wasmtime_component_record_type_t *record;
    wasmtime_component_tuple_type_t *tuple;
    wasmtime_component_variant_type_t *variant;
    wasmtime_component_enum_type_t *enum_;
    wasmtime_component_option_type_t *option;
    wasmtime_component_result_type_t *result;
    wasmtime_component_flags_type_t *flags;
    wasmtime_component_resource_type_t *own, *borrow;
  } of;
} wasmtime_component_valtype_t;
typedef struct wasmtime_component_item_t {
  uint8_t kind;
  union {
    wasmtime_component_instance_type_t *component_instance;
    wasmtime_component_func_type_t *component_func;
    wasmtime_component_resource_type_t *resource;
    wasmtime_component_valtype_t type;
  } of;
} wasmtime_component_item_t;

typedef struct wasmtime_linear_memory {
  void *env;
  uint8_t *(*get_memory)(void *, size_t *, size_t *);
  wasmtime_error_t *(*grow_memory)(void *, size_t);
  void (*finalizer)(void *);
} wasmtime_linear_memory_t;
typedef struct wasmtime_memory_creator {
  void *env;
  wasmtime_error_t *(*new_memory)(void *, const wasm_memorytype_t *, size_t, size_t, size_t, size_t, wasmtime_linear_memory_t *);
  void (*finalizer)(void *);
} wasmtime_memory_creator_t;

#endif // TW_CHECK

// Kinds, numbered by wasmtime.
enum { TW_WASM_I32, TW_WASM_I64, TW_WASM_F32, TW_WASM_F64 };
enum { TW_EXTERN_FUNC, TW_EXTERN_GLOBAL, TW_EXTERN_TABLE, TW_EXTERN_MEMORY };
enum { TW_VALUE_FUNCREF = 5 };
enum { TW_ITEM_INSTANCE = 1, TW_ITEM_FUNC = 3, TW_ITEM_RESOURCE = 4, TW_ITEM_TYPE = 6 };
enum {
  TW_VAL_BOOL, TW_VAL_S8, TW_VAL_U8, TW_VAL_S16, TW_VAL_U16, TW_VAL_S32, TW_VAL_U32, TW_VAL_S64, TW_VAL_U64, TW_VAL_F32,
  TW_VAL_F64, TW_VAL_CHAR, TW_VAL_STRING, TW_VAL_LIST, TW_VAL_RECORD, TW_VAL_TUPLE, TW_VAL_VARIANT, TW_VAL_ENUM,
  TW_VAL_OPTION, TW_VAL_RESULT, TW_VAL_FLAGS, TW_VAL_RESOURCE,
};
enum {
  TW_TYPE_BOOL, TW_TYPE_S8, TW_TYPE_S16, TW_TYPE_S32, TW_TYPE_S64, TW_TYPE_U8, TW_TYPE_U16, TW_TYPE_U32, TW_TYPE_U64,
  TW_TYPE_F32, TW_TYPE_F64, TW_TYPE_CHAR, TW_TYPE_STRING, TW_TYPE_LIST, TW_TYPE_RECORD, TW_TYPE_TUPLE, TW_TYPE_VARIANT,
  TW_TYPE_ENUM, TW_TYPE_OPTION, TW_TYPE_RESULT, TW_TYPE_FLAGS, TW_TYPE_OWN, TW_TYPE_BORROW,
};
enum { TW_OPT_SPEED = 1, TW_STRATEGY_CRANELIFT = 1 };

// wasm.h
wasm_config_t *wasm_config_new(void);
wasm_engine_t *wasm_engine_new_with_config(wasm_config_t *);
void wasm_byte_vec_new(wasm_byte_vec_t *, size_t, const char *);
void wasm_byte_vec_delete(wasm_byte_vec_t *);
void wasm_trap_delete(wasm_trap_t *);
void wasm_trap_message(const wasm_trap_t *, wasm_byte_vec_t *);
wasm_valtype_t *wasm_valtype_new(uint8_t);
uint8_t wasm_valtype_kind(const wasm_valtype_t *);
void wasm_valtype_vec_new(wasm_valtype_vec_t *, size_t, wasm_valtype_t *const[]);
wasm_functype_t *wasm_functype_new(wasm_valtype_vec_t *, wasm_valtype_vec_t *);
void wasm_functype_delete(wasm_functype_t *);
const wasm_valtype_vec_t *wasm_functype_params(const wasm_functype_t *);
const wasm_valtype_vec_t *wasm_functype_results(const wasm_functype_t *);
uint8_t wasm_externtype_kind(const wasm_externtype_t *);
const wasm_functype_t *wasm_externtype_as_functype_const(const wasm_externtype_t *);
const wasm_name_t *wasm_exporttype_name(const wasm_exporttype_t *);
const wasm_externtype_t *wasm_exporttype_type(const wasm_exporttype_t *);
void wasm_exporttype_vec_delete(wasm_exporttype_vec_t *);
const wasm_name_t *wasm_importtype_module(const wasm_importtype_t *);
const wasm_name_t *wasm_importtype_name(const wasm_importtype_t *);
const wasm_externtype_t *wasm_importtype_type(const wasm_importtype_t *);
void wasm_importtype_vec_delete(wasm_importtype_vec_t *);

// wasmtime/config.h
void wasmtime_config_epoch_interruption_set(wasm_config_t *, bool);
void wasmtime_config_wasm_component_model_set(wasm_config_t *, bool);
void wasmtime_config_wasm_threads_set(wasm_config_t *, bool);
void wasmtime_config_wasm_gc_set(wasm_config_t *, bool);
void wasmtime_config_wasm_exceptions_set(wasm_config_t *, bool);
void wasmtime_config_wasm_stack_switching_set(wasm_config_t *, bool);
void wasmtime_config_wasm_function_references_set(wasm_config_t *, bool);
void wasmtime_config_wasm_multi_memory_set(wasm_config_t *, bool);
void wasmtime_config_wasm_memory64_set(wasm_config_t *, bool);
void wasmtime_config_parallel_compilation_set(wasm_config_t *, bool);
void wasmtime_config_native_unwind_info_set(wasm_config_t *, bool);
void wasmtime_config_strategy_set(wasm_config_t *, uint8_t);
void wasmtime_config_cranelift_opt_level_set(wasm_config_t *, uint8_t);
void wasmtime_config_memory_reservation_set(wasm_config_t *, uint64_t);
void wasmtime_config_memory_guard_size_set(wasm_config_t *, uint64_t);
void wasmtime_config_host_memory_creator_set(wasm_config_t *, wasmtime_memory_creator_t *);
wasmtime_pooling_allocation_config_t *wasmtime_pooling_allocation_config_new();
void wasmtime_pooling_allocation_config_delete(wasmtime_pooling_allocation_config_t *);
void wasmtime_pooling_allocation_strategy_set(wasm_config_t *, const wasmtime_pooling_allocation_config_t *);
void wasmtime_pooling_allocation_config_total_component_instances_set(wasmtime_pooling_allocation_config_t *, uint32_t);
void wasmtime_pooling_allocation_config_total_core_instances_set(wasmtime_pooling_allocation_config_t *, uint32_t);
void wasmtime_pooling_allocation_config_total_memories_set(wasmtime_pooling_allocation_config_t *, uint32_t);
void wasmtime_pooling_allocation_config_total_tables_set(wasmtime_pooling_allocation_config_t *, uint32_t);
void wasmtime_pooling_allocation_config_max_memory_size_set(wasmtime_pooling_allocation_config_t *, size_t);
void wasmtime_pooling_allocation_config_table_elements_set(wasmtime_pooling_allocation_config_t *, size_t);
void wasmtime_pooling_allocation_config_max_tables_per_module_set(wasmtime_pooling_allocation_config_t *, uint32_t);
void wasmtime_pooling_allocation_config_linear_memory_keep_resident_set(wasmtime_pooling_allocation_config_t *, size_t);
void wasmtime_pooling_allocation_config_table_keep_resident_set(wasmtime_pooling_allocation_config_t *, size_t);
void wasmtime_pooling_allocation_config_max_unused_warm_slots_set(wasmtime_pooling_allocation_config_t *, uint32_t);
void wasmtime_engine_increment_epoch(wasm_engine_t *);

// wasmtime/error.h, wasmtime/trap.h
wasmtime_error_t *wasmtime_error_new(const char *);
void wasmtime_error_delete(wasmtime_error_t *);
void wasmtime_error_message(const wasmtime_error_t *, wasm_name_t *);
bool wasmtime_error_exit_status(const wasmtime_error_t *, int *);
wasm_trap_t *wasmtime_trap_new(const char *, size_t);

// wasmtime/store.h
wasmtime_store_t *wasmtime_store_new(wasm_engine_t *, void *, void (*)(void *));
wasmtime_context_t *wasmtime_store_context(wasmtime_store_t *);
void wasmtime_store_limiter(wasmtime_store_t *, int64_t, int64_t, int64_t, int64_t, int64_t);
void wasmtime_store_delete(wasmtime_store_t *);
void *wasmtime_context_get_data(const wasmtime_context_t *);
wasmtime_error_t *wasmtime_context_set_wasi(wasmtime_context_t *, wasi_config_t *);
void wasmtime_context_set_epoch_deadline(wasmtime_context_t *, uint64_t);
void wasmtime_store_epoch_deadline_callback(
    wasmtime_store_t *, wasmtime_error_t *(*)(wasmtime_context_t *, void *, uint64_t *, uint8_t *), void *,
    void (*)(void *));

// wasi.h
wasi_config_t *wasi_config_new();
bool wasi_config_set_argv(wasi_config_t *, size_t, const char *[]);
bool wasi_config_set_env(wasi_config_t *, size_t, const char *[], const char *[]);
bool wasi_config_set_stdin_file(wasi_config_t *, const char *);
void wasi_config_set_stdout_custom(wasi_config_t *, ptrdiff_t (*)(void *, const unsigned char *, size_t), void *,
                                   void (*)(void *));
void wasi_config_set_stderr_custom(wasi_config_t *, ptrdiff_t (*)(void *, const unsigned char *, size_t), void *,
                                   void (*)(void *));
bool wasi_config_preopen_dir(wasi_config_t *, const char *, const char *, size_t, size_t);
void wasi_config_delete(wasi_config_t *);

// wasmtime/module.h, linker.h, instance.h, func.h, memory.h, global.h, table.h, val.h
wasmtime_error_t *wasmtime_module_new(wasm_engine_t *, const uint8_t *, size_t, wasmtime_module_t **);
void wasmtime_module_delete(wasmtime_module_t *);
void wasmtime_module_imports(const wasmtime_module_t *, wasm_importtype_vec_t *);
void wasmtime_module_exports(const wasmtime_module_t *, wasm_exporttype_vec_t *);
wasmtime_error_t *wasmtime_module_serialize(wasmtime_module_t *, wasm_byte_vec_t *);
wasmtime_error_t *wasmtime_module_deserialize(wasm_engine_t *, const uint8_t *, size_t, wasmtime_module_t **);
wasmtime_error_t *wasmtime_module_deserialize_file(wasm_engine_t *, const char *, wasmtime_module_t **);
wasmtime_linker_t *wasmtime_linker_new(wasm_engine_t *);
void wasmtime_linker_delete(wasmtime_linker_t *);
wasmtime_error_t *wasmtime_linker_define_wasi(wasmtime_linker_t *);
void wasmtime_linker_allow_shadowing(wasmtime_linker_t *, bool);
wasmtime_error_t *wasmtime_linker_define_func_unchecked(
    wasmtime_linker_t *, const char *, size_t, const char *, size_t, const wasm_functype_t *,
    wasm_trap_t *(*)(void *, wasmtime_caller_t *, wasmtime_val_raw_t *, size_t), void *, void (*)(void *));
wasmtime_error_t *wasmtime_linker_instantiate_pre(const wasmtime_linker_t *, const wasmtime_module_t *,
                                                  wasmtime_instance_pre_t **);
bool wasmtime_linker_get(const wasmtime_linker_t *, wasmtime_context_t *, const char *, size_t, const char *, size_t,
                         wasmtime_extern_t *);
wasmtime_error_t *wasmtime_instance_new(wasmtime_context_t *, const wasmtime_module_t *, const wasmtime_extern_t *, size_t,
                                        wasmtime_instance_t *, wasm_trap_t **);
void wasmtime_instance_pre_delete(wasmtime_instance_pre_t *);
wasmtime_error_t *wasmtime_instance_pre_instantiate(const wasmtime_instance_pre_t *, wasmtime_context_t *,
                                                    wasmtime_instance_t *, wasm_trap_t **);
bool wasmtime_instance_export_get(wasmtime_context_t *, const wasmtime_instance_t *, const char *, size_t,
                                  wasmtime_extern_t *);
wasmtime_error_t *wasmtime_func_call_unchecked(wasmtime_context_t *, const wasmtime_func_t *, wasmtime_val_raw_t *,
                                               size_t, wasm_trap_t **);
wasmtime_context_t *wasmtime_caller_context(wasmtime_caller_t *);
bool wasmtime_caller_export_get(wasmtime_caller_t *, const char *, size_t, wasmtime_extern_t *);
wasmtime_error_t *wasmtime_memory_grow(wasmtime_context_t *, const wasmtime_memory_t *, uint64_t, uint64_t *);
uint8_t *wasmtime_memory_data(const wasmtime_context_t *, const wasmtime_memory_t *);
size_t wasmtime_memory_data_size(const wasmtime_context_t *, const wasmtime_memory_t *);
void wasmtime_global_get(wasmtime_context_t *, const wasmtime_global_t *, wasmtime_val_t *);
wasmtime_error_t *wasmtime_global_set(wasmtime_context_t *, const wasmtime_global_t *, const wasmtime_val_t *);
bool wasmtime_table_get(wasmtime_context_t *, const wasmtime_table_t *, uint64_t, wasmtime_val_t *);
uint64_t wasmtime_table_size(const wasmtime_context_t *, const wasmtime_table_t *);
void wasmtime_val_unroot(wasmtime_val_t *);

// wasmtime/component/*.h
wasmtime_error_t *wasmtime_component_new(const wasm_engine_t *, const uint8_t *, size_t, wasmtime_component_t **);
wasmtime_error_t *wasmtime_component_serialize(const wasmtime_component_t *, wasm_byte_vec_t *);
wasmtime_error_t *wasmtime_component_deserialize(const wasm_engine_t *, const uint8_t *, size_t,
                                                 wasmtime_component_t **);
void wasmtime_component_delete(wasmtime_component_t *);
wasmtime_component_export_index_t *wasmtime_component_get_export_index(const wasmtime_component_t *,
                                                                       const wasmtime_component_export_index_t *,
                                                                       const char *, size_t);
void wasmtime_component_export_index_delete(wasmtime_component_export_index_t *);
wasmtime_component_linker_t *wasmtime_component_linker_new(const wasm_engine_t *);
void wasmtime_component_linker_allow_shadowing(wasmtime_component_linker_t *, bool);
void wasmtime_component_linker_delete(wasmtime_component_linker_t *);
wasmtime_error_t *wasmtime_component_linker_add_wasip2(wasmtime_component_linker_t *);
wasmtime_component_linker_instance_t *wasmtime_component_linker_root(wasmtime_component_linker_t *);
wasmtime_error_t *wasmtime_component_linker_instantiate(const wasmtime_component_linker_t *, wasmtime_context_t *,
                                                        const wasmtime_component_t *, wasmtime_component_instance_t *);
wasmtime_error_t *wasmtime_component_linker_instance_add_instance(wasmtime_component_linker_instance_t *, const char *,
                                                                  size_t, wasmtime_component_linker_instance_t **);
wasmtime_error_t *wasmtime_component_linker_instance_add_func(
    wasmtime_component_linker_instance_t *, const char *, size_t,
    wasmtime_error_t *(*)(void *, wasmtime_context_t *, const wasmtime_component_func_type_t *,
                          wasmtime_component_val_t *, size_t, wasmtime_component_val_t *, size_t),
    void *, void (*)(void *));
wasmtime_error_t *wasmtime_component_linker_instance_add_resource(
    wasmtime_component_linker_instance_t *, const char *, size_t, const wasmtime_component_resource_type_t *,
    wasmtime_error_t *(*)(void *, wasmtime_context_t *, uint32_t), void *, void (*)(void *));
void wasmtime_component_linker_instance_delete(wasmtime_component_linker_instance_t *);
bool wasmtime_component_instance_get_func(const wasmtime_component_instance_t *, wasmtime_context_t *,
                                          const wasmtime_component_export_index_t *, wasmtime_component_func_t *);
wasmtime_error_t *wasmtime_component_func_call(const wasmtime_component_func_t *, wasmtime_context_t *,
                                               const wasmtime_component_val_t *, size_t, wasmtime_component_val_t *,
                                               size_t);
wasmtime_error_t *wasmtime_component_func_post_return(const wasmtime_component_func_t *, wasmtime_context_t *);
void wasmtime_component_val_clone(const wasmtime_component_val_t *, wasmtime_component_val_t *);
void wasmtime_component_val_delete(wasmtime_component_val_t *);
wasmtime_component_resource_type_t *wasmtime_component_resource_type_new_host(uint32_t);
bool wasmtime_component_resource_type_equal(const wasmtime_component_resource_type_t *,
                                            const wasmtime_component_resource_type_t *);
wasmtime_component_resource_type_t *wasmtime_component_resource_type_clone(const wasmtime_component_resource_type_t *);
void wasmtime_component_resource_type_delete(wasmtime_component_resource_type_t *);
wasmtime_component_resource_host_t *wasmtime_component_resource_host_new(bool, uint32_t, uint32_t);
uint32_t wasmtime_component_resource_host_rep(const wasmtime_component_resource_host_t *);
uint32_t wasmtime_component_resource_host_type(const wasmtime_component_resource_host_t *);
void wasmtime_component_resource_host_delete(wasmtime_component_resource_host_t *);
wasmtime_error_t *wasmtime_component_resource_any_to_host(wasmtime_context_t *,
                                                          const wasmtime_component_resource_any_t *,
                                                          wasmtime_component_resource_host_t **);
wasmtime_error_t *wasmtime_component_resource_host_to_any(wasmtime_context_t *,
                                                          const wasmtime_component_resource_host_t *,
                                                          wasmtime_component_resource_any_t **);
void wasmtime_component_resource_any_delete(wasmtime_component_resource_any_t *);

// wasmtime/component/types/*.h
wasmtime_component_type_t *wasmtime_component_type(const wasmtime_component_t *);
void wasmtime_component_type_delete(wasmtime_component_type_t *);
size_t wasmtime_component_type_import_count(const wasmtime_component_type_t *, const wasm_engine_t *);
bool wasmtime_component_type_import_nth(const wasmtime_component_type_t *, const wasm_engine_t *, size_t, const char **,
                                        size_t *, struct wasmtime_component_item_t *);
size_t wasmtime_component_type_export_count(const wasmtime_component_type_t *, const wasm_engine_t *);
bool wasmtime_component_type_export_nth(const wasmtime_component_type_t *, const wasm_engine_t *, size_t, const char **,
                                        size_t *, struct wasmtime_component_item_t *);
void wasmtime_component_item_delete(wasmtime_component_item_t *);
size_t wasmtime_component_instance_type_export_count(const wasmtime_component_instance_type_t *, const wasm_engine_t *);
bool wasmtime_component_instance_type_export_nth(const wasmtime_component_instance_type_t *, const wasm_engine_t *,
                                                 size_t, const char **, size_t *, struct wasmtime_component_item_t *);
size_t wasmtime_component_func_type_param_count(const wasmtime_component_func_type_t *);
bool wasmtime_component_func_type_param_nth(const wasmtime_component_func_type_t *, size_t, const char **, size_t *,
                                            wasmtime_component_valtype_t *);
bool wasmtime_component_func_type_result(const wasmtime_component_func_type_t *, wasmtime_component_valtype_t *);
void wasmtime_component_valtype_delete(wasmtime_component_valtype_t *);
void wasmtime_component_list_type_element(const wasmtime_component_list_type_t *, struct wasmtime_component_valtype_t *);
size_t wasmtime_component_record_type_field_count(const wasmtime_component_record_type_t *);
bool wasmtime_component_record_type_field_nth(const wasmtime_component_record_type_t *, size_t, const char **, size_t *,
                                              struct wasmtime_component_valtype_t *);
size_t wasmtime_component_tuple_type_types_count(const wasmtime_component_tuple_type_t *);
bool wasmtime_component_tuple_type_types_nth(const wasmtime_component_tuple_type_t *, size_t,
                                             struct wasmtime_component_valtype_t *);
size_t wasmtime_component_variant_type_case_count(const wasmtime_component_variant_type_t *);
bool wasmtime_component_variant_type_case_nth(const wasmtime_component_variant_type_t *, size_t, const char **,
                                              size_t *, bool *, struct wasmtime_component_valtype_t *);
size_t wasmtime_component_enum_type_names_count(const wasmtime_component_enum_type_t *);
bool wasmtime_component_enum_type_names_nth(const wasmtime_component_enum_type_t *, size_t, const char **, size_t *);
void wasmtime_component_option_type_ty(const wasmtime_component_option_type_t *, struct wasmtime_component_valtype_t *);
bool wasmtime_component_result_type_ok(const wasmtime_component_result_type_t *, struct wasmtime_component_valtype_t *);
bool wasmtime_component_result_type_err(const wasmtime_component_result_type_t *, struct wasmtime_component_valtype_t *);
size_t wasmtime_component_flags_type_names_count(const wasmtime_component_flags_type_t *);
bool wasmtime_component_flags_type_names_nth(const wasmtime_component_flags_type_t *, size_t, const char **, size_t *);
#endif
