// Package netthread runs functions inside a network namespace. The kernel keeps the namespace per OS thread, so a
// thread that cannot return to the host's namespace must not go back to the Go scheduler.
//
//	goroutine ──► Run / In ──► goroutine locked to its thread ──► setns ──► fn ──► setns back ──► thread reused
//	                                                                                  └─ fails ──► thread ends
//
// It also opens netlink handles and sockets there. It knows nothing about interfaces, plugins or pods.
package netthread
