// A server on tripod:grpc/raw that has snapshots. Its initialization does what the variable DO says.
#include <stdio.h>
#include <stdlib.h>
#include <wasi/api.h>

#include "../../../../../../examples/wasm/include/raw.h"

static int initialized, warmed, requests;
static unsigned drawn; // a random value

static void draw(void) {
  if (__wasi_random_get((uint8_t *)&drawn, sizeof drawn)) __builtin_trap();
}

static int open_file(void) {
  __wasi_fd_t fd;
  if (__wasi_path_open(3, 0, "file", 0, __WASI_RIGHTS_FD_READ, 0, 0, &fd)) __builtin_trap();
  return (int)fd;
}

static void *some(size_t n) {
  void *p = malloc(n);
  if (!p) __builtin_trap();
  return p;
}

// perform does what a variable of the environment says.
static void *perform(const char *variable) {
  static struct {
    uint8_t failed;
    union {
      uint32_t renewed;
      str error;
    };
  } result;
  static uint32_t renewed; // since the start of the guest
  str what = {getenv(variable) ? getenv(variable) : "", 0};
  while (what.ptr[what.len]) what.len++;
  received r;
  __wasi_timestamp_t now;
  if (eq(what, STR("renew"))) draw(), renewed++;
  if (eq(what, STR("random"))) draw();
  if (eq(what, STR("clock")) && __wasi_clock_time_get(__WASI_CLOCKID_REALTIME, 0, &now)) __builtin_trap();
  if (eq(what, STR("monotonic")) && __wasi_clock_time_get(__WASI_CLOCKID_MONOTONIC, 0, &now)) __builtin_trap();
  if (eq(what, STR("file")) && __wasi_fd_close((__wasi_fd_t)open_file())) __builtin_trap();
  if (eq(what, STR("open-file"))) open_file();
  if (eq(what, STR("close")) && __wasi_fd_close(0)) __builtin_trap();
  if (eq(what, STR("call"))) raw_receive(1, &r);
  result.failed = 0, result.renewed = renewed;
  if (eq(what, STR("error"))) result.failed = 1, result.error = STR("not today");
  if (eq(what, STR("bad-result"))) return (void *)0xfffffff0;
  if (eq(what, STR("trap"))) __builtin_trap();
  if (eq(what, STR("exit"))) _Exit(3);
  if (eq(what, STR("loop"))) for (volatile int on = 1; on;) {}
  if (eq(what, STR("memory"))) for (;;) *(volatile char *)some(1 << 20) = 1;
  if (eq(what, STR("fill"))) for (int n = 0; n < 100 << 20; n += 4096) *(volatile char *)some(4096) = 1;
  if (eq(what, STR("sparse"))) *(volatile char *)((char *)some(30 << 20) + (29 << 20)) = 1;
  return &result;
}

__attribute__((constructor)) static void start(void) { perform("START"); }

EXPORT("tripod:grpc/snapshot@0.1.0#prepare") void *prepare(void) {
  initialized++;
  return perform("DO");
}

EXPORT("tripod:grpc/warm@0.1.0#warm") void *warm(void) {
  warmed++;
  return perform("WARM");
}

HANDLE {
  static DONE done, sent;
  static char text[100];
  if (drawn) draw();
  int n = snprintf(text, sizeof text, "%d initialized, %d requests, %x, %d warmed", initialized, requests++, drawn, warmed);
  raw_send(text, (uint32_t)n, &sent);
  return &done;
}
