// connectrpc.conformance.v1.ConformanceService in JavaScript: the server that the public conformance suite of Connect, gRPC and
// gRPC-Web calls. It answers as each request asks, and reports to the client what it received. `make test-connect` runs it.
import response from 'tripod:grpc/response@0.1.0';
import monotonicClock from 'wasi:clocks/monotonic-clock@0.2.12';

const UNIMPLEMENTED = 12;
const PACKAGE = 'type.googleapis.com/connectrpc.conformance.v1.';
const codes = [
  'unspecified', 'canceled', 'unknown', 'invalid-argument', 'deadline-exceeded', 'not-found', 'already-exists', 'permission-denied',
  'resource-exhausted', 'failed-precondition', 'aborted', 'out-of-range', 'unimplemented', 'internal', 'unavailable', 'data-loss',
  'unauthenticated',
];
const codeOf = (code) => (code.tag === 'unrecognized' ? code.val : codes.indexOf(code.tag));

// The engine has only the bare language, without TextEncoder and atob.
const utf8 = (text) => Uint8Array.from(unescape(encodeURIComponent(text)), (c) => c.charCodeAt(0));
const ascii = (bytes) => Array.from(bytes, (b) => String.fromCharCode(b)).join('');
const alphabet = 'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/';

function base64(bytes) {
  let text = '';
  for (let i = 0; i < bytes.length; i += 3) {
    const group = (bytes[i] << 16) | ((bytes[i + 1] ?? 0) << 8) | (bytes[i + 2] ?? 0);
    for (let j = 0; j < Math.min(4, bytes.length - i + 1); j++) text += alphabet[(group >> (18 - 6 * j)) & 63];
  }
  return text;
}

function fromBase64(text) {
  const bytes = [];
  let group = 0;
  let bits = 0;
  for (const c of text.replace(/=+$/, '').replaceAll('-', '+').replaceAll('_', '/')) {
    group = ((group << 6) | alphabet.indexOf(c)) & 0xffffff;
    bits += 6;
    if (bits >= 8) bytes.push((group >> (bits -= 8)) & 255);
  }
  return Uint8Array.from(bytes);
}

// A serialized message is a list of byte strings. Fields without presence are omitted if they have the default value.
function join(parts) {
  const all = new Uint8Array(parts.reduce((n, p) => n + p.length, 0));
  let at = 0;
  for (const p of parts) {
    all.set(p, at);
    at += p.length;
  }
  return all;
}

function varint(n) {
  const bytes = [];
  for (n = BigInt.asUintN(64, BigInt(n)); n > 127n; n >>= 7n) bytes.push(Number(n & 127n) | 128);
  return Uint8Array.from([...bytes, Number(n)]);
}

const number = (field, n) => join([varint(field << 3), varint(n)]);
const delimited = (field, bytes) => join([varint((field << 3) | 2), varint(bytes.length), bytes]);
const text = (field, s) => delimited(field, utf8(s));
const each = (field, list, encode) => join(list.map((x) => delimited(field, encode(x))));
const unless = (condition, bytes) => (condition ? new Uint8Array() : bytes());
const maybe = (value, encode) => unless(value === undefined || value === null, () => encode(value));

const anyOf = (a) => join([text(1, a.typeUrl), delimited(2, a.value)]);
const headerOf = (h) => join([text(1, h.name), join(h.value.map((v) => text(2, v)))]);
const errorOf = (e) => join([number(1, codeOf(e.code)), maybe(e.message, (m) => text(2, m)), each(3, e.details, anyOf)]);

const unaryDefinition = (d) =>
  join([
    each(1, d.responseHeaders, headerOf),
    maybe(d.response, (r) => (r.tag === 'error' ? delimited(3, errorOf(r.val)) : delimited(2, r.val))),
    each(4, d.responseTrailers, headerOf),
    unless(!d.responseDelayMs, () => number(6, d.responseDelayMs)),
  ]);

const streamDefinition = (d) =>
  join([
    each(1, d.responseHeaders, headerOf),
    join(d.responseData.map((data) => delimited(2, data))),
    unless(!d.responseDelayMs, () => number(3, d.responseDelayMs)),
    maybe(d.error, (e) => delimited(4, errorOf(e))),
    each(5, d.responseTrailers, headerOf),
  ]);

// request returns a request as an Any.
function request(type, r) {
  const stream = type === 'BidiStreamRequest' || type === 'ServerStreamRequest';
  const data = type === 'BidiStreamRequest' ? 3 : 2;
  return {
    typeUrl: PACKAGE + type,
    value: join([
      maybe(r.responseDefinition, (d) => delimited(1, stream ? streamDefinition(d) : unaryDefinition(d))),
      unless(!r.fullDuplex, () => number(2, 1)),
      unless(!r.requestData.length, () => delimited(data, r.requestData)),
    ]),
  };
}

// info returns what was received of a call: its header and deadline, and the requests so far.
function info(context, requests) {
  const headers = new Map();
  for (const { key, value } of context.metadata) {
    const values = headers.get(key) ?? headers.set(key, []).get(key);
    values.push(key.endsWith('-bin') ? base64(value) : ascii(value));
  }
  return {
    requestHeaders: Array.from(headers, ([name, value]) => ({ name, value })),
    timeoutMs: context.timeout === undefined || context.timeout === null ? undefined : Math.ceil(Number(context.timeout) / 1000000),
    requests,
    connectGetInfo: undefined,
  };
}

const infoOf = (i) =>
  join([each(1, i.requestHeaders, headerOf), maybe(i.timeoutMs, (t) => number(2, t)), each(3, i.requests, anyOf)]);

// failure returns the status that an error asks for. If no response was sent before, its details contain what was received.
function failure(error, seen) {
  const details = error.details.map(anyOf);
  if (seen) details.push(anyOf({ typeUrl: PACKAGE + 'ConformancePayload.RequestInfo', value: infoOf(seen) }));
  return { code: codeOf(error.code), message: error.message ?? '', details };
}

function metadata(definition) {
  const entries = (headers) =>
    headers.flatMap(({ name, value }) =>
      value.map((v) => ({ key: name.toLowerCase(), value: name.toLowerCase().endsWith('-bin') ? fromBase64(v) : utf8(v) })));
  entries(definition?.responseHeaders ?? []).forEach(response.setHeader);
  entries(definition?.responseTrailers ?? []).forEach(response.setTrailer);
}

function sleep(milliseconds) {
  if (milliseconds) monotonicClock.subscribeDuration(milliseconds * 1000000).block();
}

// single answers a call with one response.
function single(context, definition, requests) {
  const seen = info(context, requests);
  metadata(definition);
  sleep(definition?.responseDelayMs);
  if (definition?.response?.tag === 'error') throw failure(definition.response.val, seen);
  return { payload: { data: definition?.response?.val ?? new Uint8Array(), requestInfo: seen } };
}

// several sends the remaining responses of a definition, the first with what was received, and fails if it asks for that.
function several(definition, replies, seen, from = 0) {
  for (const data of definition?.responseData.slice(from) ?? []) {
    sleep(definition.responseDelayMs);
    replies.send({ payload: { data, requestInfo: seen } });
    seen = undefined;
  }
  if (definition?.error) throw failure(definition.error, seen);
}

function* all(requests) {
  for (let r = requests.next(); r !== null && r !== undefined; r = requests.next()) yield r;
}

function fullDuplex(context, requests, replies, first) {
  const definition = first.responseDefinition;
  let sent = 0;
  for (let r = first; r !== null && r !== undefined; r = requests.next()) {
    const seen = sent ? { ...info(context, []), requestHeaders: [], timeoutMs: undefined } : info(context, []);
    seen.requests = [request('BidiStreamRequest', r)];
    if (sent >= (definition?.responseData.length ?? 0)) {
      if (definition?.error) throw failure(definition.error, sent ? undefined : seen);
      break;
    }
    sleep(definition.responseDelayMs);
    replies.send({ payload: { data: definition.responseData[sent++], requestInfo: seen } });
  }
  several(definition, replies, undefined, sent);
}

export const conformanceService = {
  unary: (context, r) => single(context, r.responseDefinition, [request('UnaryRequest', r)]),

  idempotentUnary: (context, r) => single(context, r.responseDefinition, [request('IdempotentUnaryRequest', r)]),

  unimplemented() {
    throw { code: UNIMPLEMENTED, message: 'it is not to be implemented', details: [] };
  },

  serverStream(context, r, replies) {
    metadata(r.responseDefinition);
    several(r.responseDefinition, replies, info(context, [request('ServerStreamRequest', r)]));
  },

  clientStream(context, requests) {
    const received = Array.from(all(requests));
    return single(context, received[0]?.responseDefinition, received.map((r) => request('ClientStreamRequest', r)));
  },

  bidiStream(context, requests, replies) {
    const first = requests.next();
    if (first === null || first === undefined) return;
    metadata(first.responseDefinition);
    if (first.fullDuplex) {
      fullDuplex(context, requests, replies, first);
      return;
    }
    const received = [first, ...all(requests)];
    several(first.responseDefinition, replies, info(context, received.map((r) => request('BidiStreamRequest', r))));
  },
};
