package network

import (
	"fmt"
	"log/slog"
	"sync/atomic"
	"testing"
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
