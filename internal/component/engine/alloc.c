// Memory of the C half. A failed allocation ends a call, not the worker, so every caller must handle it.
#include "tw.h"
#include <stdlib.h>

int64_t tw_spare = -1;

static bool spare(void) {
  int64_t n = __atomic_load_n(&tw_spare, __ATOMIC_RELAXED);
  while (n > 0 && !__atomic_compare_exchange_n(&tw_spare, &n, n - 1, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return n != 0;
}

void *tw_get(void *old, size_t n) { return spare() ? realloc(old, n ? n : 1) : NULL; }
void *tw_zeroed(size_t n) { return spare() ? calloc(1, n ? n : 1) : NULL; }
