// WASI preview 1 for guests without directories, which are most: arguments, environment, clocks, random numbers,
// standard streams, exit. (https://github.com/WebAssembly/WASI/blob/main/legacy/preview1/docs.md)
//
// The engine's own serves files too, but it starts tasks of an asynchronous runtime for each instance, which costs as
// much as the rest of a request, and a guest that sleeps in it cannot be woken. This one costs nothing until it is
// called, and wherever it waits the guest can be killed. What needs a directory fails, as there is none.
#define _GNU_SOURCE
#include "tw.h"
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

enum { OK, EBADF_ = 8, EFAULT_ = 21, EINVAL_ = 28, EIO_ = 29, ENOTDIR_ = 54, ENOTSOCK_ = 57, ENOTSUP_ = 58, ESPIPE_ = 70 };
enum { ENDED = -1 }; // the guest has been ended; why is set

// What a call does in one piece, between two looks at whether the guest has been killed: vectors of a stream and
// subscriptions (as IOV_MAX), bytes.
enum { MAX_ENTRIES = 1024, MAX_PIECE = 1 << 20 };

// call is one call: its parameters, and the guest's memory, which does not move meanwhile.
typedef struct {
  tw_inst *i;
  const wasmtime_val_raw_t *v;
  uint8_t *mem;
  size_t size;
} call;

static uint32_t arg(const call *c, int n) { return (uint32_t)c->v[n].i32; }
static bool fits(const call *c, uint64_t at, uint64_t n) { return at + n <= c->size; }
static void put32(const call *c, uint32_t at, uint32_t v) { memcpy(c->mem + at, &v, 4); }
static void put64(const call *c, uint32_t at, uint64_t v) { memcpy(c->mem + at, &v, 8); }
static uint32_t get32(const call *c, uint32_t at) {
  uint32_t v;
  memcpy(&v, c->mem + at, 4);
  return v;
}
static uint64_t get64(const call *c, uint32_t at) {
  uint64_t v;
  memcpy(&v, c->mem + at, 8);
  return v;
}
static bool is_open(const call *c, uint32_t fd) { return fd < 3 && !(c->i->closed_fds >> fd & 1); }

// ---- arguments and environment: NUL-terminated strings, one after the other ----

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

static int args_sizes_get(call *c) { return sizes(c, c->i->strings, c->i->env, c->i->nargs); }
static int args_get(call *c) { return copies(c, c->i->strings, c->i->env, c->i->nargs); }
static int environ_sizes_get(call *c) { return sizes(c, c->i->env, c->i->env_end, c->i->nenv); }
static int environ_get(call *c) { return copies(c, c->i->env, c->i->env_end, c->i->nenv); }

// ---- clocks, random numbers, exit ----

enum { REALTIME, MONOTONIC };

static bool clock_now(uint32_t id, bool resolution, uint64_t *ns) {
  struct timespec t;
  if (id > MONOTONIC) return false;
  clockid_t clock = id == REALTIME ? CLOCK_REALTIME : CLOCK_MONOTONIC;
  if (resolution) clock_getres(clock, &t);
  else clock_gettime(clock, &t);
  *ns = (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
  return true;
}

static int clock_res_get_(call *c) {
  uint64_t ns;
  if (!clock_now(arg(c, 0), true, &ns)) return EINVAL_;
  if (!fits(c, arg(c, 1), 8)) return EFAULT_;
  return put64(c, arg(c, 1), ns), OK;
}

static int clock_time_get(call *c) {
  uint64_t ns;
  if (!clock_now(arg(c, 0), false, &ns)) return EINVAL_;
  if (!fits(c, arg(c, 2), 8)) return EFAULT_;
  return put64(c, arg(c, 2), ns), OK;
}

static int random_get(call *c) {
  uint32_t at = arg(c, 0), n = arg(c, 1);
  if (!fits(c, at, n)) return EFAULT_;
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

static ptrdiff_t write_some(call *c, uint8_t *from, size_t n) {
  int64_t paused = tw_pause(c->i);
  ptrdiff_t k = twWrite(c->i->go_, (int)arg(c, 0), from, n);
  tw_resume(c->i, paused);
  return tw_over(c->i) ? ENDED : k == ENDED ? -EIO : k;
}

// wait_input waits until there is input, or until a time on the monotonic clock; in slices, so that it learns of the
// guest's end. It gives whether there is input.
static int wait_input(call *c, int64_t until) {
  for (;;) {
    struct pollfd p = {.fd = c->i->stdin_fd, .events = POLLIN};
    int64_t left = (until - tw_now()) / 1000000;
    if (poll(&p, 1, left < 0 ? 0 : left > 20 ? 20 : (int)left) > 0) return 1;
    if (tw_over(c->i)) return ENDED;
    if (tw_now() >= until) return 0;
  }
}

static ptrdiff_t read_some(call *c, uint8_t *to, size_t n) {
  if (c->i->stdin_fd < 0) return 0;
  int ready = wait_input(c, INT64_MAX);
  if (ready < 0) return ready;
  ssize_t k = read(c->i->stdin_fd, to, n);
  return k < 0 ? -EIO : k;
}

static int stream(call *c, bool out) {
  uint32_t fd = arg(c, 0);
  uint64_t moved;
  if (!is_open(c, fd) || (fd > 0) != out) return EBADF_;
  if (!fits(c, arg(c, 3), 4)) return EFAULT_;
  int err = each_vector(c, out ? write_some : read_some, &moved);
  if (!err) put32(c, arg(c, 3), (uint32_t)moved);
  return err;
}
static int fd_write(call *c) { return stream(c, true); }
static int fd_read(call *c) { return stream(c, false); }

static int fd_close(call *c) {
  if (!is_open(c, arg(c, 0))) return EBADF_;
  c->i->closed_fds |= 1u << arg(c, 0);
  return OK;
}

// The type of the streams is "unknown": they are no terminal.
static int fd_fdstat_get(call *c) {
  enum { SIZE = 24, RIGHTS = 8, FD_READ = 1 << 1, FD_WRITE = 1 << 6, POLL = 1 << 27 };
  uint32_t fd = arg(c, 0), at = arg(c, 1);
  if (!is_open(c, fd)) return EBADF_;
  if (!fits(c, at, SIZE)) return EFAULT_;
  memset(c->mem + at, 0, SIZE);
  put64(c, at + RIGHTS, POLL | (fd ? FD_WRITE : FD_READ));
  return OK;
}

static int fd_filestat_get(call *c) {
  enum { SIZE = 64 };
  if (!is_open(c, arg(c, 0))) return EBADF_;
  if (!fits(c, arg(c, 1), SIZE)) return EFAULT_;
  memset(c->mem + arg(c, 1), 0, SIZE);
  return OK;
}

// ---- poll ----

enum { SUBSCRIPTION = 48, EVENT = 32, CLOCK = 0, FD_READ_READY = 1, HANGUP = 1, ABSOLUTE = 1 };

// deadline_of gives when a subscription of a clock is due, on the monotonic clock.
static int deadline_of(call *c, uint32_t sub, int64_t now, int64_t *due) {
  uint64_t timeout = get64(c, sub + 24), clock;
  if (!clock_now(get32(c, sub + 16), false, &clock)) return EINVAL_;
  bool absolute = c->mem[sub + 40] & ABSOLUTE;
  uint64_t left = !absolute ? timeout : timeout > clock ? timeout - clock : 0;
  *due = left > (uint64_t)(INT64_MAX - now) ? INT64_MAX : now + (int64_t)left;
  return OK;
}

static void event(call *c, uint32_t sub, uint32_t *n, int error, bool hangup) {
  uint32_t at = arg(c, 1) + *n * EVENT;
  uint64_t user = get64(c, sub); // the two arrays may overlap
  uint8_t tag = c->mem[sub + 8];
  memset(c->mem + at, 0, EVENT);
  put64(c, at, user);
  c->mem[at + 8] = (uint8_t)error, c->mem[at + 10] = tag, c->mem[at + 24] = hangup ? HANGUP : 0;
  ++*n;
}

// streams_ready tells events of streams: output never makes anybody wait, input does if there is a standard input.
static uint32_t streams_ready(call *c, uint32_t subs, uint32_t n, bool input) {
  uint32_t events = 0;
  for (uint32_t k = 0; k < n; k++) {
    uint32_t sub = subs + k * SUBSCRIPTION, fd = get32(c, sub + 16);
    uint8_t tag = c->mem[sub + 8];
    if (tag == CLOCK) continue;
    bool good = is_open(c, fd) && (fd == 0) == (tag == FD_READ_READY);
    if (good && fd == 0 && !input) continue;
    event(c, sub, &events, good ? OK : EBADF_, fd == 0 && c->i->stdin_fd < 0);
  }
  return events;
}

static bool wants_input(call *c, uint32_t subs, uint32_t n) {
  for (uint32_t k = 0; k < n; k++)
    if (c->mem[subs + k * SUBSCRIPTION + 8] == FD_READ_READY) return true;
  return false;
}

static int poll_oneoff(call *c) {
  uint32_t subs = arg(c, 0), n = arg(c, 2);
  if (!n || n > MAX_ENTRIES) return EINVAL_;
  if (!fits(c, subs, (uint64_t)n * SUBSCRIPTION) || !fits(c, arg(c, 1), (uint64_t)n * EVENT) || !fits(c, arg(c, 3), 4)) return EFAULT_;
  int64_t now = tw_now(), first = INT64_MAX, due;
  for (uint32_t k = 0; k < n; k++) {
    uint32_t sub = subs + k * SUBSCRIPTION;
    if (c->mem[sub + 8] != CLOCK) continue;
    int error = deadline_of(c, sub, now, &due);
    if (error) return error;
    if (due < first) first = due;
  }
  bool waits = wants_input(c, subs, n) && c->i->stdin_fd >= 0;
  uint32_t events = streams_ready(c, subs, n, !waits);
  if (!events) {
    int ready = waits ? wait_input(c, first) : tw_wait(c->i, first) ? 0 : ENDED;
    if (ready < 0) return ENDED;
    if (ready) events = streams_ready(c, subs, n, true);
    else
      for (uint32_t k = 0; k < n; k++) {
        uint32_t sub = subs + k * SUBSCRIPTION;
        if (c->mem[sub + 8] == CLOCK && !deadline_of(c, sub, now, &due) && due <= first) event(c, sub, &events, OK, false);
      }
  }
  put32(c, arg(c, 3), events);
  return OK;
}

// ---- the rest: there are no files, directories and sockets ----

static int no_file(call *c) { return is_open(c, arg(c, 0)) ? ENOTSUP_ : EBADF_; }
static int no_seek(call *c) { return is_open(c, arg(c, 0)) ? ESPIPE_ : EBADF_; }
static int no_directory(call *c) { return is_open(c, arg(c, 0)) ? ENOTDIR_ : EBADF_; }
static int no_socket(call *c) { return is_open(c, arg(c, 0)) ? ENOTSOCK_ : EBADF_; }
static int not_here(call *c) { return (void)c, ENOTSUP_; }
static int nothing(call *c) { return is_open(c, arg(c, 0)) ? OK : EBADF_; }
static int no_symlink(call *c) { return is_open(c, arg(c, 2)) ? ENOTDIR_ : EBADF_; }

// functions is preview 1: name, parameters (i: i32, l: i64), what it does. All but proc_exit give an error number.
static const struct function {
  const char *name, *params;
  int (*run)(call *);
} functions[] = {
    {"args_get", "ii", args_get},
    {"args_sizes_get", "ii", args_sizes_get},
    {"environ_get", "ii", environ_get},
    {"environ_sizes_get", "ii", environ_sizes_get},
    {"clock_res_get", "ii", clock_res_get_},
    {"clock_time_get", "ili", clock_time_get},
    {"fd_advise", "illi", no_seek},
    {"fd_allocate", "ill", no_file},
    {"fd_close", "i", fd_close},
    {"fd_datasync", "i", no_file},
    {"fd_fdstat_get", "ii", fd_fdstat_get},
    {"fd_fdstat_set_flags", "ii", nothing},
    {"fd_fdstat_set_rights", "ill", no_file},
    {"fd_filestat_get", "ii", fd_filestat_get},
    {"fd_filestat_set_size", "il", no_file},
    {"fd_filestat_set_times", "illi", no_file},
    {"fd_pread", "iiili", no_seek},
    {"fd_prestat_get", "ii", no_directory},
    {"fd_prestat_dir_name", "iii", no_directory},
    {"fd_pwrite", "iiili", no_seek},
    {"fd_read", "iiii", fd_read},
    {"fd_readdir", "iiili", no_directory},
    {"fd_renumber", "ii", no_file},
    {"fd_seek", "ilii", no_seek},
    {"fd_sync", "i", no_file},
    {"fd_tell", "ii", no_seek},
    {"fd_write", "iiii", fd_write},
    {"path_create_directory", "iii", no_directory},
    {"path_filestat_get", "iiiii", no_directory},
    {"path_filestat_set_times", "iiiilli", no_directory},
    {"path_link", "iiiiiii", no_directory},
    {"path_open", "iiiiillii", no_directory},
    {"path_readlink", "iiiiii", no_directory},
    {"path_remove_directory", "iii", no_directory},
    {"path_rename", "iiiiii", no_directory},
    {"path_symlink", "iiiii", no_symlink},
    {"path_unlink_file", "iii", no_directory},
    {"poll_oneoff", "iiii", poll_oneoff},
    {"proc_exit", "i", proc_exit},
    {"proc_raise", "i", not_here},
    {"sched_yield", "", sched_yield_},
    {"random_get", "ii", random_get},
    {"sock_accept", "iii", no_socket},
    {"sock_recv", "iiiiii", no_socket},
    {"sock_send", "iiiii", no_socket},
    {"sock_shutdown", "ii", no_socket},
};

static wasm_trap_t *enter(void *f, wasmtime_caller_t *caller, wasmtime_val_raw_t *v, size_t n) {
  (void)n;
  wasmtime_context_t *cx = wasmtime_caller_context(caller);
  call c = {.i = wasmtime_context_get_data(cx), .v = v};
  wasmtime_memory_t memory = c.i->memory;
  if (!c.i->has_memory) { // it is still being instantiated
    wasmtime_extern_t e;
    if (!wasmtime_caller_export_get(caller, "memory", 6, &e) || e.kind != TW_EXTERN_MEMORY) return wasmtime_trap_new("no memory", 9);
    memory = e.of.memory;
  }
  c.mem = wasmtime_memory_data(cx, &memory), c.size = wasmtime_memory_data_size(cx, &memory);
  int error = ((const struct function *)f)->run(&c);
  if (error == ENDED) return wasmtime_trap_new("ended by the host", 17);
  memset(v, 0, sizeof *v);
  v->i32 = error;
  return NULL;
}

char *tw_define_preview1(wasmtime_linker_t *l) {
  static const char module[] = "wasi_snapshot_preview1";
  const uint8_t result = TW_WASM_I32;
  for (size_t k = 0; k < sizeof functions / sizeof *functions; k++) {
    const struct function *f = &functions[k];
    uint8_t params[TW_MAX_FLAT];
    uint32_t n = 0;
    for (; f->params[n]; n++) params[n] = f->params[n] == 'l' ? TW_WASM_I64 : TW_WASM_I32;
    wasm_functype_t *t = tw_core_type(params, n, &result, f->run != proc_exit);
    wasmtime_error_t *e = wasmtime_linker_define_func_unchecked(l, module, sizeof module - 1, f->name, strlen(f->name), t,
                                                                enter, (void *)f, NULL);
    wasm_functype_delete(t);
    if (e) return tw_error(e);
  }
  return NULL;
}
