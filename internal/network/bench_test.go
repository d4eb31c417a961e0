package network

import (
	"fmt"
	"log/slog"
	"testing"
)

func quiet(c *Config) { c.Logger = slog.New(slog.DiscardHandler) }

// BenchmarkSetupTeardown is a pod's network from nothing to nothing, split into its halves.
func BenchmarkSetupTeardown(b *testing.B) {
	conf := map[string]string{
		"default": "",
		"nomasq":  `{"cniVersion":"1.0.0","name":"x","plugins":[{"type":"bridge","bridge":"nomasq0","isGateway":true,"ipam":{"type":"host-local","dataDir":"/run/bench","ranges":[[{"subnet":"10.99.0.0/16"}]]}}]}`,
		"noipam":  `{"cniVersion":"1.0.0","name":"y","plugins":[{"type":"bridge","bridge":"noipam0"}]}`,
		"noop":    `{"cniVersion":"1.0.0","name":"z","plugins":[{"type":"noop"}]}`,
	}
	for name, list := range conf {
		b.Run(name, func(b *testing.B) {
			n := newNode(b, quiet)
			n.plugin("noop", "echo '{\"cniVersion\":\"1.0.0\"}'")
			if list != "" {
				n.configure("10.conflist", list)
			}
			b.Run("setup", func(b *testing.B) {
				for i := range b.N {
					n.setup(Attachment{ID: fmt.Sprintf("pod-%d", i)})
					b.StopTimer()
					n.teardown(Attachment{ID: fmt.Sprintf("pod-%d", i)})
					b.StartTimer()
				}
			})
			b.Run("teardown", func(b *testing.B) {
				for i := range b.N {
					b.StopTimer()
					n.setup(Attachment{ID: fmt.Sprintf("pod-%d", i)})
					b.StartTimer()
					n.teardown(Attachment{ID: fmt.Sprintf("pod-%d", i)})
				}
			})
		})
	}
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
			b.Fatal("not ready")
		}
	}
}
