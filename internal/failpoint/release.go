//go:build !failpoints

package failpoint

import (
	"context"
	"errors"
)

// Point is nothing: this build has no points.
type Point struct{}

// New drops the name.
func New(string) *Point { return nil }

// Hit does nothing.
func (*Point) Hit(context.Context) error { return nil }

// Names lists nothing.
func Names() []string { return nil }

// Check finds nothing wrong.
func Check() error { return nil }

// Arm fails: there is nothing to arm.
func Arm(string, string) error {
	return errors.New("this build has no fail points: use -tags failpoints")
}

// Needed skips a test that arms points.
func Needed(t skipper) {
	t.Helper()
	t.Skip("needs a build with -tags failpoints")
}
