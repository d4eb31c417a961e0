// Package soak lets several impatient clients drive one real daemon at random, with containers that end by themselves,
// helpers that are killed and the daemon itself killed or made to fail, and holds what the daemon says against a model
// and against the machine.
//
//	workers ──▶ one pod of their own each: its state is known, so every answer is
//	        ──▶ pods that all share: any answer that a caller may see is right
//	units   ──▶ one component pod each: its model is the state table, and what runs answers on the network, whatever
//	            the daemon does; the processes that run components are killed as well
//	test    ──▶ phases: quiet, SIGKILL, SIGTERM, a fail point that kills, fails or delays
//	        ──▶ between the phases nobody calls, and everything must be true (check_test.go)
//
// The seed is logged; TRIPOD_SOAK_SEED sets it, TRIPOD_SOAK says for how long (30s for each backend). Only the calls are
// drawn from the seed: how they interleave is the machine's.
package soak
