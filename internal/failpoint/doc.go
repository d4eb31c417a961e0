// Package failpoint names the lines of the program at which a test may let it fail, hang, wait, panic or die.
//
// A point is a package-level variable made by New, hit by Hit. Points exist only in a program that is built with
// -tags failpoints; in a release New and Hit compile to nothing. In a test build a point does nothing either, unless the
// environment variable TRIPOD_FAILPOINTS arms it when the process starts:
//
//	TRIPOD_FAILPOINTS="node.run-sandbox.intent=kill,node.start-container.effect=error(disk on fire)"
//
// Actions: kill (SIGKILL to this process), panic, error(TEXT), hang (until the context ends), delay(DURATION).
// A prefix N* lets the action happen at the first N hits only: 1*error(once).
// Names lists all points, so that the crash matrix visits every one without a list of its own.
package failpoint

// Variable is the environment variable that arms points.
const Variable = "TRIPOD_FAILPOINTS"

// skipper is the part of testing.TB that Needed uses; testing itself must not come into the program.
type skipper interface {
	Helper()
	Skip(args ...any)
}
