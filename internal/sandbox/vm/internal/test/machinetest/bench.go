package machinetest

import (
	"testing"
	"time"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// BenchmarkLife reports the time of each call in milliseconds. "start" is measured until the guest's CPUs run, "boot"
// until the guest is ready, and "shutdown" until the driver reports the end.
func BenchmarkLife(b *testing.B, s Subject) {
	l := s.Begin(b)
	defer l.Close()
	sums := map[string]time.Duration{}
	lap := func(what string, call func() error) {
		b.Helper()
		begun := time.Now()
		if err := call(); err != nil {
			b.Fatalf("%s: %v", what, err)
		}
		sums[what] += time.Since(begun)
	}
	warm := s.Definition(b) // not measured, because libvirt probes QEMU's capabilities on the first start
	lap("warm", func() error { return l.Define(b.Context(), warm) })
	lap("warm", func() error { return l.Start(b.Context(), warm.Name) })
	lap("warm", func() error { return l.Undefine(b.Context(), warm.Name) })
	delete(sums, "warm")
	for b.Loop() {
		d := s.Definition(b)
		lap("define", func() error { return l.Define(b.Context(), d) })
		lap("start", func() error { return l.Start(b.Context(), d.Name) })
		lap("boot", func() error { l.Boot(b, d); return nil })
		lap("shutdown", func() error {
			err := l.Shutdown(b.Context(), d.Name)
			if cause := l.End(d.Name).Cause; cause != machine.CausePowerOff {
				b.Fatalf("cause of the end = %q, want a power-off", cause)
			}
			return err
		})
		lap("again", func() error { return l.Start(b.Context(), d.Name) })
		lap("destroy", func() error { return l.Destroy(b.Context(), d.Name) })
		lap("undefine", func() error { return l.Undefine(b.Context(), d.Name) })
	}
	for what, sum := range sums {
		b.ReportMetric(float64(sum.Microseconds())/1000/float64(b.N), what+"-ms")
	}
	b.ReportMetric(0, "ns/op")
}
