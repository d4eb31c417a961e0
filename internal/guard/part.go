package guard

import (
	"runtime/debug"

	"sync"
)

// elsewhere is a panic of another goroutine that does part of the same request.
type elsewhere struct {
	value any
	stack []byte
}

// Part prepares f to run on another goroutine as part of a request. Start run there, once, and call wait, which returns
// f's error. If f panics, wait panics, so that the request's own recover() ends it as if f had run in place.
func Part(f func() error) (run func(), wait func() error) {
	var err error
	var panicked *elsewhere
	done := make(chan struct{})
	run = func() {
		defer close(done)
		defer func() {
			if p := recover(); p != nil {
				panicked = &elsewhere{value: p, stack: debug.Stack()}
			}
		}()
		err = f()
	}
	return run, func() error {
		<-done
		if panicked != nil {
			panic(panicked)
		}
		return err
	}
}

// Group runs the parts of a request in parallel. The zero value is ready for use.
type Group struct {
	parts sync.WaitGroup
	waits []func() error
}

// Go runs f on another goroutine. Calls must not be concurrent.
func (g *Group) Go(f func() error) {
	run, wait := Part(f)
	g.waits = append(g.waits, wait)
	g.parts.Go(run)
}

// Wait waits for all parts and returns the error of the first one that Go was called for and that failed. If a part
// panicked, Wait panics.
func (g *Group) Wait() (err error) {
	g.parts.Wait()
	for _, wait := range g.waits {
		if failed := wait(); err == nil {
			err = failed
		}
	}
	return err
}
