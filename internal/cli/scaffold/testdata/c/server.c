// The server shop. Each method gets the context of the call (method, peer, timeout, metadata) and a request, or a stream of
// requests. It fills in ret, or writes replies to a stream, and returns true; or it returns fail(err, …), a status of gRPC.
// The functions and types are declared in gen/server.h.
//
// Memory: the arguments are the method's to free, by the functions of gen/server.h that end in _free, but not the streams. What ret
// and err point to must come from malloc, as by server_string_dup, and is freed for you. A call has an instance of its own, unless
// the pods reuse them, and all memory ends with it: only what grows with a stream must be freed.
#include <stdio.h>
#include <string.h>

#include "server.h"

// The services that the component serves; add a new one, and run `tripod component generate`.
// tripod:services shop.v1.Cart

// fail sets the status of a call, with a code of gRPC: 3 is INVALID_ARGUMENT, 5 is NOT_FOUND. It returns false.
__attribute__((unused)) static bool fail(tripod_grpc_types_status_t *err, uint32_t code, const char *message) {
  memset(err, 0, sizeof *err); // no details
  err->code = code;
  server_string_dup(&err->message, message);
  return false;
}

// Add adds an item.
bool exports_proto_shop_v1_cart_add(
    exports_proto_shop_v1_cart_context_t *context,
    exports_proto_shop_v1_cart_add_request_t *request,
    exports_proto_shop_v1_cart_add_reply_t *ret,
    exports_proto_shop_v1_cart_status_t *err) {
  (void)context, (void)err; // until you use them
  exports_proto_shop_v1_cart_add_request_free(request);
  memset(ret, 0, sizeof *ret); // a reply without content
  return true;
}

bool exports_proto_shop_v1_cart_watch(
    exports_proto_shop_v1_cart_context_t *context,
    exports_proto_shop_v1_cart_add_request_t *request,
    exports_proto_shop_v1_cart_borrow_add_reply_writer_t replies,
    exports_proto_shop_v1_cart_status_t *err) {
  (void)context, (void)err; // until you use them
  exports_proto_shop_v1_cart_add_request_free(request);
  proto_shop_v1_cart_streams_add_reply_t reply = {0}; // without content
  return proto_shop_v1_cart_streams_method_add_reply_writer_send(replies, &reply, err);
}

bool exports_proto_shop_v1_cart_fill(
    exports_proto_shop_v1_cart_context_t *context,
    exports_proto_shop_v1_cart_borrow_add_request_reader_t requests,
    exports_proto_shop_v1_cart_add_reply_t *ret,
    exports_proto_shop_v1_cart_status_t *err) {
  (void)context, (void)err; // until you use them
  for (;;) {
    proto_shop_v1_cart_streams_option_add_request_t request;
    if (!proto_shop_v1_cart_streams_method_add_request_reader_next(requests, &request, err)) return false; // the call has ended, as err says
    if (!request.is_some) break;
    // Use request.val.
    proto_shop_v1_cart_streams_option_add_request_free(&request);
  }
  memset(ret, 0, sizeof *ret); // a reply without content
  return true;
}

bool exports_proto_shop_v1_cart_talk(
    exports_proto_shop_v1_cart_context_t *context,
    exports_proto_shop_v1_cart_borrow_add_request_reader_t requests,
    exports_proto_shop_v1_cart_borrow_add_reply_writer_t replies,
    exports_proto_shop_v1_cart_status_t *err) {
  (void)context, (void)err; // until you use them
  for (;;) {
    proto_shop_v1_cart_streams_option_add_request_t request;
    if (!proto_shop_v1_cart_streams_method_add_request_reader_next(requests, &request, err)) return false; // the call has ended, as err says
    if (!request.is_some) break;
    proto_shop_v1_cart_streams_add_reply_t reply = {0}; // without content
    if (!proto_shop_v1_cart_streams_method_add_reply_writer_send(replies, &reply, err)) return false;
    proto_shop_v1_cart_streams_option_add_request_free(&request);
  }
  return true;
}

bool exports_proto_shop_v1_cart_clear(
    exports_proto_shop_v1_cart_context_t *context,
    exports_proto_shop_v1_cart_google_protobuf_empty_t request,
    exports_proto_shop_v1_cart_google_protobuf_empty_t *ret,
    exports_proto_shop_v1_cart_status_t *err) {
  (void)context, (void)err; // until you use them
  *ret = request;
  return true;
}

bool exports_proto_shop_v1_cart_mirror(
    exports_proto_shop_v1_cart_context_t *context,
    exports_proto_shop_v1_cart_borrow_add_request_reader_t requests,
    exports_proto_shop_v1_cart_borrow_add_request_writer_t replies,
    exports_proto_shop_v1_cart_status_t *err) {
  (void)context, (void)err; // until you use them
  for (;;) {
    proto_shop_v1_cart_streams_option_add_request_t request;
    if (!proto_shop_v1_cart_streams_method_add_request_reader_next(requests, &request, err)) return false; // the call has ended, as err says
    if (!request.is_some) break;
    if (!proto_shop_v1_cart_streams_method_add_request_writer_send(replies, &request.val, err)) return false;
    proto_shop_v1_cart_streams_option_add_request_free(&request);
  }
  return true;
}

bool exports_proto_shop_v1_cart_repeat(
    exports_proto_shop_v1_cart_context_t *context,
    exports_proto_shop_v1_cart_add_request_t *request,
    exports_proto_shop_v1_cart_borrow_add_request_writer_t replies,
    exports_proto_shop_v1_cart_status_t *err) {
  (void)context, (void)err; // until you use them
  bool sent = proto_shop_v1_cart_streams_method_add_request_writer_send(replies, request, err);
  exports_proto_shop_v1_cart_add_request_free(request);
  return sent;
}

bool exports_proto_shop_v1_cart_label(
    exports_proto_shop_v1_cart_context_t *context,
    exports_proto_shop_v1_cart_borrow_google_protobuf_string_value_reader_t requests,
    int64_t *ret,
    exports_proto_shop_v1_cart_status_t *err) {
  (void)context, (void)err; // until you use them
  for (;;) {
    server_option_string_t request;
    if (!proto_shop_v1_cart_streams_method_google_protobuf_string_value_reader_next(requests, &request, err)) return false; // the call has ended, as err says
    if (!request.is_some) break;
    // Use request.val.
    server_option_string_free(&request);
  }
  memset(ret, 0, sizeof *ret); // a reply without content
  return true;
}

bool exports_proto_shop_v1_cart_count(
    exports_proto_shop_v1_cart_context_t *context,
    int64_t request,
    exports_proto_shop_v1_cart_borrow_google_protobuf_int64_value_writer_t replies,
    exports_proto_shop_v1_cart_status_t *err) {
  (void)context, (void)err; // until you use them
  bool sent = proto_shop_v1_cart_streams_method_google_protobuf_int64_value_writer_send(replies, request, err);
  return sent;
}

bool exports_proto_shop_v1_cart_any(
    exports_proto_shop_v1_cart_context_t *context,
    exports_proto_shop_v1_cart_google_protobuf_value_t *request,
    exports_proto_shop_v1_cart_google_protobuf_value_t *ret,
    exports_proto_shop_v1_cart_status_t *err) {
  (void)context, (void)err; // until you use them
  *ret = *request;
  return true;
}

