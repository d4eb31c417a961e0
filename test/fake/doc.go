// Package fake is a backend that runs nothing: its sandboxes and containers are files that contain their states.
//
// The backend is for tests, either in the test's own process or in a real daemon (configuration key backends.fake). It
// behaves as a real backend must: effects are found by ID, orders can be repeated, and "running" containers outlive the
// daemon. Annotations of the pod or the container make the backend misbehave, in the syntax of internal/failpoint:
//
//	fake.tripod.dev/create-sandbox: error(no room)   the order fails before its effect
//	fake.tripod.dev/start-container: hang            the order hangs until its context ends
//	fake.tripod.dev/stop-container.done: delay(1s)   the order waits after its effect
//	fake.tripod.dev/exit-after: 50ms                 the container exits by itself …
//	fake.tripod.dev/exit-code: "3"                   … with this code
//	fake.tripod.dev/ignore-stop: "true"              the container ends only by force, after the grace period
//
// The steps are create-sandbox, stop-sandbox, remove-sandbox, create-container, start-container, stop-container,
// remove-container, status, stats and exec. After each effect there is a fail point fake.STEP, for the crash matrix.
package fake
