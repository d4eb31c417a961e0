// The C half of the engine: everything that must happen within one crossing from Go, and on the guest's thread.
//
//	tick.c      clocks, the epoch ticker, accounts, and the work of a guest's thread at a tick
//	prog.c      type tables (wit.Program), the check of flat values
//	abi.c       core path: the canonical ABI on linear memory, handles
//	dyn.c       component path: conversion between flat values and wasmtime's dynamic values
//	p1.c        WASI preview 1: the table of its functions; p1.h says how its other files depend on each other
//	host.c      calls of host functions, on both paths
//	inst.c      stores and instances, calls, the configuration of WASI
//	error.c     why a call ended; wasmtime's errors and traps
//	snapshot.c  core path: guests whose memory is detached from their code, and their snapshots
//	memory.c    the linear memories of these guests
#ifndef TW_H
#define TW_H
#if !__has_include(<wasmtime.h>) // the compiler's message says what to do, and it is the only one
#include "the engine is not built: run `make engine`"
#endif
#include <wasi.h>
#include <wasm.h>
#include <wasmtime.h>
#include <wasmtime/component.h>
#include <time.h>

// What wasmtime/lib.rs adds to wasmtime's C API.
void tripod_config_proposals(wasm_config_t *);
bool tripod_table_sum(wasmtime_context_t *, const wasmtime_table_t *, uint64_t *sum);

// The outcome of a call. Go uses the same numbers through cgo.
enum {
  TW_OK,
  TW_TRAP,      // the guest trapped; message
  TW_EXIT,      // WASI exit; exit_code
  TW_DEADLINE,  // compute budget used up
  TW_KILLED,    // killed by its sequence number or for good
  TW_MEMORY,    // over its memory limit
  TW_HANDLES,   // too many resources
  TW_HOSTCALLS, // too many calls of the host
  TW_OUTPUT,    // a value for the host is too large
  TW_ABI,       // the guest broke the canonical ABI; message
  TW_HOST,      // a host function failed; Go has its error
  TW_ARGS,      // the caller's flat bytes do not match the types; message
  TW_NOROOM,    // the pool is full, or a guest does not fit into it
  TW_STARVED,   // the worker has no memory for it; message
  TW_FAILED,    // any other error of wasmtime; message
};

#define TW_NONE 0xffffffffu
#define TW_MAX_FLAT 16
#define TW_FOREVER UINT64_MAX // as a sequence number: every call

// ---- type tables: internal/component/wit.Program, whose comment fixes the format ----

typedef struct {
  uint32_t kind, name, first, count, size, align, discriminant, payload, core, ncore;
} tw_node;

typedef struct {
  uint32_t node, offset, name;
} tw_child;

// Kinds, with the numbers of wit.Kind.
enum {
  TW_BOOL, TW_S8, TW_U8, TW_S16, TW_U16, TW_S32, TW_U32, TW_S64, TW_U64, TW_F32, TW_F64, TW_CHAR, TW_STRING, TW_LIST,
  TW_RECORD, TW_TUPLE, TW_VARIANT, TW_ENUM, TW_OPTION, TW_RESULT, TW_FLAGS, TW_OWN, TW_BORROW,
};

typedef struct {
  uint32_t nparams, result; // result: a node, or TW_NONE
  const uint32_t *params;
  const tw_node *nodes;
  const tw_child *children;
  const uint8_t *cores;
  const char *names;
  const uint32_t *resources; // per node: the host's number of the resource of an own or borrow
  // Derived: parameters are core values, or are spilled to memory as a tuple of this size and alignment.
  uint32_t param_core, result_core; // TW_NONE if too many
  uint32_t spill_size, spill_align;
} tw_prog;

// tw_prog_new copies the table and the numbers of resources (one per node). It returns NULL for a bad table or if there
// is no memory.
tw_prog *tw_prog_new(const uint8_t *table, size_t len, const uint32_t *resources);
void tw_prog_free(tw_prog *);
uint32_t tw_align(uint32_t n, uint32_t align);

// ---- buffers ----

// A buffer begins with borrowed memory, or none, and moves to malloc when that is too small.
typedef struct {
  uint8_t *data;
  size_t len, cap, max; // max: limit of len
  bool owned, failed, starved; // starved: failed because there was no memory
} tw_buf;

uint8_t *tw_room(tw_buf *, size_t n); // appends n bytes, or returns NULL and sets failed
void tw_put(tw_buf *, const void *, size_t n);
void tw_buf_free(tw_buf *);

// ---- accounts ----

// Resources that guests hold through the host, besides their own memory: open files and directories, resources
// (handles), and bytes that the host stores for them.
enum { TW_FILES, TW_RESOURCES, TW_BYTES, TW_HELD };

typedef struct tw_account {
  int64_t memory, peak, limit; // bytes; limit 0: unlimited
  int64_t cpu;                 // ns
  int64_t throttled;           // ns that threads have slept because of the quota
  int64_t quota, period;       // ns; quota 0: unlimited
  int64_t window, used;        // end of the current period; ns used in it
  int32_t lock;
  int64_t held[TW_HELD], most[TW_HELD]; // most 0: unlimited
  struct tw_account *within;            // the worker's, which sums those of its pods; or NULL
} tw_account;

int64_t tw_load(const int64_t *);
void tw_account_set_limit(tw_account *, int64_t);
void tw_account_bound(tw_account *, int what, int64_t most);
void tw_account_set_cpu(tw_account *, int64_t quota, int64_t period);
// tw_take adds n to an account and to the accounts that it is within. If that exceeds a limit, it adds nothing and
// returns false. tw_give subtracts. Both ignore a NULL account.
bool tw_take(tw_account *, int what, int64_t n);
void tw_give(tw_account *, int what, int64_t n);

// ---- instances ----

typedef struct {
  uint32_t rep, type; // type TW_NONE: free, and rep is the next free handle
  bool own;
} tw_handle;

// tw_fd is a descriptor of a preview 1 guest (p1.h).
typedef struct {
  uint8_t kind, modes; // TW_READ, TW_WRITE
  uint16_t flags;      // of preview 1
  uint32_t n;          // FD_STREAM: 0 to 2; FD_CHANNEL: Go's number; FD_PASSED: the descriptor in wasmtime's WASI
} tw_fd;

enum { TW_READ = 1, TW_WRITE = 2 };
enum { TW_FD_CHANNEL = 3, TW_NONBLOCK = 4 }; // a kind and a flag that Go sets

// tw_passing holds the linker and the module with which guests that have directories call wasmtime's preview 1
// (p1pass.c).
typedef struct {
  const wasmtime_linker_t *linker;
  const wasmtime_module_t *module;
} tw_passing;

// tw_allocator is a function of the guest that allocates memory in it.
typedef struct {
  wasmtime_func_t func;
  bool found;
} tw_allocator;

// The phase of an instance. While the guest's cabi_realloc or cabi_post runs, the guest is inside, where it may not call the
// host; after a trap or an error, why says so, and it is never called again.
//
//	made ──(instantiated)──▶ starts ──▶ serves ◀──┐
//	                           │          └─(a call)
//	                           └──▶ commands ──(ended)
enum tw_phase {
  TW_MADE,     // wasmtime runs a start function, if there is one; the host's functions cannot be called
  TW_STARTS,   // _initialize runs
  TW_SERVES,   // calls one after another, each with its budget
  TW_COMMANDS, // a command runs to its end, without one
};

typedef struct tw_inst {
  wasmtime_store_t *store;
  wasmtime_context_t *cx;
  uintptr_t go_; // the Go half, as a cgo.Handle
  tw_account *account;
  int64_t own; // bytes that the instance takes beside its memory, as far as they are charged
  enum tw_phase phase;
  bool core;   // the core path
  bool inside; // the guest may not call the host
  bool over;   // the account has exceeded its limit
  bool spent;  // the guest has ended after it returned its result
  int why, exit_code;
  char *message;
  size_t max_value; // bytes of one flat value from the guest
  tw_buf scratch, out;

  // Shared between threads, accessed with atomics.
  uint64_t killed; // the number of the call to end, or TW_FOREVER
  uint32_t wake;   // futex: changes when killed or a channel does
  uint32_t waits;  // whether the thread waits for it
  int64_t cpu, mem;
  int64_t seen; // when the guest was last known to run; 0 while it is in a host function

  struct { // the current call; used by the guest's thread only
    uint64_t seq, calls, max_calls;
    int64_t budget, deadline; // ns of compute, 0: unlimited; on the monotonic clock
    int64_t mark; // CPU time is accounted up to here: on the thread's CPU clock, or on the monotonic clock
    uint32_t ticks;
    int64_t preempted, back_off; // involuntary context switches up to the last tick; ticks slept because of them
    bool on_cpu_clock;
    bool demoted; // the thread yields to others
    bool renew;   // the host function wants the call to count as begun after it
  } call;

  struct { // the messages of the current call that need no crossing to Go (host.c); used by the guest's thread only
    const uint8_t *message; // the request, as a flat list<u8>; NULL: the host has it
    bool told, taken;       // by TW_RECEIVE and TW_TAKE
    bool one;               // the next TW_SEND is left in reply: the only response
    bool sent;              // it is there, and Go does not know yet
    tw_buf reply;           // the response, as a flat list<u8>
  } exchange;

  struct { // for a guest in the list of idlers (tick.c), under its lock
    struct tw_inst *next;
    int64_t due; // the guest's deadline
    int32_t thread;
  } idle;

  struct { // for profiles: when the next call ends, in ns after its begin; 0: not
    int64_t after;
    bool set;
    volatile bool hit; // it was ended
    timer_t timer;
    wasm_engine_t *engine;
  } interrupt;

  struct { // what is called
    wasmtime_component_instance_t comp; // component path
    wasmtime_instance_t mod;            // core path
    wasmtime_memory_t memory;
    bool has_memory;
    const char *const *names;            // of the allocators
    tw_allocator *allocators, allocator1; // one is not allocated
    uint32_t allocator;                  // of the current function, or TW_NONE
  } guest;

  struct { // preview 1: arguments from strings to env, variables from env to env_end
    char *strings, *env, *env_end;
    uint32_t nargs, nenv;
    int stdin_fd;
    tw_fd *fds, stdio[4]; // by number; points to stdio until more are needed
    uint32_t nfds, files; // files: descriptors in wasmtime's WASI, which are counted (tw_take)
    uint32_t preopened;   // the first of them, for directories
    tw_passing passing;
    wasmtime_func_t *passed; // wasmtime's functions by number; made on first use
  } p1;

  struct { // what the guest has done since it was instantiated, for snapshots (snapshot.c)
    bool on;          // tables is set
    uint64_t tables;  // a checksum of the tables' initial contents
    uint32_t used;    // TW_USED_*
    uint64_t randoms; // calls of random_get
    uint64_t clocks;  // readings of the time of day
  } capture;

  struct {
    tw_handle *list;
    uint32_t n, cap, free, live, borrows, max; // free: the first that is free
  } handles;
} tw_inst;

int64_t tw_now(void);
void tw_enter(tw_inst *);  // before guest code runs: sets the epoch deadline, starts the CPU clock
void tw_leave(tw_inst *);  // after guest code has run
void tw_charge(tw_inst *, int64_t size); // sets the size of the guest's memory
void tw_memory(tw_inst *); // updates mem and the account
bool tw_ended(tw_inst *);  // whether the call has been killed; sets why
bool tw_over(tw_inst *);   // whether the call has been killed or has used up its budget; sets why
uint32_t tw_seen(tw_inst *); // the argument for tw_await; check the awaited condition after this call
// tw_await lets the guest sleep until the time, until tw_wake is called after tw_seen, or spuriously. It returns false
// if the call is over.
bool tw_await(tw_inst *, int64_t until, uint32_t seen);
void tw_wake(tw_inst *);
void tw_fresh(tw_inst *); // the guest has new work, or waits for it: it stops yielding
wasmtime_error_t *tw_tick(wasmtime_context_t *, void *, uint64_t *, uint8_t *);
void tw_kill(tw_inst *, uint64_t seq);
// tw_interrupt_after ends the next call some time after its begin, when the guest enters a function or loop, without waiting
// for a tick. Other guests of the engine look at their budgets, too.
void tw_interrupt_after(tw_inst *, wasm_engine_t *, int64_t ns);
int64_t tw_pause(tw_inst *); // the guest's thread leaves the guest; returns the time
void tw_resume(tw_inst *, int64_t paused);
int64_t tw_sleep(tw_inst *, int64_t ns); // sleeps until then or until killed; this does not count as computing
// tw_ticker starts the ticker (once per process) and adds the engine to it. It returns whether guests that compute for
// long can yield as SCHED_IDLE threads here, or a negative errno.
int tw_ticker(wasm_engine_t *);
void tw_stand_back(bool by_idle); // selects how guests yield; for tests

// ---- errors (error.c) ----

void tw_fail(tw_inst *, int why, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
bool tw_starve(tw_inst *, const char *what); // ends the call because there is no memory; returns false
// tw_took converts wasmtime's error and trap, which it frees, to why and message. It returns false if both are NULL.
bool tw_took(tw_inst *, wasmtime_error_t *, wasm_trap_t *);
char *tw_error(wasmtime_error_t *); // returns the message, for tw_free_error, and frees the error; NULL for NULL
void tw_free_error(char *);

// ---- values (abi.c, dyn.c) ----

bool tw_utf8(const uint8_t *, size_t);
bool tw_char(uint32_t);
// tw_check checks flat values of the parameters (or the result). It returns the number of bytes, or -1 and the reason
// in text.
int64_t tw_check(const tw_prog *, bool result, const uint8_t *flat, size_t len, const char **text);

typedef struct {
  tw_inst *i;
  const tw_prog *prog;
  const uint8_t *at; // the checked flat bytes
} tw_src;

const wasmtime_func_t *tw_allocator_of(tw_inst *); // for the current function, or NULL
bool tw_lower_flat(tw_src *, uint32_t node, wasmtime_val_raw_t *);
bool tw_lower_at(tw_src *, uint32_t node, uint32_t addr);
bool tw_alloc(tw_inst *, uint32_t size, uint32_t align, uint32_t *addr);
bool tw_range(tw_inst *, uint32_t addr, uint64_t size, uint32_t align); // fails unless the range is in memory
bool tw_lift_flat(tw_inst *, const tw_prog *, uint32_t node, const wasmtime_val_raw_t *, tw_buf *);
bool tw_lift_at(tw_inst *, const tw_prog *, uint32_t node, uint32_t addr, tw_buf *);

// tw_resource_new counts a resource that the guest holds. It ends the call and returns false at the limit.
bool tw_resource_new(tw_inst *);
void tw_resource_gone(tw_inst *);
bool tw_handle_new(tw_inst *, uint32_t type, uint32_t rep, bool own, uint32_t *handle);
bool tw_handle_get(tw_inst *, uint32_t handle, uint32_t type, tw_handle **);
void tw_handle_drop(tw_inst *, uint32_t handle);

typedef struct tw_arena tw_arena;
void tw_arena_free(tw_arena *);
bool tw_to_val(tw_src *, uint32_t node, wasmtime_component_val_t *, tw_arena **);
// tw_release frees the values made for a call. With take_back, it first takes back the resources that the host has
// lent.
void tw_release(tw_inst *, tw_arena *, bool take_back);
bool tw_from_val(tw_inst *, const tw_prog *, uint32_t node, const wasmtime_component_val_t *, tw_buf *);

// ---- host functions (host.c) ----

enum { TW_KEPT = 64 << 10 }; // bytes of the largest result whose memory an instance keeps for the next call

typedef struct {
  uint32_t index;    // among the host's functions; with drop, among its resources
  bool drop;         // [resource-drop]
  const tw_prog *prog;
  uint32_t allocator; // core path: for its result, or TW_NONE
  uint32_t role;      // with the numbers of Role; what it is for the call's messages matters on the core path
} tw_hostfn;

enum { TW_RECEIVE = 1, TW_TAKE, TW_SEND, TW_CONSTANT };

wasm_trap_t *tw_core_host(void *fn, wasmtime_caller_t *, wasmtime_val_raw_t *, size_t);
wasmtime_error_t *tw_comp_host(void *fn, wasmtime_context_t *, const wasmtime_component_func_type_t *,
                               wasmtime_component_val_t *, size_t, wasmtime_component_val_t *, size_t);
wasmtime_error_t *tw_comp_drop(void *fn, wasmtime_context_t *, uint32_t rep);

wasm_functype_t *tw_core_type(const uint8_t *params, uint32_t, const uint8_t *results, uint32_t); // WASM_*
char *tw_define_core(wasmtime_linker_t *, const char *module, const char *name, const tw_hostfn *);
char *tw_define_comp(wasmtime_component_linker_instance_t *, const char *name, const tw_hostfn *);
char *tw_define_resource(wasmtime_component_linker_instance_t *, const char *name, const tw_hostfn *);

// tw_define_preview1 defines WASI preview 1 (p1.c).
char *tw_define_preview1(wasmtime_linker_t *);
// tw_preview1 returns the name of the n-th function of preview 1, its parameters (i: i32, l: i64), and a bit mask of
// the parameters that are descriptors; NULL at the end.
const char *tw_preview1(uint32_t n, const char **params, uint32_t *fds);
bool tw_fd_new(tw_inst *, tw_fd, uint32_t *number); // gives a descriptor the lowest free number; false if too many are open
void tw_fd_free(tw_inst *, uint32_t channel); // frees the number of the descriptor of a channel

// ---- stores, instances, calls (inst.c) ----

// tw_image is what linear memories begin with (memory.c): the bytes from begin to end are those of a file, the others zero.
typedef struct tw_slot tw_slot;
typedef struct tw_image {
  int fd;
  const uint8_t *data;     // the file in memory, less begin; NULL if it is empty
  size_t begin, end, size; // in the memory, multiples of a page; size: of the memory
  size_t min;              // of the memory that the module declares
  bool keep, closed;       // keep: memories stay warm after their instances
  tw_account *account;     // is charged for what warm memories hold
  int64_t kept;            // bytes
  tw_slot *warm;
  uint32_t nwarm;
  uint64_t users; // the memories in use, and the owner
} tw_image;

// tw_image_new makes an image and takes over the file. It returns NULL if there is no memory, and leaves the file open.
tw_image *tw_image_new(int fd, size_t begin, size_t end, size_t size);
void tw_image_use(tw_image *);  // takes a reference
void tw_image_done(tw_image *); // gives it back
// tw_image_close gives back the owner's reference.
void tw_image_close(tw_image *);
// tw_begin_with says what the memory begins with that an instance made on this thread will define; NULL if it defines none.
void tw_begin_with(tw_image *);
void tw_use_slots(wasm_config_t *); // makes memory.c provide the memories of an engine
// TW_PAGEMAP_SCAN is the ioctl of Linux 6.7 that finds changed pages; tw_set_pagemap sets the descriptor of
// /proc/self/pagemap, or -1.
#define TW_PAGEMAP_SCAN 0xc0606610u
void tw_set_pagemap(int fd);
int tw_scan_pages(int fd); // returns 0 if the ioctl works, otherwise errno
bool tw_find_pages(bool);  // whether changed pages are looked for; returns what it was; for tests
// The number of memories that an image keeps for instances, and the bytes of changed pages in each.
enum { TW_MAX_WARM = 32, TW_MAX_KEPT = 2 << 20 };

// Warm memories of all images in the process. Each has four mappings, of which the kernel allows 65530 (vm.max_map_count).
enum { TW_MAX_ALL_WARM = 2048 };

// tw_detached is what belongs to a module whose memory begins empty (wasmbin.Detach).
typedef struct {
  tw_image *initial; // what the memory begins with
  uint32_t nglobals, ntables;
} tw_detached;

// tw_snapshot is the state from which instances of a detached module begin.
typedef struct {
  tw_image *memory;
  const wasmtime_val_t *globals;
  uint32_t nglobals;
  bool initial; // the module's own memory: _initialize has not run
} tw_snapshot;

enum { TW_USED_FILES = 1, TW_USED_HOST = 2 }; // files, functions of the host

// tw_capture returns why the guest's state is more than its memory and globals, or NULL and the values of the globals, which
// can be NULL.
const char *tw_capture(tw_inst *, const tw_detached *, wasmtime_val_t *globals);

typedef struct {
  wasm_engine_t *engine;
  const wasmtime_instance_pre_t *pre; // core path; otherwise NULL
  char **allocators;                  // core path: the exports that allocate
  uint32_t nallocators;
  const tw_detached *detached;        // core path with a detached memory; otherwise NULL
  const wasmtime_component_linker_t *linker;
  const wasmtime_component_t *component;
  bool wasi; // whether the guest can call WASI
} tw_code;

// tw_instantiate_detached instantiates a module with its initial memory, or from a snapshot. With capture, tw_capture is
// possible later.
bool tw_instantiate_detached(tw_inst *, const tw_code *, const tw_snapshot *, bool capture);

typedef struct {
  uintptr_t go_;
  tw_account *account;
  int64_t budget;
  uint64_t max_memory, max_table, max_calls, max_value;
  int64_t own;
  uint64_t min_memory; // declared by the guest; on the component path its size is known no better
  uint32_t max_handles, memories; // memories: number of memories that the guest defines
  uint32_t nargs, nenv, npreopens;
  int stdin_fd;       // the pipe to read, or -1
  bool channels;      // the guest has /ch (core path)
  bool capture;       // see tw_instantiate_detached
  tw_passing passing; // for directories (core path)
  int stdio[3];       // channels that replace standard streams, or -1
  uint64_t read_only; // bit n: preopen n
} tw_opts;

// tw_new makes an instance without running it. On failure, why is set, or the result is NULL if there is no memory.
// strings are NUL-terminated and consecutive: args, env (NAME=value), and for each preopen its path on the host and in
// the guest.
tw_inst *tw_new(const tw_code *, const tw_opts *, const char *strings, size_t len);
// tw_start instantiates the guest and runs its initialization, or begins from a snapshot, which can be NULL. It returns
// why.
int tw_start(tw_inst *, const tw_code *, const tw_snapshot *, uint64_t seq);
void tw_free(tw_inst *);

typedef struct {
  const tw_prog *prog;
  uint32_t allocator;                             // core path: among those of tw_code, or TW_NONE
  const char *name, *post;                        // core path: names of exports; post can be NULL
  const wasmtime_component_export_index_t *index; // component path
} tw_func;

// tw_call calls a function with flat arguments. It returns why. The flat result is in out, which begins in the caller's
// room.
// A message makes the engine answer the guest's functions for its messages, as far as one request and one response go; it
// can be NULL.
int tw_call(tw_inst *, const tw_func *, uint64_t seq, const uint8_t *args, size_t len, uint8_t *room, size_t cap, const uint8_t *message,
            bool one);
// tw_run runs a command: _start if run is NULL, otherwise run of wasi:cli/run. It returns why.
int tw_run(tw_inst *, const tw_func *run, uint64_t seq);

// ---- memory (alloc.c) ----

void *tw_get(void *old, size_t n); // realloc; returns NULL and keeps old if there is no memory
void *tw_zeroed(size_t n);         // calloc; returns NULL if there is no memory
extern int64_t tw_spare;           // allocations that succeed before all others fail, for tests; negative: no limit

// ---- the Go half (export.go) ----

// twHost calls a host function and leaves its flat result in the instance's scratch buffer. It returns why.
extern int twHost(uintptr_t go, uint32_t fn, uint8_t *args, size_t len, tw_inst *);
extern void twDrop(uintptr_t go, uint32_t resource, uint32_t rep);
extern ptrdiff_t twWrite(uintptr_t go, int fd, unsigned char *, size_t);

// Channels. Errors are negative error numbers of preview 1.
extern int twChannelOpen(uintptr_t go, uint8_t *name, size_t, int modes); // returns the number; with modes 0 only checks that it exists
extern void twChannelClose(uintptr_t go, int);
extern int64_t twChannelRead(uintptr_t go, int, uint8_t *, size_t, bool more); // more: only from the current message
extern int64_t twChannelWrite(uintptr_t go, int, uint8_t *, size_t);
extern int twChannelReady(uintptr_t go, int, int mode);
#endif
