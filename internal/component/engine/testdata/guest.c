// The guest of the engine's tests, with a handwritten canonical ABI: one function for each thing that a guest can do, right
// or wrong. build.sh compiles it to guest.wasm.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define EXPORT(n) __attribute__((export_name("test:guest/api@1.2.0#" n)))
#define POST(n) __attribute__((export_name("cabi_post_test:guest/api@1.2.0#" n)))
#define IMPORT(n) __attribute__((import_module("test:guest/host@1.2.0"), import_name(n)))

IMPORT("[constructor]thing") int32_t thing_new(uint32_t);
IMPORT("[method]thing.number") uint32_t thing_number(int32_t);
IMPORT("[static]thing.join") int32_t thing_join(int32_t, int32_t);
IMPORT("[resource-drop]thing") void thing_drop(int32_t);
IMPORT("wait") uint32_t host_wait(uint32_t);
IMPORT("fail") void host_fail(const char *, uint32_t);

__attribute__((export_name("cabi_realloc"))) void *cabi_realloc(void *old, size_t n0, size_t align, size_t n) {
  (void)n0;
  if (!n) return (void *)align;
  void *p = realloc(old, n);
  if (!p) __builtin_trap();
  return p;
}

typedef struct { uint8_t *p; uint32_t n; } span;
static struct {
  uint8_t kind;
  union {
    struct { int16_t x; double y; uint8_t tagged; uint32_t tag; } dot;
    span list;
    float small;
    int8_t tiny;
  } __attribute__((aligned(8))) of;
} shape;
static span result;
static uint32_t calls;

// The slots of shape: i32 (s16, pointer, f32, s8), i64 (f64, length), i32 and i32 (the tag).
EXPORT("mixed") void *mixed(uint32_t a, uint32_t kind, uint32_t s1, uint64_t s2, uint32_t s3, uint32_t s4, uint32_t colours,
                            uint32_t b, float f) {
  memset(&shape, 0, sizeof shape);
  shape.kind = kind;
  switch (kind) {
  case 1:
    shape.of.dot.x = (int16_t)(s1 + a);
    memcpy(&shape.of.dot.y, &s2, 8);
    shape.of.dot.y += f;
    shape.of.dot.tagged = s3;
    shape.of.dot.tag = s4;
    break;
  case 2:
  case 3:
    shape.of.list = (span){(uint8_t *)s1, (uint32_t)s2};
    break;
  case 4:
    memcpy(&shape.of.small, &s1, 4);
    shape.of.small += colours;
    break;
  case 5:
    shape.of.tiny = (int8_t)s1 + (b ? 1 : 0);
  }
  return &shape;
}
POST("mixed") void post_mixed(void *r) {
  (void)r;
  if ((shape.kind == 2 || shape.kind == 3) && shape.of.list.n) free(shape.of.list.p);
}

EXPORT("sum") uint32_t sum(uint8_t *p, uint32_t n) {
  uint32_t s = n ? n + p[0] + p[n - 1] : 0;
  if (n) free(p);
  return s;
}
EXPORT("fill") void *fill(uint32_t n) {
  result = (span){malloc(n), n};
  if (n && !result.p) __builtin_trap();
  memset(result.p, 7, n);
  return &result;
}
POST("fill") void post_fill(void *r) { (void)r, free(result.p); }
EXPORT("flip") uint32_t flip(uint32_t b) { return !b; }

EXPORT("take") uint32_t take(int32_t t) {
  uint32_t n = thing_number(t);
  thing_drop(t);
  return n;
}
EXPORT("lend") uint32_t lend(int32_t t) {
  uint32_t n = thing_number(t);
  thing_drop(t);
  return n;
}
EXPORT("keep") uint32_t keep(int32_t t) { return thing_number(t); }
EXPORT("give") int32_t give(uint32_t n) {
  int32_t a = thing_new(n), b = thing_new(1);
  int32_t both = thing_join(a, b);
  thing_drop(b);
  return both;
}
EXPORT("flood") uint32_t flood(uint32_t n) {
  uint32_t k = 0;
  while (k < n) thing_new(k++);
  return k;
}
EXPORT("wait") uint32_t wait(uint32_t ms, uint32_t times) {
  uint32_t s = 0;
  while (times--) s += host_wait(ms);
  return s;
}
EXPORT("fail") void fail(char *p, uint32_t n) { host_fail(p, n); }

EXPORT("spin") uint32_t spin(uint32_t rounds) {
  volatile uint32_t x = 0;
  for (uint32_t k = 0; k < rounds || !rounds; k++) x += k;
  return x;
}
// deeper uses only the engine's stack, and none of the stack in linear memory.
static volatile uint32_t enough;
static __attribute__((noinline)) uint32_t deeper(uint32_t n) { return enough ? n : n * deeper(n + 3) ^ n; }
EXPORT("recurse") uint32_t recurse(void) { return deeper(1); }
EXPORT("grow") uint32_t grow(uint32_t mib) {
  return __builtin_wasm_memory_grow(0, mib * 16) == (size_t)-1 ? 0 : __builtin_wasm_memory_size(0);
}
// touch allocates step by step, like a program, and aborts when there is no more memory.
EXPORT("touch") uint32_t touch(uint32_t mib) {
  for (uint32_t k = 0; k < mib; k++) {
    char *p = malloc(1 << 20);
    if (!p) abort();
    for (uint32_t j = 0; j < 1 << 20; j += 4096) ((volatile char *)p)[j] = 1;
  }
  return mib;
}
static uint32_t table_size;
EXPORT("table") uint32_t table(uint32_t n) {
  __asm__("ref.null_func\n local.get %1\n table.grow __indirect_function_table\n local.set %0" : "=r"(table_size) : "r"(n));
  return table_size;
}
EXPORT("trap") uint32_t trap(uint32_t kind) {
  volatile uint32_t zero = 0;
  switch (kind) {
  case 0: __builtin_trap();
  case 1: return *(volatile uint32_t *)0xfffffff0u;
  case 2: return kind / zero;
  case 3: return ((uint32_t(*)(void))(uintptr_t)(12345 + zero))();
  }
  return 0;
}
EXPORT("bad") void *bad(uint32_t kind) {
  static span s;
  switch (kind) {
  case 0: s = (span){(uint8_t *)0xfffffff0u, 100}; break;
  case 1: s = (span){(uint8_t *)"\xff\xfe", 2}; break;
  case 2: s = (span){(uint8_t *)16, 0x7fffffff}; break;
  case 3: return (void *)0xfffffffcu;
  case 4: return (char *)&s + 1;
  case 5: thing_drop(999); break;
  case 6: thing_number(0); break;
  case 7: host_fail((char *)0xfffffff0u, 100); break;
  }
  return &s;
}
EXPORT("print") void print(char *p, uint32_t n) {
  fwrite(p, 1, n, stdout);
  fflush(stdout);
  fprintf(stderr, "%u bytes\n", n);
  if (n) free(p);
}
EXPORT("leave") uint32_t leave(uint32_t code) { exit((int)code); }
EXPORT("count") uint32_t count(void) { return ++calls; }
EXPORT("env") void *env(char *p, uint32_t n) {
  static struct { uint8_t some; span s; } r;
  char *name = strndup(p, n), *v = getenv(name);
  free(name), free(p);
  r.some = v != NULL, r.s = v ? (span){(uint8_t *)v, strlen(v)} : (span){0};
  return &r;
}
EXPORT("nap") uint32_t nap(uint32_t ms) {
  struct timespec t = {ms / 1000, ms % 1000 * 1000000};
  return nanosleep(&t, NULL) == 0;
}
