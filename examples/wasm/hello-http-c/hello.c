// A component of the world wasi:http/incoming-handler, in C without generated bindings.
//
//   GET  /PATH        200, "hello from /PATH", and the value of the header x-name
//   POST /echo        200, the body of the request, streamed
//   GET  /status/NNN  that status
//   GET  /trap        traps; /empty ends without a response, /spin does not end, /handles makes handles without end
#include "../include/abi.h"

#define TYPES "wasi:http/types@0.2.0"
#define STREAMS "wasi:io/streams@0.2.0"

// Results that do not fit into a core value are written to where the last argument points. These are their layouts.
typedef struct {
  uint8_t some;
  str value;
} opt_str;
typedef struct { // result<own<T>>
  uint8_t err;
  int32_t value;
} res_handle;
typedef struct {
  uint8_t closed;
  int32_t error;
} stream_error;
typedef struct { // result<_, stream-error>
  uint8_t err;
  stream_error error;
} res_write;
typedef struct { // result<list<u8>, stream-error>
  uint8_t err;
  union {
    str value;
    stream_error error;
  };
} res_read;

IMPORT(TYPES, "[constructor]fields") int32_t fields_new(void);
IMPORT(TYPES, "[method]fields.append")
void fields_append(int32_t self, const char *key, uint32_t key_len, const char *value, uint32_t value_len, void *result);
IMPORT(TYPES, "[method]fields.get") void fields_get(int32_t self, const char *key, uint32_t key_len, list *values);
IMPORT(TYPES, "[resource-drop]fields") void fields_drop(int32_t self);
IMPORT(TYPES, "[method]incoming-request.method") void request_method(int32_t self, uint8_t *method);
IMPORT(TYPES, "[method]incoming-request.path-with-query") void request_path(int32_t self, opt_str *path);
IMPORT(TYPES, "[method]incoming-request.headers") int32_t request_headers(int32_t self);
IMPORT(TYPES, "[method]incoming-request.consume") void request_consume(int32_t self, res_handle *body);
IMPORT(TYPES, "[resource-drop]incoming-request") void request_drop(int32_t self);
IMPORT(TYPES, "[method]incoming-body.stream") void in_body_stream(int32_t self, res_handle *stream);
IMPORT(TYPES, "[resource-drop]incoming-body") void in_body_drop(int32_t self);
IMPORT(TYPES, "[constructor]outgoing-response") int32_t response_new(int32_t headers);
IMPORT(TYPES, "[method]outgoing-response.set-status-code") int32_t response_set_status(int32_t self, int32_t code);
IMPORT(TYPES, "[method]outgoing-response.body") void response_body(int32_t self, res_handle *body);
IMPORT(TYPES, "[method]outgoing-body.write") void out_body_write(int32_t self, res_handle *stream);
IMPORT(TYPES, "[static]outgoing-body.finish") void out_body_finish(int32_t self, int32_t some, int32_t trailers, void *result);
// The response is result<outgoing-response, error-code>; an error-code takes seven parameters.
IMPORT(TYPES, "[static]response-outparam.set")
void outparam_set(int32_t self, int32_t err, int32_t response, int32_t, int64_t, int32_t, int32_t, int32_t, int32_t);
IMPORT(STREAMS, "[method]input-stream.blocking-read") void in_read(int32_t self, int64_t length, res_read *result);
IMPORT(STREAMS, "[resource-drop]input-stream") void in_drop(int32_t self);
IMPORT(STREAMS, "[method]output-stream.blocking-write-and-flush")
void out_write(int32_t self, const char *data, uint32_t len, res_write *result);
IMPORT(STREAMS, "[resource-drop]output-stream") void out_drop(int32_t self);
IMPORT("wasi:io/error@0.2.0", "[resource-drop]error") void error_drop(int32_t self);

enum { GET, HEAD, POST }; // of the variant method

static uint64_t unread[8]; // for results that are not read, of up to 40 bytes

static void check(int failed) {
  if (failed) __builtin_trap();
}

static void forget(stream_error e) {
  if (!e.closed) error_drop(e.error);
}

// put writes to the response's body. It returns 0 when the client no longer reads it.
static int put(int32_t stream, str s) {
  const uint32_t most = 4096; // bytes that one call may write
  while (s.len > 0) {
    uint32_t n = s.len < most ? s.len : most;
    res_write result;
    out_write(stream, s.ptr, n, &result);
    if (result.err) {
      forget(result.error);
      return 0;
    }
    s.ptr += n, s.len -= n;
  }
  return 1;
}

static void echo(int32_t request, int32_t to) {
  res_handle body, from;
  request_consume(request, &body);
  check(body.err);
  in_body_stream(body.value, &from);
  check(from.err);
  for (;;) {
    chunk *mark = chunks;
    res_read piece;
    in_read(from.value, 64 << 10, &piece);
    if (piece.err) {
      forget(piece.error);
      break;
    }
    if (!put(to, piece.value)) break;
    release(mark);
  }
  in_drop(from.value);
  in_body_drop(body.value);
}

static void greet(int32_t request, int32_t to, str path) {
  put(to, join(STR("hello from "), path));
  int32_t headers = request_headers(request);
  list names;
  fields_get(headers, FLAT(STR("x-name")), &names);
  for (uint32_t i = 0; i < names.len; i++) put(to, join(STR(", "), ((str *)names.ptr)[i]));
  fields_drop(headers);
  put(to, STR("\n"));
}

static int32_t status_of(str path) {
  if (!begins(path, STR("/status/"))) return 200;
  int32_t status = 0;
  for (uint32_t i = sizeof "/status/" - 1; i < path.len && status < 100; i++) status = status * 10 + path.ptr[i] - '0';
  return status;
}

EXPORT("wasi:http/incoming-handler@0.2.0#handle") void handle(int32_t request, int32_t outparam) {
  uint8_t method[12];
  opt_str given;
  request_method(request, method);
  request_path(request, &given);
  str path = given.some ? given.value : STR("/");
  check(eq(path, STR("/trap")));
  if (eq(path, STR("/empty"))) return;
  if (eq(path, STR("/handles")))
    for (;;) fields_new();
  if (eq(path, STR("/spin")))
    for (volatile int turns = 0;; turns++) continue;

  int32_t headers = fields_new();
  fields_append(headers, FLAT(STR("content-type")), FLAT(STR("text/plain; charset=utf-8")), unread);
  int32_t response = response_new(headers);
  check(response_set_status(response, status_of(path)));
  res_handle body, stream;
  response_body(response, &body);
  check(body.err);
  outparam_set(outparam, 0, response, 0, 0, 0, 0, 0, 0);
  out_body_write(body.value, &stream);
  check(stream.err);
  if (method[0] == POST && eq(path, STR("/echo")))
    echo(request, stream.value);
  else if (method[0] != HEAD)
    greet(request, stream.value, path);
  out_drop(stream.value); // must be dropped before its body ends
  out_body_finish(body.value, 0, 0, unread);
  request_drop(request);
  release(NULL);
}
