// Package fake is a backend that isolates nothing: its sandboxes and containers are files that say what would run.
//
// It exists for tests, in process and behind a real daemon (configuration key backends.fake), and behaves as a real
// backend must: its effects are found by ID, its orders can be repeated, and what "runs" outlives the daemon. It is
// told where to misbehave by annotations of the pod or the container, in the syntax of internal/failpoint:
//
//	fake.tripod.dev/create-sandbox: error(no room)   the order fails before its effect
//	fake.tripod.dev/start-container: hang            the order hangs until its context ends
//	fake.tripod.dev/stop-container.done: delay(1s)   the order waits after its effect
//	fake.tripod.dev/exit-after: 50ms                 the container ends by itself …
//	fake.tripod.dev/exit-code: "3"                   … with this code
//	fake.tripod.dev/ignore-stop: "true"              it ends only by force, after the grace period
//
// The steps are create-sandbox, stop-sandbox, remove-sandbox, create-container, start-container, stop-container,
// remove-container, status, stats and exec. Fail points called fake.STEP stand after each effect, for the crash matrix.
package fake
