// Directories with names that are not UTF-8, which have no form in WASI. Wasmtime's fd_readdir fails for the whole
// directory with EILSEQ (p1pass.c). Then the other names are listed here, and a line in the log counts those left out.
//
// Wasmtime does not say which descriptor of this process belongs to a directory of the guest, so it is found by the
// guest's inode of the directory. That is a hash of the real one (hash_inode), which Rust can change. Without a match,
// EILSEQ remains.
#define _GNU_SOURCE
#include "p1.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

static uint64_t rotate(uint64_t v, int n) { return v << n | v >> (64 - n); }

static void sip_round(uint64_t v[4]) {
  v[0] += v[1], v[2] += v[3];
  v[1] = rotate(v[1], 13) ^ v[0], v[3] = rotate(v[3], 16) ^ v[2];
  v[0] = rotate(v[0], 32);
  v[0] += v[3], v[2] += v[1];
  v[1] = rotate(v[1], 17) ^ v[2], v[3] = rotate(v[3], 21) ^ v[0];
  v[2] = rotate(v[2], 32);
}

// hash_inode returns the inode that guests see: SipHash-1-3 of the device and the inode, with zero as the key.
static uint64_t hash_inode(uint64_t device, uint64_t inode) {
  uint64_t v[] = {0x736f6d6570736575, 0x646f72616e646f6d, 0x6c7967656e657261, 0x7465646279746573};
  const uint64_t words[] = {device, inode, (uint64_t)16 << 56}; // the last is the length
  for (int k = 0; k < 3; k++) v[3] ^= words[k], sip_round(v), v[0] ^= words[k];
  v[2] ^= 0xff;
  for (int k = 0; k < 3; k++) sip_round(v);
  return v[0] ^ v[1] ^ v[2] ^ v[3];
}

// guest_inode returns the guest's inode of a file, or 0. It waits for no server of a network file system.
static uint64_t guest_inode(int fd, const char *path) {
  struct statx s;
  if (statx(fd, path, AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW | AT_STATX_DONT_SYNC, STATX_INO, &s)) return 0;
  return hash_inode(makedev(s.stx_dev_major, s.stx_dev_minor), s.stx_ino);
}

// open_same opens the directory of a descriptor, or returns NULL if it has another inode. The descriptor can belong to
// another pod and be closed and used again at any time, so what counts is the inode of what has been opened.
static DIR *open_same(int fd, uint64_t inode) {
  if (guest_inode(fd, "") != inode) return NULL;
  int opened = openat(fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR *dir = opened >= 0 && guest_inode(opened, "") == inode ? fdopendir(opened) : NULL;
  if (!dir && opened >= 0) close(opened);
  return dir;
}

static DIR *directory(uint64_t inode) {
  DIR *fds = opendir("/proc/self/fd"), *found = NULL;
  const struct dirent *e;
  while (fds && !found && (e = readdir(fds)))
    if (*e->d_name != '.') found = open_same(atoi(e->d_name), inode);
  if (fds) closedir(fds);
  return found;
}

// listing is the buffer of fd_readdir.
typedef struct {
  const call *c;
  uint32_t at, end;
  uint64_t next, cookie; // the number of the next entry, and of the first one that is wanted
} listing;

static void put(listing *l, const void *from, size_t n) {
  if (n > l->end - l->at) n = l->end - l->at;
  memcpy(l->c->mem + l->at, from, n);
  l->at += (uint32_t)n;
}

static void add(listing *l, int dir, const char *name, const char *path, uint8_t type) {
  struct {
    uint64_t next, inode;
    uint32_t length;
    uint8_t type, padding[3];
  } head = {.length = (uint32_t)strlen(name), .type = type};
  if (l->next++ < l->cookie || l->at == l->end) return;
  head.next = l->next, head.inode = guest_inode(dir, path);
  put(l, &head, sizeof head);
  put(l, name, head.length);
}

// list adds all entries, and counts those it leaves out.
static int list(call *c, listing *l, DIR *dir, unsigned *left_out) {
  static const uint8_t types[] = {[DT_DIR] = DIRECTORY, [DT_REG] = REGULAR_FILE, [DT_LNK] = SYMBOLIC_LINK};
  const struct dirent *e;
  add(l, dirfd(dir), ".", ".", DIRECTORY);
  add(l, dirfd(dir), "..", ".", DIRECTORY); // wasmtime gives the same inode
  while (errno = 0, (e = readdir(dir))) {
    if (tw_over(c->i)) return ENDED;
    if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
    if (!tw_utf8((const uint8_t *)e->d_name, strlen(e->d_name))) ++*left_out;
    else add(l, dirfd(dir), e->d_name, e->d_name, e->d_type < sizeof types ? types[e->d_type] : UNKNOWN);
  }
  return errno ? EIO_ : OK;
}

int p1_list(call *c, uint64_t inode) {
  uint32_t at = arg(c, 1), room = arg(c, 2), used = arg(c, 4);
  unsigned left_out = 0;
  if (!fits(c, at, room) || !fits(c, used, 4)) return EFAULT_;
  DIR *dir = directory(inode);
  if (!dir) return EILSEQ_;
  listing l = {c, at, at + room, 0, (uint64_t)c->v[3].i64};
  int error = list(c, &l, dir, &left_out);
  closedir(dir);
  if (error) return error;
  put32(c, used, l.at - at);
  if (l.cookie) return OK;
  char line[160];
  int n = snprintf(line, sizeof line,
                   "level=WARN msg=\"a directory has names that are not UTF-8: %u of its entries are left out\" "
                   "context=wasi_snapshot_preview1\n", left_out);
  return p1_write(c, 2, (uint8_t *)line, (size_t)n) == ENDED ? ENDED : OK;
}
