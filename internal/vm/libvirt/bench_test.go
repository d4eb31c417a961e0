package libvirt

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/vm/machine"
)

// BenchmarkLife reports, in milliseconds, the time of each call; "start" is until the CPUs run, "boot" from then until the
// guest is up, "shutdown" from the power button until the end is told.
func BenchmarkLife(b *testing.B) {
	r := newRig(b)
	s := r.subject(b)
	l := s.Begin(b)
	defer l.Close()
	warm := s.Definition(b) // libvirt asks QEMU what it can do, once
	require.NoError(b, l.Define(b.Context(), warm))
	require.NoError(b, l.Start(b.Context(), warm.Name))
	require.NoError(b, l.Undefine(b.Context(), warm.Name))
	sums := map[string]time.Duration{}
	lap := func(what string, call func() error) {
		begun := time.Now()
		require.NoError(b, call())
		sums[what] += time.Since(begun)
	}
	for b.Loop() {
		d := s.Definition(b)
		lap("define", func() error { return l.Define(b.Context(), d) })
		lap("start", func() error { return l.Start(b.Context(), d.Name) })
		lap("boot", func() error { l.Up(b, d); return nil })
		lap("shutdown", func() error {
			err := l.Shutdown(b.Context(), d.Name)
			require.Equal(b, machine.CausePowerOff, l.End(d.Name).Cause)
			return err
		})
		require.NoError(b, l.Start(b.Context(), d.Name))
		lap("destroy", func() error { return l.Destroy(b.Context(), d.Name) })
		require.NoError(b, l.Undefine(b.Context(), d.Name))
	}
	for what, sum := range sums {
		b.ReportMetric(float64(sum.Microseconds())/1000/float64(b.N), what+"-ms")
	}
	b.ReportMetric(0, "ns/op")
}
