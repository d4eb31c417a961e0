// Package stress makes the calls of many clients at a time, in every protocol over every transport, whose messages name
// their owner: what one client sends is of no other, and what comes back is known to the byte. A server that lets a
// buffer out of its hands too early answers one client with the bytes of another, and is found out.
//
// It is for the tests of the data plane (internal/sandbox/wasm/internal/dataplane) and of component pods (test/e2e). It knows neither:
// they say what their methods answer (Method) and how they are reached (Transport). Begin reading at Run.
package stress
