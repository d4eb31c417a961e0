// Directories and files of preview 1 guests: calls are passed on to wasmtime's WASI, whose descriptors have other
// numbers. Each uses one of the worker's descriptors, so they are counted; beyond the limit, opening fails with EMFILE.
//
// Wasmtime's functions find the guest's memory through their caller, which must be an instance that exports it. So each
// such guest gets a second, tiny instance (forwarder.go), which imports and exports the guest's memory and passes the
// calls on. It is made on first use.
#include "p1.h"
#include <stdlib.h>

static const char preview1[] = "wasi_snapshot_preview1";

static bool took(call *c, wasmtime_error_t *e, wasm_trap_t *t) { return tw_took(c->i, e, t); }

// imports collects the imports of the second instance: the memory, and all functions that are passed on, in order.
static size_t imports(tw_inst *i, wasmtime_memory_t memory, wasmtime_extern_t *all) {
  const char *name, *params;
  uint32_t fds;
  size_t n = 0;
  all[n++] = (wasmtime_extern_t){.kind = WASMTIME_EXTERN_MEMORY, .of.memory = memory};
  for (uint32_t k = 0; (name = tw_preview1(k, &params, &fds)); k++)
    if (fds && !wasmtime_linker_get(i->p1.passing.linker, i->cx, preview1, sizeof preview1 - 1, name, strlen(name), &all[n++])) return 0;
  return n;
}

// prepare makes the second instance.
static bool prepare(call *c) {
  enum { MOST = 64 };
  tw_inst *i = c->i;
  wasmtime_extern_t all[MOST + 1];
  wasmtime_instance_t second;
  wasm_trap_t *trap = NULL;
  const char *name, *params;
  uint32_t fds;
  size_t n = imports(i, c->memory, all);
  if (!n) return tw_fail(i, TW_FAILED, "wasmtime lacks functions of preview 1"), false;
  if (took(c, wasmtime_instance_new(i->cx, i->p1.passing.module, all, n, &second, &trap), trap)) return false;
  if (!(i->p1.passed = tw_zeroed(MOST * sizeof *i->p1.passed))) return tw_starve(i, "the engine's functions");
  for (uint32_t k = 0; k < MOST && (name = tw_preview1(k, &params, &fds)); k++) {
    if (!fds) continue;
    if (!wasmtime_instance_export_get(i->cx, &second, name, strlen(name), &all[0])) return tw_fail(i, TW_FAILED, "no %s", name), false;
    i->p1.passed[k] = all[0].of.func;
  }
  return true;
}

// function_named returns the number of a function.
static uint32_t function_named(const char *want) {
  const char *name, *params;
  uint32_t fds, k = 0;
  while ((name = tw_preview1(k, &params, &fds)) && strcmp(name, want)) k++;
  return k;
}

int p1_pass(call *c, uint32_t function, uint32_t nparams, uint32_t fds) {
  wasmtime_val_raw_t v[TW_MAX_FLAT];
  wasm_trap_t *trap = NULL;
  memcpy(v, c->v, nparams * sizeof *v);
  for (uint32_t k = 0; k < nparams; k++) {
    if (!(fds >> k & 1)) continue;
    const tw_fd *d = fd_at(c, arg(c, (int)k));
    if (!d) return EBADF_;
    if (d->kind != FD_PASSED) return EXDEV_;
    v[k].i32 = (int32_t)d->n;
  }
  if (tw_over(c->i) || (!c->i->p1.passed && !prepare(c))) return ENDED;
  if (took(c, wasmtime_func_call_unchecked(c->i->cx, &c->i->p1.passed[function], v, nparams, &trap), trap)) return ENDED;
  return v[0].i32;
}

enum { STAT = 64, STAT_INODE = 8, STAT_TYPE = 16, STAT_SIZE = 32 }; // a filestat of preview 1

// ask calls a function that writes a filestat to its last parameter. It uses a place in the guest's memory, and
// restores the contents.
static int ask(call *c, const char *function, wasmtime_val_raw_t *v, uint32_t nparams, uint32_t at, uint8_t *stat) {
  uint8_t was[STAT];
  call asking = *c;
  asking.v = v, v[nparams - 1].i32 = (int32_t)at;
  memcpy(was, c->mem + at, STAT);
  int error = p1_pass(&asking, function_named(function), nparams, 1);
  memcpy(stat, c->mem + at, STAT);
  memcpy(c->mem + at, was, STAT);
  return error;
}

// may_open lets a guest open only files and directories. Opening a pipe waits for its other end, on one of wasmtime's
// threads, of which there is a limited number for all guests. If the path cannot be checked, the call that opens it
// reports the error.
static int may_open(call *c) {
  enum { PATH = 2, LENGTH = 3 };
  uint8_t stat[STAT];
  uint32_t path = arg(c, PATH), n = arg(c, LENGTH), at = path >= STAT ? 0 : (uint32_t)(c->size - STAT);
  if (c->size < 2 * STAT || !fits(c, path, n)) return EFAULT_;
  if (at && (uint64_t)path + n > at) return ENAMETOOLONG_;
  wasmtime_val_raw_t v[] = {c->v[0], c->v[1], c->v[PATH], c->v[LENGTH], {.i32 = 0}};
  int error = ask(c, "path_filestat_get", v, 5, at, stat);
  if (error) return error == ENDED ? ENDED : OK;
  uint8_t type = stat[STAT_TYPE];
  return type == REGULAR_FILE || type == DIRECTORY || type == SYMBOLIC_LINK ? OK : EPERM_;
}

// p1_pass_list lists a directory. For each call, wasmtime reads the whole directory into several times its size on
// disk, so that memory is counted during the call.
int p1_pass_list(call *c, uint32_t function, uint32_t nparams) {
  enum { LISTED = 8 };
  uint8_t stat[STAT];
  int64_t size, most = (int64_t)1 << 40;
  uint64_t inode;
  if (c->size < STAT) return EFAULT_;
  wasmtime_val_raw_t v[] = {c->v[0], {.i32 = 0}};
  int error = ask(c, "fd_filestat_get", v, 2, 0, stat);
  if (error) return error;
  memcpy(&size, stat + STAT_SIZE, sizeof size);
  memcpy(&inode, stat + STAT_INODE, sizeof inode);
  int64_t bytes = stat[STAT_TYPE] != DIRECTORY ? 0 : LISTED * (size < most ? size : most);
  if (!tw_take(c->i->account, TW_BYTES, bytes)) return ENOMEM_;
  error = p1_pass(c, function, nparams, 1);
  if (error == EILSEQ_) error = p1_list(c, inode);
  tw_give(c->i->account, TW_BYTES, bytes);
  return error;
}

int p1_pass_open(call *c, uint32_t function, uint32_t nparams) {
  uint32_t at = arg(c, 8), number;
  if (!fits(c, at, 4)) return EFAULT_;
  int odd = may_open(c);
  if (odd) return odd;
  if (!tw_fd_new(c->i, (tw_fd){0}, &number)) return c->i->why ? ENDED : EMFILE_;
  if (!tw_take(c->i->account, TW_FILES, 1)) return EMFILE_;
  int error = p1_pass(c, function, nparams, 1);
  if (error) return tw_give(c->i->account, TW_FILES, 1), error;
  c->i->p1.files++;
  c->i->p1.fds[number] = (tw_fd){.kind = FD_PASSED, .modes = CAN_READ | CAN_WRITE, .n = get32(c, at)};
  return put32(c, at, number), OK;
}

// p1_pass_remove removes slashes at the end of the path before passing it on, because wasmtime takes them for invalid.
// They only mean that the path is a directory.
int p1_pass_remove(call *c, uint32_t function, uint32_t nparams) {
  enum { PATH = 1, LENGTH = 2 };
  uint32_t at = arg(c, PATH), n = arg(c, LENGTH);
  if (!fits(c, at, n)) return EFAULT_;
  while (n > 1 && c->mem[at + n - 1] == '/') n--;
  wasmtime_val_raw_t v[] = {c->v[0], c->v[PATH], {.i32 = (int32_t)n}};
  call shorter = *c;
  shorter.v = v;
  return p1_pass(&shorter, function, nparams, 1);
}

int p1_pass_close(call *c, const tw_fd *d) {
  wasmtime_val_raw_t number = {.i32 = (int32_t)(d - c->i->p1.fds)};
  call close = *c;
  close.v = &number;
  int error = p1_pass(&close, function_named("fd_close"), 1, 1);
  if (!error) c->i->p1.files--, tw_give(c->i->account, TW_FILES, 1);
  return error;
}
