// A component that uses proposals of WASI besides wasi:http, in C without generated bindings.
//
//   GET /config/KEY  the value of the key (wasi:config), or 404
//   GET /config      all values, one line each: KEY=VALUE
//   GET /kv          does with the key in the header x-key what x-op says (wasi:keyvalue): get, set, delete, exists,
//                    increment, append (with cas), many (set-many and get-many), keys; x-value is the value
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

#define KV "wasi:keyvalue/"
#define DRAFT "@0.2.0-draft2"

typedef struct { // error of wasi:keyvalue
  uint8_t tag;
  str text;
} kv_error;
typedef struct { // result<option<list<u8>>, error>, result<bucket, error>, result<cas, error>, result<bool, error>
  uint8_t err;
  union __attribute__((aligned(4))) {
    kv_error error;
    int32_t handle;
    uint8_t yes;
    list pairs; // result<list<tuple<string, option<list<u8>>>>, error>
    struct {    // result<key-response, error>
      list keys;
      uint8_t more;
      str cursor;
    };
  };
} res_kv;
typedef struct { // result<s64, error>
  uint8_t err;
  union __attribute__((aligned(8))) {
    kv_error error;
    int64_t sum;
  };
} res_sum;
typedef struct { // result<_, cas-error>
  uint8_t err;
  uint8_t failed __attribute__((aligned(4)));
  union __attribute__((aligned(4))) {
    kv_error error;
    int32_t handle;
  };
} res_swap;
typedef struct {
  str key;
  uint8_t some;
  str value;
} found_pair;
_Static_assert(sizeof(res_kv) == 24 && sizeof(res_sum) == 24 && sizeof(res_swap) == 20 && sizeof(found_pair) == 20, "the ABI's layouts");

IMPORT(KV "store" DRAFT, "open") void kv_open(const char *name, uint32_t len, res_kv *result);
IMPORT(KV "store" DRAFT, "[method]bucket.get") void kv_get(int32_t self, const char *key, uint32_t len, res_kv *result);
IMPORT(KV "store" DRAFT, "[method]bucket.set")
void kv_set(int32_t self, const char *key, uint32_t len, const char *value, uint32_t value_len, res_kv *result);
IMPORT(KV "store" DRAFT, "[method]bucket.delete") void kv_delete(int32_t self, const char *key, uint32_t len, res_kv *result);
IMPORT(KV "store" DRAFT, "[method]bucket.exists") void kv_exists(int32_t self, const char *key, uint32_t len, res_kv *result);
IMPORT(KV "store" DRAFT, "[method]bucket.list-keys")
void kv_list_keys(int32_t self, int32_t some, const char *cursor, uint32_t len, res_kv *result);
IMPORT(KV "store" DRAFT, "[resource-drop]bucket") void kv_drop(int32_t self);
IMPORT(KV "atomics" DRAFT, "increment")
void kv_increment(int32_t bucket, const char *key, uint32_t len, int64_t delta, res_sum *result);
IMPORT(KV "atomics" DRAFT, "[static]cas.new") void cas_new(int32_t bucket, const char *key, uint32_t len, res_kv *result);
IMPORT(KV "atomics" DRAFT, "[method]cas.current") void cas_current(int32_t self, res_kv *result);
IMPORT(KV "atomics" DRAFT, "swap") void cas_swap(int32_t cas, const char *value, uint32_t len, res_swap *result);
IMPORT(KV "batch" DRAFT, "get-many") void kv_get_many(int32_t bucket, const str *keys, uint32_t count, res_kv *result);
IMPORT(KV "batch" DRAFT, "set-many") void kv_set_many(int32_t bucket, const entry *pairs, uint32_t count, res_kv *result);
IMPORT(KV "batch" DRAFT, "delete-many") void kv_delete_many(int32_t bucket, const str *keys, uint32_t count, res_kv *result);

static void reply_error(int32_t outparam, kv_error e) {
  str names[] = {STR("no-such-store"), STR("access-denied"), e.text};
  reply(outparam, 502, names[e.tag]);
}

static void kv_all_keys(int32_t outparam, int32_t bucket) {
  res_kv r = {0};
  str text = STR(""), cursor = STR("");
  do {
    kv_list_keys(bucket, cursor.len > 0, FLAT(cursor), &r);
    if (r.err) {
      reply_error(outparam, r.error);
      return;
    }
    for (uint32_t i = 0; i < r.keys.len; i++) text = join(text, ((str *)r.keys.ptr)[i], STR("\n"));
    cursor = r.cursor;
  } while (r.more);
  reply(outparam, 200, text);
}

// kv_append appends to a value, again if somebody else has changed it meanwhile.
static void kv_append(int32_t outparam, int32_t bucket, str key, str value) {
  res_kv r;
  res_swap swapped = {0};
  cas_new(bucket, FLAT(key), &r);
  if (r.err) {
    reply_error(outparam, r.error);
    return;
  }
  int32_t cas = r.handle;
  do {
    if (swapped.err) cas = swapped.handle;
    cas_current(cas, &r);
    check(r.err);
    str all = r.error.tag ? join(r.error.text, value) : value;
    cas_swap(cas, FLAT(all), &swapped);
  } while (swapped.err && swapped.failed);
  if (swapped.err)
    reply_error(outparam, swapped.error);
  else
    reply(outparam, 200, STR(""));
}

// kv_many sets KEY and KEY2 to the value, and returns them with KEY3, which it deletes first.
static void kv_many(int32_t outparam, int32_t bucket, str key, str value) {
  res_kv r;
  str keys[] = {key, join(key, STR("2")), join(key, STR("3"))};
  entry pairs[] = {{keys[0], value}, {keys[1], value}};
  kv_delete_many(bucket, &keys[2], 1, &r);
  if (!r.err) kv_set_many(bucket, pairs, 2, &r);
  if (!r.err) kv_get_many(bucket, keys, 3, &r);
  if (r.err) {
    reply_error(outparam, r.error);
    return;
  }
  str text = STR("");
  for (uint32_t i = 0; i < r.pairs.len; i++) {
    found_pair *p = (found_pair *)r.pairs.ptr + i;
    text = join(text, p->key, p->some ? STR("=") : STR(" is missing"), p->some ? p->value : STR(""), STR("\n"));
  }
  reply(outparam, 200, text);
}

static void keyvalue(int32_t outparam, int32_t headers) {
  str op = first(headers, STR("x-op")), key = first(headers, STR("x-key")), value = first(headers, STR("x-value"));
  str store = first(headers, STR("x-store"));
  res_kv r;
  res_sum added = {0};
  kv_open(FLAT(store), &r);
  if (r.err) {
    reply_error(outparam, r.error);
    return;
  }
  int32_t bucket = r.handle;
  if (eq(op, STR("get"))) {
    kv_get(bucket, FLAT(key), &r);
    if (!r.err) reply(outparam, r.error.tag ? 200 : 404, r.error.tag ? r.error.text : STR(""));
  } else if (eq(op, STR("set"))) {
    kv_set(bucket, FLAT(key), FLAT(value), &r);
    if (!r.err) reply(outparam, 200, STR(""));
  } else if (eq(op, STR("delete"))) {
    kv_delete(bucket, FLAT(key), &r);
    if (!r.err) reply(outparam, 200, STR(""));
  } else if (eq(op, STR("exists"))) {
    kv_exists(bucket, FLAT(key), &r);
    if (!r.err) reply(outparam, 200, r.yes ? STR("yes") : STR("no"));
  } else if (eq(op, STR("increment"))) {
    kv_increment(bucket, FLAT(key), value.len > 0 ? value.ptr[0] - '0' : 1, &added);
    if (!added.err) reply(outparam, 200, decimal(added.sum));
    r.err = added.err;
    r.error = added.error;
  } else if (eq(op, STR("append"))) {
    kv_append(outparam, bucket, key, value);
  } else if (eq(op, STR("many"))) {
    kv_many(outparam, bucket, key, value);
  } else {
    kv_all_keys(outparam, bucket);
  }
  int replied = eq(op, STR("append")) || eq(op, STR("many")) || eq(op, STR("keys"));
  if (r.err && !replied) reply_error(outparam, r.error);
  kv_drop(bucket);
}

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
  else if (eq(path.value, STR("/kv")))
    keyvalue(outparam, headers);
  else if (eq(path.value, STR("/log")))
    write_log(outparam, headers);
  else
    reply(outparam, 404, STR("no such path"));
  fields_drop(headers);
  request_drop(request);
  release(NULL);
}
