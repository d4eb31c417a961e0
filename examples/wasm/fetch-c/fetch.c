// A component of the world wasi:http/proxy, in C without generated bindings: it answers with what another server answers.
//
//   /fetch   the response to a request like this one, with the same method and body, to the URL in the header x-url.
//            With the header x-follow, redirects are followed.
//   /drain   sends as many requests to the URL in x-url as the header x-count says, one after the other, and reads the
//            responses: the number of bytes
//   /hoard   sends requests to the URL in x-url without reading the responses, until one fails: "N calls, then CODE"
//
// If the other server cannot be reached, the status is 502, and the body is the name of the error-code.
#include "../include/http.h"

IMPORT(TYPES, "[constructor]outgoing-request") int32_t out_request_new(int32_t headers);
IMPORT(TYPES, "[method]outgoing-request.set-method")
int32_t out_request_set_method(int32_t self, int32_t method, const char *other, uint32_t other_len);
IMPORT(TYPES, "[method]outgoing-request.set-scheme")
int32_t out_request_set_scheme(int32_t self, int32_t some, int32_t scheme, const char *other, uint32_t other_len);
IMPORT(TYPES, "[method]outgoing-request.set-authority")
int32_t out_request_set_authority(int32_t self, int32_t some, const char *value, uint32_t len);
IMPORT(TYPES, "[method]outgoing-request.set-path-with-query")
int32_t out_request_set_path(int32_t self, int32_t some, const char *value, uint32_t len);
IMPORT(TYPES, "[method]outgoing-request.body") void out_request_body(int32_t self, res_handle *body);
// result<own<future-incoming-response>, error-code>: the cases are bytes, the payload is aligned to 8
IMPORT("wasi:http/outgoing-handler@0.2.0", "handle")
void send_request(int32_t request, int32_t some, int32_t options, uint64_t *result);
IMPORT(TYPES, "[method]future-incoming-response.subscribe") int32_t future_subscribe(int32_t self);
// option<result<result<own<incoming-response>, error-code>>>
IMPORT(TYPES, "[method]future-incoming-response.get") void future_get(int32_t self, uint64_t *result);
IMPORT(TYPES, "[resource-drop]future-incoming-response") void future_drop(int32_t self);
IMPORT(TYPES, "[method]incoming-response.status") int32_t response_status(int32_t self);
IMPORT(TYPES, "[method]incoming-response.headers") int32_t response_headers(int32_t self);
IMPORT(TYPES, "[method]incoming-response.consume") void response_consume(int32_t self, res_handle *body);
IMPORT(TYPES, "[resource-drop]incoming-response") void response_drop(int32_t self);

static const char *const codes[] = { // of the variant error-code
    "DNS-timeout", "DNS-error", "destination-not-found", "destination-unavailable", "destination-IP-prohibited",
    "destination-IP-unroutable", "connection-refused", "connection-terminated", "connection-timeout",
    "connection-read-timeout", "connection-write-timeout", "connection-limit-reached", "TLS-protocol-error",
    "TLS-certificate-error", "TLS-alert-received", "HTTP-request-denied", "HTTP-request-length-required",
    "HTTP-request-body-size", "HTTP-request-method-invalid", "HTTP-request-URI-invalid", "HTTP-request-URI-too-long",
    "HTTP-request-header-section-size", "HTTP-request-header-size", "HTTP-request-trailer-section-size",
    "HTTP-request-trailer-size", "HTTP-response-incomplete", "HTTP-response-header-section-size",
    "HTTP-response-header-size", "HTTP-response-body-size", "HTTP-response-trailer-section-size",
    "HTTP-response-trailer-size", "HTTP-response-transfer-coding", "HTTP-response-content-coding",
    "HTTP-response-timeout", "HTTP-upgrade-failed", "HTTP-protocol-error", "loop-detected", "configuration-error",
    "internal-error"};

enum { GET };

static str code_of(const uint64_t *p) { return (str){codes[byte_of(p)], strlen(codes[byte_of(p)])}; }

// request makes a request for a URL, or returns 0.
static int32_t request_to(str url, uint32_t method) {
  str schemes[] = {STR("http://"), STR("https://")};
  int scheme = begins(url, schemes[1]);
  if (!begins(url, schemes[scheme])) return 0;
  str host = {url.ptr + schemes[scheme].len, 0}, path;
  while (host.ptr + host.len < url.ptr + url.len && host.ptr[host.len] != '/') host.len++;
  path.ptr = host.ptr + host.len;
  path.len = url.ptr + url.len - path.ptr;
  if (path.len == 0) path = STR("/");
  int32_t request = out_request_new(fields_new());
  check(out_request_set_method(request, method, NULL, 0));
  check(out_request_set_scheme(request, 1, scheme, NULL, 0));
  check(out_request_set_authority(request, 1, FLAT(host)));
  check(out_request_set_path(request, 1, FLAT(path)));
  return request;
}

// answer waits for a response. It returns 0 and the error-code if there is none.
static int32_t answer(int32_t future, str *code) {
  uint64_t got[8];
  int32_t pollable = future_subscribe(future);
  pollable_block(pollable);
  pollable_drop(pollable);
  future_get(future, got);
  check(!byte_of(&got[0]) || byte_of(&got[1]));
  if (byte_of(&got[2])) {
    *code = code_of(&got[3]);
    return 0;
  }
  return handle_of(&got[3]);
}

// fetch sends a request with the body of another one, unless it is a GET. It returns the response, or 0 and the code.
static int32_t fetch(str url, uint32_t method, int32_t original, str *code) {
  int32_t request = request_to(url, method);
  if (request == 0) {
    *code = STR("x-url is not a URL");
    return 0;
  }
  res_handle body = {0}, to, from_body, from;
  if (method != GET) {
    out_request_body(request, &body);
    check(body.err);
    out_body_write(body.value, &to);
    check(to.err);
  }
  uint64_t sent[6];
  send_request(request, 0, 0, sent);
  if (byte_of(&sent[0])) {
    *code = code_of(&sent[1]);
    return 0;
  }
  if (method != GET) {
    request_consume(original, &from_body);
    check(from_body.err);
    in_body_stream(from_body.value, &from);
    check(from.err);
    pump(to.value, from.value);
    in_drop(from.value);
    in_body_drop(from_body.value);
    out_drop(to.value);
    uint64_t finished[6];
    out_body_finish(body.value, 0, 0, finished);
  }
  int32_t future = handle_of(&sent[1]), response = answer(future, code);
  future_drop(future);
  return response;
}

static void forward(int32_t outparam, int32_t response) {
  res_handle from_body, from, to;
  uint64_t finished[6];
  int32_t body = begin(outparam, response_status(response));
  response_consume(response, &from_body);
  check(from_body.err);
  in_body_stream(from_body.value, &from);
  check(from.err);
  out_body_write(body, &to);
  check(to.err);
  int whole = pump(to.value, from.value);
  in_drop(from.value);
  in_body_drop(from_body.value);
  out_drop(to.value);
  if (whole) out_body_finish(body, 0, 0, finished);
  response_drop(response);
}

// read_all reads a response to its end and returns the number of bytes.
static uint64_t read_all(int32_t response) {
  res_handle body, from;
  uint64_t bytes = 0;
  response_consume(response, &body);
  check(body.err);
  in_body_stream(body.value, &from);
  check(from.err);
  for (;;) {
    chunk *mark = chunks;
    uint32_t result[3]; // result<list<u8>, stream-error>
    in_read(from.value, 64 << 10, result);
    if ((uint8_t)result[0]) {
      if ((uint8_t)result[1] == 0) error_drop(result[2]);
      break;
    }
    bytes += result[2];
    release(mark);
  }
  in_drop(from.value);
  in_body_drop(body.value);
  response_drop(response);
  return bytes;
}

static void drain(int32_t outparam, str url, str count) {
  uint64_t bytes = 0;
  for (int left = atoi(join(count, STR("\0")).ptr); left > 0; left--) {
    chunk *mark = chunks;
    str code;
    int32_t response = fetch(url, GET, 0, &code);
    if (response == 0) {
      reply(outparam, 502, code);
      return;
    }
    bytes += read_all(response);
    release(mark);
  }
  reply(outparam, 200, decimal(bytes));
}

static void hoard(int32_t outparam, str url) {
  for (int calls = 0;; calls++) {
    uint64_t sent[6];
    str code = STR("");
    int32_t request = request_to(url, GET);
    check(request == 0);
    send_request(request, 0, 0, sent);
    if (byte_of(&sent[0]))
      code = code_of(&sent[1]);
    else
      answer(handle_of(&sent[1]), &code);
    if (code.len > 0) {
      reply(outparam, 200, join(decimal(calls), STR(" calls, then "), code));
      return;
    }
  }
}

EXPORT("wasi:http/incoming-handler@0.2.0#handle") void handle(int32_t request, int32_t outparam) {
  uint32_t method[3];
  opt_str path;
  request_method(request, method);
  request_path(request, &path);
  int32_t headers = request_headers(request);
  str url = first(headers, STR("x-url"));
  str count = first(headers, STR("x-count"));
  int follow = first(headers, STR("x-follow")).len > 0;
  fields_drop(headers);
  if (path.some && eq(path.value, STR("/hoard"))) {
    hoard(outparam, url);
  } else if (path.some && eq(path.value, STR("/drain"))) {
    drain(outparam, url, count);
  } else {
    str code;
    int32_t response = fetch(url, (uint8_t)method[0], request, &code);
    while (response != 0 && follow && response_status(response) / 100 == 3) {
      int32_t fields = response_headers(response);
      url = first(fields, STR("location"));
      fields_drop(fields);
      response_drop(response);
      response = fetch(url, GET, request, &code);
    }
    if (response != 0)
      forward(outparam, response);
    else
      reply(outparam, 502, code);
  }
  request_drop(request);
  release(NULL);
}
