package tripodgrpc

import (
	"context"
	"fmt"
)

var warmups []func(context.Context)

// Warm registers a function that makes in advance what the program's requests would make at first use, such as tables,
// templates and regular expressions. Call it before Serve. In a guest, the host runs the function when it makes a snapshot
// for a pod, and requests begin in the memory that it has left. Some requests begin without it, and all if the host makes
// no snapshot: so a handler must be able to make what it needs itself, for example by a [sync.OnceValue] that the function
// calls as well.
//
// The function may print, and must not ask for the time of day or for random values, read files, leave any open, or call
// other servers: such a warm-up, one that panics and one that takes too long are undone, and the pod's log says so.
// Natively, Serve runs the functions before it listens.
//
// What gRPC and protobuf make at first use for the registered services is made without it.
func Warm(f func(context.Context)) { warmups = append(warmups, f) }

// runWarmups runs the functions that the program has registered. The error is a panic of one of them.
func runWarmups(ctx context.Context) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	for _, f := range warmups {
		f(ctx)
	}
	return nil
}
