package harness

import (
	"testing"
	"time"
)

// Eventually polls cond until it is nil and fails the test with its last error after timeout.
// It is for conditions of another process, of which there is no event to wait for.
func Eventually(t testing.TB, timeout time.Duration, cond func() error) {
	t.Helper()
	if err := poll(timeout, cond); err != nil {
		t.Fatalf("not within %v: %v", timeout, err)
	}
}

// poll calls cond, at first often, until it is nil or timeout has passed.
func poll(timeout time.Duration, cond func() error) error {
	pause := 2 * time.Millisecond
	for deadline := time.Now().Add(timeout); ; pause = min(2*pause, 100*time.Millisecond) {
		err := cond()
		if err == nil || time.Now().After(deadline) {
			return err
		}
		time.Sleep(pause)
	}
}
