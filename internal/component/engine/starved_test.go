package engine

import (
	"errors"
	"testing"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// TestStarvedCalls makes each allocation of the C half fail in turn, while an instance is made and called with values
// of all kinds. Each failure ends only that call, with ErrStarved.
func TestStarvedCalls(t *testing.T) {
	onBothPaths(t, func(t *testing.T, p Path) {
		c, h := theGuest(t), &things{}
		o := InstanceOptions{Path: p, Host: h, Account: NewAccount(0), Args: []string{"a"}, Env: []string{"A=b"}}
		mixed := wit.AppendString(wit.AppendCase([]byte{1}, 2), "hello, world")
		mixed = wit.AppendF32(append(wit.AppendU32(mixed, 0), 1), 1)
		all := func() error {
			i, err := c.Instantiate(t.Context(), o)
			if err != nil {
				return err
			}
			defer i.Close()
			for _, call := range []struct {
				name string
				args []byte
			}{
				{"mixed", mixed}, {"fill", u32s(1000)}, {"sum", wit.AppendBytes(nil, make([]byte, 100_000))},
				{"take", u32s(h.put(1))}, {"give", u32s(1)},
			} {
				if _, err := i.Call(t.Context(), bound(t, call.name), call.args, nil); err != nil {
					return err
				}
			}
			return nil
		}
		if err := all(); err != nil {
			t.Fatal(err)
		}
		n := int64(0)
		for ; n < 1000; n++ {
			failAllocsAfter(n)
			err := all()
			failAllocsAfter(-1)
			if err == nil {
				break
			}
			if !errors.Is(err, ErrStarved) {
				t.Errorf("with %d allocations: error %v, want ErrStarved", n, err)
			}
			if err := all(); err != nil {
				t.Fatalf("a call after a failure with %d allocations: %v", n, err)
			}
		}
		if n < 3 || n == 1000 {
			t.Errorf("%d allocations failed, want 3 to 999", n)
		}
	})
}
