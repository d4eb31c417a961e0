package harness

import "github.com/tripod-run/tripod/test/until"

// Eventually polls a condition of another process until it is nil. It fails the test with the last error after a timeout.
var Eventually = until.NoError
