// A server on tripod:grpc/raw that breaks the contract in the way that the method's name says, or waits for its client.
#include <wasi/api.h>

#include "../../../../../../examples/wasm/include/raw.h"

static DONE result;

static void answer(const char *text, uint32_t len) {
  DONE done;
  raw_send(text, len, &done);
}

// await waits until the client's next message or 20 ms have passed. It returns whether the message has arrived.
static int await(uint32_t events) {
  __wasi_subscription_t subs[2] = {
    {.userdata = 0, .u = {.tag = __WASI_EVENTTYPE_CLOCK, .u.clock = {.id = __WASI_CLOCKID_MONOTONIC, .timeout = 20000000}}},
    {.userdata = 1, .u = {.tag = __WASI_EVENTTYPE_FD_READ, .u.fd_read = {events}}},
  };
  __wasi_event_t got[2];
  __wasi_size_t n;
  if (__wasi_poll_oneoff(subs, got, 2, &n)) __builtin_trap();
  for (__wasi_size_t k = 0; k < n; k++)
    if (got[k].userdata == 1) return 1;
  return 0;
}

HANDLE {
  str fault = {method, method_len}, message;
  received r;
  result = (DONE){0};
  if (eq(fault, STR("/f/result-out-of-bounds"))) return (void *)0xfffffff0;
  if (eq(fault, STR("/f/result-not-aligned"))) return (char *)&result + 1;
  if (eq(fault, STR("/f/unknown-case"))) result.failed = 7;
  if (eq(fault, STR("/f/status-ok"))) result = (DONE){1, {0, STR("all is well"), {NULL, 0}}};
  if (eq(fault, STR("/f/status-99"))) result = (DONE){1, {99, STR("what is this"), {NULL, 0}}};
  if (eq(fault, STR("/f/message-out-of-bounds"))) result = (DONE){1, {5, {(char *)0x7fffffff, 100}, {NULL, 0}}};
  if (eq(fault, STR("/f/message-not-utf8"))) result = (DONE){1, {5, {"\xff\xfe", 2}, {NULL, 0}}};
  if (eq(fault, STR("/f/endless-details"))) result = (DONE){1, {5, STR("x"), {(void *)8, 0x20000000}}};
  if (eq(fault, STR("/f/details-not-any"))) {
    static str details[] = {STR("\xff\xff\xff")};
    result = (DONE){1, {5, STR("x"), {details, 1}}};
  }
  if (eq(fault, STR("/f/no-answer"))) return &result;
  if (eq(fault, STR("/f/two-answers"))) answer("", 0), answer("", 0);
  if (eq(fault, STR("/f/send-out-of-bounds"))) answer((char *)0x7fffffff, 1000);
  if (eq(fault, STR("/f/send-100-mib"))) answer(NULL, 100 << 20);
  if (eq(fault, STR("/f/take-without-message"))) raw_take(&message);
  if (eq(fault, STR("/f/take-twice"))) raw_receive(1, &r), raw_take(&message), raw_take(&message);
  if (eq(fault, STR("/f/events"))) { // leaves them open
    uint32_t events = raw_events();
    if (raw_events() != events || __wasi_fd_close(events) || raw_events() != events) __builtin_trap();
  }
  if (eq(fault, STR("/f/endless-receive"))) for (;;) raw_receive(0, &r);
  if (eq(fault, STR("/f/endless-loop"))) for (volatile int on = 1; on;) {}
  if (eq(fault, STR("/f/endless-header")))
    for (;;) grpc_set_header(FLAT(STR("x-key")), FLAT(STR("0123456789012345678901234567890123456789")));
  if (eq(fault, STR("/f/header-reserved"))) grpc_set_header(FLAT(STR("grpc-status")), FLAT(STR("0")));
  if (eq(fault, STR("/f/trap"))) __builtin_trap();
  if (eq(fault, STR("/f/exit"))) _Exit(3);
  if (eq(fault, STR("/f/memory"))) for (;;) *(volatile char *)allocate(1 << 20) = 1;
  if (eq(fault, STR("/f/until-ended"))) {
    for (DONE ended = {0}; !ended.failed;) raw_ended(&ended);
    result = (DONE){1, {1, STR("noticed"), {NULL, 0}}};
  }
  if (eq(fault, STR("/f/poll"))) { // answers each message, and the time while there is none
    uint32_t events = raw_events();
    for (;;) {
      raw_receive(0, &r);
      if (r.failed || r.which == RECEIVED_END) break;
      if (r.which == RECEIVED_MESSAGE) raw_take(&message), answer(message.ptr, message.len);
      else if (!await(events)) answer("tick", 4);
    }
  }
  if (eq(fault, STR("/f/leave"))) raw_receive(0, &r); // without waiting for the answer
  if (eq(fault, STR("/f/good"))) answer("", 0);
  return &result;
}
