// Output of guests of preview 1 that have no files: arguments and environment aside, all that WASI is to most of them.
//
// wasmtime's own streams start two tasks of its asynchronous runtime for each instance, which costs as much as the rest
// of a request. So these guests get no streams from it, and this fd_write in place of its own. They cannot open
// anything, so that there is nothing to write to but standard output and error.
#include "tw.h"
#include <string.h>

// Errors of preview 1.
enum { EBADF_ = 8, EFAULT_ = 21, EIO_ = 29 };

static uint32_t word(const uint8_t *p) { return p[0] | p[1] << 8 | p[2] << 16 | (uint32_t)p[3] << 24; }

// write_vector writes what an array of (address, length) tells, and gives an error; the length is that of memory.
static int write_vector(tw_inst *i, int fd, const uint8_t *mem, size_t size, uint64_t at, uint32_t count, uint32_t *written) {
  for (*written = 0; count--; at += 8) {
    if (at + 8 > size) return EFAULT_;
    uint64_t from = word(mem + at), n = word(mem + at + 4);
    if (from + n > size) return EFAULT_;
    ptrdiff_t took = n ? twWrite(i->go_, fd, (unsigned char *)mem + from, n) : 0;
    if (took < 0) return *written ? 0 : EIO_;
    *written += (uint32_t)took;
    if ((uint64_t)took < n) return 0;
  }
  return 0;
}

// fd_write(fd, vector, count, &written) -> error
static wasm_trap_t *fd_write(void *unused, wasmtime_caller_t *caller, wasmtime_val_raw_t *v, size_t n) {
  (void)unused, (void)n;
  wasmtime_context_t *cx = wasmtime_caller_context(caller);
  tw_inst *i = wasmtime_context_get_data(cx);
  uint32_t fd = (uint32_t)v[0].i32, at = (uint32_t)v[1].i32, count = (uint32_t)v[2].i32, to = (uint32_t)v[3].i32;
  wasmtime_extern_t e;
  int error = EBADF_;
  if ((fd == 1 || fd == 2) && wasmtime_caller_export_get(caller, "memory", 6, &e) && e.kind == TW_EXTERN_MEMORY) {
    uint8_t *mem = wasmtime_memory_data(cx, &e.of.memory);
    size_t size = wasmtime_memory_data_size(cx, &e.of.memory);
    uint32_t written = 0;
    int64_t paused = tw_pause(i);
    error = (uint64_t)to + 4 > size ? EFAULT_ : write_vector(i, (int)fd, mem, size, at, count, &written);
    tw_resume(i, paused);
    if (tw_ended(i)) return wasmtime_trap_new("ended by the host", 17);
    if (!error) memcpy(mem + to, &written, sizeof written);
  }
  memset(v, 0, sizeof *v);
  v->i32 = error;
  return NULL;
}

char *tw_define_stdio(wasmtime_linker_t *l) {
  static const char module[] = "wasi_snapshot_preview1", name[] = "fd_write";
  const uint8_t i32s[4] = {TW_WASM_I32, TW_WASM_I32, TW_WASM_I32, TW_WASM_I32};
  wasm_functype_t *t = tw_core_type(i32s, 4, i32s, 1);
  wasmtime_linker_allow_shadowing(l, true);
  wasmtime_error_t *e =
      wasmtime_linker_define_func_unchecked(l, module, sizeof module - 1, name, sizeof name - 1, t, fd_write, NULL, NULL);
  wasm_functype_delete(t);
  return tw_error(e);
}
