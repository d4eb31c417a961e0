package engine

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/tripod-run/tripod/internal/component/wit"
)

func benchPaths(b *testing.B, f func(b *testing.B, p Path)) {
	for _, p := range []Path{PathCore, PathComponent} {
		b.Run(p.String(), func(b *testing.B) { f(b, p) })
	}
}

// BenchmarkFresh measures a request in a fresh instance.
func BenchmarkFresh(b *testing.B) {
	benchPaths(b, func(b *testing.B, p Path) {
		c, f := theGuest(b), bound(b, "flip")
		for b.Loop() {
			i, err := c.Instantiate(context.Background(), InstanceOptions{Path: p})
			if err != nil {
				b.Fatal(err)
			}
			if _, err := i.Call(context.Background(), f, []byte{1}, nil); err != nil {
				b.Fatal(err)
			}
			i.Close()
		}
	})
}

// BenchmarkCall measures a call in an existing instance.
func BenchmarkCall(b *testing.B) {
	benchPaths(b, func(b *testing.B, p Path) {
		f := bound(b, "mixed")
		i, err := theGuest(b).Instantiate(context.Background(), InstanceOptions{Path: p})
		if err != nil {
			b.Fatal(err)
		}
		defer i.Close()
		args := wit.AppendString(wit.AppendCase([]byte{1}, 2), "hello, world")
		args = wit.AppendF32(append(wit.AppendU32(args, 0), 1), 1)
		out := make([]byte, 0, 100)
		for b.Loop() {
			if _, err := i.Call(context.Background(), f, args, out); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkBytes measures moving 1 MiB of list<u8> into the guest, and out of it.
func BenchmarkBytes(b *testing.B) {
	const size = 1 << 20
	for name, args := range map[string][]byte{"sum": wit.AppendBytes(nil, make([]byte, size)), "fill": u32s(size)} {
		b.Run(name, func(b *testing.B) {
			benchPaths(b, func(b *testing.B, p Path) {
				f := bound(b, name)
				i, err := theGuest(b).Instantiate(context.Background(), InstanceOptions{Path: p})
				if err != nil {
					b.Fatal(err)
				}
				defer i.Close()
				out := make([]byte, 0, size+100)
				b.SetBytes(size)
				for b.Loop() {
					if _, err := i.Call(context.Background(), f, args, out); err != nil {
						b.Fatal(err)
					}
				}
			})
		})
	}
}

// BenchmarkNeighbour measures the latency of calls in fresh instances while other guests spin, for both ways in which
// these yield.
func BenchmarkNeighbour(b *testing.B) {
	testEngine(b)
	for name, byIdle := range map[string]bool{"idle": true, "polite": false} {
		b.Run(name, func(b *testing.B) {
			yieldByIdle(byIdle)
			defer yieldByIdle(true)
			benchNeighbour(b)
		})
	}
}

func benchNeighbour(b *testing.B) {
	for _, spinning := range []int{0, 1, 8} {
		b.Run(fmt.Sprintf("%d-spinning", spinning), func(b *testing.B) {
			c, f, spin := theGuest(b), bound(b, "sum"), bound(b, "spin")
			ctx, cancel := context.WithCancel(context.Background())
			var wg sync.WaitGroup
			for range spinning {
				wg.Go(func() {
					i, err := c.Instantiate(ctx, InstanceOptions{})
					if err != nil {
						b.Error(err)
						return
					}
					_, _ = i.Call(ctx, spin, u32s(0), nil)
					i.Close()
				})
			}
			args := wit.AppendBytes(nil, make([]byte, 1000))
			time.Sleep(50 * time.Millisecond) // pace: the spinning ones are under way
			var all []time.Duration
			for b.Loop() {
				start := time.Now()
				i, err := c.Instantiate(context.Background(), InstanceOptions{})
				if err != nil {
					b.Fatal(err)
				}
				if _, err := i.Call(context.Background(), f, args, nil); err != nil {
					b.Fatal(err)
				}
				i.Close()
				all = append(all, time.Since(start))
				time.Sleep(100 * time.Microsecond) // pace: requests do not come back to back
			}
			cancel()
			wg.Wait()
			slices.Sort(all)
			b.ReportMetric(float64(all[len(all)*99/100].Nanoseconds())/1000, "p99-µs")
			b.ReportMetric(float64(all[len(all)/2].Nanoseconds())/1000, "p50-µs")
		})
	}
}
