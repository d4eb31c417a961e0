// The core path: conversion between flat values and linear memory by the canonical ABI
// (https://github.com/WebAssembly/component-model/blob/main/design/mvp/CanonicalABI.md), and the guest's handles. Flat
// bytes from the caller have been checked (tw_check). Nothing from the guest is trusted.
#include "tw.h"
#include <stdlib.h>
#include <string.h>

static bool broken(tw_inst *i, const char *what) {
  tw_fail(i, TW_ABI, "%s", what);
  return false;
}

// Linear memory can move when it grows, so do not keep this pointer across calls into the guest.
static uint8_t *mem(tw_inst *i, uint32_t addr) { return wasmtime_memory_data(i->cx, &i->guest.memory) + addr; }

bool tw_range(tw_inst *i, uint32_t addr, uint64_t size, uint32_t align) {
  if (!i->guest.has_memory) return broken(i, "the guest exports no memory");
  if (addr % align) return broken(i, "a pointer of the guest is not aligned");
  if (addr + size > wasmtime_memory_data_size(i->cx, &i->guest.memory)) return broken(i, "a pointer of the guest is out of bounds");
  return true;
}

bool tw_alloc(tw_inst *i, uint32_t size, uint32_t align, uint32_t *addr) {
  const wasmtime_func_t *realloc = tw_allocator_of(i);
  if (!realloc) return broken(i, "the guest exports no cabi_realloc");
  wasmtime_val_raw_t v[4];
  memset(v, 0, sizeof v);
  v[2].i32 = (int32_t)align, v[3].i32 = (int32_t)size;
  wasm_trap_t *trap = NULL;
  i->inside = true;
  wasmtime_error_t *err = wasmtime_func_call_unchecked(i->cx, realloc, v, 4, &trap);
  i->inside = false;
  if (tw_took(i, err, trap)) {
    // A trap is the only way in which an allocator can report that there is no more memory.
    if (i->why == TW_TRAP && size > 0) i->why = TW_MEMORY;
    return false;
  }
  *addr = (uint32_t)v[0].i32;
  return tw_range(i, *addr, size, align);
}

// ---- handles ----

bool tw_resource_new(tw_inst *i) {
  if (i->handles.live >= i->handles.max || !tw_take(i->account, TW_RESOURCES, 1)) {
    tw_fail(i, TW_HANDLES, "%u resources", i->handles.live);
    return false;
  }
  return ++i->handles.live;
}

void tw_resource_gone(tw_inst *i) {
  if (!i->handles.live) return;
  i->handles.live--;
  tw_give(i->account, TW_RESOURCES, 1);
}

bool tw_handle_new(tw_inst *i, uint32_t type, uint32_t rep, bool own, uint32_t *handle) {
  if (!i->handles.free) {
    if (i->handles.n == i->handles.cap) {
      uint32_t cap = i->handles.cap ? i->handles.cap * 2 : 16;
      tw_handle *more = tw_get(i->handles.list, cap * sizeof *more);
      if (!more) return tw_starve(i, "a handle");
      i->handles.list = more, i->handles.cap = cap;
      if (!i->handles.n) i->handles.n = 1; // 0 is not a valid handle
    }
    i->handles.free = i->handles.n++;
    i->handles.list[i->handles.free] = (tw_handle){.rep = 0, .type = TW_NONE};
  }
  if (!tw_resource_new(i)) return false;
  *handle = i->handles.free;
  tw_handle *h = &i->handles.list[*handle];
  i->handles.free = h->rep;
  *h = (tw_handle){.rep = rep, .type = type, .own = own};
  if (!own) i->handles.borrows++;
  return true;
}

bool tw_handle_get(tw_inst *i, uint32_t handle, uint32_t type, tw_handle **h) {
  if (!handle || handle >= i->handles.n || i->handles.list[handle].type == TW_NONE) return broken(i, "an unknown handle");
  if (i->handles.list[handle].type != type) return broken(i, "a handle of another type of resource");
  *h = &i->handles.list[handle];
  return true;
}

void tw_handle_drop(tw_inst *i, uint32_t handle) {
  tw_handle *h = &i->handles.list[handle];
  if (!h->own) i->handles.borrows--;
  *h = (tw_handle){.rep = i->handles.free, .type = TW_NONE};
  i->handles.free = handle;
  tw_resource_gone(i);
}

// ---- lowering: flat bytes to the guest ----

static uint32_t next32(tw_src *s) {
  uint32_t v;
  memcpy(&v, s->at, 4);
  s->at += 4;
  return v;
}

// lower_list lowers a string or list and returns its address and length.
static bool lower_list(tw_src *s, const tw_node *n, uint32_t *addr, uint32_t *count) {
  const tw_node *e = n->kind == TW_LIST ? &s->prog->nodes[s->prog->children[n->first].node] : NULL;
  *count = next32(s);
  uint32_t each = e ? e->size : 1, size = *count * each;
  if (!tw_alloc(s->i, size, e ? e->align : 1, addr)) return false;
  if (!e || e->kind <= TW_F64) { // bools too, which are 0 and 1 in both encodings
    if (size) memcpy(mem(s->i, *addr), s->at, size);
    s->at += size;
    return true;
  }
  for (uint32_t k = 0; k < *count; k++)
    if (!tw_lower_at(s, s->prog->children[n->first].node, *addr + k * each)) return false;
  return true;
}

static bool lower_handle(tw_src *s, uint32_t node, uint32_t *handle) {
  uint32_t rep = next32(s);
  return tw_handle_new(s->i, s->prog->resources[node], rep, s->prog->nodes[node].kind == TW_OWN, handle);
}

static bool lower_case_at(tw_src *s, const tw_node *n, uint32_t addr) {
  uint32_t which = next32(s), payload = s->prog->children[n->first + which].node;
  memcpy(mem(s->i, addr), &which, n->discriminant);
  return payload == TW_NONE || tw_lower_at(s, payload, addr + n->payload);
}

bool tw_lower_at(tw_src *s, uint32_t node, uint32_t addr) {
  const tw_node *n = &s->prog->nodes[node];
  uint32_t pair[2];
  switch (n->kind) {
  case TW_STRING:
  case TW_LIST:
    if (!lower_list(s, n, &pair[0], &pair[1])) return false;
    memcpy(mem(s->i, addr), pair, 8);
    return true;
  case TW_RECORD:
  case TW_TUPLE:
    for (const tw_child *c = s->prog->children + n->first, *end = c + n->count; c < end; c++)
      if (!tw_lower_at(s, c->node, addr + c->offset)) return false;
    return true;
  case TW_VARIANT:
  case TW_ENUM:
  case TW_OPTION:
  case TW_RESULT:
    return lower_case_at(s, n, addr);
  case TW_OWN:
  case TW_BORROW:
    if (!lower_handle(s, node, &pair[0])) return false;
    memcpy(mem(s->i, addr), pair, 4);
    return true;
  case TW_FLAGS:
    memcpy(mem(s->i, addr), s->at, n->size);
    s->at += (n->count + 31) / 32 * 4;
    return true;
  default:
    memcpy(mem(s->i, addr), s->at, n->size);
    s->at += n->size;
    return true;
  }
}

static int32_t sign_extend(uint32_t kind, uint32_t v) {
  return kind == TW_S8 ? (int8_t)v : kind == TW_S16 ? (int16_t)v : (int32_t)v;
}

// tw_lower_flat writes the value's core values to v, which is zeroed. In a slot shared by the cases of a variant, a
// narrower value occupies the low bits, so every value can be written with its own type.
bool tw_lower_flat(tw_src *s, uint32_t node, wasmtime_val_raw_t *v) {
  const tw_node *n = &s->prog->nodes[node];
  uint32_t which, handle, small = 0;
  switch (n->kind) {
  case TW_STRING:
  case TW_LIST:
    return lower_list(s, n, (uint32_t *)&v[0].i32, (uint32_t *)&v[1].i32);
  case TW_RECORD:
  case TW_TUPLE:
    for (uint32_t k = 0; k < n->count; k++) {
      uint32_t child = s->prog->children[n->first + k].node;
      if (!tw_lower_flat(s, child, v)) return false;
      v += s->prog->nodes[child].ncore;
    }
    return true;
  case TW_VARIANT:
  case TW_ENUM:
  case TW_OPTION:
  case TW_RESULT:
    v->i32 = (int32_t)(which = next32(s));
    which = s->prog->children[n->first + which].node;
    return which == TW_NONE || tw_lower_flat(s, which, v + 1);
  case TW_OWN:
  case TW_BORROW:
    if (!lower_handle(s, node, &handle)) return false;
    v->i32 = (int32_t)handle;
    return true;
  case TW_FLAGS:
    for (uint32_t k = 0; k < n->ncore; k++) v[k].i32 = (int32_t)next32(s);
    return true;
  case TW_S64:
  case TW_U64:
  case TW_F64:
    memcpy(&v->i64, s->at, 8);
    s->at += 8;
    return true;
  default:
    memcpy(&small, s->at, n->size);
    s->at += n->size;
    v->i32 = sign_extend(n->kind, small);
    return true;
  }
}

// ---- lifting: values from the guest to flat bytes ----

static bool out(tw_inst *i, tw_buf *b, const void *from, size_t n) {
  tw_put(b, from, n);
  if (b->starved) return tw_starve(i, "a value");
  if (b->failed) tw_fail(i, TW_OUTPUT, "a value of more than %zu bytes", b->max);
  return !b->failed;
}

static bool lift_list(tw_inst *i, const tw_prog *p, const tw_node *n, uint32_t addr, uint32_t count, tw_buf *b) {
  uint32_t elem = n->kind == TW_LIST ? p->children[n->first].node : TW_NONE;
  const tw_node *e = elem == TW_NONE ? NULL : &p->nodes[elem];
  uint32_t each = e ? e->size : 1;
  if (!tw_range(i, addr, (uint64_t)count * each, e ? e->align : 1) || !out(i, b, &count, 4)) return false;
  if (!e || (e->kind >= TW_S8 && e->kind <= TW_F64)) {
    if (!out(i, b, mem(i, addr), (size_t)count * each)) return false; // before the check, because it may be all of the memory
    return e || tw_utf8(b->data + b->len - count, count) || broken(i, "a string of the guest is not UTF-8");
  }
  for (uint32_t k = 0; k < count; k++)
    if (!tw_lift_at(i, p, elem, addr + k * each, b)) return false;
  return true;
}

static bool lift_handle(tw_inst *i, const tw_prog *p, uint32_t node, uint32_t handle, tw_buf *b) {
  tw_handle *h;
  if (!tw_handle_get(i, handle, p->resources[node], &h)) return false;
  uint32_t rep = h->rep;
  if (p->nodes[node].kind == TW_OWN) {
    if (!h->own) return broken(i, "the guest passed on a borrowed handle as its own");
    tw_handle_drop(i, handle);
  }
  return out(i, b, &rep, 4);
}

static bool lift_case(tw_inst *i, const tw_prog *p, const tw_node *n, uint32_t which, uint32_t *payload, tw_buf *b) {
  if (which >= n->count) return broken(i, "an unknown case");
  *payload = p->children[n->first + which].node;
  return out(i, b, &which, 4);
}

// lift_flags lifts the k-th word of flags.
static bool lift_flags(tw_inst *i, const tw_node *n, uint32_t k, uint32_t word, tw_buf *b) {
  uint32_t rest = n->count - k * 32;
  if (rest < 32) word &= (1u << rest) - 1;
  return out(i, b, &word, 4);
}

// lift_word lifts a value of at most 32 bits.
static bool lift_word(tw_inst *i, const tw_node *n, uint32_t v, tw_buf *b) {
  if (n->kind == TW_BOOL) v = v != 0;
  if (n->kind == TW_CHAR && !tw_char(v)) return broken(i, "a char that is not a Unicode scalar value");
  return out(i, b, &v, n->size);
}

bool tw_lift_at(tw_inst *i, const tw_prog *p, uint32_t node, uint32_t addr, tw_buf *b) {
  const tw_node *n = &p->nodes[node];
  uint32_t v[2] = {0}, payload;
  switch (n->kind) {
  case TW_STRING:
  case TW_LIST:
    memcpy(v, mem(i, addr), 8);
    return lift_list(i, p, n, v[0], v[1], b);
  case TW_RECORD:
  case TW_TUPLE:
    for (const tw_child *c = p->children + n->first, *end = c + n->count; c < end; c++)
      if (!tw_lift_at(i, p, c->node, addr + c->offset, b)) return false;
    return true;
  case TW_VARIANT:
  case TW_ENUM:
  case TW_OPTION:
  case TW_RESULT:
    memcpy(v, mem(i, addr), n->discriminant);
    if (!lift_case(i, p, n, v[0], &payload, b)) return false;
    return payload == TW_NONE || tw_lift_at(i, p, payload, addr + n->payload, b);
  case TW_OWN:
  case TW_BORROW:
    memcpy(v, mem(i, addr), 4);
    return lift_handle(i, p, node, v[0], b);
  case TW_FLAGS:
    for (uint32_t k = 0; k * 32 < n->count; k++) {
      uint32_t word = 0, left = n->size - 4 * k;
      memcpy(&word, mem(i, addr + 4 * k), left < 4 ? left : 4);
      if (!lift_flags(i, n, k, word, b)) return false;
    }
    return true;
  case TW_S64:
  case TW_U64:
  case TW_F64:
    return out(i, b, mem(i, addr), 8);
  default:
    memcpy(v, mem(i, addr), n->size);
    return lift_word(i, n, v[0], b);
  }
}

bool tw_lift_flat(tw_inst *i, const tw_prog *p, uint32_t node, const wasmtime_val_raw_t *v, tw_buf *b) {
  const tw_node *n = &p->nodes[node];
  uint32_t payload;
  switch (n->kind) {
  case TW_STRING:
  case TW_LIST:
    return lift_list(i, p, n, (uint32_t)v[0].i32, (uint32_t)v[1].i32, b);
  case TW_RECORD:
  case TW_TUPLE:
    for (uint32_t k = 0; k < n->count; k++) {
      uint32_t child = p->children[n->first + k].node;
      if (!tw_lift_flat(i, p, child, v, b)) return false;
      v += p->nodes[child].ncore;
    }
    return true;
  case TW_VARIANT:
  case TW_ENUM:
  case TW_OPTION:
  case TW_RESULT:
    if (!lift_case(i, p, n, (uint32_t)v->i32, &payload, b)) return false;
    return payload == TW_NONE || tw_lift_flat(i, p, payload, v + 1, b);
  case TW_OWN:
  case TW_BORROW:
    return lift_handle(i, p, node, (uint32_t)v->i32, b);
  case TW_FLAGS:
    for (uint32_t k = 0; k < n->ncore; k++)
      if (!lift_flags(i, n, k, (uint32_t)v[k].i32, b)) return false;
    return true;
  case TW_S64:
  case TW_U64:
  case TW_F64:
    return out(i, b, &v->i64, 8);
  default:
    return lift_word(i, n, (uint32_t)v->i32, b);
  }
}
