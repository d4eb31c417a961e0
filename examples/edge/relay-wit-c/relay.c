// Relay as a component: it publishes messages from the channel "in" on the channel "out", in capital letters, and prints them.
//
//	tripod edge run relay-wit-c/relay.wasm --channel in=app/in:r --channel out=app/out:w
//
// The interface is internal/sandbox/wasm/internal/worker/channels.wit. This file implements its canonical ABI by hand, which
// wit-bindgen could generate (https://github.com/bytecodealliance/wit-bindgen).
#include <ctype.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHANNELS(name) __attribute__((import_module("tripod:edge/channels@0.1.0"), import_name(name)))

enum { NOT_FOUND, NOT_PERMITTED, TOO_MANY, TOO_LONG, CLOSED, IO };

typedef struct { uint8_t failed; union { uint32_t channel; uint8_t error; }; } opened;
typedef struct { uint8_t failed, error; } sent;
typedef struct { uint8_t failed; union { struct { uint8_t some; uint8_t *data; uint32_t len; }; uint8_t error; }; } received;

CHANNELS("[static]channel.open") void channel_open(const char *name, uint32_t len, opened *);
CHANNELS("[method]channel.send") void channel_send(uint32_t self, const uint8_t *message, uint32_t len, sent *);
CHANNELS("[method]channel.receive") void channel_receive(uint32_t self, uint32_t limited, uint64_t ns, received *);
CHANNELS("[resource-drop]channel") void channel_drop(uint32_t self);

// The host allocates memory for received messages here.
__attribute__((export_name("cabi_realloc"))) void *cabi_realloc(void *old, size_t was, size_t align, size_t n) {
  (void)was, (void)align;
  return realloc(old, n);
}

static uint32_t channel(const char *name) {
  opened o;
  channel_open(name, strlen(name), &o);
  if (!o.failed) return o.channel;
  fprintf(stderr, "relay: channel %s: error %d\n", name, o.error);
  exit(1);
}

static int relay(uint32_t in, uint32_t out, uint64_t limit) {
  for (;;) {
    received r;
    channel_receive(in, limit != 0, limit, &r);
    if (r.failed) return r.error == CLOSED ? 0 : 10 + r.error;
    if (!r.some) return 2; // timeout
    for (uint32_t k = 0; k < r.len; k++) r.data[k] = (uint8_t)toupper(r.data[k]);
    printf("%.*s\n", (int)r.len, (char *)r.data);
    fflush(stdout);
    sent s;
    channel_send(out, r.data, r.len, &s);
    free(r.data);
    if (s.failed) return 10 + s.error;
  }
}

// The optional argument is the timeout for a message, in milliseconds.
int main(int argc, char **argv) {
  uint32_t in = channel("in"), out = channel("out");
  int code = relay(in, out, argc > 1 ? strtoull(argv[1], NULL, 10) * 1000000 : 0);
  channel_drop(in), channel_drop(out);
  return code;
}

#ifdef REACTOR // for a test: a component whose run does not come from a preview 1 adapter
__attribute__((export_name("wasi:cli/run@0.2.0#run"))) int32_t run(void) { return main(0, NULL) != 0; }
#endif
