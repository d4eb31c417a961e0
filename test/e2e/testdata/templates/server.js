import { create } from '@bufbuild/protobuf';
import { AddRequestSchema } from './gen/shop_pb.js';
import { Code, StatusError, getenv, serve } from './gen/tripod.js';
import { services } from './gen/services.js';

let shop = 'cold';
export function warm() {
  shop = getenv('SHOP');
}

export const handler = serve(services, {
  'shop.v1.Cart': {
    // Returns amount + 1, and what the call has in metadata. Names ask for the ways in which a call can fail.
    add({ name, amount }, call) {
      console.log('add', name, { amount });
      switch (name) {
        case 'status':
          throw new StatusError(Code.FAILED_PRECONDITION, 'not now: ü', [[AddRequestSchema, { name: 'detail', amount: -1n }]]);
        case 'bug':
          return undefined.total;
        case 'async':
          return Promise.resolve({});
        case 'type':
          return { total: 'many' };
        case 'nothing':
          return undefined;
      }
      for (const id of call.metadata('x-request-id')) call.setHeader('x-request-id', `${id}/${call.method}/${shop}`);
      for (const id of call.metadata('x-trace-bin')) call.setTrailer('x-trace-bin', id);
      return { total: amount + 1n };
    },

    *watch({ amount }) {
      for (let total = amount; ; total++) yield { total };
    },

    fill(requests) {
      let total = 0n;
      for (const { amount } of requests) total += amount;
      return { total };
    },

    *talk(requests) {
      for (const request of requests) {
        if (request.text === 'stop') return;
        yield { ...request, adds: [...request.adds, create(AddRequestSchema, { name: 'more' })] };
      }
    },
  },
});
