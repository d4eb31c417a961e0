// A component of the world wasi:http/incoming-handler that uses wasi:sockets, in C without generated bindings.
//
//   /tcp     connects to the address in the header x-to, sends the header x-data, ends its side, and answers with what the
//            server sends
//   /udp     sends x-data as a datagram to x-to, and answers with the datagram that comes back, or with "timeout" after
//            a second. With the header x-many, the socket has no peer of its own, but each datagram names one.
//   /lookup  the addresses of the name x-name
//   /hoard   connects to x-to without end, and keeps the connections: "N connections, then CODE"
//   /flood   sends datagrams from one socket to ever more ports of x-to: "N peers, then CODE"
//   /names   looks names up without end, at the same time: "N lookups, then CODE"
//
// Addresses are ADDRESS:PORT with IPv4. If something fails, the status is 502, and the body is the name of the error-code.
#include "../include/http.h"

#define NETWORK "wasi:sockets/network@0.2.0"
#define TCP "wasi:sockets/tcp@0.2.0"
#define UDP "wasi:sockets/udp@0.2.0"
#define LOOKUP "wasi:sockets/ip-name-lookup@0.2.0"

// The layouts of results that do not fit into a core value.
typedef struct { // result<_, error-code>
  uint8_t err, code;
} res_code;
typedef struct { // result<own<T>, error-code>; result<tuple<own<T>, own<U>>, error-code>
  uint8_t err;
  union {
    uint8_t code;
    int32_t handle[2];
  };
} res_handles;
typedef struct { // result<u64, error-code>
  uint8_t err;
  union {
    uint8_t code;
    uint64_t value;
  };
} res_number;
typedef struct { // result<list<T>, error-code>
  uint8_t err;
  union {
    uint8_t code;
    list value;
  };
} res_list;
typedef struct { // result<option<ip-address>, error-code>
  uint8_t err;
  union __attribute__((aligned(2))) {
    uint8_t code;
    struct {
      uint8_t some;
      struct {
        uint8_t v6;
        uint16_t parts[8]; // or four bytes
      } address;
    };
  };
} res_address;

typedef struct { // the case ipv4 of ip-socket-address
  uint8_t v6;
  union __attribute__((aligned(4))) {
    struct {
      uint16_t port;
      uint8_t ip[4];
    };
    uint32_t others[7];
  };
} address;
typedef struct {
  str data;
  address from;
} in_datagram;
typedef struct {
  str data;
  uint8_t some;
  address to;
} out_datagram;
_Static_assert(sizeof(in_datagram) == 40 && sizeof(out_datagram) == 44 && sizeof(res_address) == 22, "the ABI's layouts");

// An ip-socket-address is passed as twelve parameters: the case, and the parts of the largest case.
#define ADDRESS_PARAMS \
  int32_t v6, int32_t port, int32_t, int32_t, int32_t, int32_t, int32_t, int32_t, int32_t, int32_t, int32_t, int32_t
#define ADDRESS(a) 0, (a).port, (a).ip[0], (a).ip[1], (a).ip[2], (a).ip[3], 0, 0, 0, 0, 0, 0

IMPORT("wasi:sockets/instance-network@0.2.0", "instance-network") int32_t instance_network(void);
IMPORT("wasi:sockets/tcp-create-socket@0.2.0", "create-tcp-socket") void tcp_new(int32_t family, res_handles *result);
IMPORT(TCP, "[method]tcp-socket.start-connect")
void tcp_start_connect(int32_t self, int32_t network, ADDRESS_PARAMS, res_code *result);
IMPORT(TCP, "[method]tcp-socket.finish-connect") void tcp_finish_connect(int32_t self, res_handles *result);
IMPORT(TCP, "[method]tcp-socket.subscribe") int32_t tcp_subscribe(int32_t self);
IMPORT(TCP, "[method]tcp-socket.shutdown") void tcp_shutdown(int32_t self, int32_t type, res_code *result);
IMPORT(TCP, "[resource-drop]tcp-socket") void tcp_drop(int32_t self);
IMPORT("wasi:sockets/udp-create-socket@0.2.0", "create-udp-socket") void udp_new(int32_t family, res_handles *result);
IMPORT(UDP, "[method]udp-socket.start-bind")
void udp_start_bind(int32_t self, int32_t network, ADDRESS_PARAMS, res_code *result);
IMPORT(UDP, "[method]udp-socket.finish-bind") void udp_finish_bind(int32_t self, res_code *result);
IMPORT(UDP, "[method]udp-socket.stream") void udp_stream(int32_t self, int32_t some, ADDRESS_PARAMS, res_handles *result);
IMPORT(UDP, "[resource-drop]udp-socket") void udp_drop(int32_t self);
IMPORT(UDP, "[method]incoming-datagram-stream.receive") void udp_receive(int32_t self, int64_t most, res_list *result);
IMPORT(UDP, "[method]incoming-datagram-stream.subscribe") int32_t udp_in_subscribe(int32_t self);
IMPORT(UDP, "[resource-drop]incoming-datagram-stream") void udp_in_drop(int32_t self);
IMPORT(UDP, "[method]outgoing-datagram-stream.check-send") void udp_check_send(int32_t self, res_number *result);
IMPORT(UDP, "[method]outgoing-datagram-stream.send")
void udp_send(int32_t self, const out_datagram *datagrams, uint32_t count, res_number *result);
IMPORT(UDP, "[method]outgoing-datagram-stream.subscribe") int32_t udp_out_subscribe(int32_t self);
IMPORT(UDP, "[resource-drop]outgoing-datagram-stream") void udp_out_drop(int32_t self);
IMPORT(LOOKUP, "resolve-addresses") void resolve(int32_t network, const char *name, uint32_t len, res_handles *result);
IMPORT(LOOKUP, "[method]resolve-address-stream.resolve-next-address") void resolve_next(int32_t self, res_address *result);
IMPORT(LOOKUP, "[method]resolve-address-stream.subscribe") int32_t resolve_subscribe(int32_t self);
IMPORT(LOOKUP, "[resource-drop]resolve-address-stream") void resolve_drop(int32_t self);
IMPORT("wasi:clocks/monotonic-clock@0.2.0", "subscribe-duration") int32_t subscribe_duration(int64_t ns);
IMPORT("wasi:io/poll@0.2.0", "poll") void wasi_poll(const int32_t *pollables, uint32_t count, list *ready);

static const char *const codes[] = { // of the enum error-code
    "unknown", "access-denied", "not-supported", "invalid-argument", "out-of-memory", "timeout", "concurrency-conflict",
    "not-in-progress", "would-block", "invalid-state", "new-socket-limit", "address-not-bindable", "address-in-use",
    "remote-unreachable", "connection-refused", "connection-reset", "connection-aborted", "datagram-too-large",
    "name-unresolvable", "temporary-resolver-failure", "permanent-resolver-failure"};

enum { IPV4 };

static str code_of(uint8_t code) { return (str){codes[code], strlen(codes[code])}; }

static void wait_for(int32_t pollable) {
  pollable_block(pollable);
  pollable_drop(pollable);
}

// number reads digits from the front of a string.
static uint32_t number(str *s) {
  uint32_t n = 0;
  for (; s->len > 0 && *s->ptr >= '0' && *s->ptr <= '9'; s->ptr++, s->len--) n = n * 10 + *s->ptr - '0';
  return n;
}

// address_of parses ADDRESS:PORT.
static address address_of(str s) {
  address a = {0};
  for (int i = 0; i < 4; i++) {
    a.ip[i] = number(&s);
    check(s.len == 0 || *s.ptr != (i < 3 ? '.' : ':'));
    s.ptr++, s.len--;
  }
  a.port = number(&s);
  return a;
}

// connect returns 0 and the streams, or an error-code.
static uint8_t connect_to(address to, int32_t *socket, int32_t streams[2]) {
  res_handles made;
  res_code started;
  tcp_new(IPV4, &made);
  if (made.err) return made.code;
  *socket = made.handle[0];
  tcp_start_connect(*socket, instance_network(), ADDRESS(to), &started);
  if (started.err) return started.code;
  wait_for(tcp_subscribe(*socket));
  tcp_finish_connect(*socket, &made);
  if (made.err) return made.code;
  streams[0] = made.handle[0], streams[1] = made.handle[1];
  return 0;
}

static void tcp(int32_t outparam, address to, str data) {
  int32_t socket, streams[2];
  uint8_t code = connect_to(to, &socket, streams);
  if (code) {
    reply(outparam, 502, code_of(code));
    return;
  }
  uint32_t result[3];
  out_write(streams[1], FLAT(data), result);
  check((uint8_t)result[0]);
  res_code ended;
  tcp_shutdown(socket, 1 /* send */, &ended);
  check(ended.err);
  str got = STR("");
  for (;;) {
    in_read(streams[0], 4096, result); // result<list<u8>, stream-error>
    if ((uint8_t)result[0]) break;
    got = join(got, ((str){(const char *)result[1], result[2]}));
  }
  if ((uint8_t)result[1] == 0) error_drop(result[2]);
  in_drop(streams[0]);
  out_drop(streams[1]);
  tcp_drop(socket);
  reply(outparam, 200, got);
}

// udp_open returns 0 and the streams of a UDP socket, or an error-code.
static uint8_t udp_open(address to, int connected, int32_t *socket, int32_t streams[2]) {
  res_handles made;
  res_code done;
  address any = {0};
  udp_new(IPV4, &made);
  if (made.err) return made.code;
  *socket = made.handle[0];
  udp_start_bind(*socket, instance_network(), ADDRESS(any), &done);
  if (done.err) return done.code;
  udp_finish_bind(*socket, &done);
  if (done.err) return done.code;
  udp_stream(*socket, connected, ADDRESS(to), &made);
  if (made.err) return made.code;
  streams[0] = made.handle[0], streams[1] = made.handle[1];
  return 0;
}

// udp_put sends a datagram, and returns 0 or an error-code.
static uint8_t udp_put(int32_t out, out_datagram d) {
  res_number n;
  do {
    for (udp_check_send(out, &n); !n.err && n.value == 0; udp_check_send(out, &n)) wait_for(udp_out_subscribe(out));
    if (n.err) return n.code;
    udp_send(out, &d, 1, &n);
    if (n.err) return n.code;
  } while (n.value == 0);
  return 0;
}

static void udp(int32_t outparam, address to, str data, int many) {
  int32_t socket, streams[2];
  uint8_t code = udp_open(to, !many, &socket, streams);
  if (!code) code = udp_put(streams[1], (out_datagram){data, many, to});
  if (code) {
    reply(outparam, 502, code_of(code));
    return;
  }
  int32_t pollables[2] = {udp_in_subscribe(streams[0]), subscribe_duration(1000000000)};
  list ready;
  wasi_poll(pollables, 2, &ready);
  pollable_drop(pollables[0]);
  pollable_drop(pollables[1]);
  res_list got;
  udp_receive(streams[0], 1, &got);
  if (got.err)
    reply(outparam, 502, code_of(got.code));
  else if (got.value.len == 0)
    reply(outparam, 502, STR("timeout"));
  else
    reply(outparam, 200, ((in_datagram *)got.value.ptr)->data);
  udp_in_drop(streams[0]);
  udp_out_drop(streams[1]);
  udp_drop(socket);
}

static void lookup(int32_t outparam, str name) {
  res_handles begun;
  str text = STR("");
  resolve(instance_network(), FLAT(name), &begun);
  if (begun.err) {
    reply(outparam, 502, code_of(begun.code));
    return;
  }
  wait_for(resolve_subscribe(begun.handle[0]));
  for (;;) {
    res_address next;
    resolve_next(begun.handle[0], &next);
    if (next.err) {
      reply(outparam, 502, code_of(next.code));
      return;
    }
    if (!next.some) break;
    if (text.len > 0) text = join(text, STR(" "));
    const uint8_t *ip = (const uint8_t *)next.address.parts;
    if (next.address.v6)
      text = join(text, STR("ipv6"));
    else
      text = join(text, decimal(ip[0]), STR("."), decimal(ip[1]), STR("."), decimal(ip[2]), STR("."), decimal(ip[3]));
  }
  resolve_drop(begun.handle[0]);
  reply(outparam, 200, text);
}

static void count(int32_t outparam, int n, str what, uint8_t code) {
  reply(outparam, 200, join(decimal(n), STR(" "), what, STR(", then "), code_of(code)));
}

static void hoard(int32_t outparam, address to) {
  int n = 0;
  uint8_t code;
  for (int32_t socket, streams[2]; (code = connect_to(to, &socket, streams)) == 0;) n++;
  count(outparam, n, STR("connections"), code);
}

static void flood(int32_t outparam, address to, str data) {
  int n = 0;
  int32_t socket, streams[2];
  uint8_t code = udp_open(to, 0, &socket, streams);
  for (; !code && (code = udp_put(streams[1], (out_datagram){data, 1, to})) == 0; to.port++) n++;
  count(outparam, n, STR("peers"), code);
}

static void names(int32_t outparam) {
  int32_t network = instance_network();
  for (int n = 0;; n++) {
    res_handles begun;
    chunk *mark = chunks;
    str name = join(STR("n"), decimal(n), STR(".example"));
    resolve(network, FLAT(name), &begun);
    release(mark);
    if (begun.err) {
      count(outparam, n, STR("lookups"), begun.code);
      return;
    }
  }
}

EXPORT("wasi:http/incoming-handler@0.2.0#handle") void handle(int32_t request, int32_t outparam) {
  opt_str path;
  request_path(request, &path);
  check(!path.some);
  int32_t headers = request_headers(request);
  str to = first(headers, STR("x-to")), data = first(headers, STR("x-data")), name = first(headers, STR("x-name"));
  int many = first(headers, STR("x-many")).len > 0;
  fields_drop(headers);
  if (eq(path.value, STR("/tcp")))
    tcp(outparam, address_of(to), data);
  else if (eq(path.value, STR("/udp")))
    udp(outparam, address_of(to), data, many);
  else if (eq(path.value, STR("/lookup")))
    lookup(outparam, name);
  else if (eq(path.value, STR("/hoard")))
    hoard(outparam, address_of(to));
  else if (eq(path.value, STR("/flood")))
    flood(outparam, address_of(to), data);
  else if (eq(path.value, STR("/names")))
    names(outparam);
  else
    reply(outparam, 404, STR("unknown path"));
  request_drop(request);
  release(NULL);
}
