// Package wittest makes types and values at random, for tests that hold one implementation of the flat encoding or of
// the canonical ABI against another. Nothing but tests imports it.
package wittest
