// Package store keeps the node's records on disk: bytes by kind and key in one bbolt file.
//
// It does not know what a record means. It knows how not to lose one: every write is a transaction that is on the
// disk when Put returns, and concurrent writes share a transaction (group commit), so that ten pods started
// together pay for one fsync and not for ten.
//
//	Put ─┐
//	Put ─┼─▶ queue ─▶ committer ─▶ one bbolt transaction ─▶ all callers
//	Del ─┘
//
// The file carries a format number; a file of a later format is refused unread, so that a downgrade harms nothing. A file
// that is there and not whole is refused as well, and is never taken for a new one: a new one appears by a rename. An ID tells
// one file from another; whose it must be is the caller's to know.
package store
