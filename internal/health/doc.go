// Package health holds the list of what the node cannot do at the moment. A part of the node reports its problem, and reports again
// when it is solved. The CRI's conditions, `tripod check` and the metrics show the list.
//
// It must not decide what follows from a problem: the part that reports it refuses the calls that it cannot serve.
package health
