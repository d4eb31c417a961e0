// Channels for preview 1 guests: /ch is a directory in which each channel is a file. A read returns one message, or the
// rest of the current one; a write publishes one. The channels themselves are in Go (InstanceOptions.Channels). The
// guest waits here and not in Go, so that it can be killed and occupies no Go processor.
#include "p1.h"
#include <stdlib.h>

static const char room_name[] = "/ch";

int p1_room_prestat(call *c) {
  if (!fits(c, arg(c, 1), 8)) return EFAULT_;
  put32(c, arg(c, 1), 0); // a directory
  put32(c, arg(c, 1) + 4, sizeof room_name - 1);
  return OK;
}

int p1_room_dir_name(call *c) {
  uint32_t at = arg(c, 1), n = arg(c, 2);
  if (n < sizeof room_name - 1) return ENAMETOOLONG_;
  if (!fits(c, at, n)) return EFAULT_;
  memcpy(c->mem + at, room_name, sizeof room_name - 1);
  return OK;
}

// name_of splits a path: it returns the name of a channel, in the guest's memory. "./NAME" is valid too.
static int name_of(call *c, uint32_t at, uint32_t n, const uint8_t **name, uint32_t *len) {
  enum { MAX_NAME = 255 };
  if (!fits(c, at, n)) return EFAULT_;
  const uint8_t *s = c->mem + at;
  while (n > 2 && s[0] == '.' && s[1] == '/') s += 2, n -= 2;
  if (!n) return ENOENT_;
  if (n > MAX_NAME) return ENAMETOOLONG_;
  *name = s, *len = n;
  return OK;
}

static int from_go(call *c, int (*f)(uintptr_t, uint8_t *, size_t, int), const uint8_t *p, uint32_t n, int modes) {
  int64_t paused = tw_pause(c->i);
  int k = f(c->i->go_, (uint8_t *)p, n, modes);
  tw_resume(c->i, paused);
  return k;
}

int p1_channel_open(call *c) {
  enum { IS_DIRECTORY = 2, EXCLUSIVE = 4 };
  uint32_t flags = arg(c, 4), at = arg(c, 8), len, number;
  uint64_t rights = (uint64_t)c->v[5].i64;
  const uint8_t *name;
  int error = name_of(c, arg(c, 2), arg(c, 3), &name, &len);
  if (error) return error;
  if (!fits(c, at, 4)) return EFAULT_;
  if (len == 1 && *name == '.') return ENOTSUP_; // the directory cannot be listed
  int modes = (rights & RIGHT_READ ? CAN_READ : 0) | (rights & RIGHT_WRITE ? CAN_WRITE : 0);
  if (flags & IS_DIRECTORY) return ENOTDIR_;
  if (flags & EXCLUSIVE) return EEXIST_;
  if (!modes) return EINVAL_;
  if (tw_over(c->i)) return ENDED;
  if (!tw_fd_new(c->i, (tw_fd){0}, &number)) return c->i->why ? ENDED : EMFILE_;
  int n = from_go(c, twChannelOpen, name, len, modes);
  if (n < 0) return -n;
  c->i->p1.fds[number] = (tw_fd){.kind = FD_CHANNEL, .modes = (uint8_t)modes, .flags = (uint16_t)arg(c, 7), .n = (uint32_t)n};
  return put32(c, at, number), OK;
}

int p1_channel_filestat(call *c) {
  enum { SIZE = 64, TYPE = 16 };
  uint32_t at = arg(c, 4), len;
  const uint8_t *name;
  int error = name_of(c, arg(c, 2), arg(c, 3), &name, &len);
  if (error) return error;
  if (!fits(c, at, SIZE)) return EFAULT_;
  if (tw_over(c->i)) return ENDED;
  bool itself = len == 1 && *name == '.';
  if (!itself && (error = -from_go(c, twChannelOpen, name, len, 0)) > 0) return error;
  memset(c->mem + at, 0, SIZE);
  c->mem[at + TYPE] = itself ? DIRECTORY : CHARACTER_DEVICE;
  return OK;
}

void p1_channel_close(call *c, const tw_fd *d) {
  int64_t paused = tw_pause(c->i);
  twChannelClose(c->i->go_, (int)d->n);
  tw_resume(c->i, paused);
}

bool p1_channel_ready(call *c, const tw_fd *d, int mode) {
  int64_t paused = tw_pause(c->i);
  bool ready = twChannelReady(c->i->go_, (int)d->n, mode);
  tw_resume(c->i, paused);
  return ready;
}

// vectors checks the vectors of a read or write, and returns their total size.
static int vectors(call *c, uint64_t *sum) {
  uint32_t at = arg(c, 1), n = arg(c, 2);
  *sum = 0;
  if (n > MAX_ENTRIES) return EINVAL_;
  if (!fits(c, at, (uint64_t)n * 8) || !fits(c, arg(c, 3), 4)) return EFAULT_;
  for (; n--; at += 8) {
    uint32_t to = get32(c, at), len = get32(c, at + 4);
    if (!fits(c, to, len)) return EFAULT_;
    *sum += len;
  }
  return OK;
}

// once reads into a vector or publishes a message. It returns Go's result: a length or a negative error. A guest that
// gets messages stops yielding until it has computed for long again, because switching for each message would cost more
// than the message.
static int64_t once(call *c, const tw_fd *d, int mode, uint8_t *p, size_t n, bool more) {
  int64_t paused = tw_pause(c->i);
  int64_t k = mode == CAN_READ ? twChannelRead(c->i->go_, (int)d->n, p, n, more) : twChannelWrite(c->i->go_, (int)d->n, p, n);
  tw_resume(c->i, paused);
  if (k > 0) tw_fresh(c->i);
  return k;
}

// patiently is like once, but waits where once would return EAGAIN.
static int64_t patiently(call *c, const tw_fd *d, int mode, uint8_t *p, size_t n) {
  enum { AGAIN = 200 * 1000 * 1000 }; // ns; room can also appear just because time passes
  for (;;) {
    uint32_t seen = tw_seen(c->i);
    if (tw_over(c->i)) return ENDED;
    int64_t k = once(c, d, mode, p, n, false);
    if (k != -EAGAIN_ || d->flags & NONBLOCK) return k;
    tw_fresh(c->i);
    if (!tw_await(c->i, mode == CAN_READ ? INT64_MAX : tw_now() + AGAIN, seen)) return ENDED;
  }
}

int p1_channel_read(call *c, tw_fd *d) {
  uint64_t room, got = 0;
  int error = vectors(c, &room);
  if (error) return error;
  for (uint32_t k = 0, at = arg(c, 1); k < arg(c, 2) && room; k++, at += 8) {
    uint32_t to = get32(c, at), len = get32(c, at + 4);
    if (!len) continue;
    int64_t n = got ? once(c, d, CAN_READ, c->mem + to, len, true) : patiently(c, d, CAN_READ, c->mem + to, len);
    if (n == ENDED) return ENDED;
    if (n < 0) return (int)-n;
    got += (uint64_t)n;
    if ((uint64_t)n < len) break; // end of the message
  }
  return put32(c, arg(c, 3), (uint32_t)got), OK;
}

int p1_channel_write(call *c, tw_fd *d) {
  enum { MAX_MESSAGE = 16 << 20 }; // the limit of the frames
  uint64_t sum;
  int error = vectors(c, &sum);
  if (error) return error;
  if (sum > MAX_MESSAGE) return EMSGSIZE_;
  uint8_t *made = NULL, *p = NULL, *end;
  uint32_t at = arg(c, 1);
  for (uint32_t k = 0; k < arg(c, 2); k++, at += 8) {
    uint32_t len = get32(c, at + 4);
    if (!len) continue;
    uint8_t *from = c->mem + get32(c, at);
    if (len == sum) { // the message is contiguous
      p = from;
      break;
    }
    if (!made && !(made = tw_get(NULL, sum))) return tw_starve(c->i, "a message"), ENDED;
    if (!p) p = end = made;
    memcpy(end, from, len), end += len;
  }
  int64_t n = sum ? patiently(c, d, CAN_WRITE, p, sum) : 0;
  free(made);
  if (n == ENDED) return ENDED;
  if (n < 0) return (int)-n;
  return put32(c, arg(c, 3), (uint32_t)sum), OK;
}
