// Package netthread runs functions inside a network namespace: a namespace belongs to an OS thread, and the threads
// are the Go scheduler's, which must never get one back that is not at home.
//
//	goroutine ──► Run / In ──► goroutine locked to its thread ──► setns ──► fn ──► setns back ──► thread used again
//	                                                                                  └─ fails ──► thread ends
//
// It knows nothing of interfaces, plugins or pods.
package netthread
