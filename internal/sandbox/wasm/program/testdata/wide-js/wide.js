import clock from 'wasi:clocks/monotonic-clock@0.2.12';

export const wide = {
  watch(context, request, replies) {
    for (const key of ['a', 'b', 'c', 'd', 'e']) replies.send({ text: request[key], n: request.n });
  },
  wait(context, request) {
    clock.subscribeDuration(request.n * 1e6).block();
    return { text: request.a, n: request.n };
  },
};
