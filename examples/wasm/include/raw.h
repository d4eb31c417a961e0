// tripod:grpc/raw@0.1.0 in C, for servers that keep their own protobuf code (`tripod wit raw`).
#pragma once
#include "grpc.h"

// result<received, status>
enum { RECEIVED_MESSAGE, RECEIVED_END, RECEIVED_PENDING };
typedef struct {
  uint8_t failed;
  union {
    struct {
      uint8_t which;
      uint32_t size; // of a message
    };
    status error;
  };
} received;

IMPORT("tripod:grpc/raw@0.1.0", "receive") void raw_receive(int32_t wait, received *);
IMPORT("tripod:grpc/raw@0.1.0", "take") void raw_take(str *message);
IMPORT("tripod:grpc/raw@0.1.0", "send") void raw_send(const char *message, uint32_t len, DONE *);
IMPORT("tripod:grpc/raw@0.1.0", "ended") void raw_ended(DONE *why); // option<status>: failed means some
IMPORT("tripod:grpc/raw@0.1.0", "events") uint32_t raw_events(void);

// HANDLE defines the function that serves all methods. It returns a DONE*.
#define HANDLE                                                                                        \
  EXPORT("cabi_post_tripod:grpc/handler@0.1.0#handle") void handle_done(void *result) { release(NULL); } \
  EXPORT("tripod:grpc/handler@0.1.0#handle") void *handle(CONTEXT)

// next takes the next request message, in memory of the call. It returns 0 after the last one, and also after a failure, of
// which the host tells the client by itself.
static inline int next(str *message) {
  received r;
  raw_receive(1, &r);
  if (r.failed || r.which != RECEIVED_MESSAGE) return 0;
  raw_take(message);
  return 1;
}
