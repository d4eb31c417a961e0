// Package edgetest has scripted peers of the edge protocol for tests, modelled on recorded messages of public peers. It
// shares no code with internal/edge/wire or internal/edge/mqtt, so that errors on the two sides do not cancel out.
//
//	Program       a runtime of SLSocket, as a process (cmd/edge-runtime, or a test binary that calls Main)
//	Manager       a manager with its runtimes                      ┐
//	Orchestrator  places modules on the runtime that clients name  ├─ MQTT 3.1.1 with the bridge bit, a user and an empty password
//	Player        creates modules, sends and receives messages     ┘
//	Recorder      records all messages ──▶ Lines ──▶ Normal: sorted, with equal object_ids and pids, for comparison
//
// The modules of Program and Manager are scripted as well: argv[0] selects their behaviour (module.go). Session is the
// recorded session of public peers as a table, and Player plays the client's part of it.
//
// The package is for tests only; the product must not import it.
package edgetest
