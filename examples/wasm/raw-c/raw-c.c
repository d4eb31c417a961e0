// A gRPC service in C that reads and writes protobuf itself: a core module on tripod:grpc/raw, without a component around
// it. It gets each message as the client has serialized it, and logs failures by wasi:logging.
#include "../include/raw.h"

enum { UNIMPLEMENTED = 12 };
enum { VARINT, FIXED64, BYTES, FIXED32 = 5 }; // wire types

// varint reads a number and moves at. It returns 0 at a malformed number.
static int varint(const uint8_t **at, const uint8_t *end, uint64_t *v) {
  *v = 0;
  for (int shift = 0; *at < end && shift < 70; shift += 7) {
    uint8_t b = *(*at)++;
    *v |= (uint64_t)(b & 0x7f) << shift;
    if (b < 0x80) return 1;
  }
  return 0;
}

// add adds the field numbers of a Numbers message to a sum, packed or not, and counts them. It skips other fields, and
// returns 0 for a malformed message.
static int add(str message, uint64_t *sum, uint32_t *count) {
  const uint8_t *at = (const uint8_t *)message.ptr, *end = at + message.len;
  while (at < end) {
    uint64_t tag, v;
    if (!varint(&at, end, &tag)) return 0;
    switch (tag & 7) {
    case VARINT:
      if (!varint(&at, end, &v)) return 0;
      if (tag >> 3 == 1) *sum += v, ++*count;
      break;
    case BYTES:
      if (!varint(&at, end, &v) || v > (uint64_t)(end - at)) return 0;
      for (const uint8_t *stop = at + v; tag >> 3 == 1 && at < stop; ++*count) {
        uint64_t n;
        if (!varint(&at, stop, &n)) return 0;
        *sum += n;
      }
      if (tag >> 3 != 1) at += v;
      break;
    case FIXED64:
    case FIXED32:
      v = (tag & 7) == FIXED64 ? 8 : 4;
      if (v > (uint64_t)(end - at)) return 0;
      at += v;
      break;
    default:
      return 0;
    }
  }
  return 1;
}

// reply sends a Sum message. It returns 0 if the client is gone.
static int reply(uint64_t total) {
  uint8_t message[11] = {1 << 3 | VARINT};
  uint32_t n = 1;
  for (; total >= 0x80; total >>= 7) message[n++] = (uint8_t)total | 0x80;
  message[n++] = (uint8_t)total;
  DONE done;
  raw_send((const char *)message, n, &done);
  return !done.failed;
}

static DONE result;

enum { WARN = 3 };
IMPORT("wasi:logging/logging@0.1.0-draft", "log")
void log_entry(int32_t level, const char *context, uint32_t context_len, const char *message, uint32_t message_len);

static DONE *fail(uint32_t code, str message) {
  str context = STR("sum.v1.Sums");
  log_entry(WARN, FLAT(context), FLAT(message));
  result = (DONE){1, {code, message, {NULL, 0}}};
  return &result;
}

HANDLE {
  str name = {method, method_len}, message;
  int unary = eq(name, STR("/sum.v1.Sums/Add"));
  if (!unary && !eq(name, STR("/sum.v1.Sums/Running"))) return fail(UNIMPLEMENTED, join(STR("unknown method "), name));
  uint64_t sum = 0;
  uint32_t count = 0;
  chunk *mark = chunks;
  while (next(&message)) {
    if (!add(message, &sum, &count)) return fail(INVALID_ARGUMENT, STR("the message is not a sum.v1.Numbers"));
    release(mark);
    if (unary) break;
    if (!reply(sum)) break;
  }
  if (unary && !count) return fail(INVALID_ARGUMENT, STR("numbers: must not be empty"));
  if (unary) reply(sum);
  result = (DONE){0};
  return &result;
}
