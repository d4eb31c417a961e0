package worker

import (
	"bytes"
	"os"
	"path/filepath"
	"sync"
	"testing"
)

// TestOutputFromSeveralThreads checks that no byte is lost when several threads write a guest's output while it is
// flushed.
func TestOutputFromSeveralThreads(t *testing.T) {
	log, err := os.Create(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	o := newOutput(log, 0, false)
	s := o.stream(false)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 2000 {
				_, _ = s.Write([]byte("xx"))
			}
		})
	}
	wg.Go(func() {
		for range 500 {
			_ = s.Close()
		}
	})
	wg.Wait()
	_ = s.Close()
	o.end()
	b, err := os.ReadFile(log.Name())
	if err != nil {
		t.Fatal(err)
	}
	if n := bytes.Count(b, []byte("x")); n != 16000 {
		t.Errorf("the log has %d bytes of output, want 16000", n)
	}
}
