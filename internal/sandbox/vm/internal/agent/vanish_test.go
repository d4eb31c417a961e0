package agent_test

import (
	"context"
	"io"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"
)

// TestVanishingClients (C5): 1000 programs and connections whose clients vanish at any moment leave no goroutine,
// descriptor or process behind. Host and guest are both in this process.
func TestVanishingClients(t *testing.T) {
	a, _ := connected(t)
	port := server(t, "127.0.0.1:0")
	once := func(i int) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i%40)*time.Millisecond)
		defer cancel()
		if i%2 == 0 {
			in, feed := io.Pipe()
			defer feed.Close()
			cmd := command(in, io.Discard, io.Discard, "sh", "-c", "yes vanishing & sleep 1000")
			cmd.TTY = i%4 == 0
			a.Exec(ctx, cmd)
			return
		}
		c, err := a.DialTCP(ctx, port)
		if err != nil {
			return
		}
		go c.Write(make([]byte, 300<<10))
		<-ctx.Done()
		c.Close()
	}
	once(38)
	once(39)
	count := func() (goroutines, descriptors int) {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return runtime.NumGoroutine(), len(entries)
	}
	goroutines, descriptors := count()
	var group sync.WaitGroup
	for worker := range 10 {
		group.Go(func() {
			for i := range 100 {
				once(worker*100 + i)
			}
		})
	}
	group.Wait()
	for end := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		g, d := count()
		if g <= goroutines+2 && d <= descriptors+2 {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("%d goroutines became %d, %d descriptors became %d", goroutines, g, descriptors, d)
		}
	}
	// Tests of other packages run in the same PID namespace at the same time, and some of them also run yes.
	if code, err := a.Exec(deadline(t), command(nil, nil, nil, "sh", "-c", "! pgrep -f 'yes [v]anishing'")); code != 0 || err != nil {
		t.Errorf("pgrep = %d, %v; want no programs left in the guest", code, err)
	}
}
