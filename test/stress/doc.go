// Package stress makes calls from many concurrent clients, in every protocol over every transport. Each message names
// its client, so every byte of a reply is known in advance. The package thus notices if a server reuses a buffer too
// early and sends one client the bytes of another.
//
// It is for the tests of the data plane (internal/sandbox/wasm/internal/dataplane) and of component pods (test/e2e),
// but knows neither. Those tests describe their methods (Method) and how to reach them (Transport). Begin reading with
// Run.
package stress
