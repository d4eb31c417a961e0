// The canonical ABI of the component model (WebAssembly/component-model, CanonicalABI.md) for guests in C without generated
// bindings. Include it once, in the only source file of a component.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define IMPORT(module, name) __attribute__((import_module(module), import_name(name)))
#define EXPORT(name) __attribute__((export_name(name)))

// str is a string or list<u8>. list is any other list: a pointer to the elements and their number.
typedef struct {
  const char *ptr;
  uint32_t len;
} str;
typedef struct {
  void *ptr;
  uint32_t len;
} list;

#define STR(literal) ((str){"" literal, sizeof(literal) - 1})
// A string is passed as two parameters.
#define FLAT(s) (s).ptr, (s).len

static inline int eq(str a, str b) { return a.len == b.len && memcmp(a.ptr, b.ptr, a.len) == 0; }
static inline int begins(str s, str prefix) { return s.len >= prefix.len && memcmp(s.ptr, prefix.ptr, prefix.len) == 0; }

// Memory that a call allocates, or that the host allocates for it, lives until release(): at the end of the call, or after
// each message of a stream.
typedef struct chunk {
  struct chunk *next;
  uint64_t data[];
} chunk;
static chunk *chunks;

static void *allocate(size_t size) {
  chunk *c = malloc(sizeof(chunk) + size);
  if (c == NULL) __builtin_trap();
  c->next = chunks;
  chunks = c;
  return c->data;
}

// release frees everything allocated after mark; NULL frees everything.
static void release(chunk *mark) {
  while (chunks != mark) {
    chunk *c = chunks;
    chunks = c->next;
    free(c);
  }
}

// The host calls this to allocate memory for arguments. It never grows an allocation.
EXPORT("cabi_realloc") void *cabi_realloc(void *old, size_t old_size, size_t align, size_t size) {
  if (old != NULL || align > sizeof(uint64_t)) __builtin_trap();
  return size == 0 ? (void *)align : allocate(size);
}

// On hosts without preview 1, an adapter keeps its state in our memory, forever.
EXPORT("cabi_realloc_adapter") void *cabi_realloc_adapter(void *old, size_t old_size, size_t align, size_t size) {
  if (old != NULL) __builtin_trap();
  void *p = aligned_alloc(align < 16 ? 16 : align, (size + 15) & ~15u);
  if (p == NULL) __builtin_trap();
  return p;
}

// join concatenates strings in memory of the call.
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

// decimal formats a number in memory of the call.
static inline str decimal(uint64_t n) {
  char *end = (char *)allocate(20) + 20, *p = end;
  do *--p = '0' + n % 10;
  while ((n /= 10) > 0);
  return (str){p, end - p};
}
