// Package health keeps what the node cannot do at the moment. It owns the list of problems: who has one reports it, and reports
// again when it is gone; the CRI's conditions, `tripod check` and the metrics show it.
//
// It must not decide what follows from a problem: who reports it refuses what cannot be done.
package health
