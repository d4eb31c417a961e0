// The Faults service (faults.proto): faults that a runtime must survive, and functions to measure its speed.
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <wasi/api.h>

#include "../include/grpc.h"

#define FAULTS "proto:faults-v1/faults"
#define STREAMS "proto:faults-v1/faults-streams"

// A record of one field has the layout of the field, in memory and as a parameter.
typedef RESULT(uint64_t) total;
typedef RESULT(str) payload;

IMPORT(STREAMS, "[method]payload-reader.next") void payloads_next(int32_t self, void *next);
IMPORT(STREAMS, "[resource-drop]payload-reader") void payloads_drop(int32_t self);
IMPORT(STREAMS, "[method]payload-writer.send") void payloads_send(int32_t self, const char *data, uint32_t len, DONE *);
IMPORT(STREAMS, "[resource-drop]payload-writer") void writer_drop(int32_t self);
IMPORT(STREAMS, "[method]tick-reply-writer.send")
void ticks_send(int32_t self, uint32_t number, const char *data, uint32_t len, DONE *result);
IMPORT(STREAMS, "[resource-drop]tick-reply-writer") void ticks_drop(int32_t self);

static uint64_t calls; // served by this instance

static void *answer(uint64_t value) {
  static total result;
  calls++;
  result.failed = 0;
  result.ok = value;
  return &result;
}

static void *refuse(uint32_t code, str message) {
  static total result; // in all results the status has the offset of the other case, here 8
  result.failed = 1;
  result.error = (status){code, message, {NULL, 0}};
  return &result;
}

static uint64_t now_ms(void) {
  __wasi_timestamp_t t;
  (void)__wasi_clock_time_get(__WASI_CLOCKID_MONOTONIC, 1000000, &t);
  return t / 1000000;
}

// ---- speed ----

METHOD(FAULTS, "echo", echo, const char *data, uint32_t len) {
  static payload result;
  calls++;
  result.ok = (str){data, len};
  return &result;
}

METHOD(FAULTS, "discard", discard, int32_t requests) {
  NEXT(str) next;
  uint64_t bytes = 0;
  for (;;) {
    payloads_next(requests, &next);
    if (next.failed || !next.some) break;
    bytes += next.value.len;
    release(NULL);
  }
  payloads_drop(requests);
  if (next.failed) return refuse(next.error.code, next.error.message);
  return answer(bytes);
}

METHOD(FAULTS, "mirror", mirror, int32_t requests, int32_t replies) {
  static DONE result;
  for (;;) {
    NEXT(str) next;
    payloads_next(requests, &next);
    result.failed = next.failed;
    if (next.failed) result.error = next.error;
    if (next.failed || !next.some) break;
    payloads_send(replies, FLAT(next.value), &result);
    if (result.failed) break;
    release(NULL);
  }
  payloads_drop(requests);
  writer_drop(replies);
  return &result;
}

METHOD(FAULTS, "tick", tick, uint32_t count, uint32_t interval_ms, uint32_t bytes, int32_t replies) {
  static DONE result;
  str data = {allocate(bytes), bytes};
  memset((char *)data.ptr, 't', bytes);
  for (uint32_t n = 1;; n++) {
    ticks_send(replies, n, FLAT(data), &result);
    if (result.failed || n == count) break;
    if (interval_ms > 0) usleep(interval_ms * 1000);
  }
  ticks_drop(replies);
  return &result;
}

// ---- faults ----

METHOD(FAULTS, "spin", spin, uint32_t milliseconds) {
  volatile uint64_t turns = 0;
  if (milliseconds == 0)
    for (;;) turns++;
  for (uint64_t end = now_ms() + milliseconds; now_ms() < end;)
    for (int i = 0; i < 100000; i++) turns++;
  return answer(turns);
}

enum { UNREACHABLE, OUT_OF_BOUNDS, DIVIDE_BY_ZERO, INDIRECT_CALL };

METHOD(FAULTS, "trap", trap, int32_t kind, int32_t number) {
  static volatile uint32_t zero;
  switch (kind) {
    case OUT_OF_BOUNDS: return answer(*(volatile uint32_t *)(0xfffffff0u - zero));
    case DIVIDE_BY_ZERO: return answer(metadata_len / zero);
    case INDIRECT_CALL: return answer(((uint32_t(*)(float))(&now_ms + zero))(1));
    default: __builtin_trap();
  }
}

// deeper computes after its recursive call, because otherwise the compiler would make a loop of it. It uses no stack in
// linear memory, whose end would be another fault.
static __attribute__((noinline)) uint64_t deeper(volatile uint64_t *depth) {
  if (++*depth == UINT64_MAX) return 0;
  uint64_t rest = deeper(depth);
  return rest * 3 + *depth;
}

METHOD(FAULTS, "recurse", recurse, int32_t nothing) {
  static volatile uint64_t depth;
  return answer(deeper(&depth));
}

METHOD(FAULTS, "grow", grow, uint64_t bytes) {
  const uint64_t page = 65536;
  uint64_t got = 0;
  while (got < bytes) {
    size_t at = __builtin_wasm_memory_grow(0, 1);
    if (at == SIZE_MAX) break;
    memset((void *)(at * page), 1, page);
    got += page;
  }
  return answer(got);
}

METHOD(FAULTS, "allocate", keep, uint64_t bytes) {
  const size_t piece = 1 << 20;
  uint64_t got = 0;
  for (; got < bytes; got += piece) memset(allocate(piece), 1, piece);
  return answer(got);
}

METHOD(FAULTS, "exit", leave, uint64_t code) {
  __wasi_proc_exit(code);
}

METHOD(FAULTS, "headers", headers, uint64_t count) {
  for (uint64_t n = 0; n < count; n++) {
    str key = join(STR("x-header-"), decimal(n));
    grpc_set_header(FLAT(key), FLAT(STR("a value of some length, as they have it")));
    release(NULL);
  }
  return answer(count);
}

// ---- output ----

METHOD(FAULTS, "fail", fail, uint32_t code, const char *message, uint32_t message_len, str *details, uint32_t n) {
  total *result = refuse(code, (str){message, message_len});
  result->error.details = (list){details, n};
  return result;
}

static void print(int fd, str line, uint32_t times) {
  if (line.len == 0) return;
  line = join(line, STR("\n"));
  for (uint32_t i = 0; i < (times ? times : 1); i++)
    for (uint32_t done = 0; done < line.len;) {
      ssize_t n = write(fd, line.ptr + done, line.len - done);
      if (n <= 0) return;
      done += n;
    }
}

METHOD(FAULTS, "print", print_lines, const char *out, uint32_t out_len, const char *err, uint32_t err_len, uint32_t times) {
  print(1, (str){out, out_len}, times);
  print(2, (str){err, err_len}, times);
  return answer(times);
}

typedef struct {
  list args, env;
  str method, peer;
  struct {
    uint8_t some;
    uint64_t value;
  } timeout;
  list metadata; // of entries, which have the layout of two strings
} view;

// strings makes a list of n C strings.
static list strings(char **all, size_t n) {
  str *s = allocate(n * sizeof(str));
  for (size_t i = 0; i < n; i++) s[i] = (str){all[i], strlen(all[i])};
  return (list){s, n};
}

typedef __wasi_errno_t (*lister)(uint8_t **pointers, uint8_t *text);

static list from_wasi(__wasi_errno_t err, lister get, size_t n, size_t bytes) {
  char **all = allocate(n * sizeof(char *));
  if (err || get((uint8_t **)all, allocate(bytes))) return (list){NULL, 0};
  return strings(all, n);
}

METHOD(FAULTS, "inspect", inspect, int32_t nothing) {
  static RESULT(view) result;
  size_t n, bytes;
  calls++;
  __wasi_errno_t err = __wasi_args_sizes_get(&n, &bytes);
  result.ok.args = from_wasi(err, __wasi_args_get, n, bytes);
  err = __wasi_environ_sizes_get(&n, &bytes);
  result.ok.env = from_wasi(err, __wasi_environ_get, n, bytes);
  result.ok.method = (str){method, method_len};
  result.ok.peer = (str){peer, peer_len};
  result.ok.timeout.some = has_timeout;
  result.ok.timeout.value = timeout;
  result.ok.metadata = (list){metadata, metadata_len};
  return &result;
}

static char *c_string(str s) {
  char *p = allocate(s.len + 1);
  memcpy(p, s.ptr, s.len);
  p[s.len] = 0;
  return p;
}

METHOD(FAULTS, "read-file", read_file, const char *path, uint32_t len) {
  static payload result;
  const size_t most = 1 << 20;
  int fd = open(c_string((str){path, len}), O_RDONLY);
  char *data = allocate(most);
  ssize_t n = fd < 0 ? -1 : read(fd, data, most);
  if (fd >= 0) close(fd);
  calls++;
  result.failed = n < 0;
  if (n < 0)
    result.error = (status){NOT_FOUND, STR("the file cannot be read"), {NULL, 0}};
  else
    result.ok = (str){data, n};
  return &result;
}

METHOD(FAULTS, "write-file", write_file, const char *path, uint32_t path_len, const char *data, uint32_t len) {
  int fd = open(c_string((str){path, path_len}), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  ssize_t n = fd < 0 ? -1 : write(fd, data, len);
  if (fd >= 0) close(fd);
  if (n < 0) return refuse(NOT_FOUND, STR("the file cannot be written"));
  return answer(n);
}

METHOD(FAULTS, "count", count, int32_t nothing) {
  return answer(calls + 1);
}
