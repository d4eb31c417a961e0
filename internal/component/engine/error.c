// Why a call ended, and wasmtime's errors and traps.
#define _GNU_SOURCE
#include "tw.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char starved[] = "no memory for the message";

void tw_fail(tw_inst *i, int why, const char *fmt, ...) {
  va_list args;
  va_start(args, fmt);
  free(i->message);
  if (vasprintf(&i->message, fmt, args) < 0) i->message = NULL;
  va_end(args);
  i->why = why;
}

// text returns a message without wasmtime's own backtrace, which is useless, or NULL if there is no memory.
static char *text(wasm_byte_vec_t *v) {
  char *s = tw_get(NULL, v->size + 1), *end;
  if (s) {
    memcpy(s, v->data, v->size), s[v->size] = 0;
    if ((end = strstr(s, "\n\nStack backtrace:"))) *end = 0;
  }
  wasm_byte_vec_delete(v);
  return s;
}

static char *error_text(wasmtime_error_t *e) {
  wasm_byte_vec_t v;
  wasmtime_error_message(e, &v);
  wasmtime_error_delete(e);
  return text(&v);
}

char *tw_error(wasmtime_error_t *e) {
  if (!e) return NULL;
  char *s = error_text(e);
  return s ? s : starved;
}

void tw_free_error(char *s) {
  if (s != starved) free(s);
}

// no_room reports whether the pool, or memory.c, has no room. The C API has no code for it. What follows the words "wasm
// backtrace" has names of the guest's.
static bool no_room(const char *s) {
  const char *at = s ? strstr(s, "maximum concurrent") : NULL, *guest = s ? strstr(s, "wasm backtrace") : NULL;
  return at && (!guest || at < guest);
}

bool tw_took(tw_inst *i, wasmtime_error_t *e, wasm_trap_t *t) {
  if (!e && !t) return false;
  int code;
  bool exited = e && wasmtime_error_exit_status(e, &code);
  char *s;
  if (e) {
    s = error_text(e);
  } else {
    wasm_byte_vec_t v;
    wasm_trap_message(t, &v);
    wasm_trap_delete(t);
    s = text(&v);
  }
  if (i->why) { // whatever ended the guest has already set the reason
    if (i->message) free(s);
    else i->message = s;
    return true;
  }
  free(i->message);
  i->message = s;
  i->why = exited ? TW_EXIT : e && no_room(s) ? TW_NOROOM : TW_TRAP;
  if (exited) i->exit_code = code;
  return true;
}

bool tw_starve(tw_inst *i, const char *what) {
  tw_fail(i, TW_STARVED, "%s", what);
  return false;
}
