// Package until polls for conditions that nothing announces: those of other processes, and of goroutines that offer no event.
// It stands here once, so that no test has a loop or a deadline of its own.
package until

import (
	"fmt"
	"testing"
	"time"
)

// patience is how long a condition may take on a busy machine when its test names no bound.
const patience = 30 * time.Second

// Holds fails the test if the condition does not come true. what names the condition.
func Holds(t testing.TB, what string, holds func() bool) {
	t.Helper()
	Within(t, patience, what, holds)
}

// Within is Holds with a bound.
func Within(t testing.TB, timeout time.Duration, what string, holds func() bool) {
	t.Helper()
	err := poll(timeout, 5*time.Millisecond, func() error {
		if !holds() {
			return fmt.Errorf("%s: not within %v", what, timeout)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// NoError fails the test with cond's last error if it does not succeed within timeout.
func NoError(t testing.TB, timeout time.Duration, cond func() error) {
	t.Helper()
	if err := Poll(timeout, cond); err != nil {
		t.Fatalf("not within %v: %v", timeout, err)
	}
}

// Poll returns nil once cond does, or cond's last error after timeout.
func Poll(timeout time.Duration, cond func() error) error {
	return poll(timeout, 100*time.Millisecond, cond)
}

// poll calls cond often at first, then less often, down to once in slowest.
func poll(timeout, slowest time.Duration, cond func() error) error {
	pause := 2 * time.Millisecond
	for deadline := time.Now().Add(timeout); ; pause = min(2*pause, slowest) {
		err := cond()
		if err == nil || time.Now().After(deadline) {
			return err
		}
		time.Sleep(pause) // pacing of the poll
	}
}
