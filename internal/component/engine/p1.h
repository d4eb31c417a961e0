// Shared declarations of the preview 1 files. Each needs only those to its right:
//
//	p1.c ──┬─▶ p1poll.c ──▶ p1channel.c ──┬─▶ p1fd.c
//	       └─▶ p1pass.c ──┬─▶ p1list.c ───┘
//	                      └─▶ p1table.c
#ifndef P1_H
#define P1_H
#include "tw.h"
#include <string.h>

// Error numbers of preview 1.
enum {
  OK, EACCES_ = 2, EAGAIN_ = 6, EBADF_ = 8, EEXIST_ = 20, EFAULT_ = 21, EILSEQ_ = 25, EINVAL_ = 28, EIO_ = 29, EISDIR_ = 31, EMFILE_ = 33,
  EMSGSIZE_ = 35, ENAMETOOLONG_ = 37, ENOENT_ = 44, ENOMEM_ = 48, ENOTDIR_ = 54, ENOTSOCK_ = 57, ENOTSUP_ = 58, EPERM_ = 63, ESPIPE_ = 70, EXDEV_ = 75,
};
enum { ENDED = -1 }; // the guest's call has ended; why is set

// The limits of what a call does between two checks whether the guest has been killed: vectors or subscriptions (as
// IOV_MAX), and bytes.
enum { MAX_ENTRIES = 1024, MAX_PIECE = 1 << 20 };

// Kinds of tw_fd, its modes, and the one flag that matters.
enum { FD_NONE, FD_STREAM, FD_ROOM, FD_CHANNEL = TW_FD_CHANNEL, FD_PASSED };
enum { CAN_READ = TW_READ, CAN_WRITE = TW_WRITE };
enum { NONBLOCK = TW_NONBLOCK };

// Rights that are checked, and types of files.
enum { RIGHT_READ = 1 << 1, RIGHT_WRITE = 1 << 6, RIGHT_OPEN = 1 << 13, RIGHT_POLL = 1 << 27 };
enum { UNKNOWN, CHARACTER_DEVICE = 2, DIRECTORY, REGULAR_FILE, SYMBOLIC_LINK = 7 };

// call is one call: its parameters, and the guest's memory, which does not move during the call.
typedef struct {
  tw_inst *i;
  const wasmtime_val_raw_t *v;
  wasmtime_memory_t memory;
  uint8_t *mem;
  size_t size;
} call;

static inline uint32_t arg(const call *c, int n) { return (uint32_t)c->v[n].i32; }
static inline bool fits(const call *c, uint64_t at, uint64_t n) { return at + n <= c->size; }
static inline void put32(const call *c, uint32_t at, uint32_t v) { memcpy(c->mem + at, &v, 4); }
static inline void put64(const call *c, uint32_t at, uint64_t v) { memcpy(c->mem + at, &v, 8); }
static inline uint32_t get32(const call *c, uint32_t at) {
  uint32_t v;
  memcpy(&v, c->mem + at, 4);
  return v;
}
static inline uint64_t get64(const call *c, uint32_t at) {
  uint64_t v;
  memcpy(&v, c->mem + at, 8);
  return v;
}

// fd_at returns the open descriptor with a number, or NULL.
static inline tw_fd *fd_at(const call *c, uint32_t fd) {
  return fd < c->i->p1.nfds && c->i->p1.fds[fd].kind ? &c->i->p1.fds[fd] : NULL;
}

// ---- descriptors, clocks, streams (p1fd.c); tw_fd_new ----

enum { REALTIME, MONOTONIC };
bool p1_clock(uint32_t id, bool resolution, uint64_t *ns);
// p1_wait_input waits for input until a time on the monotonic clock. It returns whether there is input, or ENDED.
int p1_wait_input(call *, int64_t until);
// p1_write writes to the guest's standard output (1) or error (2). It returns how much, ENDED, or a negative error.
ptrdiff_t p1_write(call *, int to, uint8_t *, size_t);

// ---- p1poll.c ----

int p1_poll(call *); // poll_oneoff

// ---- channels (p1channel.c) ----

int p1_channel_open(call *);     // path_open below /ch
int p1_channel_filestat(call *); // path_filestat_get below /ch
int p1_channel_read(call *, tw_fd *);
int p1_channel_write(call *, tw_fd *);
bool p1_channel_ready(call *, const tw_fd *, int mode); // whether a read or write would not wait
void p1_channel_close(call *, const tw_fd *);
int p1_room_prestat(call *);  // fd_prestat_get of /ch
int p1_room_dir_name(call *); // fd_prestat_dir_name

// ---- descriptors of wasmtime's WASI (p1pass.c) ----

// p1_pass calls a function of preview 1 in wasmtime's WASI. Bit k of fds means that parameter k is a descriptor.
int p1_pass(call *, uint32_t function, uint32_t nparams, uint32_t fds);
int p1_pass_open(call *, uint32_t function, uint32_t nparams); // path_open, which makes a descriptor
int p1_pass_close(call *, const tw_fd *);
int p1_pass_list(call *, uint32_t function, uint32_t nparams);   // fd_readdir
int p1_pass_remove(call *, uint32_t function, uint32_t nparams); // path_remove_directory

// p1_list lists a directory with names that are not UTF-8 (p1list.c). The parameters are those of fd_readdir.
int p1_list(call *, uint64_t inode);
#endif
