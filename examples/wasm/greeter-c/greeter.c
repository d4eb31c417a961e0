// The Greeter service in C, with handwritten interfaces as `tripod wit gen ../greeter/greeter.proto` prints them.
#include <stdlib.h>
#include <wasi/api.h>

#include "../include/grpc.h"

#define GREETER "proto:greet-v1/greeter"
#define STREAMS "proto:greet-v1/greeter-streams"

typedef struct {
  uint8_t kind;
  int32_t number; // payload of the last case, for numbers that the enum does not know
} language;
typedef struct {
  str name;
  language language;
} hello_request;
typedef struct {
  str message, served_by;
} hello_reply;

IMPORT(STREAMS, "[method]hello-request-reader.next") void requests_next(int32_t self, void *next);
IMPORT(STREAMS, "[resource-drop]hello-request-reader") void requests_drop(int32_t self);
IMPORT(STREAMS, "[method]hello-reply-writer.send")
void replies_send(int32_t self, const char *message, uint32_t len, const char *served_by, uint32_t served_by_len, DONE *);
IMPORT(STREAMS, "[resource-drop]hello-reply-writer") void replies_drop(int32_t self);
IMPORT(STREAMS, "[method]countdown-reply-writer.send") void numbers_send(int32_t self, uint32_t number, DONE *result);
IMPORT(STREAMS, "[resource-drop]countdown-reply-writer") void numbers_drop(int32_t self);

static const str hello[] = {STR("Hello, "), STR("Hello, "), STR("Hallo, "), STR("Bonjour, "), STR("Hello, ")};

// say writes a line to standard output, which is the container's log.
static void say(str line) {
  str text = join(line, STR("\n"));
  __wasi_ciovec_t io = {(const uint8_t *)text.ptr, text.len};
  __wasi_size_t written;
  (void)__wasi_fd_write(1, &io, 1, &written);
}

static hello_reply greet(str names, language l) {
  const char *pod = getenv("POD_NAME");
  str message = join(hello[l.kind], names, STR("!"));
  return (hello_reply){message, pod ? (str){pod, strlen(pod)} : STR("")};
}

// An Any with a google.protobuf.StringValue that names the wrong field.
#define URL "type.googleapis.com/google.protobuf.StringValue"
static const char wrong_field[] = "\x0a\x2f" URL "\x12\x06\x0a\x04name";
_Static_assert(sizeof URL - 1 == 0x2f, "the length in wrong_field");
static const str details[] = {{wrong_field, sizeof wrong_field - 1}};
static const status no_name = {INVALID_ARGUMENT, STR("name: must not be empty"), {(void *)details, 1}};

METHOD(GREETER, "say-hello", say_hello, const char *name, uint32_t len, int32_t kind, int32_t number) {
  static RESULT(hello_reply) result;
  const str *id = find(metadata, metadata_len, STR("x-request-id"));
  if (id) grpc_set_header(FLAT(STR("x-request-id")), FLAT(*id));
  const str *bin = find(metadata, metadata_len, STR("x-trace-bin"));
  if (bin) grpc_set_trailer(FLAT(STR("x-trace-bin")), FLAT(*bin));
  result.failed = len == 0;
  if (result.failed)
    result.error = no_name;
  else
    result.ok = greet((str){name, len}, (language){kind, number});
  say(join(STR("SayHello "), (str){name, len}, STR(" from "), (str){peer, peer_len}));
  return &result;
}

METHOD(GREETER, "countdown", countdown, uint32_t from, uint32_t interval_ms, int32_t numbers) {
  static DONE result;
  say(join(STR("Countdown from "), decimal(from)));
  __wasi_subscription_t timer = {.u = {.tag = __WASI_EVENTTYPE_CLOCK, .u.clock = {
    .id = __WASI_CLOCKID_MONOTONIC, .timeout = interval_ms * 1000000ull}}};
  for (uint32_t n = from;; n--) {
    numbers_send(numbers, n, &result);
    if (result.failed || n == 0) break;
    __wasi_event_t event;
    __wasi_size_t events;
    if (interval_ms > 0) (void)__wasi_poll_oneoff(&timer, &event, 1, &events);
  }
  numbers_drop(numbers);
  return &result;
}

METHOD(GREETER, "collect", collect, int32_t requests) {
  static RESULT(hello_reply) result;
  NEXT(hello_request) next;
  str names = STR("");
  language last = {0};
  for (;;) {
    requests_next(requests, &next);
    if (next.failed || !next.some) break;
    names = names.len == 0 ? next.value.name : join(names, STR(", "), next.value.name);
    last = next.value.language;
  }
  requests_drop(requests);
  result.failed = next.failed || names.len == 0;
  if (next.failed)
    result.error = next.error;
  else if (names.len == 0)
    result.error = no_name;
  else
    result.ok = greet(names, last);
  say(join(STR("Collect "), names));
  return &result;
}

METHOD(GREETER, "chat", chat, int32_t requests, int32_t replies) {
  static DONE result;
  say(STR("Chat"));
  chunk *mark = chunks;
  for (;;) {
    NEXT(hello_request) next;
    requests_next(requests, &next);
    result.failed = next.failed;
    if (next.failed) result.error = next.error;
    if (next.failed || !next.some) break;
    hello_reply reply = greet(next.value.name, next.value.language);
    replies_send(replies, FLAT(reply.message), FLAT(reply.served_by), &result);
    if (result.failed) break;
    release(mark); // a long conversation needs no more memory than a short one
  }
  requests_drop(requests);
  replies_drop(replies);
  return &result;
}
