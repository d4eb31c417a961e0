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

// loopPause lies between a loop's panic and its next beginning.
const loopPause = time.Second

// Panic is a recovered panic as an error.
type Panic struct {
	// Where is the place that recovered it.
	Where string
	// Value is what was panicked with.
	Value any
}

func (p *Panic) Error() string {
	text := strings.Join(strings.Fields(fmt.Sprint(p.Value)), " ")
	return fmt.Sprintf("%s: a defect of tripod, its log has the stack: %s", p.Where, text)
}

// Unwrap gives the error its class.
func (p *Panic) Unwrap() error { return errdefs.ErrInternal }

var (
	mu     sync.Mutex
	counts = map[string]uint64{}
)

// Counts is how many panics each place has recovered since the process began.
func Counts() map[string]uint64 {
	mu.Lock()
	defer mu.Unlock()
	return maps.Clone(counts)
}

// Total is their sum.
func Total() (n uint64) {
	for _, count := range Counts() {
		n += count
	}
	return n
}

// Report counts and logs what recover() has returned. It is called by the function that recovers, so that the stack is still
// that of the panic. Places are few: a method's name is one, a pod's is not.
func Report(log *slog.Logger, where string, value any) *Panic {
	mu.Lock()
	counts[where]++
	mu.Unlock()
	log.Error("recovered a panic", "place", where, "panic", fmt.Sprint(value), "stack", string(debug.Stack()))
	return &Panic{Where: where, Value: value}
}

// Call runs f. A panic of f is its error.
func Call(log *slog.Logger, where string, f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = Report(log, where, p)
		}
	}()
	return f()
}

// Func is f for a goroutine of its own, which ends at a panic. Nobody must wait for what f has not done then, unless by defer.
func Func(log *slog.Logger, where string, f func()) func() {
	return func() {
		_ = Call(log, where, func() error { f(); return nil }) // it is reported
	}
}

// Loop is f, which runs until it is told to end, for a goroutine of its own. After a panic it begins again, as it would in the
// process's next life.
func Loop(log *slog.Logger, where string, f func()) func() {
	return func() {
		for Call(log, where, func() error { f(); return nil }) != nil {
			time.Sleep(loopPause)
		}
	}
}

// Handler is h. After a panic the client sees a response that breaks off, as net/http has it.
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
