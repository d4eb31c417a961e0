// tripod:grpc@0.1.0 in C: the context and the status of a call.
#pragma once
#include "abi.h"

// The parameters as which the record `context` is passed.
#define CONTEXT                                                                                               \
  const char *method, uint32_t method_len, const char *peer, uint32_t peer_len, int32_t has_timeout,          \
      uint64_t timeout, entry *metadata, uint32_t metadata_len

typedef struct {
  str key, value;
} entry;

typedef struct {
  uint32_t code;
  str message;
  list details; // of list<u8>: serialized google.protobuf.Any
} status;

enum { INVALID_ARGUMENT = 3, NOT_FOUND = 5 };

// result<T, status> in memory; result<_, status> is DONE.
#define RESULT(T)    \
  struct {           \
    uint8_t failed;  \
    union {          \
      T ok;          \
      status error;  \
    };               \
  }
typedef struct {
  uint8_t failed;
  status error;
} DONE;
// The result of a reader's next: result<option<T>, status>.
#define NEXT(T)      \
  struct {           \
    uint8_t failed;  \
    union {          \
      struct {       \
        uint8_t some; \
        T value;     \
      };             \
      status error;  \
    };               \
  }

// METHOD exports a function of a service, and its post-return function, by which the host says that it has read the result.
#define METHOD(service, name, function, ...)                                         \
  EXPORT("cabi_post_" service "#" name) void function##_done(void *result) { release(NULL); } \
  EXPORT(service "#" name) void *function(CONTEXT, ##__VA_ARGS__)

IMPORT("tripod:grpc/response@0.1.0", "set-header") void grpc_set_header(const char *, uint32_t, const char *, uint32_t);
IMPORT("tripod:grpc/response@0.1.0", "set-trailer") void grpc_set_trailer(const char *, uint32_t, const char *, uint32_t);

// find returns the first metadata value of a key, or NULL.
static inline const str *find(const entry *metadata, uint32_t n, str key) {
  for (uint32_t i = 0; i < n; i++)
    if (eq(metadata[i].key, key)) return &metadata[i].value;
  return NULL;
}
