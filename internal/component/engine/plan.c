// Instances of several core modules, made and connected by a plan (plan.go).
#include "tw.h"
#include <stdlib.h>
#include <string.h>

// find looks up what a plan refers to. Everything that it refers to has been made before.
static bool find(tw_inst *i, const tw_plan *p, const tw_core *c, wasmtime_extern_t *e) {
  if (c->hosted ? wasmtime_linker_get(p->hosts, i->cx, "", 0, c->name, strlen(c->name), e)
                : wasmtime_instance_export_get(i->cx, &i->guest.mods[c->instance], c->name, strlen(c->name), e))
    return true;
  tw_fail(i, TW_FAILED, "core instance %u has no export %s", c->instance, c->name);
  return false;
}

// step makes a core instance. Its memory, if it has one that is detached, begins with an image.
static bool step(tw_inst *i, const tw_plan *p, uint32_t n, tw_image *memory) {
  const tw_step *s = &p->steps[n];
  wasmtime_extern_t *imports = tw_get(NULL, s->nimports * sizeof *imports);
  if (!imports) return tw_starve(i, "imports");
  bool ok = true;
  for (uint32_t k = 0; k < s->nimports && ok; k++) ok = find(i, p, &s->imports[k], &imports[k]);
  if (ok) {
    wasm_trap_t *trap = NULL;
    tw_begin_with(memory);
    wasmtime_error_t *err = wasmtime_instance_new(i->cx, s->module, imports, s->nimports, &i->guest.mods[n], &trap);
    tw_begin_with(NULL);
    ok = !tw_took(i, err, trap);
  }
  free(imports);
  return ok;
}

void tw_instantiate_plan(tw_inst *i, const tw_code *c, const tw_snapshot *from) {
  const tw_plan *p = c->plan;
  tw_image *memory = from ? from->memory : c->detached ? c->detached->initial : NULL;
  i->guest.mods = tw_zeroed(p->nsteps * sizeof *i->guest.mods), i->guest.allocators = tw_zeroed(p->nallocators * sizeof *i->guest.allocators);
  if (!i->guest.mods || !i->guest.allocators) {
    tw_starve(i, "core instances");
    return;
  }
  i->guest.plan = p, i->phase = TW_STARTS;
  for (uint32_t n = 0; n < p->nsteps; n++) {
    if (!step(i, p, n, p->memory && p->memory->instance == n ? memory : NULL)) return;
    if (!p->memory || p->memory->instance != n) continue;
    wasmtime_extern_t e;
    if (!find(i, p, p->memory, &e)) return;
    if (e.kind != WASMTIME_EXTERN_MEMORY) {
      tw_fail(i, TW_FAILED, "%s is not a memory", p->memory->name);
      return;
    }
    i->guest.memory = e.of.memory, i->guest.has_memory = true;
    tw_memory(i);
  }
}

const wasmtime_func_t *tw_allocator_of(tw_inst *i) {
  if (i->guest.allocator == TW_NONE) return NULL;
  tw_allocator *a = &i->guest.allocators[i->guest.allocator];
  wasmtime_extern_t e;
  if (!a->found && i->guest.plan && find(i, i->guest.plan, &i->guest.plan->allocators[i->guest.allocator], &e) && e.kind == WASMTIME_EXTERN_FUNC)
    a->func = e.of.func, a->found = true;
  return a->found ? &a->func : NULL;
}

static wasm_trap_t *trap(void *none, wasmtime_caller_t *caller, wasmtime_val_raw_t *v, size_t n) {
  (void)none, (void)caller, (void)v, (void)n;
  static const char text[] = "wasm trap: wasm `unreachable` instruction executed";
  return wasmtime_trap_new(text, sizeof text - 1);
}

char *tw_define_trap(wasmtime_linker_t *l, const char *name, const wasm_functype_t *t) {
  return tw_error(wasmtime_linker_define_func_unchecked(l, "", 0, name, strlen(name), t, trap, NULL, NULL));
}
