package engine

import (
	"errors"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// resident returns the resident memory of this process, in bytes.
func resident(t *testing.T) int {
	t.Helper()
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Fatal(err)
	}
	pages, err := strconv.Atoi(strings.Fields(string(b))[1])
	if err != nil {
		t.Fatal(err)
	}
	return pages * os.Getpagesize()
}

// TestNothingLeaks calls fresh instances and a reused one, successfully and not, and compares the process's memory with
// that after the first rounds.
func TestNothingLeaks(t *testing.T) {
	rounds := 20000
	if os.Getenv("TRIPOD_TEST_FULL") != "" {
		rounds = 200000
	}
	onBothPaths(t, func(t *testing.T, p Path) {
		c, h := theGuest(t), &things{}
		o := InstanceOptions{Path: p, Host: h, Account: NewAccount(0), Args: []string{"a"}, Env: []string{"A=b"}}
		kept := instance(t, c, o)
		mixed := wit.AppendString(wit.AppendCase([]byte{1}, 2), "hello, world")
		mixed = wit.AppendF32(append(wit.AppendU32(mixed, 0), 1), 1)
		call := func(i *Instance, name string, args []byte) error {
			_, err := i.Call(t.Context(), bound(t, name), args, nil)
			return err
		}
		round := func(n int) {
			fresh, err := c.Instantiate(t.Context(), o)
			if err != nil {
				t.Fatal(err)
			}
			defer fresh.Close()
			for _, i := range []*Instance{fresh, kept} {
				err := errors.Join(call(i, "mixed", mixed), call(i, "fill", u32s(1000)), call(i, "sum", wit.AppendBytes(nil, make([]byte, 100))),
					call(i, "take", u32s(h.put(1))), call(i, "give", u32s(1)))
				if err != nil {
					t.Fatal(err)
				}
			}
			if n%16 == 0 && call(fresh, []string{"bad", "trap", "fail"}[n/16%3],
				[][]byte{u32s(1), u32s(0), wit.AppendString(nil, "no")}[n/16%3]) == nil {
				t.Fatal("the call of a bad guest succeeded")
			}
			clear(h.numbers)
			h.dropped = h.dropped[:0]
		}
		for n := range rounds / 10 {
			round(n)
		}
		before := resident(t)
		for n := range rounds {
			round(n)
		}
		// The limit would show a leak of 100 bytes per round.
		if grown := resident(t) - before; grown > 4<<20+rounds*100 && !underSanitizer {
			t.Errorf("%d rounds: memory grew by %d KiB", rounds, grown>>10)
		} else {
			t.Logf("%d rounds: memory grew by %d KiB", rounds, grown>>10)
		}
		kept.Close()
		if m := o.Account.Memory(); m != 0 {
			t.Errorf("Account.Memory() after Close = %d, want 0", m)
		}
	})
}
