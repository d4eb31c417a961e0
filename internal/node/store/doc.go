// Package store keeps the node's records on disk: bytes by kind and key in one bbolt file.
//
// It does not interpret records. It guarantees that none is lost: Put returns only after its transaction is on disk.
// Concurrent writes share a transaction (group commit), so ten pods that start together cost one fsync instead of ten.
//
//	Put ─┐
//	Put ─┼─▶ queue ─▶ committer ─▶ one bbolt transaction ─▶ all callers
//	Del ─┘
//
// A value that announces what is about to happen need not outlive the machine. Draft keeps such a value in a file on a
// tmpfs, without a sync, until the next Put or Delete of the key.
//
// The file has a format number. Open refuses a file of a later format, so that a downgrade is harmless. It also refuses
// an incomplete file. Such a file cannot be new, because a new file gets its name only when it is complete. Each file
// has an ID, by which the caller must check that the file is the right one.
package store
