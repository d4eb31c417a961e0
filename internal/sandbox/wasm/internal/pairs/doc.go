// Package pairs keeps the pairs of wasi:keyvalue of a namespace on the node, in a file of bbolt. Store is a wasi.Store.
// Begin with New.
//
//	<directory of the namespace>/    pairs.db  lock  turn
//
// The pods of a namespace can be in several workers, and bbolt lets one process open a file. So each operation takes the
// lock, opens the file, does its work in one transaction, and closes the file. No process owns the store: it works while
// the daemon is away, nothing is lost when a worker is killed, and a file that is removed under the lock is an empty store.
//
// The package knows nothing of pods. Whoever made the directory decides who can write to it, and a process that can write
// to it can damage the store, so an operation on a damaged file returns an error and never ends the process.
package pairs
