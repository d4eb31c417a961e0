// poll_oneoff of preview 1: a guest waits for clocks, its standard input and channels at the same time.
#include "p1.h"

enum { SUBSCRIPTION = 48, EVENT = 32, CLOCK = 0, FD_READ_READY = 1, HANGUP = 1, ABSOLUTE = 1 };

// deadline_of computes when a clock subscription is due, on the monotonic clock.
static int deadline_of(call *c, uint32_t sub, int64_t now, int64_t *due) {
  uint64_t timeout = get64(c, sub + 24), clock;
  if (!p1_clock(get32(c, sub + 16), false, &clock)) return EINVAL_;
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

// streams_ready writes events for streams and channels that are ready. Output to streams is always ready, and so is
// input without a standard input.
static uint32_t streams_ready(call *c, uint32_t subs, uint32_t n, bool input) {
  uint32_t events = 0;
  for (uint32_t k = 0; k < n; k++) {
    uint32_t sub = subs + k * SUBSCRIPTION;
    uint8_t tag = c->mem[sub + 8];
    if (tag == CLOCK) continue;
    const tw_fd *d = fd_at(c, get32(c, sub + 16));
    int mode = tag == FD_READ_READY ? CAN_READ : CAN_WRITE;
    bool good = d && d->modes & mode, in = good && d->kind == FD_STREAM && mode == CAN_READ;
    if (in && !input) continue;
    if (good && d->kind == FD_CHANNEL && !p1_channel_ready(c, d, mode)) continue;
    event(c, sub, &events, good ? OK : EBADF_, in && c->i->p1.stdin_fd < 0);
  }
  return events;
}

// waits_for returns a bit mask of the kinds of descriptors that the guest waits to read, or to write.
static uint32_t waits_for(call *c, uint32_t subs, uint32_t n, bool reading) {
  uint32_t kinds = 0;
  for (uint32_t k = 0; k < n; k++) {
    const tw_fd *d = fd_at(c, get32(c, subs + k * SUBSCRIPTION + 16));
    uint8_t tag = c->mem[subs + k * SUBSCRIPTION + 8];
    if (d && tag != CLOCK && (tag == FD_READ_READY) == reading) kinds |= 1u << d->kind;
  }
  return kinds;
}

// clocks_due writes events for the clocks that were due first.
static uint32_t clocks_due(call *c, uint32_t subs, uint32_t n, int64_t now, int64_t first) {
  uint32_t events = 0;
  int64_t due;
  for (uint32_t k = 0; k < n; k++) {
    uint32_t sub = subs + k * SUBSCRIPTION;
    if (c->mem[sub + 8] == CLOCK && !deadline_of(c, sub, now, &due) && due <= first) event(c, sub, &events, OK, false);
  }
  return events;
}

static int64_t sooner(int64_t a, int64_t b) { return a < b ? a : b; }

// wait_streams waits for streams and channels, and writes their events, or none if the time is up. A guest that waits
// for both is polled every few milliseconds. A guest that waits for room is polled now and then, because room can also
// appear just because time passes.
static int wait_streams(call *c, uint32_t subs, uint32_t n, int64_t first, uint32_t *events) {
  enum { BOTH = 5 * 1000 * 1000, NOW_AND_THEN = 200 * 1000 * 1000 }; // ns
  uint32_t reads = waits_for(c, subs, n, true), writes = waits_for(c, subs, n, false);
  bool input = reads >> FD_STREAM & 1 && c->i->p1.stdin_fd >= 0, room = writes >> FD_CHANNEL & 1;
  bool channels = room || reads >> FD_CHANNEL & 1;
  int64_t pause = channels && input ? BOTH : room ? NOW_AND_THEN : INT64_MAX;
  for (;;) {
    uint32_t seen = tw_seen(c->i);
    int ready = input ? p1_wait_input(c, 0) : 1;
    if (ready < 0 || tw_over(c->i)) return ENDED;
    *events = streams_ready(c, subs, n, ready);
    if (*events || tw_now() >= first) return OK;
    if (channels) tw_fresh(c->i);
    if (input && !channels) ready = p1_wait_input(c, first);
    else if (!tw_await(c->i, pause == INT64_MAX ? first : sooner(first, tw_now() + pause), seen)) return ENDED;
    if (ready < 0) return ENDED;
  }
}

int p1_poll(call *c) {
  uint32_t subs = arg(c, 0), n = arg(c, 2);
  if (!n || n > MAX_ENTRIES) return EINVAL_;
  if (!fits(c, subs, (uint64_t)n * SUBSCRIPTION) || !fits(c, arg(c, 1), (uint64_t)n * EVENT) || !fits(c, arg(c, 3), 4)) return EFAULT_;
  int64_t now = tw_now(), first = INT64_MAX, due;
  for (uint32_t k = 0; k < n; k++) {
    uint32_t sub = subs + k * SUBSCRIPTION;
    if (c->mem[sub + 8] != CLOCK) continue;
    int error = deadline_of(c, sub, now, &due);
    if (error) return error;
    first = sooner(first, due);
  }
  uint32_t events = 0;
  int error = wait_streams(c, subs, n, first, &events);
  if (error) return error;
  if (!events) events = clocks_due(c, subs, n, now, first);
  put32(c, arg(c, 3), events);
  return OK;
}
