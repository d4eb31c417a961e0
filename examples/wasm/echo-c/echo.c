// The smallest gRPC service in C.
#include "../include/grpc.h"

// A Payload has one field, so its layout in memory is that of the field.
METHOD("proto:echo-v1/echo", "echo", echo, const char *data, uint32_t len) {
  static RESULT(str) result;
  result.ok = (str){data, len};
  return &result;
}
