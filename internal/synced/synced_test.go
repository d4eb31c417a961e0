package synced

import (
	"path/filepath"
	"testing"

	"go.etcd.io/bbolt"
)

func TestTotal(t *testing.T) {
	db, err := bbolt.Open(filepath.Join(t.TempDir(), "db"), 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	before := Total()
	stop := Watch(Transactions(db))
	put := func(*bbolt.Tx) error { return nil }
	for range 3 {
		if err := db.Update(put); err != nil {
			t.Fatal(err)
		}
	}
	Add(1)
	if got := Total() - before; got != 7 {
		t.Errorf("Total grew by %d, want 1 and 3 transactions of 2", got)
	}
	stop()
	stop()
	if err := db.Update(put); err != nil {
		t.Fatal(err)
	}
	if got := Total() - before; got != 7 {
		t.Errorf("Total grew by %d after the end of the watch, want what it had counted", got)
	}
}
