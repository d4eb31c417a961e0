// A command of preview 1 for the engine's tests: what it does is told by its first argument.
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char **argv) {
  const char *what = argc > 1 ? argv[1] : "";
  char line[4096];
  if (!strcmp(what, "env")) printf("%s %s\n", argv[0], getenv(argv[2]));
  if (!strcmp(what, "cat"))
    while (fgets(line, sizeof line, stdin)) fputs(line, stdout);
  if (!strcmp(what, "exit")) return atoi(argv[2]);
  if (!strcmp(what, "abort")) abort();
  if (!strcmp(what, "sleep")) sleep((unsigned)atoi(argv[2]));
  if (!strcmp(what, "spin"))
    for (volatile int k = 0;; k++) {
    }
  if (!strcmp(what, "eat"))
    for (;;) {
      char *p = malloc(1 << 20);
      if (!p) abort();
      for (int k = 0; k < 1 << 20; k += 4096) ((volatile char *)p)[k] = 1;
    }
  if (!strcmp(what, "write")) {
    FILE *f = fopen(argv[2], "w");
    if (!f) return fprintf(stderr, "%s\n", strerror(errno)), 9;
    fputs(argv[3], f);
    return fclose(f);
  }
  if (!strcmp(what, "read")) {
    FILE *f = fopen(argv[2], "r");
    if (!f) return fprintf(stderr, "%s\n", strerror(errno)), 9;
    while (fgets(line, sizeof line, f)) fputs(line, stdout);
  }
  return 0;
}
