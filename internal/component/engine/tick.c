// Clocks, the epoch ticker, accounts, and the work of a guest's thread at a tick.
#define _GNU_SOURCE
#include "tw.h"
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define TICK 10000000          // ns
#define LINGER 100             // ticks that the ticker continues without guests, to avoid waking it for the next one
#define LONG_HOST_CALL 1000000 // ns; a longer host call has waited, and waiting does not count as computing
#define MAX_ENGINES 128

static int64_t ns(clockid_t clock) {
  struct timespec t;
  clock_gettime(clock, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

int64_t tw_now(void) { return ns(CLOCK_MONOTONIC); }
int64_t tw_load(const int64_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }

// ---- the ticker ----

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t awake = PTHREAD_COND_INITIALIZER;
static wasm_engine_t *engines[MAX_ENGINES];
static int nengines, parked;
static int64_t active; // number of running guests

// How guests that compute for long yield to others: as SCHED_IDLE threads, if we may undo that (RLIMIT_NICE allows nice
// 0, or CAP_SYS_NICE). Otherwise they get a long slice, so that waking threads come first (Linux 6.12), and sleep when
// other threads want the processor.
enum { UNKNOWN, IDLE, POLITE };
static int standing_back;

static int idle(bool on) {
  struct sched_param none = {0};
  return sched_setscheduler(0, on ? SCHED_IDLE : SCHED_OTHER, &none);
}

static void slice(uint64_t ns) { // 0: the system's default
  struct {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period;
  } attr = {.size = sizeof attr};
  if (syscall(SYS_sched_getattr, 0, &attr, sizeof attr, 0)) return;
  attr.runtime = ns;
  syscall(SYS_sched_setattr, 0, &attr, 0);
}

static void stand_back(bool on) {
  if (standing_back == IDLE) idle(on);
  else slice(on ? 100000000 : 0);
}

// try_idle runs on its own thread, which may stay SCHED_IDLE.
static void *try_idle(void *arg) {
  *(int *)arg = idle(true) || idle(false) ? POLITE : IDLE;
  return NULL;
}

void tw_stand_back(bool by_idle) { standing_back = by_idle ? IDLE : POLITE; }

static bool killed(tw_inst *i) {
  uint64_t k = __atomic_load_n(&i->killed, __ATOMIC_ACQUIRE);
  return k == TW_FOREVER || k == i->call.seq;
}

// idlers are the guests that yield as SCHED_IDLE threads. On a fully loaded machine, such a thread would not run to
// notice that its guest must end. So the ticker takes it out of SCHED_IDLE.
static pthread_mutex_t idlers_mu = PTHREAD_MUTEX_INITIALIZER;
static tw_inst *idlers;

static void rouse(void) {
  struct sched_param none = {0};
  int64_t now = tw_now();
  pthread_mutex_lock(&idlers_mu);
  for (tw_inst *i = idlers; i; i = i->idle.next)
    if (killed(i) || (i->idle.due && now > i->idle.due)) sched_setscheduler(i->idle.thread, SCHED_OTHER, &none);
  pthread_mutex_unlock(&idlers_mu);
}

static void *tick(void *arg) {
  (void)arg;
  for (int idle = 0;;) {
    struct timespec t = {0, TICK};
    clock_nanosleep(CLOCK_MONOTONIC, 0, &t, NULL);
    int n = __atomic_load_n(&nengines, __ATOMIC_ACQUIRE);
    for (int k = 0; k < n; k++) wasmtime_engine_increment_epoch(engines[k]);
    rouse();
    idle = __atomic_load_n(&active, __ATOMIC_SEQ_CST) ? 0 : idle + 1;
    if (idle < LINGER) continue;
    pthread_mutex_lock(&mu);
    __atomic_store_n(&parked, 1, __ATOMIC_SEQ_CST);
    while (!__atomic_load_n(&active, __ATOMIC_SEQ_CST)) pthread_cond_wait(&awake, &mu);
    __atomic_store_n(&parked, 0, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&mu);
    idle = 0;
  }
  return NULL;
}

// start starts a thread with all signals blocked, because signals must reach Go's threads.
static int start(pthread_t *t, void *(*run)(void *), void *arg) {
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  int rc = pthread_create(t, NULL, run, arg);
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  return rc;
}

int tw_ticker(wasm_engine_t *e) {
  pthread_t t;
  int rc = 0;
  pthread_mutex_lock(&mu);
  if (!standing_back) {
    if (!(rc = start(&t, try_idle, &standing_back))) rc = pthread_join(t, NULL);
    if (!rc && !(rc = start(&t, tick, NULL))) pthread_detach(t);
  }
  if (!rc && nengines == MAX_ENGINES) rc = ENOSPC;
  if (!rc) {
    engines[nengines] = e;
    __atomic_store_n(&nengines, nengines + 1, __ATOMIC_RELEASE);
  }
  pthread_mutex_unlock(&mu);
  return rc ? -rc : standing_back == IDLE;
}

static void guest_begins(void) {
  if (__atomic_fetch_add(&active, 1, __ATOMIC_SEQ_CST) || !__atomic_load_n(&parked, __ATOMIC_SEQ_CST)) return;
  pthread_mutex_lock(&mu);
  pthread_cond_broadcast(&awake);
  pthread_mutex_unlock(&mu);
}

static void guest_ends(void) { __atomic_fetch_sub(&active, 1, __ATOMIC_SEQ_CST); }

// ---- accounts ----

static void lock(int32_t *l) {
  while (__atomic_exchange_n(l, 1, __ATOMIC_ACQUIRE)) sched_yield();
}
static void unlock(int32_t *l) { __atomic_store_n(l, 0, __ATOMIC_RELEASE); }

void tw_account_set_limit(tw_account *a, int64_t limit) { __atomic_store_n(&a->limit, limit, __ATOMIC_RELAXED); }

void tw_account_bound(tw_account *a, int what, int64_t most) { __atomic_store_n(&a->most[what], most, __ATOMIC_RELAXED); }

void tw_account_set_cpu(tw_account *a, int64_t quota, int64_t period) {
  lock(&a->lock);
  a->quota = quota, a->period = period, a->window = a->used = 0;
  unlock(&a->lock);
}

bool tw_take(tw_account *a, int what, int64_t n) {
  for (tw_account *at = a; at; at = at->within) {
    int64_t sum = __atomic_add_fetch(&at->held[what], n, __ATOMIC_RELAXED), most = tw_load(&at->most[what]);
    if (!most || sum <= most) continue;
    for (tw_account *back = a;; back = back->within) {
      __atomic_sub_fetch(&back->held[what], n, __ATOMIC_RELAXED);
      if (back == at) return false;
    }
  }
  return true;
}

void tw_give(tw_account *a, int what, int64_t n) {
  for (; a; a = a->within) __atomic_sub_fetch(&a->held[what], n, __ATOMIC_RELAXED);
}

// owed adds computed time and returns how long the thread must sleep for it. Time beyond the quota of a period is taken
// from the next ones.
static int64_t owed(tw_account *a, int64_t now, int64_t computed) {
  __atomic_fetch_add(&a->cpu, computed, __ATOMIC_RELAXED);
  int64_t debt = 0;
  if (!tw_load(&a->quota)) return 0;
  lock(&a->lock);
  if (a->quota > 0) {
    if (!a->window) a->window = now + a->period;
    if (now >= a->window) {
      int64_t n = (now - a->window) / a->period + 1, paid = n > a->used / a->quota ? a->used : n * a->quota;
      a->window += n * a->period, a->used -= paid;
    }
    a->used += computed;
    if (a->used > a->quota) debt = a->window - now;
  }
  unlock(&a->lock);
  return debt;
}

void tw_charge(tw_inst *i, int64_t memory) {
  int64_t size = memory + i->own, grown = size - i->mem;
  __atomic_store_n(&i->mem, size, __ATOMIC_RELAXED);
  if (!i->account || !grown) return;
  tw_account *a = i->account;
  int64_t sum = __atomic_add_fetch(&a->memory, grown, __ATOMIC_RELAXED), peak = tw_load(&a->peak), limit = tw_load(&a->limit);
  while (sum > peak && !__atomic_compare_exchange_n(&a->peak, &peak, sum, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  if (limit && sum > limit) i->over = true;
}

void tw_memory(tw_inst *i) {
  if (i->guest.has_memory) tw_charge(i, (int64_t)wasmtime_memory_data_size(i->cx, &i->guest.memory));
}

// ---- the guest's thread ----

bool tw_ended(tw_inst *i) {
  if (!killed(i)) return false;
  i->why = TW_KILLED;
  return true;
}

bool tw_over(tw_inst *i) {
  if (!tw_ended(i) && i->call.deadline && tw_now() > i->call.deadline) i->why = TW_DEADLINE;
  return i->why != TW_OK;
}

uint32_t tw_seen(tw_inst *i) { return __atomic_load_n(&i->wake, __ATOMIC_SEQ_CST); }

// give_way makes the guest's thread start or stop to yield.
static void give_way(tw_inst *i, bool on) {
  if (standing_back == IDLE) {
    pthread_mutex_lock(&idlers_mu);
    if (on) {
      i->idle.thread = gettid(), i->idle.due = i->call.deadline;
      i->idle.next = idlers, idlers = i;
    } else {
      tw_inst **at = &idlers;
      while (*at && *at != i) at = &(*at)->idle.next;
      if (*at) *at = i->idle.next;
    }
    pthread_mutex_unlock(&idlers_mu);
  }
  stand_back(on);
}

// rest sleeps until the time, until the guest is killed, or until tw_wake is called after tw_seen.
static void rest(tw_inst *i, int64_t ns, uint32_t seen) {
  struct timespec t = {ns / 1000000000, ns % 1000000000};
  if (tw_ended(i)) return;
  guest_ends();
  __atomic_store_n(&i->waits, 1, __ATOMIC_SEQ_CST);
  syscall(SYS_futex, &i->wake, FUTEX_WAIT_PRIVATE, seen, &t, NULL, 0);
  __atomic_store_n(&i->waits, 0, __ATOMIC_SEQ_CST);
  guest_begins();
}

int64_t tw_sleep(tw_inst *i, int64_t ns) {
  int64_t begin = tw_now();
  rest(i, ns, tw_seen(i));
  int64_t slept = tw_now() - begin;
  if (i->call.deadline) i->call.deadline += slept;
  return slept;
}

static void seen(tw_inst *, int64_t);

bool tw_await(tw_inst *i, int64_t until, uint32_t at) {
  int64_t now = tw_now();
  if (i->call.deadline && i->phase != TW_SERVES && i->call.deadline < until) until = i->call.deadline + 1;
  if (tw_over(i) || now >= until) return !tw_over(i);
  if (i->phase == TW_SERVES) seen(i, 0);
  rest(i, until - now, at);
  if (i->phase == TW_SERVES) {
    int64_t woken = tw_now();
    seen(i, woken);
    if (i->call.deadline) i->call.deadline += woken - now;
  }
  return !tw_over(i);
}

void tw_fresh(tw_inst *i) {
  if (i->call.demoted) give_way(i, false), i->call.demoted = false;
  i->call.ticks = 0;
}

void tw_wake(tw_inst *i) {
  __atomic_fetch_add(&i->wake, 1, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&i->waits, __ATOMIC_SEQ_CST)) syscall(SYS_futex, &i->wake, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

// computed accounts the CPU time since its last call. Reading a thread's CPU clock is a system call, so this is only
// done for calls that have seen a tick. Until then the elapsed time is used.
static void computed(tw_inst *i, bool more) {
  int64_t now = tw_now(), cpu = i->call.on_cpu_clock || more ? ns(CLOCK_THREAD_CPUTIME_ID) : 0, debt;
  int64_t used = i->call.on_cpu_clock ? cpu - i->call.mark : now - i->call.mark;
  i->call.on_cpu_clock = more, i->call.mark = cpu;
  __atomic_fetch_add(&i->cpu, used, __ATOMIC_RELAXED);
  if (!i->account) return;
  for (; (debt = owed(i->account, now, used)) > 0 && !tw_ended(i); used = 0, now = tw_now())
    __atomic_fetch_add(&i->account->throttled, tw_sleep(i, debt), __ATOMIC_RELAXED);
}

// let_others makes the thread sleep if it was preempted since the last tick, longer each time. The thread then uses
// only a small part of a processor that others want, and all of an idle one.
static void let_others(tw_inst *i) {
  struct rusage u;
  getrusage(RUSAGE_THREAD, &u);
  bool wanted = i->call.preempted && u.ru_nivcsw != i->call.preempted;
  i->call.preempted = u.ru_nivcsw;
  int64_t most = i->phase == TW_COMMANDS ? 1 : 15; // commands are expected to compute
  i->call.back_off = !wanted ? 0 : i->call.back_off >= most ? most : i->call.back_off * 2 + 1;
  if (wanted) tw_sleep(i, i->call.back_off * TICK);
}

// seen records when the guest was last known to run, or 0 while it is in a host function or sleeps.
static void seen(tw_inst *i, int64_t now) { __atomic_store_n(&i->seen, now, __ATOMIC_RELAXED); }

// ---- profiles ----

static int interrupt_signal;

// interrupted runs on the guest's thread.
static void interrupted(int signal, siginfo_t *s, void *none) {
  (void)signal, (void)none;
  if (s->si_code != SI_TIMER) return;
  int saved = errno;
  tw_inst *i = s->si_value.sival_ptr;
  i->interrupt.hit = true;
  tw_kill(i, i->call.seq);
  wasmtime_engine_increment_epoch(i->interrupt.engine);
  errno = saved;
}

static void handle_interrupts(void) {
  struct sigaction a;
  memset(&a, 0, sizeof a);
  a.sa_sigaction = interrupted, a.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
  if (!sigaction(SIGRTMAX - 3, &a, NULL)) interrupt_signal = SIGRTMAX - 3;
}

// set_interrupt makes a timer signal this thread. Nothing else is as precise as a call is short.
static void set_interrupt(tw_inst *i) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, handle_interrupts);
  i->interrupt.hit = false;
  struct sigevent e;
  memset(&e, 0, sizeof e);
  e.sigev_notify = SIGEV_THREAD_ID, e.sigev_signo = interrupt_signal, e.sigev_value.sival_ptr = i;
  e._sigev_un._tid = gettid();
  if (!interrupt_signal || timer_create(CLOCK_MONOTONIC, &e, &i->interrupt.timer)) return;
  i->interrupt.set = true;
  struct itimerspec t = {.it_value = {i->interrupt.after / 1000000000, i->interrupt.after % 1000000000}};
  timer_settime(i->interrupt.timer, 0, &t, NULL);
}

void tw_interrupt_after(tw_inst *i, wasm_engine_t *e, int64_t ns) { i->interrupt.engine = e, i->interrupt.after = ns; }

void tw_enter(tw_inst *i) {
  i->call.mark = tw_now(), i->call.on_cpu_clock = false;
  seen(i, i->call.mark);
  i->call.deadline = i->call.budget ? i->call.mark + i->call.budget : 0;
  i->call.ticks = 0, i->call.calls = 0, i->why = TW_OK, i->inside = false;
  guest_begins();
  wasmtime_context_set_epoch_deadline(i->cx, 1);
  if (i->interrupt.after) set_interrupt(i);
}

void tw_leave(tw_inst *i) {
  if (i->interrupt.set) timer_delete(i->interrupt.timer); // what it has sent arrives before this returns
  i->interrupt.set = false, i->interrupt.after = 0;
  tw_memory(i);
  computed(i, false);
  guest_ends();
  if (i->call.demoted) give_way(i, false), i->call.demoted = false;
  if (i->over && !i->why) i->why = TW_MEMORY;
}

wasmtime_error_t *tw_tick(wasmtime_context_t *cx, void *data, uint64_t *delta, uint8_t *kind) {
  (void)cx;
  tw_inst *i = data;
  *delta = 1, *kind = 0;
  seen(i, tw_now());
  tw_memory(i);
  computed(i, true);
  if (i->call.demoted && standing_back == POLITE) let_others(i);
  if (i->over) i->why = TW_MEMORY;
  if (i->why || tw_over(i)) return wasmtime_error_new("ended by the host");
  if (++i->call.ticks >= 2 && !i->call.demoted) {
    give_way(i, true);
    i->call.demoted = true, i->call.preempted = i->call.back_off = 0;
  }
  return NULL;
}

void tw_kill(tw_inst *i, uint64_t seq) {
  uint64_t old = __atomic_load_n(&i->killed, __ATOMIC_RELAXED);
  while (old != TW_FOREVER &&
         !__atomic_compare_exchange_n(&i->killed, &old, seq, true, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {
  }
  tw_wake(i);
}

// A host function can hold locks that others wait for, so it must not yield.
int64_t tw_pause(tw_inst *i) {
  if (i->call.demoted) give_way(i, false);
  guest_ends();
  seen(i, 0);
  return tw_now();
}

void tw_resume(tw_inst *i, int64_t paused) {
  int64_t now = tw_now();
  seen(i, now);
  guest_begins();
  if (i->call.renew) {
    i->call.renew = false, i->call.calls = 0, i->call.ticks = 0, i->call.demoted = false;
    if (i->call.deadline) i->call.deadline = now + i->call.budget;
  } else if (i->call.deadline && i->phase == TW_SERVES && now - paused > LONG_HOST_CALL) {
    i->call.deadline += now - paused;
  }
  if (!i->call.on_cpu_clock && now - paused > LONG_HOST_CALL) i->call.mark += now - paused;
  if (i->call.demoted) give_way(i, true);
}
