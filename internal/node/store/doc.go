// Package store keeps the node's records on disk: bytes by kind and key in one bbolt file.
//
// It does not know what a record means. It guarantees that none is lost: Put returns once its transaction is on disk.
// Concurrent writes share a transaction (group commit), so ten pods that start together cost one fsync instead of ten.
//
//	Put ─┐
//	Put ─┼─▶ queue ─▶ committer ─▶ one bbolt transaction ─▶ all callers
//	Del ─┘
//
// The file carries a format number; a file of a later format is refused, so that a downgrade is harmless. A file that exists
// but is incomplete is refused too and never treated as new: new files appear by rename. Each file has an ID; the caller
// checks that it is the expected one.
package store
