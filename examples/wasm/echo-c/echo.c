// The smallest gRPC service in C.
#include "../include/grpc.h"

// A Payload is one field, and lies in memory as the field.
METHOD("proto:echo-v1/echo", "echo", echo, const char *data, uint32_t len) {
  static RESULT(str) result;
  result.ok = (str){data, len};
  return &result;
}
