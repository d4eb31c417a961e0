// Relay as a component of wasi:messaging: it publishes each message that it gets on the topic "out", in capital letters, and prints it.
// A topic is the name of a channel. Each message is handled in a new instance.
//
//	tripod edge run relay-messaging-c/relay.wasm --channel in=app/in:r --channel out=app/out:w
//
// This file implements the canonical ABI of messaging.wit by hand, which wit-bindgen could generate
// (https://github.com/bytecodealliance/wit-bindgen).
#include <ctype.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MESSAGING(interface, name) __attribute__((import_module("wasi:messaging/" interface "@0.2.0-draft"), import_name(name)))
#define EXPORT(name) __attribute__((export_name(name)))

typedef struct { uint8_t *data; uint32_t len; } bytes;
enum { TIMEOUT, CONNECTION, PERMISSION_DENIED, OTHER };
typedef struct { uint8_t which; bytes text; } failure;
typedef struct { uint8_t failed; failure error; } sent;
typedef struct { uint8_t some; bytes text; } maybe;
typedef struct { uint8_t failed; union { uint32_t client; failure error; }; } connected;

MESSAGING("types", "[static]client.connect") void client_connect(const char *name, uint32_t len, connected *);
MESSAGING("types", "[resource-drop]client") void client_drop(uint32_t self);
MESSAGING("types", "[method]message.topic") void message_topic(uint32_t self, maybe *topic);
MESSAGING("types", "[method]message.data") void message_data(uint32_t self, bytes *);
MESSAGING("types", "[method]message.set-data") void message_set_data(uint32_t self, const uint8_t *data, uint32_t len);
MESSAGING("types", "[resource-drop]message") void message_drop(uint32_t self);
MESSAGING("producer", "send") void producer_send(uint32_t client, const char *topic, uint32_t len, uint32_t message, sent *);

// The host allocates memory for data here.
EXPORT("cabi_realloc") void *cabi_realloc(void *old, size_t was, size_t align, size_t n) {
  (void)was, (void)align;
  return realloc(old, n);
}

static sent *failed(uint8_t which, char *text) {
  static sent result;
  result = (sent){1, {which, {(uint8_t *)text, strlen(text)}}};
  return &result;
}

EXPORT("wasi:messaging/incoming-handler@0.2.0-draft#handle") sent *handle(uint32_t message) {
  static sent result;
  bytes b;
  maybe topic;
  message_data(message, &b);
  message_topic(message, &topic);
  if (b.len == 0) {
    message_drop(message);
    return failed(OTHER, "the message is empty");
  }
  if (memchr(b.data, 0, b.len)) abort(); // no text: this instance ends, and the next message gets another one
  for (uint32_t k = 0; k < b.len; k++) b.data[k] = (uint8_t)toupper(b.data[k]);
  printf("%.*s: %.*s\n", (int)topic.text.len, (char *)topic.text.data, (int)b.len, (char *)b.data);
  fflush(stdout);
  message_set_data(message, b.data, b.len);
  connected c;
  client_connect("", 0, &c);
  if (c.failed) {
    message_drop(message);
    result = (sent){1, c.error};
    return &result;
  }
  producer_send(c.client, "out", 3, message, &result);
  client_drop(c.client);
  return &result;
}
