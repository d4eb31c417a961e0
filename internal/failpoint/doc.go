// Package failpoint marks lines at which a test can make the program fail, hang, wait, panic or die.
//
// A fail point is a package-level variable made by New; Hit marks the line. Fail points exist only in a program built
// with -tags failpoints; in a release, New and Hit compile to nothing. In a test build, a point does nothing unless the
// environment variable TRIPOD_FAILPOINTS arms it at the start of the process:
//
//	TRIPOD_FAILPOINTS="node.run-sandbox.intent=kill,node.start-container.effect=error(disk on fire)"
//
// Actions: kill (SIGKILL to this process), panic, error(TEXT), hang (until the context ends), delay(DURATION). With the
// prefix N*, only the first N hits have an effect: 1*error(once). Names lists all points, so that the crash matrix
// needs no list of its own to visit every point.
package failpoint

// Variable is the name of the environment variable that arms points.
const Variable = "TRIPOD_FAILPOINTS"

// skipper is the part of testing.TB that Needed uses. The program must not import testing.
type skipper interface {
	Helper()
	Skip(args ...any)
}
