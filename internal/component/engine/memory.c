// Linear memories of detached guests (snapshot.c): the images from which they begin, and the slots in which they lie.
//
// A slot is reserved address space. An image is mapped into it copy-on-write. When an instance ends, its slot is put back
// into the state of the image, so that the next instance finds the pages that it needs: a page fault costs more than
// copying a page, and mapping and unmapping contend with all other threads of the process.
//
//	cold ──(mapped)──▶ in use ──(reset)──▶ warm ──▶ in use
//	  ▲                   │                  │
//	  └───────────────────┴──(image closed, no room, or an error)
#define _GNU_SOURCE
#include "tw.h"
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
  MAX_IMAGE = 16 << 20, // bytes that all warm slots of an image keep, if a quarter of what its account may hold is not less
  MAX_COLD = 64,        // slots without an image that the process keeps; they cost only address space
  MAX_REGIONS = 128,    // in one scan
};

struct tw_slot {
  uint8_t *base;
  size_t reserved;   // bytes of address space from the base, of which the last are guard
  size_t guard;      // bytes of address space that are never mapped, before the base and at the end
  size_t size, used; // of the memory, and the largest size since the slot was cold
  tw_image *image;   // NULL: the slot is cold
  int64_t kept;      // bytes that a warm slot holds, charged to the image's account
  struct tw_slot *next;
};

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER; // guards the lists, and the images' counts
static tw_slot *cold;
static int ncold;
static uint32_t nwarm; // of all images

// wanted is what the memory that the engine is about to ask for begins with.
static __thread tw_image *wanted;

// ---- finding the pages that a guest has changed ----

// The ioctl PAGEMAP_SCAN of Linux 6.7 (Documentation/admin-guide/mm/pagemap.rst).
struct scan {
  uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
  uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};
struct region {
  uint64_t start, end, categories;
};
enum { IS_FILE = 1 << 2, IS_PRESENT = 1 << 3, IS_SWAPPED = 1 << 4, IS_ZERO = 1 << 5 };
_Static_assert(sizeof(struct scan) == 96 && _IOWR('f', 16, struct scan) == TW_PAGEMAP_SCAN, "PAGEMAP_SCAN");

static int pagemap = -1;
static bool blind; // for tests

int tw_scan_pages(int fd) {
  struct region found;
  struct scan arg = {.size = sizeof arg, .vec = (uintptr_t)&found, .vec_len = 1, .category_anyof_mask = IS_PRESENT};
  return ioctl(fd, TW_PAGEMAP_SCAN, &arg) < 0 ? errno : 0;
}

void tw_set_pagemap(int fd) { pagemap = fd; }

bool tw_find_pages(bool on) {
  bool was = pagemap >= 0 && !blind;
  blind = !on;
  return was;
}

// discard lets the kernel take the pages of a range, which then has the content of the image, or zeros.
static bool discard(uint8_t *at, size_t n) { return !n || !madvise(at, n, MADV_DONTNEED); }

// restore gives a range of changed pages its content in the image.
static void restore(tw_slot *s, size_t from, size_t to) {
  const tw_image *m = s->image;
  size_t begin = from > m->begin ? from : m->begin, end = to < m->end ? to : m->end;
  if (begin >= end) {
    memset(s->base + from, 0, to - from);
    return;
  }
  memset(s->base + from, 0, begin - from);
  memcpy(s->base + begin, m->data + begin, end - begin);
  memset(s->base + end, 0, to - end);
}

// restore_changed gives all pages that differ from the image their content in the image. It keeps the first TW_MAX_KEPT bytes
// of them in memory. A page of a private mapping can have been changed only if it is anonymous: neither a page of the
// image's file nor the kernel's page of zeros.
static bool restore_changed(tw_slot *s) {
  struct region found[MAX_REGIONS];
  int fd = blind ? -1 : pagemap;
  uint64_t at = (uintptr_t)s->base, end = at + s->image->size;
  for (s->kept = 0; at < end;) {
    struct scan arg = {
      .size = sizeof arg, .start = at, .end = end, .vec = (uintptr_t)found, .vec_len = MAX_REGIONS,
      .category_inverted = IS_FILE | IS_ZERO, .category_mask = IS_FILE | IS_ZERO, .category_anyof_mask = IS_PRESENT | IS_SWAPPED,
    };
    int n = fd < 0 ? -1 : ioctl(fd, TW_PAGEMAP_SCAN, &arg);
    if (n < 0) return s->kept = 0, discard(s->base, s->image->size);
    for (int k = 0; k < n; k++) {
      size_t from = found[k].start - (uintptr_t)s->base, to = found[k].end - (uintptr_t)s->base;
      size_t left = TW_MAX_KEPT - (size_t)s->kept, cut = to - from > left ? from + left : to;
      restore(s, from, cut);
      s->kept += (int64_t)(cut - from);
      if (!discard(s->base + cut, to - cut)) return false;
    }
    if (arg.walk_end <= at) return false; // cannot happen
    at = arg.walk_end;
  }
  return true;
}

// ---- slots ----

static bool empty(uint8_t *at, size_t n) {
  return !n || mmap(at, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != MAP_FAILED;
}

// chill unmaps everything in a slot. The caller does not hold mu.
static void chill(tw_slot *s) {
  bool ok = empty(s->base, s->used);
  s->image = NULL, s->kept = 0, s->used = s->size = 0;
  pthread_mutex_lock(&mu);
  if ((ok = ok && ncold < MAX_COLD)) s->next = cold, cold = s, ncold++;
  pthread_mutex_unlock(&mu);
  if (ok) return;
  munmap(s->base - s->guard, s->guard + s->reserved);
  free(s);
}

static tw_slot *reserve(size_t n, size_t guard) {
  tw_slot *s;
  pthread_mutex_lock(&mu);
  for (tw_slot **at = &cold; (s = *at); at = &s->next) {
    if (s->reserved != n || s->guard != guard) continue;
    *at = s->next, ncold--;
    break;
  }
  pthread_mutex_unlock(&mu);
  if (s || !(s = tw_zeroed(sizeof *s))) return s;
  uint8_t *at = mmap(NULL, guard + n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  s->base = at + guard, s->reserved = n, s->guard = guard;
  if (at != MAP_FAILED) return s;
  free(s);
  return NULL;
}

// fill maps an image into a cold slot.
static bool fill(tw_slot *s, const tw_image *m) {
  s->used = m->size;
  if (m->size && mprotect(s->base, m->size, PROT_READ | PROT_WRITE)) return false;
  return m->begin == m->end || mmap(s->base + m->begin, m->end - m->begin, PROT_READ | PROT_WRITE,
    MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED, m->fd, 0) != MAP_FAILED;
}

static tw_slot *warm_slot(tw_image *m) {
  pthread_mutex_lock(&mu);
  tw_slot *s = m->warm;
  if (s) {
    m->warm = s->next, m->nwarm--, nwarm--, m->kept -= s->kept;
    tw_give(m->account, TW_BYTES, s->kept);
  }
  pthread_mutex_unlock(&mu);
  return s;
}

void tw_image_use(tw_image *m) {
  pthread_mutex_lock(&mu);
  m->users++;
  pthread_mutex_unlock(&mu);
}

void tw_image_done(tw_image *m) {
  pthread_mutex_lock(&mu);
  bool last = !--m->users;
  pthread_mutex_unlock(&mu);
  if (!last) return;
  if (m->data) munmap((void *)(m->data + m->begin), m->end - m->begin);
  close(m->fd);
  free(m);
}

// room returns how many bytes the warm slots of an image can hold. The rest of its account is for the guest's calls.
static int64_t room(const tw_image *m) {
  int64_t quarter = m->account ? tw_load(&m->account->most[TW_BYTES]) / 4 : 0;
  return quarter && quarter < MAX_IMAGE ? quarter : MAX_IMAGE;
}

// keep adds a slot to the warm ones of its image, if there is room.
static bool keep(tw_slot *s) {
  tw_image *m = s->image;
  pthread_mutex_lock(&mu);
  bool ok = !m->closed && m->nwarm < TW_MAX_WARM && nwarm < TW_MAX_ALL_WARM && m->kept + s->kept <= room(m) &&
            tw_take(m->account, TW_BYTES, s->kept);
  if (ok) s->next = m->warm, m->warm = s, m->nwarm++, nwarm++, m->kept += s->kept;
  pthread_mutex_unlock(&mu);
  return ok;
}

// reset gives a slot the content and the size of its image.
static bool reset(tw_slot *s) {
  size_t size = s->image->size;
  if (s->used > size && !empty(s->base + size, s->used - size)) return false;
  s->used = size;
  return restore_changed(s);
}

// release is called when the store of an instance is deleted.
static void release(void *env) {
  tw_slot *s = env;
  tw_image *m = s->image;
  if (!m->keep || !reset(s) || !keep(s)) chill(s);
  tw_image_done(m);
}

static uint8_t *get_memory(void *env, size_t *size, size_t *capacity) {
  const tw_slot *s = env;
  *size = s->size, *capacity = s->reserved - s->guard;
  return s->base;
}

static wasmtime_error_t *grow_memory(void *env, size_t size) {
  tw_slot *s = env;
  if (size > s->used) {
    if (mprotect(s->base + s->used, size - s->used, PROT_READ | PROT_WRITE)) return wasmtime_error_new("no memory");
    s->used = size;
  }
  s->size = size;
  return NULL;
}

static wasmtime_error_t *new_memory(void *env, const wasm_memorytype_t *type, size_t min, size_t max, size_t reserved,
                                    size_t guard, wasmtime_linear_memory_t *memory) {
  (void)env, (void)type, (void)max;
  tw_image *m = wanted;
  if (!m || m->min != min) return wasmtime_error_new("a memory that begins with no image");
  wanted = NULL; // each instance has one memory
  tw_slot *s = warm_slot(m);
  if (!s) {
    if ((s = reserve(reserved + guard, guard)) && !fill(s, m)) chill(s), s = NULL;
    if (!s) return wasmtime_error_new("maximum concurrent memories: no address space, or no memory for the map of it");
  }
  tw_image_use(m);
  s->size = m->size, s->image = m;
  *memory = (wasmtime_linear_memory_t){s, get_memory, grow_memory, release};
  return NULL;
}

void tw_use_slots(wasm_config_t *c) {
  wasmtime_memory_creator_t creator = {NULL, new_memory, NULL};
  wasmtime_config_host_memory_creator_set(c, &creator);
}

// ---- images ----

tw_image *tw_image_new(int fd, size_t begin, size_t end, size_t size) {
  tw_image *m = tw_zeroed(sizeof *m);
  if (!m) return NULL;
  m->fd = fd, m->begin = begin, m->end = end, m->size = m->min = size, m->users = 1;
  if (begin == end) return m;
  uint8_t *data = mmap(NULL, end - begin, PROT_READ, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) {
    free(m);
    return NULL;
  }
  m->data = data - begin;
  return m;
}

void tw_image_close(tw_image *m) {
  pthread_mutex_lock(&mu);
  tw_slot *s = m->warm, *next;
  tw_give(m->account, TW_BYTES, m->kept);
  nwarm -= m->nwarm;
  m->warm = NULL, m->closed = true;
  pthread_mutex_unlock(&mu);
  for (; s; s = next) {
    next = s->next;
    chill(s);
  }
  tw_image_done(m);
}

void tw_begin_with(tw_image *m) { wanted = m; }
