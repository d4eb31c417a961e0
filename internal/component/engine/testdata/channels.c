// A preview 1 command with channels, for the tests of the engine and the worker. Its first argument selects what it does.
// It exits with an error number, or 0.
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>
#include <wasi/api.h>

static char buffer[17 << 20];

static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

// echo sends back what it receives, in the same pieces, until the end.
static int echo(int in, int out, size_t piece) {
  ssize_t n;
  while ((n = read(in, buffer, piece)) > 0)
    if (write(out, buffer, (size_t)n) != n) return errno;
  return n < 0 ? errno : 0;
}

// pass forwards what it receives.
static int pass(int in, int out) { return in < 0 || out < 0 ? errno : echo(in, out, sizeof buffer); }

// flood sends n messages.
static int flood(int fd, int n) {
  while (n--)
    if (write(fd, buffer, 1000) != 1000) return errno;
  return 0;
}

// later floods when another channel tells it to, and ends likewise.
static int later(const char *name, int n) {
  int in = open("/ch/in", O_RDONLY);
  if (in < 0 || read(in, buffer, 1000) < 0) return errno;
  int out = open(name, O_WRONLY), error = out < 0 ? errno : flood(out, n);
  return error ? error : read(in, buffer, 1000) < 0 ? errno : 0;
}

// both waits for a channel and for a time.
static int both(int fd, int ms) {
  struct pollfd p = {.fd = fd, .events = POLLIN};
  int n = poll(&p, 1, ms);
  if (n <= 0) return n < 0 ? errno : 100;
  return p.revents & POLLHUP ? 101 : 0;
}

// ping sends n messages, each after the previous one has come back, and prints the time for one way.
static int ping(int out, int in, int n) {
  static int64_t took[100000];
  for (int k = 0; k < n; k++) {
    int64_t begin = now();
    if (write(out, buffer, 64) != 64 || read(in, buffer, sizeof buffer) != 64) return errno ? errno : 102;
    took[k] = now() - begin;
  }
  for (int k = 1; k < n; k++) // to find the middle
    for (int j = k; j && took[j - 1] > took[j]; j--) {
      int64_t t = took[j];
      took[j] = took[j - 1], took[j - 1] = t;
    }
  printf("%lld\n", (long long)took[n / 2] / 2);
  return 0;
}

static int vectors(int fd) {
  struct iovec v[] = {{"one", 3}, {"", 0}, {" message", 8}};
  if (writev(fd, v, 3) != 11) return errno;
  char a[4], b[1], c[64];
  struct iovec r[] = {{a, sizeof a}, {NULL, 0}, {b, sizeof b}, {c, sizeof c}};
  ssize_t n = readv(fd, r, 4);
  printf("%zd %.4s|%.1s|%.*s\n", n, a, b, n > 5 ? (int)n - 5 : 0, c);
  return readv(fd, r + 1, 1) == 0 && write(fd, "", 0) == 0 ? 0 : 103;
}

static int many(const char *name) {
  int n = 0;
  while (open(name, O_RDWR) >= 0) n++;
  int error = errno;
  printf("%d\n", n);
  return error;
}

static int stats(int fd) {
  __wasi_fdstat_t s;
  struct stat st, dir;
  if (__wasi_fd_fdstat_get((__wasi_fd_t)fd, &s) || fstat(fd, &st) || stat("/ch/io", &st) || stat("/ch", &dir)) return errno;
  printf("%d %d %llx %d %d", s.fs_filetype, s.fs_flags, (unsigned long long)s.fs_rights_base, S_ISCHR(st.st_mode), S_ISDIR(dir.st_mode));
  printf(" %d", stat("/ch/none", &st) ? errno : 0);
  printf(" %d", lseek(fd, 0, SEEK_CUR) < 0 ? errno : 0);
  printf(" %d\n", mkdir("/ch/new", 0700) ? errno : 0);
  return 0;
}

static int hostile(int fd) {
  __wasi_size_t n;
  __wasi_fd_t made;
  __wasi_iovec_t v = {(uint8_t *)0xfffffff0, 64};
  __wasi_ciovec_t w = {(uint8_t *)0xfffffff0, 64}, huge[1024];
  __wasi_event_t e;
  for (int k = 0; k < 1024; k++) huge[k] = (__wasi_ciovec_t){(uint8_t *)buffer, sizeof buffer};
  int errors[] = {
      __wasi_fd_read((__wasi_fd_t)fd, &v, 1, &n),
      __wasi_fd_write((__wasi_fd_t)fd, &w, 1, &n),
      __wasi_fd_write((__wasi_fd_t)fd, huge, 1024, &n),
      __wasi_fd_write((__wasi_fd_t)fd, (__wasi_ciovec_t *)0xfffffff8, 4, &n),
      __wasi_fd_write((__wasi_fd_t)fd, huge, 2000, &n),
      __wasi_fd_read((__wasi_fd_t)fd, (__wasi_iovec_t *)huge, 1, (__wasi_size_t *)0xffffffff),
      __wasi_poll_oneoff((__wasi_subscription_t *)0xffffff00, &e, 4, &n),
      __wasi_poll_oneoff((__wasi_subscription_t *)huge, &e, 0, &n),
      __wasi_fd_prestat_dir_name(3, (uint8_t *)0xffffffff, 3),
      __wasi_fd_prestat_dir_name(3, (uint8_t *)buffer, 2),
      __wasi_path_open(3, 0, "io", 0, __WASI_RIGHTS_FD_READ, 0, 0, (__wasi_fd_t *)0xffffffff),
      __wasi_path_open(3, 0, "../io", 0, __WASI_RIGHTS_FD_READ, 0, 0, &made),
      __wasi_path_open(3, 0, "io", 0, 0, 0, 0, &made),
      __wasi_path_open(3, 0, "io", __WASI_OFLAGS_DIRECTORY, __WASI_RIGHTS_FD_READ, 0, 0, &made),
      __wasi_fd_write(3, &w, 1, &n),
      __wasi_fd_close((__wasi_fd_t)fd),
      __wasi_fd_close((__wasi_fd_t)fd),
      __wasi_fd_read((__wasi_fd_t)fd, &v, 1, &n),
      __wasi_fd_close(0xffffffff),
  };
  for (size_t k = 0; k < sizeof errors / sizeof *errors; k++) printf("%d ", errors[k]);
  return 0;
}

static int files(const char *text) { // besides the channel, the guest has a directory
  FILE *f = fopen("/data/file", "w+");
  int ch = open("/ch/io", O_RDWR);
  if (!f || ch < 0) return errno;
  fputs(text, f);
  rewind(f);
  if (!fgets(buffer, 100, f) || fclose(f) || rename("/data/file", "/data/moved") || fopen("/data/none", "r")) return 104;
  printf("%d %d", link("/data/moved", "/ch/moved") ? errno : 0, open("/data/../../etc/passwd", O_RDONLY) < 0 ? errno : 0);
  printf(" %s\n", getenv("NAME"));
  return write(ch, buffer, strlen(buffer)) < 0 ? errno : echo(ch, ch, 100);
}

// main: WHAT [CHANNEL [MORE [MODE]]]; the mode has r or w for one way, n for O_NONBLOCK.
int main(int argc, char **argv) {
  const char *what = argc > 1 ? argv[1] : "", *name = argc > 2 ? argv[2] : "/ch/io", *more = argc > 3 ? argv[3] : "", *mode = argc > 4 ? argv[4] : "";
  if (!strcmp(what, "line")) return puts(name) < 0;
  if (!strcmp(what, "stdio")) return echo(0, 1, sizeof buffer);
  if (!strcmp(what, "many")) return many(name);
  if (!strcmp(what, "exit")) return 0;
  if (!strcmp(what, "files")) return files(more);
  if (!strcmp(what, "ping")) return ping(open(argv[2], O_WRONLY), open(argv[3], O_RDONLY), atoi(argv[4]));
  if (!strcmp(what, "pass")) return pass(open(name, O_RDONLY), open(more, O_WRONLY));
  if (!strcmp(what, "flood-on-start")) return later(name, atoi(more));
  int flags = strchr(mode, 'n') ? O_NONBLOCK : 0;
  int fd = open(name, (strchr(mode, 'r') ? O_RDONLY : strchr(mode, 'w') ? O_WRONLY : O_RDWR) | flags);
  if (fd < 0) return errno;
  if (!strcmp(what, "echo")) return echo(fd, fd, sizeof buffer);
  if (!strcmp(what, "pieces")) return echo(fd, fd, 3);
  if (!strcmp(what, "send")) return write(fd, more, strlen(more)) < 0 ? errno : 0;
  if (!strcmp(what, "flood-and-read")) return flood(fd, atoi(more)) || read(fd, buffer, 1000) < 0 ? errno : 0;
  if (!strcmp(what, "sleep")) return sleep((unsigned)atoi(more)) != 0;
  if (!strcmp(what, "large")) return write(fd, buffer, (size_t)atoi(more)) < 0 ? errno : 0;
  if (!strcmp(what, "read")) return read(fd, buffer, 1) < 0 ? errno : 0;
  if (!strcmp(what, "both")) return both(fd, atoi(more));
  if (!strcmp(what, "vectors")) return vectors(fd);
  if (!strcmp(what, "stats")) return stats(fd);
  if (!strcmp(what, "hostile")) return hostile(fd);
  return 0;
}
