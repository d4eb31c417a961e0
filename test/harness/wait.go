package harness

import "github.com/tripod-run/tripod/test/until"

// Eventually polls a condition until it returns nil. After the timeout it fails the test with the last error.
var Eventually = until.NoError
