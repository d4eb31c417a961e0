package guard

import (
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
)

// loopPause is the time between a loop's panic and its restart.
const loopPause = time.Second

// Panic is a recovered panic as an error.
type Panic struct {
	// Where is the name of the place that recovered the panic.
	Where string
	// Value is the argument of panic.
	Value any
}

func (p *Panic) Error() string {
	text := strings.Join(strings.Fields(fmt.Sprint(p.Value)), " ")
	return fmt.Sprintf("%s: a defect of tripod, its log has the stack: %s", p.Where, text)
}

// Unwrap returns the error's class.
func (p *Panic) Unwrap() error { return errdefs.ErrInternal }

var (
	mu     sync.Mutex
	counts = map[string]uint64{}
)

// Counts returns the number of panics recovered since the process started, by place.
func Counts() map[string]uint64 {
	mu.Lock()
	defer mu.Unlock()
	return maps.Clone(counts)
}

// Total returns the number of panics recovered in all places.
func Total() (n uint64) {
	for _, count := range Counts() {
		n += count
	}
	return n
}

// Report counts and logs a value that recover returned. Call Report in the deferred function that recovers, because
// only there does the stack still show the panic. The place becomes a metric label, so use the name of a method, never
// the name of a pod.
func Report(log *slog.Logger, where string, value any) *Panic {
	mu.Lock()
	counts[where]++
	mu.Unlock()
	stack := debug.Stack()
	if e, ok := value.(*elsewhere); ok {
		value, stack = e.value, e.stack
	}
	log.Error("recovered a panic", "place", where, "panic", fmt.Sprint(value), "stack", string(stack))
	return &Panic{Where: where, Value: value}
}

// Call runs f and returns f's error. If f panics, Call returns a *Panic.
func Call(log *slog.Logger, where string, f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = Report(log, where, p)
		}
	}()
	return f()
}

// Func wraps f for a goroutine. A panic ends only the goroutine. If other goroutines wait for f, f must release them in
// a deferred function.
func Func(log *slog.Logger, where string, f func()) func() {
	return func() {
		_ = Call(log, where, func() error { f(); return nil }) // Call has reported the panic
	}
}

// Loop wraps a long-running f for a goroutine. If f panics, the goroutine waits for loopPause and calls f again, as if
// the process had restarted.
func Loop(log *slog.Logger, where string, f func()) func() {
	return func() {
		for Call(log, where, func() error { f(); return nil }) != nil {
			time.Sleep(loopPause)
		}
	}
}

// Handler wraps h. After a panic, the response is aborted, as in net/http.
func Handler(log *slog.Logger, where string, h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() {
			p := recover()
			if p != nil && p != http.ErrAbortHandler {
				Report(log, where, p)
			}
			if p != nil {
				panic(http.ErrAbortHandler)
			}
		}()
		h.ServeHTTP(w, r)
	})
}
