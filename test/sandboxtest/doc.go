// Package sandboxtest is the suite that every backend passes, driven through a real CRI endpoint.
//
// A backend's test gives a Subject (a connection, a handler, and configurations of containers that run, end, fail) and
// calls Run. Whether the endpoint is a server in the test's own process over test/fake (this package's own test) or
// a daemon that runs real containers (test/e2e) makes no difference to the suite:
//
//	Run ──▶ gRPC ──▶ internal/cri ──▶ internal/node ──▶ the backend under test
//
// It covers the state table cell by cell, the idempotence of every call, exits and their reasons, grace periods, events
// and, when the Subject can restart its daemon, re-adoption.
package sandboxtest
