// What the other files of preview 1 share: the table of descriptors, clocks, and the standard streams.
#define _GNU_SOURCE
#include "p1.h"
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <time.h>

enum { MAX_FDS = 2048 }; // files, directories and channels of a guest

bool tw_fd_new(tw_inst *i, tw_fd d, uint32_t *number) {
  uint32_t k = 0;
  while (k < i->p1.nfds && i->p1.fds[k].kind) k++;
  if (k == MAX_FDS) return false;
  if (k == i->p1.nfds) {
    uint32_t n = i->p1.nfds * 2;
    tw_fd *fds = tw_zeroed(n * sizeof *fds);
    if (!fds) return tw_starve(i, "a descriptor");
    memcpy(fds, i->p1.fds, i->p1.nfds * sizeof *fds);
    if (i->p1.fds != i->p1.stdio) free(i->p1.fds);
    i->p1.fds = fds, i->p1.nfds = n;
  }
  i->p1.fds[k] = d;
  return *number = k, true;
}

void tw_fd_free(tw_inst *i, uint32_t channel) {
  for (uint32_t k = 0; k < i->p1.nfds; k++)
    if (i->p1.fds[k].kind == FD_CHANNEL && i->p1.fds[k].n == channel) i->p1.fds[k].kind = FD_NONE;
}

bool p1_clock(uint32_t id, bool resolution, uint64_t *ns) {
  struct timespec t;
  if (id > MONOTONIC) return false;
  clockid_t clock = id == REALTIME ? CLOCK_REALTIME : CLOCK_MONOTONIC;
  if (resolution) clock_getres(clock, &t);
  else clock_gettime(clock, &t);
  *ns = (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
  return true;
}

ptrdiff_t p1_write(call *c, int to, uint8_t *from, size_t n) {
  int64_t paused = tw_pause(c->i);
  ptrdiff_t k = twWrite(c->i->go_, to, from, n);
  tw_resume(c->i, paused);
  return tw_over(c->i) ? ENDED : k == ENDED ? -EIO : k;
}

// p1_wait_input waits for input until a time on the monotonic clock. It waits in slices, to notice the guest's end.
int p1_wait_input(call *c, int64_t until) {
  for (;;) {
    struct pollfd p = {.fd = c->i->p1.stdin_fd, .events = POLLIN};
    int64_t left = (until - tw_now()) / 1000000;
    if (poll(&p, 1, left < 0 ? 0 : left > 20 ? 20 : (int)left) > 0) return 1;
    if (tw_over(c->i)) return ENDED;
    if (tw_now() >= until) return 0;
  }
}
