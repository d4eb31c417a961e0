package dialer

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// TestResolved: names count for a limited time, and both the addresses and the names of each are bounded.
func TestResolved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r resolved
		addr := netip.MustParseAddr("192.0.2.1")
		r.add([]string{"a.example"}, []netip.Addr{addr})
		time.Sleep(resolvedTime / 2) // pacing: the bubble's clock
		r.add([]string{"b.example"}, []netip.Addr{addr})
		if got := r.names(addr); !slices.Equal(got, []string{"a.example", "b.example"}) {
			t.Errorf("names = %v", got)
		}
		time.Sleep(resolvedTime/2 + 1) // pacing: the bubble's clock
		if got := r.names(addr); !slices.Equal(got, []string{"b.example"}) {
			t.Errorf("names after the first one's time = %v", got)
		}
		for i := range 2 * maxResolved {
			r.add([]string{"many.example"}, []netip.Addr{netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})})
		}
		if len(r.addrs) > maxResolved {
			t.Errorf("%d addresses, want at most %d", len(r.addrs), maxResolved)
		}
		for i := range 2 * maxNames {
			r.add([]string{fmt.Sprintf("n%d.example", i)}, []netip.Addr{addr})
		}
		if got := r.names(addr); len(got) != maxNames || got[maxNames-1] != "n15.example" {
			t.Errorf("names = %v, want the last %d", got, maxNames)
		}
	})
}
