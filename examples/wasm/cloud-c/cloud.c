// A component that uses proposals of WASI besides wasi:http, in C without generated bindings.
//
//   GET /config/KEY  the value of the key (wasi:config), or 404
//   GET /config      all values, one line each: KEY=VALUE
//   GET /log         logs the header x-message with the level x-level (a number) and the context x-context (wasi:logging)
//
// If the host reports an error, the status is 502, and the body is its text.
#include "../include/http.h"

typedef struct { // result<option<string>, error>: tag is the case of the option or of the error
  uint8_t err;
  union __attribute__((aligned(4))) {
    struct {
      uint8_t tag;
      str value;
    };
    list entries; // result<list<tuple<string, string>>, error>
  };
} res_config;
typedef struct {
  str key, value;
} entry;

IMPORT("wasi:config/store@0.2.0-rc.1", "get") void config_get(const char *key, uint32_t len, res_config *result);
IMPORT("wasi:config/store@0.2.0-rc.1", "get-all") void config_get_all(res_config *result);
IMPORT("wasi:logging/logging@0.1.0-draft", "log")
void log_entry(int32_t level, const char *context, uint32_t context_len, const char *message, uint32_t message_len);

static void config(int32_t outparam, str key) {
  res_config r;
  config_get(FLAT(key), &r);
  if (r.err)
    reply(outparam, 502, r.value);
  else if (!r.tag)
    reply(outparam, 404, STR(""));
  else
    reply(outparam, 200, r.value);
}

static void config_all(int32_t outparam) {
  res_config r;
  config_get_all(&r);
  if (r.err) {
    reply(outparam, 502, r.value);
    return;
  }
  str text = STR("");
  for (uint32_t i = 0; i < r.entries.len; i++) {
    entry *e = (entry *)r.entries.ptr + i;
    text = join(text, e->key, STR("="), e->value, STR("\n"));
  }
  reply(outparam, 200, text);
}

static void write_log(int32_t outparam, int32_t headers) {
  str level = first(headers, STR("x-level")), context = first(headers, STR("x-context"));
  str message = first(headers, STR("x-message"));
  log_entry(level.len > 0 ? level.ptr[0] - '0' : 0, FLAT(context), FLAT(message));
  reply(outparam, 200, STR(""));
}

EXPORT("wasi:http/incoming-handler@0.2.0#handle") void handle(int32_t request, int32_t outparam) {
  opt_str path;
  request_path(request, &path);
  int32_t headers = request_headers(request);
  str config_prefix = STR("/config/");
  if (eq(path.value, STR("/config")))
    config_all(outparam);
  else if (begins(path.value, config_prefix))
    config(outparam, (str){path.value.ptr + config_prefix.len, path.value.len - config_prefix.len});
  else if (eq(path.value, STR("/log")))
    write_log(outparam, headers);
  else
    reply(outparam, 404, STR("no such path"));
  fields_drop(headers);
  request_drop(request);
  release(NULL);
}
