package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"
)

// FuzzPreview1 runs a guest that calls preview 1 at random, with and without channels and directories. Whatever it
// does, the host survives, the guest can be ended, and its channels can be closed.
func FuzzPreview1(f *testing.F) {
	for range 8 {
		f.Add(rand.Uint32())
	}
	var code *Code
	f.Fuzz(func(t *testing.T, seed uint32) {
		if code == nil {
			img, err := testEngine(t).Compile(t.Context(), read(t, "chaos.wasm"), CompileOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if code, err = testEngine(t).Load(img, Host{}); err != nil {
				t.Fatal(err)
			}
		}
		for _, o := range []InstanceOptions{
			{}, {Channels: chaoticHub()}, {Channels: chaoticHub(), Preopens: []Preopen{{Path: t.TempDir(), Guest: "/data"}}},
		} {
			var out bytes.Buffer
			o.Args, o.Stdout, o.MaxMemory = []string{"prog", fmt.Sprint(seed), "20000"}, &out, 16<<20
			ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
			i, err := code.Instantiate(ctx, o)
			if err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			start := time.Now()
			_, err = i.Run(ctx)
			cancel()
			if took := time.Since(start); took > 10*time.Second {
				t.Errorf("seed %d: Run took %v, want at most 10 s", seed, took)
			}
			var trap *Trap
			if err != nil && !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, ErrMemory) && !errors.As(err, &trap) {
				t.Errorf("seed %d: error %v, want a Trap, ErrMemory or DeadlineExceeded", seed, err)
			}
			i.Close()
		}
	})
}

// chaoticHub has messages to read, a channel that replaces stdin, and one that has ended.
func chaoticHub() *hub {
	h := newHub("io", "stdin", "write")
	h.most = 1 << 20
	for k := range 1000 {
		h.change("io", put(fmt.Sprintf("%0*d", k%50, k)))
	}
	h.change("stdin", put("line\n", "other line\n"))
	h.change("stdin", end)
	return h
}
