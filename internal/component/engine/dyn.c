// The component path: conversion between flat values and wasmtime's dynamic values. Values made for wasmtime live in an
// arena and are never passed to wasmtime_component_val_delete.
#include "tw.h"
#include <stdlib.h>
#include <string.h>

// Up to flags, wit.Kind and wasmtime have the same numbers.
_Static_assert(TW_BOOL == WASMTIME_COMPONENT_BOOL && TW_U8 == WASMTIME_COMPONENT_U8 && TW_F64 == WASMTIME_COMPONENT_F64 &&
               TW_STRING == WASMTIME_COMPONENT_STRING && TW_RECORD == WASMTIME_COMPONENT_RECORD &&
               TW_VARIANT == WASMTIME_COMPONENT_VARIANT && TW_OPTION == WASMTIME_COMPONENT_OPTION &&
               TW_FLAGS == WASMTIME_COMPONENT_FLAGS, "kinds");

typedef struct resource {
  struct resource *next;
  wasmtime_component_resource_any_t *any;
  bool borrow;
} resource;

struct tw_arena {
  struct tw_arena *next;
  size_t used, cap;
  resource *resources; // of the whole arena, in the first chunk
  _Alignas(16) uint8_t room[];
};

// room returns n bytes, or ends the call and returns NULL.
static void *room(tw_inst *i, tw_arena **a, size_t n) {
  n = (n + 15) & ~(size_t)15;
  if (!*a || (*a)->cap - (*a)->used < n) {
    size_t cap = n > 8000 ? n : 8000;
    tw_arena *more = tw_get(NULL, sizeof *more + cap);
    if (!more) return tw_starve(i, "a value"), NULL;
    *more = (tw_arena){.next = *a, .cap = cap, .resources = *a ? (*a)->resources : NULL};
    *a = more;
  }
  (*a)->used += n;
  return (*a)->room + (*a)->used - n;
}

void tw_arena_free(tw_arena *a) {
  if (a)
    for (resource *r = a->resources; r; r = r->next) wasmtime_component_resource_any_delete(r->any);
  while (a) {
    tw_arena *next = a->next;
    free(a);
    a = next;
  }
}

void tw_release(tw_inst *i, tw_arena *a, bool take_back) {
  for (resource *r = a && take_back ? a->resources : NULL; r; r = r->next) {
    if (!r->borrow) continue;
    wasmtime_component_resource_host_t *h = NULL; // removed from the store's table without being dropped
    wasmtime_error_t *e = wasmtime_component_resource_any_to_host(i->cx, r->any, &h);
    if (e) wasmtime_error_delete(e);
    else wasmtime_component_resource_host_delete(h);
  }
  tw_arena_free(a);
}

// ---- flat bytes to values ----

static uint32_t next32(tw_src *s) {
  uint32_t v;
  memcpy(&v, s->at, 4);
  s->at += 4;
  return v;
}

static wasm_name_t name_of(const tw_prog *p, const tw_child *c) {
  char *name = (char *)p->names + c->name;
  return (wasm_name_t){strlen(name), name};
}

static bool to_resource(tw_src *s, uint32_t node, wasmtime_component_val_t *v, tw_arena **a) {
  bool own = s->prog->nodes[node].kind == TW_OWN;
  resource *r = room(s->i, a, sizeof *r);
  if (!r || (own && !tw_resource_new(s->i))) return false;
  // Lend the host's own resource: a borrow exists only within a call of the guest, and none is running yet.
  wasmtime_component_resource_host_t *h = wasmtime_component_resource_host_new(true, next32(s), s->prog->resources[node]);
  wasmtime_error_t *e = wasmtime_component_resource_host_to_any(s->i->cx, h, &v->of.resource);
  wasmtime_component_resource_host_delete(h);
  if (tw_took(s->i, e, NULL)) {
    if (own) tw_resource_gone(s->i);
    return false;
  }
  *r = (resource){(*a)->resources, v->of.resource, !own};
  (*a)->resources = r;
  return true;
}

static bool to_list(tw_src *s, const tw_node *n, wasmtime_component_val_t *v, tw_arena **a) {
  uint32_t count = next32(s), elem = s->prog->children[n->first].node;
  wasmtime_component_val_t *all = room(s->i, a, count * sizeof *all);
  if (!all) return false;
  v->of.list.size = count, v->of.list.data = all;
  if (s->prog->nodes[elem].kind == TW_U8) {
    for (uint32_t k = 0; k < count; k++) all[k].kind = WASMTIME_COMPONENT_U8, all[k].of.u8 = s->at[k];
    s->at += count;
    return true;
  }
  for (uint32_t k = 0; k < count; k++)
    if (!tw_to_val(s, elem, &all[k], a)) return false;
  return true;
}

static bool to_record(tw_src *s, const tw_node *n, wasmtime_component_val_t *v, tw_arena **a) {
  wasmtime_component_valrecord_entry_t *all = room(s->i, a, n->count * sizeof *all);
  if (!all) return false;
  v->of.record.size = n->count, v->of.record.data = all;
  for (uint32_t k = 0; k < n->count; k++) {
    const tw_child *c = &s->prog->children[n->first + k];
    all[k].name = name_of(s->prog, c);
    if (!tw_to_val(s, c->node, &all[k].val, a)) return false;
  }
  return true;
}

static bool to_tuple(tw_src *s, const tw_node *n, wasmtime_component_val_t *v, tw_arena **a) {
  v->of.tuple.size = n->count, v->of.tuple.data = room(s->i, a, n->count * sizeof *v);
  if (!v->of.tuple.data) return false;
  for (uint32_t k = 0; k < n->count; k++)
    if (!tw_to_val(s, s->prog->children[n->first + k].node, &v->of.tuple.data[k], a)) return false;
  return true;
}

static bool to_case(tw_src *s, const tw_node *n, wasmtime_component_val_t *v, tw_arena **a) {
  uint32_t which = next32(s);
  const tw_child *c = &s->prog->children[n->first + which];
  wasmtime_component_val_t *payload = NULL;
  if (c->node != TW_NONE) {
    payload = room(s->i, a, sizeof *payload);
    if (!payload || !tw_to_val(s, c->node, payload, a)) return false;
  }
  switch (n->kind) {
  case TW_OPTION:
    v->of.option = payload;
    return true;
  case TW_RESULT:
    v->of.result.is_ok = which == 0, v->of.result.val = payload;
    return true;
  case TW_ENUM:
    v->of.enumeration = name_of(s->prog, c);
    return true;
  default:
    v->of.variant.discriminant = name_of(s->prog, c), v->of.variant.val = payload;
    return true;
  }
}

static bool to_flags(tw_src *s, const tw_node *n, wasmtime_component_val_t *v, tw_arena **a) {
  v->of.flags.size = 0, v->of.flags.data = room(s->i, a, n->count * sizeof(wasm_name_t));
  if (!v->of.flags.data) return false;
  uint32_t w = 0;
  for (uint32_t k = 0; k < n->count; k++) {
    if (k % 32 == 0) w = next32(s);
    if (w >> (k % 32) & 1) v->of.flags.data[v->of.flags.size++] = name_of(s->prog, &s->prog->children[n->first + k]);
  }
  return true;
}

bool tw_to_val(tw_src *s, uint32_t node, wasmtime_component_val_t *v, tw_arena **a) {
  const tw_node *n = &s->prog->nodes[node];
  memset(v, 0, sizeof *v);
  v->kind = n->kind >= TW_OWN ? WASMTIME_COMPONENT_RESOURCE : n->kind;
  switch (n->kind) {
  case TW_STRING:
    v->of.string.size = next32(s), v->of.string.data = (char *)s->at;
    s->at += v->of.string.size;
    return true;
  case TW_LIST:
    return to_list(s, n, v, a);
  case TW_RECORD:
    return to_record(s, n, v, a);
  case TW_TUPLE:
    return to_tuple(s, n, v, a);
  case TW_VARIANT:
  case TW_ENUM:
  case TW_OPTION:
  case TW_RESULT:
    return to_case(s, n, v, a);
  case TW_FLAGS:
    return to_flags(s, n, v, a);
  case TW_OWN:
  case TW_BORROW:
    return to_resource(s, node, v, a);
  default: // numbers are at the low end of the union
    memcpy(&v->of, s->at, n->size);
    s->at += n->size;
    return true;
  }
}

// ---- values to flat bytes ----

static bool out(tw_inst *i, tw_buf *b, const void *from, size_t n) {
  tw_put(b, from, n);
  if (b->starved) return tw_starve(i, "a value");
  if (b->failed) tw_fail(i, TW_OUTPUT, "a value of more than %zu bytes", b->max);
  return !b->failed;
}

static bool odd(tw_inst *i) {
  tw_fail(i, TW_FAILED, "wasmtime returned a value of the wrong type");
  return false;
}

static bool from_resource(tw_inst *i, const tw_prog *p, uint32_t node, const wasmtime_component_val_t *v, tw_buf *b) {
  wasmtime_component_resource_host_t *h = NULL;
  if (tw_took(i, wasmtime_component_resource_any_to_host(i->cx, v->of.resource, &h), NULL)) return false;
  uint32_t rep = wasmtime_component_resource_host_rep(h), type = wasmtime_component_resource_host_type(h);
  wasmtime_component_resource_host_delete(h);
  if (type != p->resources[node]) return odd(i);
  if (p->nodes[node].kind == TW_OWN) tw_resource_gone(i);
  return out(i, b, &rep, 4);
}

static bool from_list(tw_inst *i, const tw_prog *p, const tw_node *n, const wasmtime_component_val_t *v, tw_buf *b) {
  uint32_t count = (uint32_t)v->of.list.size, elem = p->children[n->first].node;
  const wasmtime_component_val_t *all = v->of.list.data;
  if (!out(i, b, &count, 4)) return false;
  if (p->nodes[elem].kind == TW_U8) {
    uint8_t *to = tw_room(b, count);
    if (!to) return out(i, b, NULL, 0);
    for (uint32_t k = 0; k < count; k++) to[k] = all[k].of.u8;
    return true;
  }
  for (uint32_t k = 0; k < count; k++)
    if (!tw_from_val(i, p, elem, &all[k], b)) return false;
  return true;
}

static uint32_t case_named(const tw_prog *p, const tw_node *n, const wasm_name_t *name) {
  for (uint32_t k = 0; k < n->count; k++) {
    const char *s = p->names + p->children[n->first + k].name;
    if (!strncmp(s, name->data, name->size) && !s[name->size]) return k;
  }
  return TW_NONE;
}

static bool from_case(tw_inst *i, const tw_prog *p, const tw_node *n, const wasmtime_component_val_t *v, tw_buf *b) {
  uint32_t which;
  const wasmtime_component_val_t *payload = NULL;
  switch (n->kind) {
  case TW_OPTION:
    payload = v->of.option, which = payload != NULL;
    break;
  case TW_RESULT:
    payload = v->of.result.val, which = !v->of.result.is_ok;
    break;
  case TW_ENUM:
    which = case_named(p, n, &v->of.enumeration);
    break;
  default:
    payload = v->of.variant.val, which = case_named(p, n, &v->of.variant.discriminant);
  }
  if (which == TW_NONE) return odd(i);
  uint32_t node = p->children[n->first + which].node;
  if ((node != TW_NONE) != (payload != NULL)) return odd(i);
  return out(i, b, &which, 4) && (!payload || tw_from_val(i, p, node, payload, b));
}

static bool from_flags(tw_inst *i, const tw_prog *p, const tw_node *n, const wasmtime_component_val_t *v, tw_buf *b) {
  uint32_t words = (n->count + 31) / 32;
  uint8_t *to = tw_room(b, (size_t)words * 4);
  if (!to) return out(i, b, NULL, 0);
  memset(to, 0, (size_t)words * 4);
  for (size_t k = 0; k < v->of.flags.size; k++) {
    uint32_t f = case_named(p, n, &v->of.flags.data[k]);
    if (f == TW_NONE) return odd(i);
    to[f / 8] |= (uint8_t)(1 << f % 8);
  }
  return true;
}

bool tw_from_val(tw_inst *i, const tw_prog *p, uint32_t node, const wasmtime_component_val_t *v, tw_buf *b) {
  const tw_node *n = &p->nodes[node];
  if (v->kind != (n->kind >= TW_OWN ? WASMTIME_COMPONENT_RESOURCE : n->kind)) return odd(i);
  uint32_t count;
  switch (n->kind) {
  case TW_STRING:
    count = (uint32_t)v->of.string.size;
    return out(i, b, &count, 4) && out(i, b, v->of.string.data, count);
  case TW_LIST:
    return from_list(i, p, n, v, b);
  case TW_RECORD:
    if (v->of.record.size != n->count) return odd(i);
    for (uint32_t k = 0; k < n->count; k++)
      if (!tw_from_val(i, p, p->children[n->first + k].node, &v->of.record.data[k].val, b)) return false;
    return true;
  case TW_TUPLE:
    if (v->of.tuple.size != n->count) return odd(i);
    for (uint32_t k = 0; k < n->count; k++)
      if (!tw_from_val(i, p, p->children[n->first + k].node, &v->of.tuple.data[k], b)) return false;
    return true;
  case TW_VARIANT:
  case TW_ENUM:
  case TW_OPTION:
  case TW_RESULT:
    return from_case(i, p, n, v, b);
  case TW_FLAGS:
    return from_flags(i, p, n, v, b);
  case TW_OWN:
  case TW_BORROW:
    return from_resource(i, p, node, v, b);
  default:
    return out(i, b, &v->of, n->size);
  }
}
