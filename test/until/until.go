// Package until polls for conditions that no event reports, such as the state of another process. It saves tests from
// having their own loops and deadlines.
package until

import (
	"fmt"
	"os"
	"strconv"
	"testing"
	"time"
)

// defaultTimeout is the timeout of Holds. It is long enough for a busy machine.
const defaultTimeout = 30 * time.Second

// slowness multiplies every timeout: TRIPOD_TEST_SLOWNESS, for a host that is emulated.
var slowness = func() time.Duration {
	if n, err := strconv.Atoi(os.Getenv("TRIPOD_TEST_SLOWNESS")); err == nil && n > 1 {
		return time.Duration(n)
	}
	return 1
}()

// Holds waits until the condition is true, and fails the test after 30 seconds. The given text names the condition.
func Holds(t testing.TB, what string, holds func() bool) {
	t.Helper()
	Within(t, defaultTimeout, what, holds)
}

// Within is like Holds, but with a timeout.
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

// NoError waits until cond returns nil, and fails the test with cond's last error after the timeout.
func NoError(t testing.TB, timeout time.Duration, cond func() error) {
	t.Helper()
	if err := Poll(timeout, cond); err != nil {
		t.Fatalf("not within %v: %v", timeout, err)
	}
}

// Poll returns nil once cond returns nil, or cond's last error after the timeout.
func Poll(timeout time.Duration, cond func() error) error {
	return poll(timeout, 100*time.Millisecond, cond)
}

// poll calls cond at intervals that grow up to the given maximum.
func poll(timeout, slowest time.Duration, cond func() error) error {
	pause := 2 * time.Millisecond
	for deadline := time.Now().Add(slowness * timeout); ; pause = min(2*pause, slowest) {
		err := cond()
		if err == nil || time.Now().After(deadline) {
			return err
		}
		time.Sleep(pause) // pacing of the poll
	}
}
