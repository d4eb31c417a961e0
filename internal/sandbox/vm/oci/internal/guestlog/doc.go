// Package guestlog copies the log of a container from the guest to the node, exactly once. Begin with Log. The package must not know
// how a guest is reached: it gets a Source.
package guestlog
