package network

import (
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
	"testing"
	"time"
)

func quiet(c *Config) { c.Logger = slog.New(slog.DiscardHandler) }

// benchNodes runs a benchmark with the default chain, and with a chain whose only plugin does nothing: our own
// overhead.
func benchNodes(b *testing.B, run func(b *testing.B, n *node)) {
	b.Run("default", func(b *testing.B) { run(b, newNode(b, quiet)) })
	b.Run("overhead", func(b *testing.B) {
		n := newNode(b, quiet)
		n.plugin("noop", "echo '{\"cniVersion\":\"1.0.0\"}'")
		n.configure("10.conflist", `{"cniVersion":"1.0.0","name":"noop","plugins":[{"type":"noop"}]}`)
		run(b, n)
	})
}

func BenchmarkSetup(b *testing.B) {
	benchNodes(b, func(b *testing.B, n *node) {
		for i := range b.N {
			pod := Attachment{ID: fmt.Sprintf("pod-%d", i)}
			n.setup(pod)
			b.StopTimer()
			n.teardown(pod)
			b.StartTimer()
		}
	})
}

func BenchmarkTeardown(b *testing.B) {
	benchNodes(b, func(b *testing.B, n *node) {
		for i := range b.N {
			pod := Attachment{ID: fmt.Sprintf("pod-%d", i)}
			b.StopTimer()
			n.setup(pod)
			b.StartTimer()
			n.teardown(pod)
		}
	})
}

// BenchmarkTenAtATime sets up and tears down ten pods in parallel; ns/op is per pod.
func BenchmarkTenAtATime(b *testing.B) {
	benchNodes(b, func(b *testing.B, n *node) {
		var count atomic.Int64
		b.SetParallelism(5) // times two cores
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				pod := Attachment{ID: fmt.Sprintf("pod-%d", count.Add(1))}
				if _, err := n.Setup(b.Context(), pod); err != nil {
					b.Error(err)
				}
				if err := n.Teardown(b.Context(), pod); err != nil {
					b.Error(err)
				}
			}
		})
	})
}

func BenchmarkNetns(b *testing.B) {
	n := newNode(b, quiet)
	for i := range b.N {
		id := fmt.Sprintf("ns-%d", i)
		if _, err := n.NewNetns(b.Context(), id); err != nil {
			b.Fatal(err)
		}
		if err := n.RemoveNetns(b.Context(), id); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkStats(b *testing.B) {
	n := newNode(b, quiet)
	r := n.setup(Attachment{ID: "pod"})
	b.ReportAllocs()
	for b.Loop() {
		if _, err := n.Stats(r.Netns); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkStatusAndPresent(b *testing.B) {
	n := newNode(b, quiet)
	n.setup(Attachment{ID: "pod"})
	if err := n.Status(b.Context()); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if n.Status(b.Context()) != nil || !n.Present("pod") {
			b.Fatal("the network is not ready, or the pod is not present")
		}
	}
}

// BenchmarkBacklog stops many pods at once and then sets up pods one by one, while the networks of the many are
// released. It reports the median time of a Setup meanwhile, and the time of the release for each pod of the many.
func BenchmarkBacklog(b *testing.B) {
	const many = 300
	for name, chain := range map[string]string{
		"default": "",
		"ipMasq":  masqueradedByPlugin,
	} {
		b.Run(name, func(b *testing.B) {
			n := newNode(b, quiet)
			if chain != "" {
				n.configure("10.conflist", fmt.Sprintf(chain, b.TempDir()))
			}
			var setups []time.Duration
			var releasing time.Duration
			for range b.N {
				for i := range many {
					n.setup(Attachment{ID: fmt.Sprintf("many-%d", i)})
				}
				begin := time.Now()
				for i := range many {
					if err := n.Teardown(b.Context(), Attachment{ID: fmt.Sprintf("many-%d", i)}); err != nil {
						b.Fatal(err)
					}
				}
				for i := 0; ; i++ {
					keys, err := n.records.keys()
					if err != nil {
						b.Fatal(err)
					}
					if len(keys) <= i {
						break
					}
					at := time.Now()
					n.setup(Attachment{ID: fmt.Sprintf("pod-%d", i)})
					setups = append(setups, time.Since(at))
				}
				releasing += time.Since(begin)
				for i := range setups {
					n.teardown(Attachment{ID: fmt.Sprintf("pod-%d", i)})
				}
			}
			slices.Sort(setups)
			b.ReportMetric(float64(setups[len(setups)/2].Microseconds())/1000, "ms/setup")
			b.ReportMetric(float64(setups[len(setups)*95/100].Microseconds())/1000, "ms/setup-p95")
			b.ReportMetric(float64(releasing.Microseconds())/1000/many/float64(b.N), "ms/release")
		})
	}
}
