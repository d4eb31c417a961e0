// The canonical ABI of the component model (WebAssembly/component-model, CanonicalABI.md), as far as a guest in C that
// writes it by hand needs it. A component made of one file includes this once.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define IMPORT(module, name) __attribute__((import_module(module), import_name(name)))
#define EXPORT(name) __attribute__((export_name(name)))

// A string or list<u8>; any other list is a pointer to its elements and their number.
typedef struct {
  const char *ptr;
  uint32_t len;
} str;
typedef struct {
  void *ptr;
  uint32_t len;
} list;

#define STR(literal) ((str){"" literal, sizeof(literal) - 1})
// Parameters are passed one by one: a string is two of them.
#define FLAT(s) (s).ptr, (s).len

static inline int eq(str a, str b) { return a.len == b.len && memcmp(a.ptr, b.ptr, a.len) == 0; }
static inline int begins(str s, str prefix) { return s.len >= prefix.len && memcmp(s.ptr, prefix.ptr, prefix.len) == 0; }

// What a call allocates, and what the host allocates for it, lives until release(): at the end of the call, or from one
// message of a stream to the next.
typedef struct chunk {
  struct chunk *below;
  uint64_t data[];
} chunk;
static chunk *chunks;

static void *allocate(size_t size) {
  chunk *c = malloc(sizeof(chunk) + size);
  if (c == NULL) __builtin_trap();
  c->below = chunks;
  chunks = c;
  return c->data;
}

// release frees what was allocated since mark was the top; NULL frees all.
static void release(chunk *mark) {
  while (chunks != mark) {
    chunk *c = chunks;
    chunks = c->below;
    free(c);
  }
}

// The host calls this to place arguments. Nothing here asks it to grow what it has placed.
EXPORT("cabi_realloc") void *cabi_realloc(void *old, size_t old_size, size_t align, size_t size) {
  if (old != NULL || align > sizeof(uint64_t)) __builtin_trap();
  return size == 0 ? (void *)align : allocate(size);
}

// Where the host has no preview 1 of its own, an adapter keeps its state in our memory, for good.
EXPORT("cabi_realloc_adapter") void *cabi_realloc_adapter(void *old, size_t old_size, size_t align, size_t size) {
  if (old != NULL) __builtin_trap();
  void *p = aligned_alloc(align < 16 ? 16 : align, (size + 15) & ~15u);
  if (p == NULL) __builtin_trap();
  return p;
}

// join puts strings one after the other into memory of the call.
#define join(...) join_all((str[]){__VA_ARGS__}, sizeof((str[]){__VA_ARGS__}) / sizeof(str))
static inline str join_all(const str *parts, size_t n) {
  size_t len = 0, at = 0;
  for (size_t i = 0; i < n; i++) len += parts[i].len;
  char *p = allocate(len);
  for (size_t i = 0; i < n; i++) {
    memcpy(p + at, parts[i].ptr, parts[i].len);
    at += parts[i].len;
  }
  return (str){p, len};
}

// decimal writes a number into memory of the call.
static inline str decimal(uint64_t n) {
  char *end = (char *)allocate(20) + 20, *p = end;
  do *--p = '0' + n % 10;
  while ((n /= 10) > 0);
  return (str){p, end - p};
}
