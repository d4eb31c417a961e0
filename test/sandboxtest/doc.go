// Package sandboxtest is the test suite for all backends. It uses a real CRI endpoint.
//
// A backend's test calls Run with a Subject (a connection, a handler, and configurations of containers that run, end or
// fail). The endpoint can be a server in the test's own process with test/fake (this package's own test) or a daemon
// that runs real containers (test/e2e):
//
//	Run ──▶ gRPC ──▶ internal/cri ──▶ internal/node ──▶ the backend under test
//
// The suite covers each cell of the state table, the idempotence of every call, exits and their reasons, grace periods
// and events. If the Subject can restart its daemon, it also covers re-adoption.
package sandboxtest
