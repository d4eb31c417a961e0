// Calls of host functions by the guest. The guest's thread runs Go code during such a call.
#include "tw.h"
#include <stdlib.h>
#include <string.h>

// may checks whether the guest may call the host now.
static bool may(tw_inst *i) {
  if (i->phase == TW_MADE) tw_fail(i, TW_ABI, "the guest called the host before it was initialized");
  else if (i->inside) tw_fail(i, TW_ABI, "the guest called the host from cabi_realloc or cabi_post");
  else if (i->call.max_calls && ++i->call.calls > i->call.max_calls) tw_fail(i, TW_HOSTCALLS, "%llu calls", (unsigned long long)i->call.calls - 1);
  else return !tw_ended(i);
  return false;
}

// call_go calls the host function and leaves the checked flat result in scratch.
static bool call_go(tw_inst *i, const tw_hostfn *f, tw_buf *args) {
  const char *text;
  i->scratch.len = 0;
  tw_memory(i);
  if (f->role != TW_CONSTANT) i->capture.used |= TW_USED_HOST;
  int64_t paused = tw_pause(i);
  int why = twHost(i->go_, f->index, args->data, args->len, i);
  tw_resume(i, paused);
  if (why) i->why = why;
  else if (tw_ended(i)) return false;
  else if (tw_check(f->prog, true, i->scratch.data, i->scratch.len, &text) < 0)
    tw_fail(i, TW_FAILED, "the result of a host function: %s", text);
  return !i->why;
}

static bool lift_params(tw_inst *i, const tw_prog *p, const wasmtime_val_raw_t *v, tw_buf *args) {
  if (p->param_core != TW_NONE) {
    for (uint32_t k = 0; k < p->nparams; k++) {
      if (!tw_lift_flat(i, p, p->params[k], v, args)) return false;
      v += p->nodes[p->params[k]].ncore;
    }
    return true;
  }
  uint32_t at = (uint32_t)v->i32, offset = 0;
  if (!tw_range(i, at, p->spill_size, p->spill_align)) return false;
  for (uint32_t k = 0; k < p->nparams; k++) {
    const tw_node *n = &p->nodes[p->params[k]];
    offset = tw_align(offset, n->align);
    if (!tw_lift_at(i, p, p->params[k], at + offset, args)) return false;
    offset += n->size;
  }
  return true;
}

static bool lower_result(tw_inst *i, const tw_prog *p, const uint8_t *flat, wasmtime_val_raw_t *v) {
  if (p->result == TW_NONE) return true;
  tw_src s = {i, p, flat};
  if (p->result_core <= 1) {
    memset(v, 0, sizeof *v);
    return tw_lower_flat(&s, p->result, v);
  }
  const tw_node *n = &p->nodes[p->result];
  uint32_t to = (uint32_t)v[p->param_core == TW_NONE ? 1 : p->param_core].i32;
  return tw_range(i, to, n->size, n->align) && tw_lower_at(&s, p->result, to);
}

// exchange carries out a function for the call's messages without Go, where one request and one response go. It returns
// false if Go must do it. ok is false if the guest has failed.
static bool exchange(tw_inst *i, const tw_hostfn *f, wasmtime_val_raw_t *v, bool *ok) {
  uint32_t result[3] = {0, 0, 0}; // ok of a result, message of a received, its size
  switch (f->role) {
  case TW_RECEIVE:
    if (!i->exchange.message || i->exchange.taken) return false;
    i->exchange.told = true;
    memcpy(&result[2], i->exchange.message, 4);
    *ok = lower_result(i, f->prog, (const uint8_t *)result, v);
    return true;
  case TW_TAKE:
    if (!i->exchange.told || i->exchange.taken) return false;
    i->exchange.taken = true;
    *ok = lower_result(i, f->prog, i->exchange.message, v);
    break;
  case TW_SEND:
    if (!i->exchange.one) return false;
    i->exchange.reply.len = 0;
    *ok = lift_params(i, f->prog, v, &i->exchange.reply) && lower_result(i, f->prog, (const uint8_t *)result, v);
    i->exchange.one = false, i->exchange.sent = true;
    break;
  default:
    return false;
  }
  i->call.renew = true; // each message gets a new budget
  tw_resume(i, tw_pause(i));
  return true;
}

static bool drop(tw_inst *i, const tw_hostfn *f, uint32_t handle) {
  tw_handle *h;
  if (!tw_handle_get(i, handle, f->index, &h)) return false;
  bool own = h->own;
  uint32_t rep = h->rep;
  tw_handle_drop(i, handle);
  if (own) {
    int64_t paused = tw_pause(i);
    twDrop(i->go_, f->index, rep);
    tw_resume(i, paused);
  }
  return true;
}

// free_call frees the memory of a call: its arguments, and a large result. The guest has its own copy, and must not make the
// host keep more than its account counts.
static void free_call(tw_inst *i, tw_buf *args) {
  tw_buf_free(args);
  if (i->scratch.cap > TW_KEPT) tw_buf_free(&i->scratch);
}

wasm_trap_t *tw_core_host(void *fn, wasmtime_caller_t *caller, wasmtime_val_raw_t *v, size_t n) {
  (void)n;
  const tw_hostfn *f = fn;
  tw_inst *i = wasmtime_context_get_data(wasmtime_caller_context(caller));
  uint8_t small[512];
  tw_buf args = {small, 0, sizeof small, i->max_value, false, false, false};
  bool ok = may(i);
  if (ok) i->guest.allocator = f->allocator;
  if (ok && f->drop) ok = drop(i, f, (uint32_t)v->i32);
  else if (ok && !exchange(i, f, v, &ok))
    ok = lift_params(i, f->prog, v, &args) && call_go(i, f, &args) && lower_result(i, f->prog, i->scratch.data, v);
  free_call(i, &args);
  return ok ? NULL : wasmtime_trap_new("ended by the host", 17);
}

wasmtime_error_t *tw_comp_host(void *fn, wasmtime_context_t *cx, const wasmtime_component_func_type_t *type,
                               wasmtime_component_val_t *in, size_t nin, wasmtime_component_val_t *out, size_t nout) {
  (void)type;
  const tw_hostfn *f = fn;
  tw_inst *i = wasmtime_context_get_data(cx);
  uint8_t small[512];
  tw_buf args = {small, 0, sizeof small, i->max_value, false, false, false};
  tw_arena *arena = NULL;
  if (i->phase == TW_MADE) i->phase = TW_STARTS; // on this path wasmtime prevents calls at the wrong time
  bool ok = may(i);
  for (size_t k = 0; k < nin && ok; k++) ok = tw_from_val(i, f->prog, f->prog->params[k], &in[k], &args);
  ok = ok && call_go(i, f, &args);
  if (ok && nout) {
    wasmtime_component_val_t made;
    tw_src s = {i, f->prog, i->scratch.data};
    if ((ok = tw_to_val(&s, f->prog->result, &made, &arena))) wasmtime_component_val_clone(&made, out);
  }
  tw_arena_free(arena);
  free_call(i, &args);
  return ok ? NULL : wasmtime_error_new("ended by the host");
}

wasmtime_error_t *tw_comp_drop(void *fn, wasmtime_context_t *cx, uint32_t rep) {
  const tw_hostfn *f = fn;
  tw_inst *i = wasmtime_context_get_data(cx);
  tw_resource_gone(i);
  if (tw_ended(i)) return wasmtime_error_new("ended by the host"); // the caller of the function may be gone
  int64_t paused = tw_pause(i);
  twDrop(i->go_, f->index, rep);
  tw_resume(i, paused);
  return NULL;
}

// ---- definitions ----

wasm_functype_t *tw_core_type(const uint8_t *params, uint32_t np, const uint8_t *results, uint32_t nr) {
  wasm_valtype_t *t[TW_MAX_FLAT + 1] = {NULL};
  wasm_valtype_vec_t ps, rs;
  for (uint32_t k = 0; k < np; k++) t[k] = wasm_valtype_new(params[k]);
  wasm_valtype_vec_new(&ps, np, t);
  for (uint32_t k = 0; k < nr; k++) t[k] = wasm_valtype_new(results[k]);
  wasm_valtype_vec_new(&rs, nr, t);
  return wasm_functype_new(&ps, &rs);
}

// import_type returns the core type of an imported function: flattened, or through memory if there are too many values.
static wasm_functype_t *import_type(const tw_hostfn *f) {
  const tw_prog *p = f->prog;
  uint8_t params[TW_MAX_FLAT + 1] = {WASM_I32}, results[1];
  if (f->drop) return tw_core_type(params, 1, NULL, 0);
  uint32_t np = 1, nr = 0;
  if (p->param_core != TW_NONE) {
    np = 0;
    for (uint32_t k = 0; k < p->nparams; k++) {
      const tw_node *n = &p->nodes[p->params[k]];
      for (uint32_t c = 0; c < n->ncore; c++) params[np++] = p->cores[n->core + c];
    }
  }
  if (p->result_core == 1) results[nr++] = p->cores[p->nodes[p->result].core];
  if (p->result_core > 1) params[np++] = WASM_I32;
  return tw_core_type(params, np, results, nr);
}

char *tw_define_core(wasmtime_linker_t *l, const char *module, const char *name, const tw_hostfn *f) {
  wasm_functype_t *t = import_type(f);
  wasmtime_error_t *e = wasmtime_linker_define_func_unchecked(l, module, strlen(module), name, strlen(name), t,
                                                              tw_core_host, (void *)f, NULL);
  wasm_functype_delete(t);
  return tw_error(e);
}

char *tw_define_comp(wasmtime_component_linker_instance_t *l, const char *name, const tw_hostfn *f) {
  return tw_error(wasmtime_component_linker_instance_add_func(l, name, strlen(name), tw_comp_host, (void *)f, NULL));
}

char *tw_define_resource(wasmtime_component_linker_instance_t *l, const char *name, const tw_hostfn *f) {
  wasmtime_component_resource_type_t *t = wasmtime_component_resource_type_new_host(f->index);
  wasmtime_error_t *e =
      wasmtime_component_linker_instance_add_resource(l, name, strlen(name), t, tw_comp_drop, (void *)f, NULL);
  wasmtime_component_resource_type_delete(t);
  return tw_error(e);
}
