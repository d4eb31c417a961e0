// Package codelayer implements the signed layer with which an image brings compiled code along, so that a fleet of equal
// machines compiles a component once (ADR 68).
//
//	tripod push --compiled --key ── Pack ──► two layers: the code (zstd) and an envelope ── registry ── pull ──► a node
//	                                                                                                             │
//	                  the node's keys, its engine and its processor ── Verify ── Layer.Unpack ──► the cache of code
//
// The envelope (DSSE 1.0) holds a statement (in-toto 1.0) about the code: its digest, the component it was compiled from,
// the engine with its settings, and the features of the processor. Code is as powerful as the worker that runs it, so Verify
// decides by the envelope and by the digests alone: nothing of the code is decompressed or decoded before.
//
// The package does not decide whose keys a node accepts and does not read images; internal/sandbox/wasm does.
package codelayer
