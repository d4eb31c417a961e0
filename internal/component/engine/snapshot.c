// Guests whose memory is detached from their code (wasmbin.Detach), and their state (snapshot.go).
#include "p1.h"
#include <stdio.h>
#include <stdlib.h>

// The names of exports that wasmbin.Detach adds.
static const char global_export[] = "tripod:global/", table_export[] = "tripod:table/";

static bool numbered(tw_inst *i, const char *prefix, uint32_t n, uint8_t kind, wasmtime_extern_t *e) {
  char name[40];
  int len = snprintf(name, sizeof name, "%s%u", prefix, n);
  return wasmtime_instance_export_get(i->cx, &i->guest.mod, name, (size_t)len, e) && e->kind == kind;
}

// look calculates a checksum of the tables: their sizes, and the functions in them. It returns false for a table that
// holds anything else.
static bool look(tw_inst *i, uint32_t ntables, uint64_t *sum) {
  *sum = 14695981039346656037u; // of FNV-1a
  for (uint32_t k = 0; k < ntables; k++) {
    wasmtime_extern_t e;
    if (!numbered(i, table_export, k, WASMTIME_EXTERN_TABLE, &e) || !tripod_table_sum(i->cx, &e.of.table, sum)) return false;
  }
  return true;
}

// begin_from sets the globals to their values in a snapshot.
static bool begin_from(tw_inst *i, const tw_snapshot *s) {
  for (uint32_t k = 0; k < s->nglobals; k++) {
    wasmtime_extern_t e;
    if (!numbered(i, global_export, k, WASMTIME_EXTERN_GLOBAL, &e)) return tw_fail(i, TW_FAILED, "no global %u", k), false;
    if (tw_took(i, wasmtime_global_set(i->cx, &e.of.global, &s->globals[k]), NULL)) return false;
  }
  return true;
}

bool tw_instantiate_detached(tw_inst *i, const tw_code *c, const tw_snapshot *from, bool capture) {
  wasm_trap_t *trap = NULL;
  tw_begin_with(from ? from->memory : c->detached->initial);
  wasmtime_error_t *e = wasmtime_instance_pre_instantiate(c->pre, i->cx, &i->guest.mod, &trap);
  tw_begin_with(NULL);
  if (tw_took(i, e, trap)) return false;
  i->capture.on = capture && look(i, c->detached->ntables, &i->capture.tables);
  return !from || begin_from(i, from);
}

const char *tw_capture(tw_inst *i, const tw_detached *d, wasmtime_val_t *globals) {
  uint64_t tables;
  if (!i->capture.on || !look(i, d->ntables, &tables)) return "it has a table of other values than functions";
  if (tables != i->capture.tables) return "it has changed a table of functions";
  if (i->handles.live) return "it holds resources of the host";
  for (uint32_t k = 0; k < i->p1.nfds; k++) {
    const tw_fd *fd = &i->p1.fds[k];
    if (k < 3 ? fd->kind != FD_STREAM || fd->n != k : k < 3 + i->p1.preopened ? fd->kind != FD_PASSED || fd->n != k : fd->kind)
      return "it has opened or closed descriptors";
  }
  for (uint32_t k = 0; k < d->nglobals; k++) {
    wasmtime_extern_t e;
    if (!numbered(i, global_export, k, WASMTIME_EXTERN_GLOBAL, &e)) return "it lacks a global";
    if (globals) wasmtime_global_get(i->cx, &e.of.global, &globals[k]);
  }
  return NULL;
}
