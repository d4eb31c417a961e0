// Package guard keeps a panic to the request that met it. It owns what becomes of every panic that is recovered: it is counted,
// logged with its stack, and an error of the class Internal for who waits. The count is in the metrics of each process and,
// by place, in the runtime's verbose status, which `tripod check` and `tripod diag` show.
//
// It must not decide what happens next: that is the caller's. Begin reading with Call.
//
//	a request          Call(log, "place", f)      the panic is the request's error
//	an HTTP handler    Handler(log, "place", h)   the response breaks off
//	a goroutine        Func(log, "place", f)      the goroutine ends
//	a loop             Loop(log, "place", f)      the loop begins again
//	a recover() that   Report(log, "place", p)
//	has more to do
package guard
