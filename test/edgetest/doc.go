// Package edgetest is the other side: scripted peers of the edge protocol for everybody's tests, made from what public peers were
// seen to send, and sharing no code with internal/edge/wire or internal/edge/mqtt, so that a mistake there does not cancel out.
//
//	Program       a runtime of SLSocket, as a process (cmd/edge-runtime, or a test binary that calls Main)
//	Manager       a manager with its runtimes                  ┐
//	Orchestrator  places modules where the client says         ├─ MQTT 3.1.1 with the bridge bit, a user and an empty password
//	Client        asks for modules, sends and takes messages   ┘
//	Recorder      hears everything ──▶ Lines ──▶ Normal: sorted, object_ids and pids alike, to be compared
//
// The modules of Program and Manager are scripted, too: argv[0] says what they do (module.go). Session is the recorded session of
// public peers as a table, and PlaySession plays the client's part of it.
//
// The package is for tests only: nothing that ships imports it.
package edgetest
