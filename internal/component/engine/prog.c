// Type tables, buffers, and the check of flat values before any guest code sees them.
#include "tw.h"
#include <stdlib.h>
#include <string.h>

uint32_t tw_align(uint32_t n, uint32_t align) { return (n + align - 1) & ~(align - 1); }

enum { HEADER_WORDS = 8, NODE_WORDS = 10, CHILD_WORDS = 3, MAGIC = 0x31505654 };

static uint32_t flat_params(const tw_prog *p) {
  uint32_t n = 0;
  for (uint32_t k = 0; k < p->nparams; k++) {
    uint32_t c = p->nodes[p->params[k]].ncore;
    if (c == TW_NONE || (n += c) > TW_MAX_FLAT) return TW_NONE;
  }
  return n;
}

tw_prog *tw_prog_new(const uint8_t *table, size_t len, const uint32_t *resources) {
  uint32_t h[HEADER_WORDS];
  if (len < sizeof h) return NULL;
  memcpy(h, table, sizeof h);
  size_t words = HEADER_WORDS + h[6] + (size_t)h[2] * NODE_WORDS + (size_t)h[3] * CHILD_WORDS;
  if (h[0] != MAGIC || h[1] != len || words * 4 + h[4] + h[5] != len) return NULL;
  size_t padded = (len + 3) & ~(size_t)3;
  tw_prog *p = tw_zeroed(sizeof *p + padded + (size_t)h[2] * 4);
  if (!p) return NULL;
  uint32_t *w = (uint32_t *)(p + 1);
  memcpy(w, table, len);
  p->nparams = h[6], p->result = h[7];
  p->params = w + HEADER_WORDS;
  p->nodes = (const tw_node *)(p->params + h[6]);
  p->children = (const tw_child *)(p->nodes + h[2]);
  p->cores = (const uint8_t *)(p->children + h[3]);
  p->names = (const char *)p->cores + h[4];
  p->resources = memcpy((uint8_t *)w + padded, resources, (size_t)h[2] * 4);
  p->param_core = flat_params(p);
  p->result_core = p->result == TW_NONE ? 0 : p->nodes[p->result].ncore;
  p->spill_align = 1;
  for (uint32_t k = 0; k < p->nparams; k++) {
    const tw_node *n = &p->nodes[p->params[k]];
    p->spill_size = tw_align(p->spill_size, n->align) + n->size;
    if (n->align > p->spill_align) p->spill_align = n->align;
  }
  p->spill_size = tw_align(p->spill_size, p->spill_align);
  return p;
}

void tw_prog_free(tw_prog *p) { free(p); }

uint8_t *tw_room(tw_buf *b, size_t n) {
  if (b->failed || n > b->max - b->len) {
    b->failed = true;
    return NULL;
  }
  if (n > b->cap - b->len) {
    size_t cap = b->len + n > b->max / 2 ? b->max : (b->len + n) * 2;
    if (cap < 256) cap = 256;
    uint8_t *data = tw_get(b->owned ? b->data : NULL, cap);
    if (!data) {
      b->failed = b->starved = true;
      return NULL;
    }
    if (!b->owned && b->len) memcpy(data, b->data, b->len);
    b->data = data, b->cap = cap, b->owned = true;
  }
  b->len += n;
  return b->data + b->len - n;
}

void tw_put(tw_buf *b, const void *from, size_t n) {
  uint8_t *to = tw_room(b, n);
  if (to && n) memcpy(to, from, n);
}

void tw_buf_free(tw_buf *b) {
  if (b->owned) free(b->data);
  b->data = NULL, b->len = b->cap = 0, b->owned = b->failed = b->starved = false;
}

// ---- the check ----

typedef struct {
  const tw_prog *prog;
  const uint8_t *at, *end;
  const char *text;
} check;

static bool bad(check *c, const char *text) {
  c->text = text;
  return false;
}

static bool take(check *c, size_t n) {
  if (n > (size_t)(c->end - c->at)) return bad(c, "too few bytes");
  c->at += n;
  return true;
}

static bool take32(check *c, uint32_t *v) {
  if (!take(c, 4)) return false;
  memcpy(v, c->at - 4, 4);
  return true;
}

// tw_utf8 follows table 3-7 of the Unicode standard: no overlong forms, no surrogates, nothing above U+10FFFF.
bool tw_utf8(const uint8_t *s, size_t n) {
  const uint8_t *end = s + n;
  while (s < end) {
    uint64_t eight;
    if (end - s >= 8 && (memcpy(&eight, s, 8), !(eight & 0x8080808080808080u))) {
      s += 8;
      continue;
    }
    uint8_t b = *s++;
    if (b < 0x80) continue;
    int more = b >= 0xf0 ? 3 : b >= 0xe0 ? 2 : 1;
    if (b < 0xc2 || b > 0xf4 || end - s < more) return false;
    uint8_t low = b == 0xe0 ? 0xa0 : b == 0xf0 ? 0x90 : 0x80, high = b == 0xed ? 0x9f : b == 0xf4 ? 0x8f : 0xbf;
    if (*s < low || *s > high) return false;
    for (int k = 1; k < more; k++)
      if ((s[k] & 0xc0) != 0x80) return false;
    s += more;
  }
  return true;
}

bool tw_char(uint32_t c) { return c < 0xd800 || (c > 0xdfff && c < 0x110000); }

static bool check_value(check *c, uint32_t node);

static bool check_list(check *c, const tw_node *n) {
  uint32_t count, elem = c->prog->children[n->first].node;
  if (!take32(c, &count)) return false;
  const tw_node *e = &c->prog->nodes[elem];
  if ((uint64_t)count * e->size > UINT32_MAX / 2) return bad(c, "a list that is too large for any memory");
  if (e->kind >= TW_S8 && e->kind <= TW_F64) return take(c, (size_t)count * e->size);
  for (uint32_t k = 0; k < count; k++)
    if (!check_value(c, elem)) return false;
  return true;
}

static bool check_flags(check *c, uint32_t n) {
  for (uint32_t w; n; n -= n < 32 ? n : 32) {
    if (!take32(c, &w)) return false;
    if (n < 32 && w >> n) return bad(c, "an unknown flag");
  }
  return true;
}

static bool check_case(check *c, const tw_node *n) {
  uint32_t which;
  if (!take32(c, &which)) return false;
  if (which >= n->count) return bad(c, "an unknown case");
  uint32_t payload = c->prog->children[n->first + which].node;
  return payload == TW_NONE || check_value(c, payload);
}

static bool check_value(check *c, uint32_t node) {
  const tw_node *n = &c->prog->nodes[node];
  uint32_t v;
  switch (n->kind) {
  case TW_BOOL:
    return take(c, 1) && (c->at[-1] < 2 || bad(c, "a bool that is neither 0 nor 1"));
  case TW_CHAR:
    return take32(c, &v) && (tw_char(v) || bad(c, "a char that is not a Unicode scalar value"));
  case TW_STRING:
    if (!take32(c, &v) || !take(c, v)) return false;
    return tw_utf8(c->at - v, v) || bad(c, "a string that is not UTF-8");
  case TW_LIST:
    return check_list(c, n);
  case TW_RECORD:
  case TW_TUPLE:
    for (uint32_t k = 0; k < n->count; k++)
      if (!check_value(c, c->prog->children[n->first + k].node)) return false;
    return true;
  case TW_VARIANT:
  case TW_ENUM:
  case TW_OPTION:
  case TW_RESULT:
    return check_case(c, n);
  case TW_FLAGS:
    return check_flags(c, n->count);
  default: // numbers and resources
    return take(c, n->size);
  }
}

int64_t tw_check(const tw_prog *p, bool result, const uint8_t *flat, size_t len, const char **text) {
  check c = {p, flat, flat + len, NULL};
  uint32_t n = result ? p->result != TW_NONE : p->nparams;
  for (uint32_t k = 0; k < n; k++)
    if (!check_value(&c, result ? p->result : p->params[k])) {
      *text = c.text;
      return -1;
    }
  if (c.at != c.end) {
    *text = "too many bytes";
    return -1;
  }
  return c.at - flat;
}
