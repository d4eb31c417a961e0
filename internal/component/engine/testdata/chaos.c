// A preview 1 command that calls all functions of preview 1 at random, with good and bad arguments, for the engine's tests.
// Its arguments are the random seed and the number of calls.
#include <stdint.h>
#include <stdlib.h>

typedef uint32_t i;
typedef uint64_t l;
#define W(name, ...) __attribute__((import_module("wasi_snapshot_preview1"), import_name(#name))) i w_##name(__VA_ARGS__)
W(args_get, i, i);
W(args_sizes_get, i, i);
W(environ_get, i, i);
W(environ_sizes_get, i, i);
W(clock_res_get, i, i);
W(clock_time_get, i, l, i);
W(fd_advise, i, l, l, i);
W(fd_allocate, i, l, l);
W(fd_close, i);
W(fd_datasync, i);
W(fd_fdstat_get, i, i);
W(fd_fdstat_set_flags, i, i);
W(fd_fdstat_set_rights, i, l, l);
W(fd_filestat_get, i, i);
W(fd_filestat_set_size, i, l);
W(fd_filestat_set_times, i, l, l, i);
W(fd_pread, i, i, i, l, i);
W(fd_prestat_get, i, i);
W(fd_prestat_dir_name, i, i, i);
W(fd_pwrite, i, i, i, l, i);
W(fd_read, i, i, i, i);
W(fd_readdir, i, i, i, l, i);
W(fd_renumber, i, i);
W(fd_seek, i, l, i, i);
W(fd_sync, i);
W(fd_tell, i, i);
W(fd_write, i, i, i, i);
W(path_create_directory, i, i, i);
W(path_filestat_get, i, i, i, i, i);
W(path_filestat_set_times, i, i, i, i, l, l, i);
W(path_link, i, i, i, i, i, i, i);
W(path_open, i, i, i, i, i, l, l, i, i);
W(path_readlink, i, i, i, i, i, i);
W(path_remove_directory, i, i, i);
W(path_rename, i, i, i, i, i, i);
W(path_symlink, i, i, i, i, i);
W(path_unlink_file, i, i, i);
W(poll_oneoff, i, i, i, i);
W(proc_raise, i);
W(sched_yield, void);
W(random_get, i, i);
W(sock_accept, i, i, i);
W(sock_recv, i, i, i, i, i, i);
W(sock_send, i, i, i, i, i);
W(sock_shutdown, i, i);

static uint64_t state = 1; // placed before the memory that calls write to, like everything that the guest needs
static uint32_t next(void) { // xorshift64*
  state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
  return (uint32_t)((state * 2685821657736338717ULL) >> 32);
}

static uint8_t memory[1 << 17];

// any returns an argument: usually a descriptor or small number, or an address in memory, or anything.
static uint32_t any(void) {
  uint32_t r = next();
  switch (r >> 29) {
  case 0: case 1: case 2: return r & 15;
  case 3: case 4: case 5: return (uint32_t)(uintptr_t)memory + (r & 0xff8);
  case 6: return (uint32_t)__builtin_wasm_memory_size(0) * 65536 - (r & 63);
  default: return r & 1 ? 0xffffffff - (r >> 1 & 63) : next();
  }
}

// fill writes what calls read from memory: vectors, subscriptions, names.
static void fill(void) {
  static const char *names[] = {"io", "none", "..", ".", "./io", "file", "a/b", "/ch/io"};
  for (int k = 0; k < 4096; k += 4) {
    uint32_t v = any();
    __builtin_memcpy(memory + k, &v, 4);
  }
  for (int k = 0; k < 8; k++) __builtin_strcpy((char *)memory + (next() & 0xff8), names[next() & 7]);
}

static l wide(void) { return next() & 1 ? next() & 1023 : (l)next() << 32 | next(); }

static void one(uint32_t which) {
  switch (which) {
  case 0: w_args_get(any(), any()); break;
  case 1: w_args_sizes_get(any(), any()); break;
  case 2: w_environ_get(any(), any()); break;
  case 3: w_environ_sizes_get(any(), any()); break;
  case 4: w_clock_res_get(any(), any()); break;
  case 5: w_clock_time_get(any(), wide(), any()); break;
  case 6: w_fd_advise(any(), wide(), wide(), any()); break;
  case 7: w_fd_allocate(any(), wide(), wide()); break;
  case 8: w_fd_close(any()); break;
  case 9: w_fd_datasync(any()); break;
  case 10: w_fd_fdstat_get(any(), any()); break;
  case 11: w_fd_fdstat_set_flags(any(), any()); break;
  case 12: w_fd_fdstat_set_rights(any(), wide(), wide()); break;
  case 13: w_fd_filestat_get(any(), any()); break;
  case 14: w_fd_filestat_set_size(any(), wide()); break;
  case 15: w_fd_filestat_set_times(any(), wide(), wide(), any()); break;
  case 16: w_fd_pread(any(), any(), any(), wide(), any()); break;
  case 17: w_fd_prestat_get(any(), any()); break;
  case 18: w_fd_prestat_dir_name(any(), any(), any()); break;
  case 19: w_fd_pwrite(any(), any(), any(), wide(), any()); break;
  case 20: w_fd_read(any(), any(), any(), any()); break;
  case 21: w_fd_readdir(any(), any(), any(), wide(), any()); break;
  case 22: w_fd_renumber(any(), any()); break;
  case 23: w_fd_seek(any(), wide(), any(), any()); break;
  case 24: w_fd_sync(any()); break;
  case 25: w_fd_tell(any(), any()); break;
  case 26: w_fd_write(any(), any(), any(), any()); break;
  case 27: w_path_create_directory(any(), any(), any()); break;
  case 28: w_path_filestat_get(any(), any(), any(), any(), any()); break;
  case 29: w_path_filestat_set_times(any(), any(), any(), any(), wide(), wide(), any()); break;
  case 30: w_path_link(any(), any(), any(), any(), any(), any(), any()); break;
  case 31: w_path_open(any(), any(), any(), any(), any(), wide(), wide(), any(), any()); break;
  case 32: w_path_readlink(any(), any(), any(), any(), any(), any()); break;
  case 33: w_path_remove_directory(any(), any(), any()); break;
  case 34: w_path_rename(any(), any(), any(), any(), any(), any()); break;
  case 35: w_path_symlink(any(), any(), any(), any(), any()); break;
  case 36: w_path_unlink_file(any(), any(), any()); break;
  case 37: w_poll_oneoff(any(), any(), any(), any()); break;
  case 38: w_proc_raise(any()); break;
  case 39: w_sched_yield(); break;
  case 40: w_random_get(any(), next() & 1 ? next() & 4095 : 0xffffff00); break; // otherwise it would overwrite the guest itself
  case 41: w_sock_accept(any(), any(), any()); break;
  case 42: w_sock_recv(any(), any(), any(), any(), any(), any()); break;
  case 43: w_sock_send(any(), any(), any(), any(), any()); break;
  case 44: w_sock_shutdown(any(), any()); break;
  }
}

int main(int argc, char **argv) {
  if (argc < 3) return 1;
  state = strtoull(argv[1], NULL, 10) * 0x9e3779b97f4a7c15ULL + 1;
  for (long n = atol(argv[2]); n--;) {
    if (!(n & 31)) fill();
    one(next() % 45);
  }
  return 0;
}
