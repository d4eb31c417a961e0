// Stores and instances, the configuration of WASI, and calls.
#include "p1.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- making ----

static ptrdiff_t write_out(void *go, const unsigned char *p, size_t n) {
  return twWrite((uintptr_t)go, 1, (unsigned char *)p, n);
}
static ptrdiff_t write_err(void *go, const unsigned char *p, size_t n) {
  return twWrite((uintptr_t)go, 2, (unsigned char *)p, n);
}

static const char *next(const char **s) {
  const char *at = *s;
  *s += strlen(at) + 1;
  return at;
}

enum { MAX_INSTANCES = 64, MAX_TABLES = 64 };

static bool preopens(tw_inst *i, wasi_config_t *w, const tw_opts *o, const char *s) {
  for (uint32_t k = 0; k < o->npreopens; k++) {
    const char *host = next(&s), *guest = next(&s);
    if (!wasi_config_preopen_dir(w, host, guest, !(o->read_only >> k & 1))) {
      tw_fail(i, TW_FAILED, "cannot open directory %s, %s for the guest", host, guest);
      return false;
    }
  }
  return true;
}

// keep copies arguments and environment for preview 1. It returns what follows them in strings, or NULL.
static const char *keep(tw_inst *i, const tw_opts *o, const char *strings, size_t len) {
  if (!(i->p1.strings = tw_get(NULL, len))) return tw_starve(i, "arguments and environment"), NULL;
  memcpy(i->p1.strings, strings, len);
  const char *s = i->p1.strings;
  for (uint32_t k = 0; k < o->nargs; k++) next(&s);
  i->p1.env = (char *)s;
  for (uint32_t k = 0; k < o->nenv; k++) next(&s);
  i->p1.env_end = (char *)s;
  i->p1.nargs = o->nargs, i->p1.nenv = o->nenv, i->p1.stdin_fd = o->stdin_fd;
  return s;
}

// descriptors sets up the descriptors of preview 1: the directories, which belong to wasmtime's WASI, and after them
// the directory of channels. There is room for all; otherwise tw_fd_new ends the call.
static void descriptors(tw_inst *i, const tw_opts *o) {
  enum { FIRST = 3 }; // the first directory in wasmtime's WASI
  uint32_t number;
  i->p1.nfds = sizeof i->p1.stdio / sizeof *i->p1.stdio;
  for (uint32_t k = 0; k < 3; k++) {
    bool channel = o->channels && o->stdio[k] >= 0;
    i->p1.fds[k] = (tw_fd){channel ? FD_CHANNEL : FD_STREAM, k ? TW_WRITE : TW_READ, 0, channel ? (uint32_t)o->stdio[k] : k};
  }
  i->p1.preopened = i->p1.files;
  for (uint32_t k = 0; k < i->p1.files; k++) tw_fd_new(i, (tw_fd){FD_PASSED, TW_READ | TW_WRITE, 0, FIRST + k}, &number);
  if (o->channels) tw_fd_new(i, (tw_fd){FD_ROOM, 0, 0, 0}, &number);
}

// set_wasi configures wasmtime's WASI.
static void set_wasi(tw_inst *i, const tw_opts *o, const char *dirs) {
  const char **args = tw_zeroed((o->nargs + 2 * (size_t)o->nenv + 1) * sizeof *args), *s = i->p1.strings;
  if (!args) {
    tw_starve(i, "arguments and environment");
    return;
  }
  wasi_config_t *w = wasi_config_new();
  const char **names = args + o->nargs, **values = names + o->nenv;
  for (uint32_t k = 0; k < o->nargs; k++) args[k] = next(&s);
  for (uint32_t k = 0; k < o->nenv; k++) {
    char *equals = strchr(names[k] = next(&s), '=');
    *equals = 0, values[k] = equals + 1;
  }
  bool ok = wasi_config_set_argv(w, o->nargs, args) && wasi_config_set_env(w, o->nenv, names, values);
  for (uint32_t k = 0; k < o->nenv; k++) ((char *)values[k])[-1] = '='; // our own WASI uses the strings, too
  free(args);
  if (!ok) tw_fail(i, TW_FAILED, "arguments or environment are not UTF-8");
  char path[40];
  snprintf(path, sizeof path, "/proc/self/fd/%d", o->stdin_fd);
  if (ok && !i->core && o->stdin_fd >= 0 && !wasi_config_set_stdin_file(w, path)) { // reads ahead
    tw_fail(i, TW_FAILED, "cannot open standard input");
    ok = false;
  }
  wasi_config_set_stdout_custom(w, write_out, (void *)o->go_, NULL);
  wasi_config_set_stderr_custom(w, write_err, (void *)o->go_, NULL);
  if (!ok || !preopens(i, w, o, dirs)) {
    wasi_config_delete(w);
    return;
  }
  tw_took(i, wasmtime_context_set_wasi(i->cx, w), NULL);
}

static bool export(tw_inst *i, const char *name, uint8_t kind, wasmtime_extern_t *e) {
  return wasmtime_instance_export_get(i->cx, &i->guest.mod, name, strlen(name), e) && e->kind == kind;
}

const wasmtime_func_t *tw_allocator_of(tw_inst *i) {
  if (i->guest.allocator == TW_NONE) return NULL;
  tw_allocator *a = &i->guest.allocators[i->guest.allocator];
  wasmtime_extern_t e;
  if (!a->found && (a->found = export(i, i->guest.names[i->guest.allocator], WASMTIME_EXTERN_FUNC, &e))) a->func = e.of.func;
  return a->found ? &a->func : NULL;
}

static void instantiate_core(tw_inst *i, const tw_code *c, const tw_snapshot *from) {
  wasm_trap_t *trap = NULL;
  wasmtime_error_t *err;
  wasmtime_extern_t e;
  i->guest.names = (const char *const *)c->allocators, i->guest.allocators = &i->guest.allocator1;
  if (c->nallocators > 1 && !(i->guest.allocators = tw_zeroed(c->nallocators * sizeof *i->guest.allocators))) {
    tw_starve(i, "allocators");
    return;
  }
  if (c->detached) {
    if (!tw_instantiate_detached(i, c, from, i->capture.on)) return;
  } else {
    err = wasmtime_instance_pre_instantiate(c->pre, i->cx, &i->guest.mod, &trap);
    if (tw_took(i, err, trap)) return;
  }
  if ((i->guest.has_memory = export(i, "memory", WASMTIME_EXTERN_MEMORY, &e))) i->guest.memory = e.of.memory;
  i->phase = TW_STARTS;
  tw_memory(i);
  if ((from && !from->initial) || !export(i, "_initialize", WASMTIME_EXTERN_FUNC, &e)) return;
  wasmtime_val_raw_t none;
  err = wasmtime_func_call_unchecked(i->cx, &e.of.func, &none, 0, &trap);
  tw_took(i, err, trap);
}

tw_inst *tw_new(const tw_code *c, const tw_opts *o, const char *strings, size_t len) {
  tw_inst *i = tw_zeroed(sizeof *i);
  if (!i) return NULL;
  i->core = c->pre != NULL, i->go_ = o->go_, i->account = o->account;
  i->call.budget = o->budget, i->call.max_calls = o->max_calls, i->handles.max = o->max_handles, i->max_value = o->max_value;
  i->scratch.max = SIZE_MAX / 4;
  i->store = wasmtime_store_new(c->engine, i, NULL);
  i->cx = wasmtime_store_context(i->store);
  // The limit is per memory, so a component's memories get equal shares. The limits of instances and tables protect the
  // host's memory.
  int64_t memories = i->core || !o->memories ? 1 : (int64_t)o->memories;
  wasmtime_store_limiter(i->store, (int64_t)o->max_memory / memories, (int64_t)o->max_table, MAX_INSTANCES, MAX_TABLES, memories);
  wasmtime_store_epoch_deadline_callback(i->store, tw_tick, i, NULL);
  i->own = o->own;
  tw_charge(i, i->core ? 0 : (int64_t)o->min_memory);
  i->p1.fds = i->p1.stdio; // empty, and not allocated
  const char *dirs = keep(i, o, strings, len);
  if (!dirs) return i;
  if (c->wasi && o->npreopens) {
    if (!tw_take(i->account, TW_FILES, o->npreopens)) {
      tw_fail(i, TW_HANDLES, "%u directories, besides the files that other instances have open", o->npreopens);
      return i;
    }
    i->p1.files = o->npreopens;
  }
  if (c->wasi && (!i->core || o->npreopens)) set_wasi(i, o, dirs);
  if (i->core) descriptors(i, o);
  i->p1.passing = o->passing, i->capture.on = o->capture;
  return i;
}

int tw_start(tw_inst *i, const tw_code *c, const tw_snapshot *from, uint64_t seq) {
  i->call.seq = seq;
  tw_enter(i);
  if (i->core) instantiate_core(i, c, from);
  else tw_took(i, wasmtime_component_linker_instantiate(c->linker, i->cx, c->component, &i->guest.comp), NULL);
  tw_leave(i);
  return i->why;
}

void tw_free(tw_inst *i) {
  if (i->account) __atomic_sub_fetch(&i->account->memory, i->mem, __ATOMIC_RELAXED);
  wasmtime_store_delete(i->store);
  tw_give(i->account, TW_FILES, i->p1.files); // already closed
  tw_give(i->account, TW_RESOURCES, i->handles.live);
  tw_buf_free(&i->scratch);
  tw_buf_free(&i->out);
  tw_buf_free(&i->exchange.reply);
  free(i->handles.list);
  if (i->guest.allocators != &i->guest.allocator1) free(i->guest.allocators);
  if (i->p1.fds != i->p1.stdio) free(i->p1.fds);
  free(i->p1.passed);
  free(i->p1.strings);
  free(i->message);
  free(i);
}

// ---- calling ----

static bool lower_params(tw_src *s, wasmtime_val_raw_t *v) {
  const tw_prog *p = s->prog;
  if (p->param_core != TW_NONE) {
    for (uint32_t k = 0; k < p->nparams; k++) {
      if (!tw_lower_flat(s, p->params[k], v)) return false;
      v += p->nodes[p->params[k]].ncore;
    }
    return true;
  }
  uint32_t at, offset = 0;
  if (!tw_alloc(s->i, p->spill_size, p->spill_align, &at)) return false;
  v->i32 = (int32_t)at;
  for (uint32_t k = 0; k < p->nparams; k++) {
    const tw_node *n = &p->nodes[p->params[k]];
    offset = tw_align(offset, n->align);
    if (!tw_lower_at(s, p->params[k], at + offset)) return false;
    offset += n->size;
  }
  return true;
}

static bool lift_result(tw_inst *i, const tw_prog *p, const wasmtime_val_raw_t *v, tw_buf *out) {
  if (p->result == TW_NONE) return true;
  if (p->result_core <= 1) return tw_lift_flat(i, p, p->result, v, out);
  const tw_node *n = &p->nodes[p->result];
  uint32_t at = (uint32_t)v->i32;
  return tw_range(i, at, n->size, n->align) && tw_lift_at(i, p, p->result, at, out);
}

// afterwards handles a guest that traps during cleanup, after it has returned its result. (componentize-qjs then
// collects garbage and drops handles, which is forbidden there.) The result is valid, but the guest is dead.
static void afterwards(tw_inst *i) {
  if (i->why == TW_TRAP || i->why == TW_ABI) i->why = TW_OK, i->spent = true;
}

static void call_core(tw_inst *i, const tw_func *f, const uint8_t *args, tw_buf *out) {
  wasmtime_extern_t fn, post;
  if (!export(i, f->name, WASMTIME_EXTERN_FUNC, &fn) ||
      (f->post && !export(i, f->post, WASMTIME_EXTERN_FUNC, &post))) {
    tw_fail(i, TW_FAILED, "%s is not exported", f->name);
    return;
  }
  const tw_prog *p = f->prog;
  wasmtime_val_raw_t v[TW_MAX_FLAT + 1];
  memset(v, 0, sizeof v);
  tw_src s = {i, p, args};
  i->guest.allocator = f->allocator;
  if (!lower_params(&s, v)) return;
  wasm_trap_t *trap = NULL;
  size_t n = p->param_core == TW_NONE ? 1 : p->param_core;
  wasmtime_error_t *err = wasmtime_func_call_unchecked(i->cx, &fn.of.func, v, n > 1 ? n : 1, &trap);
  if (tw_took(i, err, trap)) return;
  if (i->handles.borrows) { // it cannot drop them any more
    tw_fail(i, TW_ABI, "the guest keeps a borrowed handle");
    return;
  }
  if (!lift_result(i, p, v, out)) return;
  if (f->post) {
    i->inside = true;
    err = wasmtime_func_call_unchecked(i->cx, &post.of.func, v, 1, &trap);
    i->inside = false;
    if (tw_took(i, err, trap)) afterwards(i);
  }
}

static void call_comp(tw_inst *i, const tw_func *f, const uint8_t *args, tw_buf *out) {
  wasmtime_component_func_t fn;
  if (!wasmtime_component_instance_get_func(&i->guest.comp, i->cx, f->index, &fn)) {
    tw_fail(i, TW_FAILED, "%s is not exported", f->name);
    return;
  }
  const tw_prog *p = f->prog;
  wasmtime_component_val_t *params = tw_get(NULL, p->nparams * sizeof *params), result;
  if (!params) {
    tw_starve(i, "parameters");
    return;
  }
  tw_arena *arena = NULL;
  tw_src s = {i, p, args};
  memset(&result, 0, sizeof result);
  bool ok = true;
  for (uint32_t k = 0; k < p->nparams && ok; k++) ok = tw_to_val(&s, p->params[k], &params[k], &arena);
  size_t results = p->result != TW_NONE;
  if (ok) ok = !tw_took(i, wasmtime_component_func_call(&fn, i->cx, params, p->nparams, &result, results), NULL);
  tw_release(i, arena, ok);
  free(params);
  if (!ok) return;
  if (results) {
    tw_from_val(i, p, p->result, &result, out);
    wasmtime_component_val_delete(&result);
  }
}

int tw_call(tw_inst *i, const tw_func *f, uint64_t seq, const uint8_t *args, size_t len, uint8_t *room, size_t cap, const uint8_t *message,
            bool one) {
  const char *why;
  i->exchange.message = message, i->exchange.one = message && one;
  i->exchange.told = i->exchange.taken = i->exchange.sent = false, i->exchange.reply.max = i->max_value;
  i->out = (tw_buf){room, 0, cap, i->max_value, false, false, false};
  if (tw_check(f->prog, false, args, len, &why) < 0) {
    tw_fail(i, TW_ARGS, "%s", why);
    i->interrupt.after = 0;
    return TW_ARGS;
  }
  i->call.seq = seq, i->phase = TW_SERVES;
  tw_enter(i);
  if (i->core) call_core(i, f, args, &i->out);
  else call_comp(i, f, args, &i->out);
  tw_leave(i);
  i->exchange.message = NULL;
  return i->why;
}

// run_core runs a command. The result of run is 0 for ok, and 1 for an error.
static void run_core(tw_inst *i, const tw_func *run) {
  wasmtime_extern_t start;
  wasmtime_val_raw_t result;
  wasm_trap_t *trap = NULL;
  const char *name = run ? run->name : "_start";
  if (!export(i, name, WASMTIME_EXTERN_FUNC, &start)) {
    tw_fail(i, TW_FAILED, "%s is not exported", name);
    return;
  }
  memset(&result, 0, sizeof result);
  wasmtime_error_t *err = wasmtime_func_call_unchecked(i->cx, &start.of.func, &result, run != NULL, &trap);
  if (!tw_took(i, err, trap) && run) i->exit_code = result.i32 != 0;
}

int tw_run(tw_inst *i, const tw_func *run, uint64_t seq) {
  i->call.seq = seq, i->call.budget = 0, i->phase = TW_COMMANDS;
  tw_enter(i);
  if (i->core) run_core(i, run);
  else {
    wasmtime_component_func_t fn;
    wasmtime_component_val_t result;
    memset(&result, 0, sizeof result);
    if (!run || !wasmtime_component_instance_get_func(&i->guest.comp, i->cx, run->index, &fn)) tw_fail(i, TW_FAILED, "run is not exported");
    else if (!tw_took(i, wasmtime_component_func_call(&fn, i->cx, NULL, 0, &result, 1), NULL)) {
      i->exit_code = !result.of.result.is_ok;
      wasmtime_component_val_delete(&result);
    }
  }
  tw_leave(i);
  return i->why;
}
