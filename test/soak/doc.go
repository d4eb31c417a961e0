// Package soak makes random calls to one real daemon from several impatient clients. Meanwhile, containers end by
// themselves, and helpers and the daemon are killed or made to fail. It compares the daemon's answers with a model, and
// with what really exists on the node.
//
//	workers ──▶ one pod each: its state is known, so every answer is known
//	        ──▶ pods that all workers share: any answer that a concurrent call can cause is right
//	units   ──▶ one component pod each: its model is the state table, and running components must answer on the network
//	            whatever the daemon does; the processes that run components are killed too
//	test    ──▶ phases: quiet, SIGKILL, SIGTERM, a fail point that kills, fails or delays
//	        ──▶ between the phases no client makes calls, and all checks must pass (check_test.go)
//
// The seed is logged. TRIPOD_SOAK_SEED sets the seed, and TRIPOD_SOAK sets the duration (30s for each backend). The
// seed determines only the calls, not how they interleave.
package soak
