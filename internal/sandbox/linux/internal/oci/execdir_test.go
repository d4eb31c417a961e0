package oci

import (
	"os"
	"sync"
	"testing"
)

// TestReapExecs checks that only the directories of sessions whose process has ended are removed.
func TestReapExecs(t *testing.T) {
	parent := t.TempDir()
	var dirs [3]execDir
	for i := range dirs {
		var err error
		if dirs[i], err = makeExecDir(parent); err != nil {
			t.Fatal(err)
		}
	}
	served, killed, removed := dirs[0], dirs[1], dirs[2]
	killed.lock.Close() // as the end of its process does
	removed.remove()
	if err := ReapExecs(parent); err != nil {
		t.Fatal(err)
	}
	for dir, want := range map[execDir]bool{served: true, killed: false, removed: false} {
		if _, err := os.Stat(dir.path); os.IsNotExist(err) == want {
			t.Errorf("directory %s: %v, want that it exists: %v", dir.path, err, want)
		}
	}
	served.remove()
	if entries, err := os.ReadDir(parent); err != nil || len(entries) > 0 {
		t.Errorf("%d directories remain, %v", len(entries), err)
	}
}

// TestReapExecsDuringMake: a directory that is not locked yet looks abandoned. Whoever makes it must not get it then.
func TestReapExecsDuringMake(t *testing.T) {
	parent := t.TempDir()
	made := make(chan struct{})
	var reaping sync.WaitGroup
	reaping.Go(func() {
		for {
			select {
			case <-made:
				return
			default:
				_ = ReapExecs(parent) // directories come and go under its eyes
			}
		}
	})
	defer reaping.Wait()
	defer close(made)
	for range 500 {
		dir, err := makeExecDir(parent)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(dir.path); err != nil {
			t.Fatalf("the directory was removed: %v", err)
		}
		dir.remove()
	}
}
