// Package guard confines a panic to the request that caused it. Every recovered panic is counted, logged with its
// stack, and returned as an errdefs.ErrInternal. The metrics of each process contain the count. The runtime's verbose
// status, which `tripod check` and `tripod diag` show, contains the counts by place.
//
// The caller decides what happens after a panic. Begin reading with Call.
//
//	a request          Call(log, "place", f)      the panic is the request's error
//	an HTTP handler    Handler(log, "place", h)   the response breaks off
//	a request's part   Part(f), Group             the panic goes on in the request
//	a goroutine        Func(log, "place", f)      the goroutine ends
//	a loop             Loop(log, "place", f)      the loop restarts
//	your own recover() Report(log, "place", p)    you decide
package guard
