// A preview 1 command for the engine's tests. Its first argument selects what it does.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <wasi/api.h>
#include <wasi/libc.h>

static void tell(const char *what, int result) { printf("%s: %s\n", what, result < 0 ? strerror(errno) : "ok"); }

// hold opens a file repeatedly, prints how often that succeeded and why it stopped, and keeps all open or only the first.
static void hold(const char *path, int times, int all) {
  int first = -1, last = -1, n = 0;
  for (int fd; n < times && (fd = open(path, O_RDONLY)) >= 0; n++, last = fd)
    if (first < 0) first = fd;
  printf("%d: %s\n", n, n < times ? strerror(errno) : "ok");
  for (int fd = first + 1; fd <= last && !all; fd++) close(fd);
  fflush(stdout);
}

// slashes tries all operations on paths with a slash at the end, of a directory and of a file.
static void slashes(void) {
  struct stat s;
  tell("mkdir d/", mkdir("/data/d/", 0777));
  tell("stat d/", stat("/data/d/", &s));
  tell("open d/", open("/data/d/", O_RDONLY));
  tell("rename d/ e/", rename("/data/d/", "/data/e/"));
  tell("symlink e l", symlink("e", "/data/l"));
  tell("stat l/", stat("/data/l/", &s));
  tell("unlink e/", unlink("/data/e/"));
  tell("rmdir e//", rmdir("/data/e//"));
  tell("create f", open("/data/f", O_CREAT | O_RDWR, 0666));
  tell("create g/", open("/data/g/", O_CREAT | O_RDWR, 0666));
  tell("stat f/", stat("/data/f/", &s));
  tell("open f/", open("/data/f/", O_RDONLY));
  tell("rmdir f/", rmdir("/data/f/"));
  tell("rename f/ h", rename("/data/f/", "/data/h"));
  tell("link f h/", link("/data/f", "/data/h/"));
  tell("unlink f/", unlink("/data/f/"));
  tell("unlink f", unlink("/data/f"));
}

// attack does what advisories about wasmtime's WASI describe: changes in /ro, which is read-only; ways out of /data by links
// with slashes; descriptors replaced by renumbering; and times outside the clock's range.
static void attack(void) {
  tell("truncate", open("/ro/f", O_RDONLY | O_TRUNC));
  tell("create", open("/ro/g", O_RDONLY | O_CREAT, 0666));
  tell("append", open("/ro/f", O_WRONLY | O_APPEND));
  tell("link", link("/ro/f", "/data/l"));
  tell("link back", link("/data/x", "/ro/x"));
  tell("rename", rename("/ro/f", "/data/m"));
  tell("rename back", rename("/data/x", "/ro/f"));
  tell("unlink", unlink("/ro/f"));
  tell("times", utimensat(AT_FDCWD, "/ro/f", NULL, 0));
  tell("out", open("/data/out/", O_RDONLY | O_DIRECTORY));
  tell("out//", open("/data/out//", O_RDONLY));
  tell("out/secret", open("/data/out/secret", O_RDONLY));
  tell("out/secret/", open("/data/out/secret/", O_RDONLY));
  tell("up/", open("/data/up/", O_RDONLY | O_DIRECTORY));
  tell("stat out/", stat("/data/out/", &(struct stat){0}));
  tell("mkdir out/d/", mkdir("/data/out/d/", 0777));
  tell("rename out/", rename("/data/out/secret", "/data/stolen"));
  int kept = open("/data/x", O_RDWR), over = open("/data/x", O_RDWR);
  for (int k = 0; k < 1000 && over >= 0; k++) {
    int fd = open("/data/x", O_RDWR);
    if (fd < 0 || __wasilibc_fd_renumber(fd, over)) over = -1;
  }
  tell("renumber", over);
  tell("moments", __wasi_fd_filestat_set_times((__wasi_fd_t)kept, UINT64_MAX, UINT64_MAX - 1, 5) ? -1 : 0);
  fflush(stdout);
}

int main(int argc, char **argv) {
  const char *what = argc > 1 ? argv[1] : "";
  char line[4096];
  if (!strcmp(what, "env")) printf("%s %s\n", argv[0], getenv(argv[2]));
  if (!strcmp(what, "cat"))
    while (fgets(line, sizeof line, stdin)) fputs(line, stdout);
  if (!strcmp(what, "exit")) return atoi(argv[2]);
  if (!strcmp(what, "abort")) abort();
  if (!strcmp(what, "sleep")) sleep((unsigned)atoi(argv[2]));
  if (!strcmp(what, "hold") || !strcmp(what, "toss")) {
    hold(argv[2], atoi(argv[3]), *what == 'h');
    sleep((unsigned)atoi(argv[4]));
  }
  if (!strcmp(what, "slashes")) slashes();
  if (!strcmp(what, "attack")) attack(), sleep((unsigned)atoi(argv[2]));
  if (!strcmp(what, "ls")) {
    errno = 0;
    DIR *dir = opendir(argv[2]);
    int n = 0;
    while (dir && readdir(dir)) n++;
    printf("%d: %s\n", n, errno ? strerror(errno) : "ok");
  }
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
