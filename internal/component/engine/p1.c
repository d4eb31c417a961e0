// WASI preview 1: arguments, environment, clocks, random numbers, standard streams, exit.
// (https://github.com/WebAssembly/WASI/blob/main/legacy/preview1/docs.md)
//
// Wasmtime's own WASI starts tasks of an asynchronous runtime for each instance, which costs as much as the rest of a
// request. A guest that sleeps in it cannot be woken, and it opens as many files as it is asked to. This WASI costs
// nothing until it is called, and a guest can be killed wherever it waits. It is the only one for guests without
// directories, which are most. For other guests, calls on directories and files are counted here and passed on
// (p1pass.c). Channels are in /ch (p1channel.c).
#define _GNU_SOURCE
#include "p1.h"
#include <errno.h>
#include <stdlib.h>
#include <sys/random.h>
#include <unistd.h>

static bool is_open(const call *c, uint32_t fd) { return fd_at(c, fd); }

// ---- arguments and environment: consecutive NUL-terminated strings ----

static int sizes(const call *c, const char *from, const char *to, uint32_t n) {
  if (!fits(c, arg(c, 0), 4) || !fits(c, arg(c, 1), 4)) return EFAULT_;
  put32(c, arg(c, 0), n);
  put32(c, arg(c, 1), (uint32_t)(to - from));
  return OK;
}

static int copies(const call *c, const char *from, const char *to, uint32_t n) {
  uint32_t pointers = arg(c, 0), at = arg(c, 1);
  if (!fits(c, pointers, (uint64_t)n * 4) || !fits(c, at, (uint64_t)(to - from))) return EFAULT_;
  memcpy(c->mem + at, from, (size_t)(to - from));
  for (const char *s = from; s < to; s += strlen(s) + 1, pointers += 4) put32(c, pointers, at + (uint32_t)(s - from));
  return OK;
}

static int args_sizes_get(call *c) { return sizes(c, c->i->p1.strings, c->i->p1.env, c->i->p1.nargs); }
static int args_get(call *c) { return copies(c, c->i->p1.strings, c->i->p1.env, c->i->p1.nargs); }
static int environ_sizes_get(call *c) { return sizes(c, c->i->p1.env, c->i->p1.env_end, c->i->p1.nenv); }
static int environ_get(call *c) { return copies(c, c->i->p1.env, c->i->p1.env_end, c->i->p1.nenv); }

// ---- clocks, random numbers, exit ----

static int clock_res_get_(call *c) {
  uint64_t ns;
  if (!p1_clock(arg(c, 0), true, &ns)) return EINVAL_;
  if (!fits(c, arg(c, 1), 8)) return EFAULT_;
  return put64(c, arg(c, 1), ns), OK;
}

static int clock_time_get(call *c) {
  uint64_t ns;
  if (!p1_clock(arg(c, 0), false, &ns)) return EINVAL_;
  if (arg(c, 0) == REALTIME) c->i->capture.clocks++;
  if (!fits(c, arg(c, 2), 8)) return EFAULT_;
  return put64(c, arg(c, 2), ns), OK;
}

static int random_get(call *c) {
  uint32_t at = arg(c, 0), n = arg(c, 1);
  if (!fits(c, at, n)) return EFAULT_;
  c->i->capture.randoms++;
  while (n && !tw_over(c->i)) {
    ssize_t got = getrandom(c->mem + at, n < 1 << 20 ? n : 1 << 20, 0);
    if (got < 0 && errno != EINTR) return EIO_;
    if (got > 0) at += (uint32_t)got, n -= (uint32_t)got;
  }
  return n ? ENDED : OK;
}

static int proc_exit(call *c) {
  c->i->why = TW_EXIT, c->i->exit_code = (int)arg(c, 0);
  return ENDED;
}

static int sched_yield_(call *c) { return tw_over(c->i) ? ENDED : OK; }

// ---- standard streams ----

static int each_vector(call *c, ptrdiff_t (*move)(call *, uint8_t *, size_t), uint64_t *moved) {
  uint64_t at = arg(c, 1);
  *moved = 0;
  if (arg(c, 2) > MAX_ENTRIES) return EINVAL_;
  for (uint32_t n = arg(c, 2); n--; at += 8) {
    if (!fits(c, at, 8)) return EFAULT_;
    uint32_t to = get32(c, (uint32_t)at), len = get32(c, (uint32_t)at + 4);
    if (!fits(c, to, len)) return EFAULT_;
    ptrdiff_t k = len ? move(c, c->mem + to, len < MAX_PIECE ? len : MAX_PIECE) : 0;
    if (k == ENDED) return ENDED;
    if (k < 0) return *moved ? OK : EIO_;
    *moved += (uint64_t)k;
    if ((uint64_t)k < len) break;
  }
  return OK;
}

static ptrdiff_t write_some(call *c, uint8_t *from, size_t n) { return p1_write(c, (int)fd_at(c, arg(c, 0))->n, from, n); }

static ptrdiff_t read_some(call *c, uint8_t *to, size_t n) {
  if (c->i->p1.stdin_fd < 0) return 0;
  int ready = p1_wait_input(c, INT64_MAX);
  if (ready < 0) return ready;
  ssize_t k = read(c->i->p1.stdin_fd, to, n);
  return k < 0 ? -EIO : k;
}

static int stream(call *c, bool out) {
  tw_fd *d = fd_at(c, arg(c, 0));
  uint64_t moved;
  if (!d || d->kind == FD_ROOM) return d ? EISDIR_ : EBADF_;
  if (!(d->modes & (out ? CAN_WRITE : CAN_READ))) return EBADF_;
  if (d->kind == FD_CHANNEL) return out ? p1_channel_write(c, d) : p1_channel_read(c, d);
  if (!fits(c, arg(c, 3), 4)) return EFAULT_;
  int err = each_vector(c, out ? write_some : read_some, &moved);
  if (!err) put32(c, arg(c, 3), (uint32_t)moved);
  return err;
}
static int fd_write(call *c) { return stream(c, true); }
static int fd_read(call *c) { return stream(c, false); }

// shut closes a descriptor and frees its number.
static int shut(call *c, tw_fd *d) {
  int error = d->kind == FD_PASSED ? p1_pass_close(c, d) : OK;
  if (d->kind == FD_CHANNEL) p1_channel_close(c, d);
  if (!error) d->kind = FD_NONE;
  return error;
}

static int fd_close(call *c) {
  tw_fd *d = fd_at(c, arg(c, 0));
  return d ? shut(c, d) : EBADF_;
}

// fd_renumber moves a descriptor to the number of another one, which it closes.
static int fd_renumber(call *c) {
  tw_fd *from = fd_at(c, arg(c, 0)), *to = fd_at(c, arg(c, 1));
  if (!from || !to) return EBADF_;
  if (from == to) return OK;
  int error = shut(c, to);
  if (!error) *to = *from, from->kind = FD_NONE;
  return error;
}

// type_of returns the file type of a descriptor. Streams are not terminals. Channels look like one, which makes the
// libraries of languages end a message at each line.
static uint8_t type_of(const tw_fd *d) {
  return d->kind == FD_STREAM ? UNKNOWN : d->kind == FD_ROOM ? DIRECTORY : CHARACTER_DEVICE;
}

static int fd_fdstat_get(call *c) {
  enum { SIZE = 24, FLAGS = 2, RIGHTS = 8, INHERITED = 16, ALL = RIGHT_POLL | RIGHT_READ | RIGHT_WRITE };
  uint32_t at = arg(c, 1);
  tw_fd *d = fd_at(c, arg(c, 0));
  if (!d) return EBADF_;
  if (!fits(c, at, SIZE)) return EFAULT_;
  memset(c->mem + at, 0, SIZE);
  c->mem[at] = type_of(d);
  memcpy(c->mem + at + FLAGS, &d->flags, 2);
  uint64_t rights = RIGHT_POLL | (d->modes & CAN_READ ? RIGHT_READ : 0) | (d->modes & CAN_WRITE ? RIGHT_WRITE : 0);
  put64(c, at + RIGHTS, d->kind == FD_ROOM ? RIGHT_OPEN : rights);
  if (d->kind == FD_ROOM) put64(c, at + INHERITED, ALL);
  return OK;
}

static int fd_fdstat_set_flags(call *c) {
  tw_fd *d = fd_at(c, arg(c, 0));
  if (!d) return EBADF_;
  if (d->kind == FD_CHANNEL) d->flags = (uint16_t)arg(c, 1);
  return OK;
}

static int fd_filestat_get(call *c) {
  enum { SIZE = 64, TYPE = 16 };
  tw_fd *d = fd_at(c, arg(c, 0));
  if (!d) return EBADF_;
  if (!fits(c, arg(c, 1), SIZE)) return EFAULT_;
  memset(c->mem + arg(c, 1), 0, SIZE);
  c->mem[arg(c, 1) + TYPE] = type_of(d);
  return OK;
}

// ---- the rest: files, directories and sockets do not exist ----

static int no_file(call *c) { return is_open(c, arg(c, 0)) ? ENOTSUP_ : EBADF_; }
static int no_seek(call *c) { return is_open(c, arg(c, 0)) ? ESPIPE_ : EBADF_; }
static int no_directory(call *c) {
  const tw_fd *d = fd_at(c, arg(c, 0));
  return !d ? EBADF_ : d->kind == FD_ROOM ? ENOTSUP_ : ENOTDIR_;
}
static int no_socket(call *c) { return is_open(c, arg(c, 0)) ? ENOTSOCK_ : EBADF_; }
static int not_here(call *c) { return (void)c, ENOTSUP_; }
static int no_symlink(call *c) { return is_open(c, arg(c, 2)) ? ENOTDIR_ : EBADF_; }

// The only directory is that of the channels.
static bool in_room(const call *c) { return is_open(c, arg(c, 0)) && fd_at(c, arg(c, 0))->kind == FD_ROOM; }
static int fd_prestat_get(call *c) { return in_room(c) ? p1_room_prestat(c) : no_directory(c); }
static int fd_prestat_dir_name(call *c) { return in_room(c) ? p1_room_dir_name(c) : no_directory(c); }
static int path_open(call *c) { return in_room(c) ? p1_channel_open(c) : no_directory(c); }
static int fd_readdir(call *c) { return no_directory(c); }
static int path_remove_directory(call *c) { return no_directory(c); }
static int path_filestat_get(call *c) { return in_room(c) ? p1_channel_filestat(c) : no_directory(c); }

static const struct function {
  const char *name, *params;
  uint32_t fds;
  int (*run)(call *);
} functions[] = {
#define P1(name, params, fds, run) {name, params, fds, run},
#include "p1table.h"
#undef P1
};

// passed passes on a call whose descriptors belong to wasmtime's WASI.
static int passed(call *c, const struct function *f) {
  bool looks = f->run == fd_prestat_get || f->run == fd_prestat_dir_name || f->run == fd_fdstat_get;
  if (!looks) c->i->capture.used |= TW_USED_FILES;
  uint32_t n = (uint32_t)(f - functions), nparams = (uint32_t)strlen(f->params);
  if (f->run == fd_close) return fd_close(c);
  if (f->run == path_open) return p1_pass_open(c, n, nparams);
  if (f->run == fd_readdir) return p1_pass_list(c, n, nparams);
  if (f->run == path_remove_directory) return p1_pass_remove(c, n, nparams);
  return p1_pass(c, n, nparams, f->fds);
}

// is_passed reports whether the first descriptor of a call belongs to wasmtime's WASI.
static bool is_passed(const call *c, const struct function *f) {
  const tw_fd *d = c->i->p1.files && f->fds ? fd_at(c, arg(c, __builtin_ctz(f->fds))) : NULL;
  return d && d->kind == FD_PASSED;
}

static wasm_trap_t *enter(void *f, wasmtime_caller_t *caller, wasmtime_val_raw_t *v, size_t n) {
  (void)n;
  wasmtime_context_t *cx = wasmtime_caller_context(caller);
  call c = {.i = wasmtime_context_get_data(cx), .v = v};
  c.memory = c.i->guest.memory;
  if (!c.i->guest.has_memory) { // the guest is still being instantiated
    wasmtime_extern_t e;
    if (!wasmtime_caller_export_get(caller, "memory", 6, &e) || e.kind != WASMTIME_EXTERN_MEMORY) return wasmtime_trap_new("no memory", 9);
    c.memory = e.of.memory;
  }
  c.mem = wasmtime_memory_data(cx, &c.memory), c.size = wasmtime_memory_data_size(cx, &c.memory);
  const struct function *fn = f;
  int error = is_passed(&c, fn) ? passed(&c, fn) : fn->run(&c);
  if (error == ENDED) return wasmtime_trap_new("ended by the host", 17);
  memset(v, 0, sizeof *v);
  v->i32 = error;
  return NULL;
}

char *tw_define_preview1(wasmtime_linker_t *l) {
  static const char module[] = "wasi_snapshot_preview1";
  const uint8_t result = WASM_I32;
  for (size_t k = 0; k < sizeof functions / sizeof *functions; k++) {
    const struct function *f = &functions[k];
    uint8_t params[TW_MAX_FLAT];
    uint32_t n = 0;
    for (; f->params[n]; n++) params[n] = f->params[n] == 'l' ? WASM_I64 : WASM_I32;
    wasm_functype_t *t = tw_core_type(params, n, &result, f->run != proc_exit);
    wasmtime_error_t *e = wasmtime_linker_define_func_unchecked(l, module, sizeof module - 1, f->name, strlen(f->name), t,
                                                                enter, (void *)f, NULL);
    wasm_functype_delete(t);
    if (e) return tw_error(e);
  }
  return NULL;
}
