// What components of the world wasi:http/incoming-handler in C need to read a request and to answer it.
#pragma once
#include "abi.h"

#define TYPES "wasi:http/types@0.2.0"
#define STREAMS "wasi:io/streams@0.2.0"

typedef struct { // option<string>
  uint8_t some;
  str value;
} opt_str;
typedef struct { // result<own<T>>
  uint8_t err;
  int32_t value;
} res_handle;

IMPORT(TYPES, "[constructor]fields") int32_t fields_new(void);
IMPORT(TYPES, "[method]fields.append")
void fields_append(int32_t self, const char *key, uint32_t key_len, const char *value, uint32_t value_len, void *result);
IMPORT(TYPES, "[method]fields.get") void fields_get(int32_t self, const char *key, uint32_t key_len, list *values);
IMPORT(TYPES, "[resource-drop]fields") void fields_drop(int32_t self);
IMPORT(TYPES, "[method]incoming-request.method") void request_method(int32_t self, uint32_t *method);
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
IMPORT("wasi:io/poll@0.2.0", "[method]pollable.block") void pollable_block(int32_t self);
IMPORT("wasi:io/poll@0.2.0", "[resource-drop]pollable") void pollable_drop(int32_t self);

IMPORT(STREAMS, "[method]input-stream.blocking-read") void in_read(int32_t self, int64_t length, uint32_t *result);
IMPORT(STREAMS, "[method]output-stream.blocking-write-and-flush")
void out_write(int32_t self, const char *data, uint32_t len, uint32_t *result);
IMPORT(STREAMS, "[method]output-stream.blocking-splice")
void out_splice(int32_t self, int32_t from, int64_t length, uint64_t *result); // result<u64, stream-error>
IMPORT(STREAMS, "[method]output-stream.flush") void out_flush(int32_t self, uint32_t *result);
IMPORT(STREAMS, "[resource-drop]input-stream") void in_drop(int32_t self);
IMPORT(STREAMS, "[resource-drop]output-stream") void out_drop(int32_t self);
IMPORT("wasi:io/error@0.2.0", "[resource-drop]error") void error_drop(int32_t self);

static void check(int failed) {
  if (failed) __builtin_trap();
}

static uint8_t byte_of(const uint64_t *p) { return *(const uint8_t *)p; }
static int32_t handle_of(const uint64_t *p) { return *(const int32_t *)p; }

// first returns the first value of a header, or an empty string.
static str first(int32_t headers, str name) {
  list values;
  fields_get(headers, FLAT(name), &values);
  return values.len > 0 ? *(str *)values.ptr : STR("");
}

// begin sets the response for the client and returns its body.
static int32_t begin(int32_t outparam, int32_t status) {
  res_handle body;
  int32_t response = response_new(fields_new());
  check(response_set_status(response, status));
  response_body(response, &body);
  check(body.err);
  outparam_set(outparam, 0, response, 0, 0, 0, 0, 0, 0);
  return body.value;
}

static void reply(int32_t outparam, int32_t status, str text) {
  res_handle stream;
  uint32_t written[3];
  uint64_t finished[6];
  int32_t body = begin(outparam, status);
  out_body_write(body, &stream);
  check(stream.err);
  out_write(stream.value, FLAT(text), written);
  out_drop(stream.value);
  out_body_finish(body, 0, 0, finished);
}

// pump moves all bytes of a stream to another one. It returns 0 if a stream fails.
static int pump(int32_t to, int32_t from) {
  for (;;) {
    uint64_t result[2];
    uint32_t flushed[3];
    out_splice(to, from, 64 << 10, result);
    if (byte_of(&result[0])) {
      const uint8_t *failed = (const uint8_t *)&result[1]; // a stream-error: 0 with an error, or 1, closed
      if (*failed == 0) error_drop(*(const int32_t *)(failed + 4));
      return *failed != 0;
    }
    out_flush(to, flushed);
    if ((uint8_t)flushed[0]) return 0;
  }
}
