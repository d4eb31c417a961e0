// Package health holds the node's current problems. Each part of the node reports its problem, and reports again when
// the problem is solved. The CRI's conditions, `tripod check` and the metrics show the problems. For `tripod check`,
// each part also checks the host; a Finding is the result of one such check.
//
// The package must not decide what follows from a problem: the part that has the problem refuses the calls that it
// cannot serve.
package health
