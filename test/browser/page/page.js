// The page calls components as an application would, with the clients of Connect and with fetch alone, and reports to its
// server what each call gave.
import { createFileRegistry, fromBinary } from '@bufbuild/protobuf';
import { FileDescriptorSetSchema } from '@bufbuild/protobuf/wkt';
import { createClient } from '@connectrpc/connect';
import { createConnectTransport, createGrpcWebTransport } from '@connectrpc/connect-web';

const bytesOf = (base64) => Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));

// greeter calls the unary method, the server stream, and a method that fails.
async function greeter(transport, service) {
  const client = createClient(service, transport);
  let id;
  const { message } = await client.sayHello({ name: 'Ada' }, { headers: { 'x-request-id': '42' }, onHeader: (h) => (id = h.get('x-request-id')) });
  const numbers = [];
  for await (const reply of client.countdown({ from: 3 })) numbers.push(reply.number);
  let failure;
  await client.sayHello({ name: '' }).catch((err) => (failure = err));
  return { message, id, numbers, code: failure?.code, details: failure?.details?.length };
}

// webText calls the server stream with gRPC-Web's text format, and returns the bytes of all frames.
async function webText(url) {
  const request = [0, 0, 0, 0, 2, 8, 3]; // CountdownRequest{from: 3}
  const half = (part) => btoa(String.fromCharCode(...part));
  const answer = await fetch(`${url}/Countdown`, {
    method: 'POST',
    headers: { 'Content-Type': 'application/grpc-web-text', 'X-Grpc-Web': '1' },
    body: half(request.slice(0, 4)) + half(request.slice(4)),
  });
  const text = await answer.text();
  let bytes = '';
  for (const [string] of text.matchAll(/[^=]+={0,2}/g)) bytes += atob(string);
  return { type: answer.headers.get('content-type'), ok: bytes.endsWith('grpc-status: 0\r\n'), frames: bytes.split('\0\0\0\0').length - 1 };
}

async function json(url, options = {}) {
  const answer = await fetch(`${url}/SayHello`, {
    method: 'POST', headers: { 'Content-Type': 'application/json', 'X-Request-Id': '7' }, body: '{"name":"Ada"}', ...options,
  });
  return { ...(await answer.json()), id: answer.headers.get('x-request-id') };
}

async function main() {
  const config = await (await fetch('/config.json')).json();
  const registry = createFileRegistry(fromBinary(FileDescriptorSetSchema, bytesOf(config.descriptors)));
  const service = registry.getService('greet.v1.Greeter');
  const results = {};
  const call = async (name, f) => {
    try {
      results[name] = await f();
    } catch (err) {
      results[name] = { refused: `${err.name}: ${err.message}` };
    }
  };
  for (const [name, base] of Object.entries(config.bases)) {
    const url = `${base}/greet.v1.Greeter`;
    await call(`${name}: Connect`, () => greeter(createConnectTransport({ baseUrl: base }), service));
    await call(`${name}: Connect with GET`, () => greeter(createConnectTransport({ baseUrl: base, useHttpGet: true }), service));
    await call(`${name}: gRPC-Web`, () => greeter(createGrpcWebTransport({ baseUrl: base }), service));
    await call(`${name}: gRPC-Web text`, () => webText(url));
    await call(`${name}: JSON`, () => json(url));
    await call(`${name}: GET`, async () =>
      (await fetch(`${url}/SayHello?connect=v1&encoding=json&message=${encodeURIComponent('{"name":"Ada"}')}`)).json());
    await call(`${name}: cookies`, () => json(url, { credentials: 'include' }));
  }
  await call('http', async () => (await fetch(config.http)).text());
  document.getElementById('results').textContent = JSON.stringify(results, null, 1);
  await fetch('/report', { method: 'POST', body: JSON.stringify(results) });
}

main().catch((err) => fetch('/report', { method: 'POST', body: JSON.stringify({ page: { refused: String(err.stack) } }) }));
