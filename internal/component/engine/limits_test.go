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
// soon is the most that a deadline of a fraction of a second may take on a machine that is busy with other work.
const soon = 10 * time.Second

func TestDeadline(t *testing.T) {
	onBothPaths(t, func(t *testing.T, p Path) {
		i := instance(t, theGuest(t), InstanceOptions{Path: p, Deadline: 100 * time.Millisecond})
		if _, err := i.Call(t.Context(), bound(t, "count"), nil, nil); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		_, err := i.Call(t.Context(), bound(t, "spin"), u32s(0), nil)
		took := time.Since(start)
		if !errors.Is(err, context.DeadlineExceeded) || took < 100*time.Millisecond || took > soon {
			t.Errorf("spin: error %v after %v, want DeadlineExceeded after 100 ms", err, took)
		}
		if cpu := i.CPU(); cpu < time.Millisecond || i.Alive() {
			t.Errorf("CPU() = %v, want at least 1 ms; Alive() = %v, want false", cpu, i.Alive())
		}
		if p == PathCore {
			return
		}
		// In wasmtime's WASI, sleeping and computing cannot be told apart.
		i = instance(t, theGuest(t), InstanceOptions{Path: p, Deadline: 100 * time.Millisecond})
		if _, err := i.Call(t.Context(), bound(t, "nap"), u32s(10), nil); err != nil {
			t.Errorf("a short sleep: %v", err)
		}
		start = time.Now()
		_, err = i.Call(t.Context(), bound(t, "nap"), u32s(600000), nil)
		if took := time.Since(start); !errors.Is(err, context.DeadlineExceeded) || took > soon {
			t.Errorf("a long sleep: error %v after %v, want DeadlineExceeded", err, took)
		}
	})
}

// TestFaultW7Handles is row W7 for handles: all instances of an account share a limit, and give handles back.
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
			t.Fatalf("flood(60): %v; Held = %d, want 60", err, a.Held(HeldResources))
		}
		if err := flood(second, 41); !errors.Is(err, ErrHandles) {
			t.Errorf("41 more of 100 handles: error %v, want ErrHandles", err)
		}
		second.Close()
		third := hold()
		if err := flood(third, 40); err != nil {
			t.Errorf("40 more of 100 handles: %v", err)
		}
		first.Close()
		third.Close()
		if a.Held(HeldResources) != 0 {
			t.Errorf("Held(HeldResources) at the end = %d, want 0", a.Held(HeldResources))
		}
	})
}

// TestSleepIsNotComputing: sleeping uses no budget, with or without directories, and the guest can still be ended.
func TestSleepIsNotComputing(t *testing.T) {
	for _, dirs := range [][]Preopen{nil, {{Path: t.TempDir(), Guest: "/data"}}} {
		i := instance(t, theGuest(t), InstanceOptions{Deadline: 50 * time.Millisecond, Preopens: dirs})
		if _, err := i.Call(t.Context(), bound(t, "nap"), u32s(200), nil); err != nil {
			t.Errorf("%d directories: 200 ms of sleep with a budget of 50 ms: %v", len(dirs), err)
		}
		if _, err := i.Call(t.Context(), bound(t, "spin"), u32s(0), nil); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%d directories: spin: error %v, want DeadlineExceeded", len(dirs), err)
		}
	}
}

// TestWaitingIsNotComputing: waiting in host functions uses no budget, and Renew resets the budget.
func TestWaitingIsNotComputing(t *testing.T) {
	onBothPaths(t, func(t *testing.T, p Path) {
		o := InstanceOptions{Path: p, Deadline: 60 * time.Millisecond, MaxHostCalls: 5}
		i := instance(t, theGuest(t), o)
		if _, err := i.Call(t.Context(), bound(t, "wait"), u32s(50, 4), nil); err != nil {
			t.Errorf("200 ms in the host with a budget of 60 ms: %v", err)
		}
		if _, err := i.Call(t.Context(), bound(t, "wait"), u32s(1000, 100), nil); err != nil {
			t.Errorf("100 calls that renew a quota of 5: %v", err)
		}
		if _, err := i.Call(t.Context(), bound(t, "wait"), u32s(0, 6), nil); !errors.Is(err, ErrHostCalls) {
			t.Errorf("6 calls with a quota of 5: error %v, want ErrHostCalls", err)
		}
		i = instance(t, theGuest(t), InstanceOptions{Path: p, Deadline: 100 * time.Millisecond})
		if _, err := i.Call(t.Context(), bound(t, "wait"), u32s(0, 1<<30), nil); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("endless host calls: error %v, want DeadlineExceeded", err)
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
			case c.want == ErrMemory && p == PathComponent: // the guest's size is not known there
				if err == nil {
					t.Errorf("%s(%x) = %x, want an error", c.name, c.arg, out)
				}
			case c.want != nil && (!errors.Is(err, c.want) || !errdefs.IsResourceExhausted(err)),
				c.kind != "" && (!errors.As(err, &trap) || trap.Kind != c.kind),
				c.out != nil && (err != nil || string(out) != string(c.out)):
				t.Errorf("%s(%x) = %x, %v; want %x, %v %s", c.name, c.arg, out, err, c.out, c.want, c.kind)
			}
		})
	}
	i := instance(t, theGuest(t), InstanceOptions{MaxMemory: 4 << 20})
	big := wit.AppendBytes(nil, make([]byte, 8<<20))
	if _, err := i.Call(t.Context(), bound(t, "sum"), big, nil); !errors.Is(err, ErrMemory) {
		t.Errorf("a parameter larger than the guest's memory: error %v, want ErrMemory", err)
	}
	if _, err := theGuest(t).Instantiate(t.Context(), InstanceOptions{MaxMemory: 1 << 16}); !errors.Is(err, ErrMemory) ||
		!strings.Contains(err.Error(), "declares 128 KiB") {
		t.Errorf("Instantiate with less memory than declared: error %v, want ErrMemory", err)
	}
}

func TestAccountMemory(t *testing.T) {
	a := NewAccount(24 << 20)
	o := InstanceOptions{Account: a, MaxMemory: 16 << 20}
	one, two := instance(t, theGuest(t), o), instance(t, theGuest(t), o)
	if m := a.Memory(); m != one.Memory()+two.Memory() || m == 0 {
		t.Errorf("Account.Memory() = %d, want the sum of %d and %d", m, one.Memory(), two.Memory())
	}
	if _, err := one.Call(t.Context(), bound(t, "touch"), u32s(12), nil); err != nil {
		t.Fatal(err)
	}
	if _, err := two.Call(t.Context(), bound(t, "touch"), u32s(13), nil); !errors.Is(err, ErrMemory) ||
		!strings.Contains(err.Error(), "24 MiB") {
		t.Errorf("both guests together over the limit: error %v, want ErrMemory", err)
	}
	two.Close()
	if m := a.Memory(); m != one.Memory() || a.MemoryPeak() < 24<<20 {
		t.Errorf("after Close of the second guest: Memory() = %d, want %d; MemoryPeak() = %d", m, one.Memory(), a.MemoryPeak())
	}
	if _, err := one.Call(t.Context(), bound(t, "count"), nil, nil); err != nil {
		t.Errorf("Call of the first guest: %v", err)
	}
	if cpu := a.CPU(); cpu <= 0 {
		t.Errorf("Account.CPU() = %v, want more than 0", cpu)
	}
	one.Close()
	if m := a.Memory(); m != 0 {
		t.Errorf("Account.Memory() at the end = %d, want 0", m)
	}
}

// TestAccountCPU: two guests that spin get no more than their common quota, and their forced sleep uses no budget.
func TestAccountCPU(t *testing.T) {
	a := NewAccount(0)
	a.SetCPU(2*time.Millisecond, 200*time.Millisecond) // less than the guests get beside other work
	var instances []*Instance                          // made before any of them uses up the quota
	for range 2 {
		instances = append(instances, instance(t, theGuest(t), InstanceOptions{Account: a, Deadline: 900 * time.Millisecond}))
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	var wg sync.WaitGroup
	for _, i := range instances {
		wg.Go(func() {
			start := time.Now()
			_, err := i.Call(ctx, bound(t, "spin"), u32s(0), nil)
			if took := time.Since(start); !errors.Is(err, context.DeadlineExceeded) || took < 800*time.Millisecond {
				t.Errorf("spin: error %v after %v, want DeadlineExceeded after 900 ms", err, took)
			}
		})
	}
	wg.Wait()
	if cpu := a.CPU(); cpu > 100*time.Millisecond || a.Throttled() == 0 {
		t.Errorf("CPU() = %v in a second with a quota of a hundredth; Throttled() = %v", cpu, a.Throttled())
	}
}

// TestPoolIsFull: when the pool is full, instances get room outside it. When that is full too, Instantiate fails until
// an instance is closed.
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
			t.Errorf("Instantiate beyond the overflow: error %v, want errdefs.ErrResourceExhausted", err)
		}
		all[0].Close()
		i, err := c.Instantiate(t.Context(), InstanceOptions{Path: p})
		if err != nil {
			t.Fatalf("Instantiate after a Close: %v", err)
		}
		i.Close()
	})
}

// TestMemoryIsFresh: an instance finds nothing of the previous one, in the only slot of the pool, and in a memory beside it.
func TestMemoryIsFresh(t *testing.T) {
	onBothPaths(t, func(t *testing.T, p Path) {
		overflow := -1
		if p == PathCore { // the memory is detached; TestInitialMemoryIsReset is about memories that are kept
			overflow = 1
		}
		e, err := New(Config{Instances: 1, Overflow: overflow})
		if err != nil {
			t.Fatal(err)
		}
		c := guestBy(t, e, read(t, "guest.wasm"), thingsHost(), CompileOptions{Both: true})
		count, err := c.Func(Signature{Interface: "test:guest/api@1.2.0", Name: "count", Result: tU32})
		if err != nil {
			t.Fatal(err)
		}
		for range 5 {
			i := instance(t, c, InstanceOptions{Path: p, Host: &things{}})
			for want := range uint32(3) {
				out, err := i.Call(t.Context(), count, nil, nil)
				if n := wit.NewReader(out).U32(); err != nil || n != want+1 {
					t.Fatalf("call %d counted %d, %v", want+1, n, err)
				}
			}
			i.Close()
		}
	})
}
