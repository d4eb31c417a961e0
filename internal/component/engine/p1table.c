// The table of preview 1's functions, without their implementations.
#include "tw.h"

static const struct {
  const char *name, *params;
  uint32_t fds;
} functions[] = {
#define P1(name, params, fds, run) {name, params, fds},
#include "p1table.h"
#undef P1
};

const char *tw_preview1(uint32_t n, const char **params, uint32_t *fds) {
  if (n == sizeof functions / sizeof *functions) return NULL;
  return *params = functions[n].params, *fds = functions[n].fds, functions[n].name;
}
