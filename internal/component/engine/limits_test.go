package engine

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// TestDeadline is row W1: an endless loop ends when its budget is used up.
func TestDeadline(t *testing.T) {
	onBothPaths(t, func(t *testing.T, p Path) {
		i := instance(t, theGuest(t), InstanceOptions{Path: p, Deadline: 100 * time.Millisecond})
		if _, err := i.Call(t.Context(), bound(t, "count"), nil, nil); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		_, err := i.Call(t.Context(), bound(t, "spin"), u32s(0), nil)
		took := time.Since(start)
		if !errors.Is(err, context.DeadlineExceeded) || took < 100*time.Millisecond || took > time.Second {
			t.Errorf("%v after %v", err, took)
		}
		if cpu := i.CPU(); cpu < 5*time.Millisecond || i.Alive() {
			t.Errorf("%v of CPU accounted, alive %v", cpu, i.Alive())
		}
		if p == PathCore {
			return
		}
		// In the engine's own WASI nobody sees whether a guest sleeps or computes.
		i = instance(t, theGuest(t), InstanceOptions{Path: p, Deadline: 100 * time.Millisecond})
		if _, err := i.Call(t.Context(), bound(t, "nap"), u32s(10), nil); err != nil {
			t.Errorf("a short sleep: %v", err)
		}
		start = time.Now()
		_, err = i.Call(t.Context(), bound(t, "nap"), u32s(600000), nil)
		if took := time.Since(start); !errors.Is(err, context.DeadlineExceeded) || took > time.Second {
			t.Errorf("a long sleep: %v after %v", err, took)
		}
	})
}

// TestFaultW7Handles is row W7 for handles: those of all instances of an account are bounded together, and given back.
func TestFaultW7Handles(t *testing.T) {
	onBothPaths(t, func(t *testing.T, p Path) {
		a := NewAccount(0)
		a.Bound(HeldResources, 100)
		flood := func(i *Instance, n uint32) error {
			_, err := i.Call(t.Context(), bound(t, "flood"), u32s(n), nil)
			return err
		}
		hold := func() *Instance {
			return instance(t, theGuest(t), InstanceOptions{Path: p, Account: a, Host: &things{}})
		}
		first, second := hold(), hold()
		if err := flood(first, 60); err != nil || a.Held(HeldResources) != 60 {
			t.Fatalf("%v; %d held", err, a.Held(HeldResources))
		}
		if err := flood(second, 41); !errors.Is(err, ErrHandles) {
			t.Errorf("41 more of 100: %v", err)
		}
		second.Close()
		third := hold()
		if err := flood(third, 40); err != nil {
			t.Errorf("40 more of 100: %v", err)
		}
		first.Close()
		third.Close()
		if a.Held(HeldResources) != 0 {
			t.Errorf("%d are held at the end", a.Held(HeldResources))
		}
	})
}

// TestSleepIsNotComputing: a guest that sleeps uses nothing of its budget, with directories and without, and can still be ended.
func TestSleepIsNotComputing(t *testing.T) {
	for _, dirs := range [][]Preopen{nil, {{Path: t.TempDir(), Guest: "/data"}}} {
		i := instance(t, theGuest(t), InstanceOptions{Deadline: 50 * time.Millisecond, Preopens: dirs})
		if _, err := i.Call(t.Context(), bound(t, "nap"), u32s(200), nil); err != nil {
			t.Errorf("%d directories: 200 ms of sleep, of a budget of 50 ms: %v", len(dirs), err)
		}
		if _, err := i.Call(t.Context(), bound(t, "spin"), u32s(0), nil); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%d directories: %v", len(dirs), err)
		}
	}
}

// TestWaitingIsNotComputing: what a guest waits for in the host does not count, and is renewed by new work.
func TestWaitingIsNotComputing(t *testing.T) {
	onBothPaths(t, func(t *testing.T, p Path) {
		o := InstanceOptions{Path: p, Deadline: 60 * time.Millisecond, MaxHostCalls: 5}
		i := instance(t, theGuest(t), o)
		if _, err := i.Call(t.Context(), bound(t, "wait"), u32s(50, 4), nil); err != nil {
			t.Errorf("200 ms in the host, of a budget of 60 ms: %v", err)
		}
		if _, err := i.Call(t.Context(), bound(t, "wait"), u32s(1000, 100), nil); err != nil {
			t.Errorf("100 calls that renew, of 5: %v", err)
		}
		if _, err := i.Call(t.Context(), bound(t, "wait"), u32s(0, 6), nil); !errors.Is(err, ErrHostCalls) {
			t.Errorf("6 calls of 5: %v", err)
		}
		i = instance(t, theGuest(t), InstanceOptions{Path: p, Deadline: 100 * time.Millisecond})
		if _, err := i.Call(t.Context(), bound(t, "wait"), u32s(0, 1<<30), nil); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("host calls without end: %v", err)
		}
	})
}

// TestBounds is the rest of row W1: recursion, memory, tables, handles of the host, values.
func TestBounds(t *testing.T) {
	o := InstanceOptions{MaxMemory: 16 << 20, MaxTableElements: 1000, MaxHandles: 100, MaxValue: 1 << 20}
	for _, c := range []struct {
		name string
		arg  []byte
		want error    // or
		kind TrapKind // of a Trap, or
		out  []byte
	}{
		{name: "recurse", kind: TrapStackOverflow},
		{name: "grow", arg: u32s(8), out: u32s(8*16 + 2)},
		{name: "grow", arg: u32s(100), out: u32s(0)},
		{name: "touch", arg: u32s(8), out: u32s(8)},
		{name: "touch", arg: u32s(100), want: ErrMemory},
		{name: "table", arg: u32s(1000), out: u32s(1<<32 - 1)},
		{name: "flood", arg: u32s(100), out: u32s(100)},
		{name: "flood", arg: u32s(101), want: ErrHandles},
		{name: "fill", arg: u32s(2 << 20), want: ErrValue},
	} {
		onBothPaths(t, func(t *testing.T, p Path) {
			o.Path, o.Host = p, &things{}
			i := instance(t, theGuest(t), o)
			out, err := i.Call(t.Context(), bound(t, c.name), c.arg, nil)
			var trap *Trap
			switch {
			case c.want == ErrMemory && p == PathComponent: // nobody tells how large the guest was
				if err == nil {
					t.Errorf("%s(%x): %x", c.name, c.arg, out)
				}
			case c.want != nil && (!errors.Is(err, c.want) || !errdefs.IsResourceExhausted(err)),
				c.kind != "" && (!errors.As(err, &trap) || trap.Kind != c.kind),
				c.out != nil && (err != nil || string(out) != string(c.out)):
				t.Errorf("%s(%x): %x, %v", c.name, c.arg, out, err)
			}
		})
	}
	i := instance(t, theGuest(t), InstanceOptions{MaxMemory: 4 << 20})
	big := wit.AppendBytes(nil, make([]byte, 8<<20))
	if _, err := i.Call(t.Context(), bound(t, "sum"), big, nil); !errors.Is(err, ErrMemory) {
		t.Errorf("a parameter larger than the guest's memory: %v", err)
	}
	if _, err := theGuest(t).Instantiate(t.Context(), InstanceOptions{MaxMemory: 1 << 16}); !errors.Is(err, ErrMemory) ||
		!strings.Contains(err.Error(), "declares 128 KiB") {
		t.Errorf("a limit below what the guest declares: %v", err)
	}
}

func TestAccountMemory(t *testing.T) {
	a := NewAccount(24 << 20)
	o := InstanceOptions{Account: a, MaxMemory: 16 << 20}
	one, two := instance(t, theGuest(t), o), instance(t, theGuest(t), o)
	if m := a.Memory(); m != one.Memory()+two.Memory() || m == 0 {
		t.Errorf("the account has %d, the instances %d and %d", m, one.Memory(), two.Memory())
	}
	if _, err := one.Call(t.Context(), bound(t, "touch"), u32s(12), nil); err != nil {
		t.Fatal(err)
	}
	if _, err := two.Call(t.Context(), bound(t, "touch"), u32s(13), nil); !errors.Is(err, ErrMemory) || !strings.Contains(err.Error(), "24 MiB") {
		t.Errorf("both together over the limit: %v", err)
	}
	two.Close()
	if m := a.Memory(); m != one.Memory() || a.MemoryPeak() < 24<<20 {
		t.Errorf("after the second is closed: %d, the first has %d, peak %d", m, one.Memory(), a.MemoryPeak())
	}
	if _, err := one.Call(t.Context(), bound(t, "count"), nil, nil); err != nil {
		t.Errorf("the first: %v", err)
	}
	if cpu := a.CPU(); cpu <= 0 {
		t.Errorf("CPU %v", cpu)
	}
	one.Close()
	if m := a.Memory(); m != 0 {
		t.Errorf("%d bytes left on the account", m)
	}
}

// TestAccountCPU: two guests that spin get no more than their quota, together; and what they sleep is not computing.
func TestAccountCPU(t *testing.T) {
	a := NewAccount(0)
	a.SetCPU(10*time.Millisecond, 200*time.Millisecond)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	var wg sync.WaitGroup
	for range 2 {
		i := instance(t, theGuest(t), InstanceOptions{Account: a, Deadline: 900 * time.Millisecond})
		wg.Go(func() {
			start := time.Now()
			_, err := i.Call(ctx, bound(t, "spin"), u32s(0), nil)
			if took := time.Since(start); !errors.Is(err, context.DeadlineExceeded) || took < 800*time.Millisecond {
				t.Errorf("%v after %v", err, took)
			}
		})
	}
	wg.Wait()
	if cpu := a.CPU(); cpu > 150*time.Millisecond || a.Throttled() == 0 {
		t.Errorf("%v of CPU in a second, with a twentieth of one; slept %v", cpu, a.Throttled())
	}
}

// TestPoolIsFull: beyond the pool there is room outside of it, and beyond that a refusal, until something is closed.
func TestPoolIsFull(t *testing.T) {
	e, err := New(Config{Instances: 4, Overflow: 2})
	if err != nil {
		t.Fatal(err)
	}
	c := guest(t, e, read(t, "guest.wasm"), thingsHost())
	f, err := c.Func(Signature{Interface: "test:guest/api@1.0.0", Name: "count", Result: tU32})
	if err != nil {
		t.Fatal(err)
	}
	onBothPaths(t, func(t *testing.T, p Path) {
		var all []*Instance
		for n := range 6 {
			i, err := c.Instantiate(t.Context(), InstanceOptions{Path: p})
			if err != nil {
				t.Fatalf("instance %d: %v", n, err)
			}
			defer i.Close()
			if out, err := i.Call(t.Context(), f, nil, nil); err != nil || wit.NewReader(out).U32() != 1 {
				t.Fatalf("instance %d: %x, %v", n, out, err)
			}
			all = append(all, i)
		}
		if _, err := c.Instantiate(t.Context(), InstanceOptions{Path: p}); !errdefs.IsResourceExhausted(err) {
			t.Errorf("one more: %v", err)
		}
		all[0].Close()
		i, err := c.Instantiate(t.Context(), InstanceOptions{Path: p})
		if err != nil {
			t.Fatalf("after one was closed: %v", err)
		}
		i.Close()
	})
}

// TestMemoryIsFresh: an instance in a slot that another has used finds none of it.
func TestMemoryIsFresh(t *testing.T) {
	e, err := New(Config{Instances: 1, Overflow: -1})
	if err != nil {
		t.Fatal(err)
	}
	c := guest(t, e, read(t, "guest.wasm"), thingsHost())
	count, err := c.Func(Signature{Interface: "test:guest/api@1.2.0", Name: "count", Result: tU32})
	if err != nil {
		t.Fatal(err)
	}
	for range 5 {
		i := instance(t, c, InstanceOptions{})
		for want := range uint32(3) {
			out, err := i.Call(t.Context(), count, nil, nil)
			if n := wit.NewReader(out).U32(); err != nil || n != want+1 {
				t.Fatalf("call %d counted %d (%v)", want+1, n, err)
			}
		}
		i.Close()
	}
}
