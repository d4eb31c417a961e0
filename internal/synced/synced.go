// Package synced counts the writes for which this process has waited until the disk had them (fsync, fdatasync), so that
// a test can hold their number and an owner of slow disks can see it. Each package that syncs counts its own calls; for
// databases of others, a watch reads how many transactions they have committed.
//
// The package must not import anything of ours. Writes of an image's content, in a pull, are not counted.
package synced

import (
	"sync"
	"sync/atomic"

	"go.etcd.io/bbolt"
)

// PerTransaction is the number of synced writes in a transaction of bbolt: its pages, and then its meta page.
const PerTransaction = 2

var (
	total   atomic.Int64
	mu      sync.Mutex
	watches = map[*watch]bool{}
)

// Add counts synced writes.
func Add(n int) { total.Add(int64(n)) }

// Total returns the number of synced writes of this process.
func Total() int64 {
	sum := total.Load()
	mu.Lock()
	defer mu.Unlock()
	for w := range watches {
		sum += w.now()
	}
	return sum
}

// watch counts the transactions of one database since its beginning.
type watch struct {
	last  func() (int, error) // the ID of the last transaction
	since int
}

// Watch counts the synced writes of a database, whose last committed transaction has the ID that last returns, until the
// returned function is called.
func Watch(last func() (int, error)) (stop func()) {
	w := &watch{last: last}
	w.since, _ = last()
	mu.Lock()
	defer mu.Unlock()
	watches[w] = true
	return sync.OnceFunc(func() {
		mu.Lock()
		defer mu.Unlock()
		delete(watches, w)
		total.Add(w.now())
	})
}

// Transactions returns the argument of Watch for a database of bbolt.
func Transactions(db *bbolt.DB) func() (int, error) {
	return func() (id int, err error) {
		err = db.View(func(tx *bbolt.Tx) error { id = tx.ID(); return nil })
		return id, err
	}
}

// now returns 0 if the database cannot be read any more.
func (w *watch) now() int64 {
	id, err := w.last()
	if err != nil {
		return 0
	}
	return int64(id-w.since) * PerTransaction
}
