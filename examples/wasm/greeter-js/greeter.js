// The Greeter service in JavaScript. `tripod wit gen ../greeter/greeter.proto` writes the interfaces that it implements:
// functions return results, or throw a status; streams are objects with next() and send().
import response from 'tripod:grpc/response@0.1.0';
import environment from 'wasi:cli/environment@0.2.12';
import stdout from 'wasi:cli/stdout@0.2.12';

const INVALID_ARGUMENT = 3;
const hello = { german: 'Hallo', french: 'Bonjour' };

// The engine has only the bare language, without console and TextEncoder. URIs are encoded in UTF-8.
const utf8 = (text) => Uint8Array.from(unescape(encodeURIComponent(text)), (c) => c.charCodeAt(0));

function say(line) {
  stdout.getStdout().blockingWriteAndFlush(utf8(line + '\n'));
}

// A google.protobuf.Any with a StringValue that names the wrong field. A field of up to 127 bytes is encoded as its number
// and wire type, its length and its bytes.
const field = (number, bytes) => [(number << 3) | 2, bytes.length, ...bytes];
const wrongField = (name) =>
  new Uint8Array([...field(1, utf8('type.googleapis.com/google.protobuf.StringValue')), ...field(2, field(1, utf8(name)))]);

function greet(name, language) {
  if (!name) throw { code: INVALID_ARGUMENT, message: 'name: must not be empty', details: [wrongField('name')] };
  const [, pod] = environment.getEnvironment().find(([variable]) => variable === 'POD_NAME') ?? [];
  return { message: `${hello[language?.tag] ?? 'Hello'}, ${name}!`, servedBy: pod ?? '' };
}

function* all(requests) {
  for (let r = requests.next(); r !== null; r = requests.next()) yield r;
}

export const greeter = {
  sayHello(context, request) {
    const id = context.metadata.find((e) => e.key === 'x-request-id');
    if (id) response.setHeader(id);
    const bin = context.metadata.find((e) => e.key === 'x-trace-bin');
    if (bin) response.setTrailer(bin);
    say(`SayHello ${request.name} from ${context.peer}`);
    return greet(request.name, request.language);
  },

  // Its world has no clock, so it ignores the interval and sends the numbers as fast as they are read.
  countdown(context, request, replies) {
    say(`Countdown from ${request.from}`);
    for (let number = request.from; number >= 0; number--) replies.send({ number });
  },

  collect(context, requests) {
    const names = [];
    let language;
    for (const r of all(requests)) {
      names.push(r.name);
      language = r.language;
    }
    say(`Collect ${names.join(', ')}`);
    return greet(names.join(', '), language);
  },

  chat(context, requests, replies) {
    say('Chat');
    for (const r of all(requests)) replies.send(greet(r.name, r.language));
  },
};

// What requests would do at their first use is done once, before the first request: each of them begins with the memory that
// is left here. The environment is the pod's; other functions of the host cannot be called here.
export const warm = {
  warm() {
    greet('warm', { tag: 'french' });
    utf8('warm');
    return 0; // nothing random and no time of day that requests would share
  },
};
