// A component that serves the objects of wasi:blobstore, in C without generated bindings.
//
//   PUT, DELETE /CONTAINER          creates or deletes the container
//   GET /CONTAINER                  the names of the objects, one a line
//   PUT /CONTAINER/OBJECT           stores the body of the request
//   GET /CONTAINER/OBJECT           the object; with the header x-range ("7-11"), this part of it; with x-size, its size
//   HEAD /CONTAINER/OBJECT          200 or 404
//   DELETE /CONTAINER/OBJECT        deletes the object
//   POST /CONTAINER/OBJECT          copies the object to /CONTAINER/OBJECT in the header x-to; with x-move, moves it
//
// If the host reports an error, the status is 502, and the body is its text.
#include "../include/http.h"

#define BLOBSTORE "wasi:blobstore/blobstore@0.2.0-draft"
#define CONTAINER "wasi:blobstore/container@0.2.0-draft"
#define BLOB_TYPES "wasi:blobstore/types@0.2.0-draft"

typedef struct { // result<T, string>, where T has a handle, a bool or nothing
  uint8_t err;
  union __attribute__((aligned(4))) {
    int32_t handle;
    uint8_t yes;
    str text;
    struct { // result<tuple<list<string>, bool>, string>
      list names;
      uint8_t end;
    };
  };
} res_blob;
typedef struct { // result<object-metadata, string>
  uint8_t err;
  union __attribute__((aligned(8))) {
    str text;
    struct {
      str name, container;
      uint64_t created, size;
    };
  };
} res_info;
_Static_assert(sizeof(res_blob) == 16 && sizeof(res_info) == 40, "the ABI's layouts");

IMPORT(BLOBSTORE, "create-container") void create_container(const char *name, uint32_t len, res_blob *result);
IMPORT(BLOBSTORE, "get-container") void get_container(const char *name, uint32_t len, res_blob *result);
IMPORT(BLOBSTORE, "delete-container") void delete_container(const char *name, uint32_t len, res_blob *result);
IMPORT(BLOBSTORE, "copy-object")
void copy_object(const char *, uint32_t, const char *, uint32_t, const char *, uint32_t, const char *, uint32_t, res_blob *);
IMPORT(BLOBSTORE, "move-object")
void move_object(const char *, uint32_t, const char *, uint32_t, const char *, uint32_t, const char *, uint32_t, res_blob *);
IMPORT(CONTAINER, "[method]container.get-data")
void get_data(int32_t self, const char *name, uint32_t len, uint64_t start, uint64_t end, res_blob *result);
IMPORT(CONTAINER, "[method]container.write-data")
void write_data(int32_t self, const char *name, uint32_t len, int32_t value, res_blob *result);
IMPORT(CONTAINER, "[method]container.list-objects") void list_objects(int32_t self, res_blob *result);
IMPORT(CONTAINER, "[method]container.delete-object")
void delete_object(int32_t self, const char *name, uint32_t len, res_blob *result);
IMPORT(CONTAINER, "[method]container.has-object")
void has_object(int32_t self, const char *name, uint32_t len, res_blob *result);
IMPORT(CONTAINER, "[method]container.object-info")
void object_info(int32_t self, const char *name, uint32_t len, res_info *result);
IMPORT(CONTAINER, "[method]stream-object-names.read-stream-object-names")
void read_names(int32_t self, uint64_t count, res_blob *result);
IMPORT(CONTAINER, "[resource-drop]container") void container_drop(int32_t self);
IMPORT(CONTAINER, "[resource-drop]stream-object-names") void names_drop(int32_t self);
IMPORT(BLOB_TYPES, "[static]outgoing-value.new-outgoing-value") int32_t value_new(void);
IMPORT(BLOB_TYPES, "[method]outgoing-value.outgoing-value-write-body") void value_body(int32_t self, res_handle *stream);
IMPORT(BLOB_TYPES, "[static]outgoing-value.finish") void value_finish(int32_t self, res_blob *result);
IMPORT(BLOB_TYPES, "[resource-drop]outgoing-value") void value_drop(int32_t self);
IMPORT(BLOB_TYPES, "[static]incoming-value.incoming-value-consume-async") void value_stream(int32_t self, res_blob *result);

// answer replies with an empty body or, after an error, with its text.
static void answer(int32_t outparam, res_blob r) {
  if (r.err)
    reply(outparam, 502, r.text);
  else
    reply(outparam, 200, STR(""));
}

// part returns a text up to a separator, and removes both from it.
static str part(str *text, char separator) {
  str head = {text->ptr, 0};
  while (head.len < text->len && head.ptr[head.len] != separator) head.len++;
  uint32_t used = head.len < text->len ? head.len + 1 : head.len;
  *text = (str){text->ptr + used, text->len - used};
  return head;
}

static uint64_t number(str digits) {
  uint64_t n = 0;
  for (uint32_t i = 0; i < digits.len; i++) n = n * 10 + digits.ptr[i] - '0';
  return n;
}

static void list_names(int32_t outparam, int32_t container) {
  res_blob r;
  list_objects(container, &r);
  if (r.err) {
    reply(outparam, 502, r.text);
    return;
  }
  int32_t names = r.handle;
  str text = STR("");
  do {
    read_names(names, 100, &r);
    if (r.err) {
      reply(outparam, 502, r.text);
      return;
    }
    for (uint32_t i = 0; i < r.names.len; i++) text = join(text, ((str *)r.names.ptr)[i], STR("\n"));
  } while (!r.end);
  names_drop(names);
  reply(outparam, 200, text);
}

static void send_object(int32_t outparam, int32_t container, str object, str range) {
  res_blob r;
  res_handle to;
  uint64_t finished[6];
  str first_byte = part(&range, '-');
  get_data(container, FLAT(object), number(first_byte), range.len > 0 ? number(range) : UINT64_MAX, &r);
  if (!r.err) value_stream(r.handle, &r);
  if (r.err) {
    reply(outparam, 502, r.text);
    return;
  }
  int32_t from = r.handle, body = begin(outparam, 200);
  out_body_write(body, &to);
  check(to.err);
  int whole = pump(to.value, from);
  in_drop(from);
  out_drop(to.value);
  if (whole) out_body_finish(body, 0, 0, finished);
}

// store writes the body of the request.
static void store(int32_t outparam, int32_t container, str object, int32_t request) {
  res_blob r;
  res_handle to, body, from;
  int32_t value = value_new();
  write_data(container, FLAT(object), value, &r);
  if (r.err) {
    reply(outparam, 502, r.text);
    return;
  }
  value_body(value, &to);
  check(to.err);
  request_consume(request, &body);
  check(body.err);
  in_body_stream(body.value, &from);
  check(from.err);
  int whole = pump(to.value, from.value);
  in_drop(from.value);
  in_body_drop(body.value);
  out_drop(to.value);
  if (whole) {
    value_finish(value, &r);
    answer(outparam, r);
  } else {
    value_drop(value);
    reply(outparam, 502, STR("the body was not written"));
  }
}

static void has(int32_t outparam, int32_t container, str object) {
  res_blob r;
  has_object(container, FLAT(object), &r);
  reply(outparam, r.err ? 502 : r.yes ? 200 : 404, STR(""));
}

static void size_of(int32_t outparam, int32_t container, str object) {
  res_info r;
  object_info(container, FLAT(object), &r);
  reply(outparam, r.err ? 502 : 200, r.err ? r.text : decimal(r.size));
}

enum { GET, HEAD, POST, PUT, DELETE }; // of the variant method

static void on_container(int32_t outparam, uint32_t method, str container) {
  res_blob r;
  if (method == PUT)
    create_container(FLAT(container), &r);
  else if (method == DELETE)
    delete_container(FLAT(container), &r);
  else
    get_container(FLAT(container), &r);
  if (method == DELETE || r.err) {
    answer(outparam, r);
    return;
  }
  int32_t handle = r.handle;
  if (method == PUT)
    answer(outparam, r);
  else
    list_names(outparam, handle);
  container_drop(handle);
}

static void on_object(int32_t outparam, int32_t request, uint32_t method, str container, str object) {
  res_blob r;
  int32_t headers = request_headers(request);
  str range = first(headers, STR("x-range")), to = first(headers, STR("x-to"));
  int moves = first(headers, STR("x-move")).len > 0, size = first(headers, STR("x-size")).len > 0;
  fields_drop(headers);
  if (method == POST) {
    str to_container = part(&to, '/');
    (moves ? move_object : copy_object)(FLAT(container), FLAT(object), FLAT(to_container), FLAT(to), &r);
    answer(outparam, r);
    return;
  }
  get_container(FLAT(container), &r);
  if (r.err) {
    reply(outparam, 502, r.text);
    return;
  }
  int32_t handle = r.handle;
  if (method == PUT)
    store(outparam, handle, object, request);
  else if (method == HEAD)
    has(outparam, handle, object);
  else if (method == DELETE) {
    delete_object(handle, FLAT(object), &r);
    answer(outparam, r);
  } else if (size)
    size_of(outparam, handle, object);
  else
    send_object(outparam, handle, object, range);
  container_drop(handle);
}

EXPORT("wasi:http/incoming-handler@0.2.0#handle") void handle(int32_t request, int32_t outparam) {
  opt_str path;
  uint32_t method[3];
  request_path(request, &path);
  request_method(request, method);
  str rest = path.value;
  part(&rest, '/');
  str container = part(&rest, '/');
  if (rest.len == 0)
    on_container(outparam, (uint8_t)method[0], container);
  else
    on_object(outparam, request, (uint8_t)method[0], container, rest);
  request_drop(request);
  release(NULL);
}
