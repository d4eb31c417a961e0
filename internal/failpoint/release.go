//go:build !failpoints

package failpoint

import (
	"context"
	"errors"
)

// Point is empty, because this build has no fail points.
type Point struct{}

// New returns nil.
func New(string) *Point { return nil }

// Hit does nothing.
func (*Point) Hit(context.Context) error { return nil }

// Names returns nil.
func Names() []string { return nil }

// Check returns nil.
func Check() error { return nil }

// Arm always fails.
func Arm(string, string) error {
	return errors.New("this build has no fail points: use -tags failpoints")
}

// Needed skips the test, because it needs fail points.
func Needed(t skipper) {
	t.Helper()
	t.Skip("needs a build with -tags failpoints")
}
