// The C half of the engine: what has to happen within one crossing from Go, and on the guest's thread.
//
//	tick.c   clocks, the epoch ticker, accounts, what a guest's thread does at a tick
//	prog.c   type tables (value.Program), the check of flat values
//	abi.c    core path: the canonical ABI on linear memory, handles
//	dyn.c    component path: flat values to and from wasmtime's dynamic ones
//	p1.c     WASI preview 1, and p1poll.c; with p1channel.c, channels, and p1pass.c, directories and files
//	host.c   calls of host functions, on both paths
//	inst.c   stores and instances, calls, WASI's configuration
#ifndef TW_H
#define TW_H
#include "capi.h"

// How a call ended. Go has the same numbers through cgo.
enum {
  TW_OK,
  TW_TRAP,      // the guest's own fault; message
  TW_EXIT,      // WASI exit; exit_code
  TW_DEADLINE,  // compute budget used up
  TW_KILLED,    // killed by its sequence number or for good
  TW_MEMORY,    // over its memory
  TW_HANDLES,   // too many resources
  TW_HOSTCALLS, // too many calls of the host
  TW_OUTPUT,    // a value for the host is too large
  TW_ABI,       // the guest broke the canonical ABI; message
  TW_HOST,      // a host function failed; Go has its error
  TW_ARGS,      // flat bytes from the caller do not fit the types; message
  TW_NOROOM,    // the pool is full, or a guest does not fit into it
  TW_STARVED,   // the worker has no memory for it; message
  TW_FAILED,    // anything else of the engine; message
};

#define TW_NONE 0xffffffffu
#define TW_MAX_FLAT 16
#define TW_FOREVER UINT64_MAX // as a sequence number: every call

// ---- type tables: internal/component/wit.Program, whose comments fix the format ----

typedef struct {
  uint32_t kind, name, first, count, size, align, discriminant, payload, core, ncore;
} tw_node;

typedef struct {
  uint32_t node, offset, name;
} tw_child;

// Kinds as value.Kind counts them.
enum {
  TW_BOOL, TW_S8, TW_U8, TW_S16, TW_U16, TW_S32, TW_U32, TW_S64, TW_U64, TW_F32, TW_F64, TW_CHAR, TW_STRING, TW_LIST,
  TW_RECORD, TW_TUPLE, TW_VARIANT, TW_ENUM, TW_OPTION, TW_RESULT, TW_FLAGS, TW_OWN, TW_BORROW,
};

typedef struct {
  uint32_t nparams, result; // result: node or TW_NONE
  const uint32_t *params;
  const tw_node *nodes;
  const tw_child *children;
  const uint8_t *cores;
  const char *names;
  const uint32_t *resources; // per node: the host's number of an own or borrow's resource
  // Derived: parameters as core values, or spilled to memory as a tuple of this size and alignment.
  uint32_t param_core, result_core; // TW_NONE: more than fit
  uint32_t spill_size, spill_align;
} tw_prog;

// tw_prog_new copies the table and the numbers of resources (one per node). NULL: not a table, or no memory.
tw_prog *tw_prog_new(const uint8_t *table, size_t len, const uint32_t *resources);
void tw_prog_free(tw_prog *);
uint32_t tw_align(uint32_t n, uint32_t align);

// ---- buffers ----

// A buffer begins with memory that someone else owns, or none, and moves to malloc when that is not enough.
typedef struct {
  uint8_t *data;
  size_t len, cap, max; // max: never longer
  bool owned, failed, starved; // starved: failed for want of memory
} tw_buf;

uint8_t *tw_room(tw_buf *, size_t n); // n bytes at the end, or NULL and failed
void tw_put(tw_buf *, const void *, size_t n);
void tw_buf_free(tw_buf *);

// ---- accounts ----

// What guests hold of the worker through the host, beside memory of their own: open files and directories, resources
// (handles), bytes that the host keeps for these.
enum { TW_FILES, TW_RESOURCES, TW_BYTES, TW_HELD };

typedef struct tw_account {
  int64_t memory, peak, limit; // bytes; limit 0: none
  int64_t cpu;                 // ns
  int64_t throttled;           // ns that threads have slept for the quota
  int64_t quota, period;       // ns; quota 0: none
  int64_t window, used;        // end of the period under way; ns in it
  int32_t lock;
  int64_t held[TW_HELD], most[TW_HELD]; // most 0: no bound
  struct tw_account *within;            // that of the worker, where all of its pods' add up; or NULL
} tw_account;

int64_t tw_load(const int64_t *);
void tw_account_set_limit(tw_account *, int64_t);
void tw_account_bound(tw_account *, int what, int64_t most);
void tw_account_set_cpu(tw_account *, int64_t quota, int64_t period);
// tw_take counts n more, for an account and for the one that it is within; false, and nothing is counted: that would be more
// than one of them may have. tw_give takes them back. Without an account nothing is counted.
bool tw_take(tw_account *, int what, int64_t n);
void tw_give(tw_account *, int what, int64_t n);

// ---- instances ----

typedef struct {
  uint32_t rep, type; // type TW_NONE: free, and rep is the next free one
  bool own;
} tw_handle;

// tw_fd is a descriptor of a guest's preview 1 (p1.h).
typedef struct {
  uint8_t kind, modes; // TW_READ, TW_WRITE
  uint16_t flags;      // of preview 1
  uint32_t n;          // FD_STREAM: 0 to 2; FD_CHANNEL: Go's number; FD_PASSED: the descriptor in the engine's WASI
} tw_fd;

enum { TW_READ = 1, TW_WRITE = 2 };

// tw_passing hands the engine's preview 1 to guests with directories (p1pass.c).
typedef struct {
  const wasmtime_linker_t *linker;
  const wasmtime_module_t *module;
} tw_passing;

typedef struct tw_inst {
  wasmtime_store_t *store;
  wasmtime_context_t *cx;
  bool core, serving, ready, has_memory, has_realloc, may_leave, renew, demoted, over, spent, command, on_cpu_clock;
  wasmtime_instance_t mod;
  wasmtime_component_instance_t comp;
  wasmtime_memory_t memory;
  wasmtime_func_t realloc;
  uintptr_t go_; // the Go half, as a cgo.Handle
  tw_account *account;

  int64_t budget; // ns of compute of a call; 0: unlimited
  uint64_t max_calls;
  uint32_t max_handles;
  size_t max_value; // bytes of one flat value that the guest gives

  // Of a guest that is one of the idlers (tick.c), under their lock.
  struct tw_inst *next_idler;
  int64_t due; // its deadline
  int32_t idle_thread;

  // Written and read by several threads, with atomics.
  uint64_t killed; // the number of the call to end, or TW_FOREVER
  uint32_t wake;   // futex: changes when killed does, or a channel
  uint32_t waits;  // whether somebody waits for it
  int64_t cpu, mem;
  int64_t seen; // when the guest was last known to run; 0: it is in a host function

  // The call under way; the guest's thread only.
  uint64_t seq, calls;
  int64_t deadline;
  int64_t mark; // up to here CPU time is accounted: on the thread's clock of it, or on the monotonic one
  uint32_t ticks;
  int64_t preempted, back_off; // involuntary switches of the thread at the last tick; ticks slept for them
  int why, exit_code;
  char *message;

  // The world of preview 1: arguments from strings to env, environment from there to env_end.
  char *strings, *env, *env_end;
  uint32_t nargs, nenv;
  int stdin_fd;
  tw_fd *fds, stdio[4]; // by number; in stdio until there are more
  uint32_t nfds, files;       // files: those that are the engine's, which are counted (tw_take)
  tw_passing passing;
  wasmtime_func_t *passed; // the engine's functions by number, once one was needed

  tw_handle *handles;
  uint32_t nhandles, cap_handles, free_handle, live, borrows;
  tw_buf scratch, out;
} tw_inst;

int64_t tw_now(void);
void tw_enter(tw_inst *);  // before guest code runs: arms the epoch, starts the CPU clock
void tw_leave(tw_inst *);  // after it
void tw_charge(tw_inst *, int64_t size); // the guest's memory is of this size now
void tw_memory(tw_inst *); // brings mem and the account up to date
bool tw_ended(tw_inst *);  // whether the call has been killed; sets why
bool tw_over(tw_inst *);   // the same, or whether it has used up its budget
uint32_t tw_seen(tw_inst *); // what tw_await takes; look for what there is to wait for after it
// tw_await lets the guest sleep until it is time, tw_wake was called after tw_seen, or at random. false: it is over.
bool tw_await(tw_inst *, int64_t until, uint32_t seen);
void tw_wake(tw_inst *);
void tw_fresh(tw_inst *); // the guest has new work, or waits for it: it stands back no more
wasmtime_error_t *tw_tick(wasmtime_context_t *, void *, uint64_t *, uint8_t *);
void tw_kill(tw_inst *, uint64_t seq);
int64_t tw_pause(tw_inst *); // the guest's thread turns to the host; gives the time
void tw_resume(tw_inst *, int64_t paused);
int64_t tw_sleep(tw_inst *, int64_t ns); // the guest sleeps, until it is killed at most, and this is not computing
// tw_ticker starts the ticker (once per process) and makes it count epochs of the engine too. It gives whether guests
// that compute for long can run as SCHED_IDLE here; negative: errno.
int tw_ticker(wasm_engine_t *);
void tw_stand_back(bool by_idle); // which of the two ways; for tests

void tw_fail(tw_inst *, int why, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
// tw_took turns the engine's error and trap, which it frees, into why and message. It gives false if there was neither.
bool tw_took(tw_inst *, wasmtime_error_t *, wasm_trap_t *);

// ---- values (abi.c, dyn.c) ----

bool tw_utf8(const uint8_t *, size_t);
bool tw_char(uint32_t);
// tw_check walks flat values of the parameters (or the result) and gives the number of bytes, or -1 and why in text.
int64_t tw_check(const tw_prog *, bool result, const uint8_t *flat, size_t len, const char **text);

typedef struct {
  tw_inst *i;
  const tw_prog *prog;
  const uint8_t *at; // the flat bytes, checked
} tw_src;

bool tw_lower_flat(tw_src *, uint32_t node, wasmtime_val_raw_t *);
bool tw_lower_at(tw_src *, uint32_t node, uint32_t addr);
bool tw_alloc(tw_inst *, uint32_t size, uint32_t align, uint32_t *addr);
bool tw_range(tw_inst *, uint32_t addr, uint64_t size, uint32_t align); // whether it lies in memory; else fails
bool tw_lift_flat(tw_inst *, const tw_prog *, uint32_t node, const wasmtime_val_raw_t *, tw_buf *);
bool tw_lift_at(tw_inst *, const tw_prog *, uint32_t node, uint32_t addr, tw_buf *);

// tw_resource_new counts a resource that the guest holds; false: it would be one too many, and the call ends.
bool tw_resource_new(tw_inst *);
void tw_resource_gone(tw_inst *);
bool tw_handle_new(tw_inst *, uint32_t type, uint32_t rep, bool own, uint32_t *handle);
bool tw_handle_get(tw_inst *, uint32_t handle, uint32_t type, tw_handle **);
void tw_handle_drop(tw_inst *, uint32_t handle);

typedef struct tw_arena tw_arena;
void tw_arena_free(tw_arena *);
bool tw_to_val(tw_src *, uint32_t node, wasmtime_component_val_t *, tw_arena **);
// tw_release frees the values that were made for a call; after a good one the host takes back what it has lent.
void tw_release(tw_inst *, tw_arena *, bool take_back);
bool tw_from_val(tw_inst *, const tw_prog *, uint32_t node, const wasmtime_component_val_t *, tw_buf *);

// ---- host functions (host.c) ----

typedef struct {
  uint32_t index;    // among the host's functions, or resources if it drops one
  bool drop;         // [resource-drop]
  const tw_prog *prog;
} tw_hostfn;

wasm_trap_t *tw_core_host(void *fn, wasmtime_caller_t *, wasmtime_val_raw_t *, size_t);
wasmtime_error_t *tw_comp_host(void *fn, wasmtime_context_t *, const wasmtime_component_func_type_t *,
                               wasmtime_component_val_t *, size_t, wasmtime_component_val_t *, size_t);
wasmtime_error_t *tw_comp_drop(void *fn, wasmtime_context_t *, uint32_t rep);

wasm_functype_t *tw_core_type(const uint8_t *params, uint32_t, const uint8_t *results, uint32_t); // TW_WASM_*
char *tw_define_core(wasmtime_linker_t *, const char *module, const char *name, const tw_hostfn *);
char *tw_define_comp(wasmtime_component_linker_instance_t *, const char *name, const tw_hostfn *);
char *tw_define_resource(wasmtime_component_linker_instance_t *, const char *name, const tw_hostfn *);

// tw_define_preview1 defines WASI preview 1 (p1.c).
char *tw_define_preview1(wasmtime_linker_t *);
// tw_preview1 tells the n-th function of preview 1, its parameters (i: i32, l: i64), and which of them are descriptors
// (bits); NULL: there are no more.
const char *tw_preview1(uint32_t n, const char **params, uint32_t *fds);
bool tw_fd_new(tw_inst *, tw_fd, uint32_t *number); // gives a descriptor the lowest free number; false: there are too many

// ---- stores, instances, calls (inst.c) ----

typedef struct {
  wasm_engine_t *engine;
  const wasmtime_instance_pre_t *pre; // core path, or
  const wasmtime_component_linker_t *linker;
  const wasmtime_component_t *component;
  bool wasi; // whether the guest can call WASI
} tw_code;

typedef struct {
  uintptr_t go_;
  tw_account *account;
  int64_t budget;
  uint64_t max_memory, max_table, max_calls, max_value;
  uint64_t min_memory; // what the guest declares; on the component path nobody tells more
  uint32_t max_handles, memories; // memories: how many the guest defines
  uint32_t nargs, nenv, npreopens;
  int stdin_fd;       // the pipe to read, or -1
  bool channels;      // /ch is there, on the core path
  tw_passing passing; // if there are directories, on the core path
  int stdio[3];       // channels in the place of standard streams, or -1
  uint64_t read_only; // bit n: preopen n
} tw_opts;

// tw_new makes an instance, without running it: one whose why tells, or NULL for want of memory. strings are NUL-terminated, one
// after the other: args, env (NAME=value), and for each preopen its path on the host and for the guest.
tw_inst *tw_new(const tw_code *, const tw_opts *, const char *strings, size_t len);
// tw_start instantiates the guest and runs its initialisation. It gives why.
int tw_start(tw_inst *, const tw_code *, uint64_t seq);
void tw_free(tw_inst *);

typedef struct {
  const tw_prog *prog;
  const char *name, *post;                        // core path: exports; post NULL: none
  const wasmtime_component_export_index_t *index; // component path
} tw_func;

// tw_call calls a function with flat arguments. The flat result is in out, which begins in the caller's room. It gives why.
int tw_call(tw_inst *, const tw_func *, uint64_t seq, const uint8_t *args, size_t len, uint8_t *room, size_t cap);
// tw_run calls a command: _start on the core path, wasi:cli/run on the component path.
int tw_run(tw_inst *, const wasmtime_component_export_index_t *, uint64_t seq);

char *tw_error(wasmtime_error_t *); // its message, for tw_free_error; frees it. NULL: NULL
void tw_free_error(char *);

// ---- memory (alloc.c) ----

void *tw_get(void *old, size_t n); // realloc; NULL: there is none, and old is as it was
void *tw_zeroed(size_t n);         // NULL: there is none
extern int64_t tw_spare;           // how often there is some, for tests; negative: as long as the system has some
extern char tw_starved[];          // in the place of a message for which there was none
bool tw_starve(tw_inst *, const char *what); // ends the call for want of memory; false

// ---- the Go half (export.go) ----

// twHost calls a host function; its flat result is left in the scratch buffer of the instance. It gives why.
extern int twHost(uintptr_t go, uint32_t fn, uint8_t *args, size_t len, tw_inst *);
extern void twDrop(uintptr_t go, uint32_t resource, uint32_t rep);
extern ptrdiff_t twWrite(uintptr_t go, int fd, unsigned char *, size_t);

// Channels. Errors are those of preview 1, negative.
extern int twChannelOpen(uintptr_t go, uint8_t *name, size_t, int modes); // its number; without modes: whether there is such a one
extern void twChannelClose(uintptr_t go, int);
extern int64_t twChannelRead(uintptr_t go, int, uint8_t *, size_t, bool more); // more: of the message that was begun only
extern int64_t twChannelWrite(uintptr_t go, int, uint8_t *, size_t);
extern int twChannelReady(uintptr_t go, int, int mode);
#endif
