package engine

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// TestMixed passes parameters as core values, in slots shared by the cases of a variant.
func TestMixed(t *testing.T) {
	text := wit.AppendString(wit.AppendCase(nil, 2), "größer 🐙")
	many := wit.AppendU64(wit.AppendU64(wit.AppendLen(wit.AppendCase(nil, 3), 2), 1<<63), 7)
	dot := func(x int16, y float64) []byte {
		b := wit.AppendF64(wit.AppendU16(wit.AppendCase(nil, 1), uint16(x)), y)
		return wit.AppendU32(wit.AppendOption(b, true), 0x1f419)
	}
	for _, c := range []struct {
		name    string
		in, out []byte
	}{
		{"nothing", wit.AppendCase(nil, 0), wit.AppendCase(nil, 0)},
		{"dot", dot(-300, 2.5), dot(-200, 3)},
		{"text", text, text},
		{"many", many, many},
		{"small", wit.AppendF32(wit.AppendCase(nil, 4), 1.25), wit.AppendF32(wit.AppendCase(nil, 4), 6.25)},
		{"tiny", append(wit.AppendCase(nil, 5), 0x80), append(wit.AppendCase(nil, 5), 0x81)},
	} {
		onBothPaths(t, func(t *testing.T, p Path) {
			i := instance(t, theGuest(t), InstanceOptions{Path: p})
			args := append([]byte{100}, c.in...)
			args = wit.AppendF32(append(wit.AppendU32(args, 0b101), 1), 0.5)
			for range 3 {
				out, err := i.Call(t.Context(), bound(t, "mixed"), args, []byte("kept"))
				if err != nil || !bytes.Equal(out, append([]byte("kept"), c.out...)) {
					t.Fatalf("mixed(%s) = %x, %v; want %x", c.name, out, err, c.out)
				}
			}
		})
	}
}

func TestBytesAndRoom(t *testing.T) {
	onBothPaths(t, func(t *testing.T, p Path) {
		i := instance(t, theGuest(t), InstanceOptions{Path: p})
		for _, n := range []int{0, 1, 100, 1 << 20} {
			want := wit.AppendBytes(nil, bytes.Repeat([]byte{7}, n))
			for _, room := range []int{0, 10, 2 << 20} {
				out, err := i.Call(t.Context(), bound(t, "fill"), u32s(uint32(n)), make([]byte, 0, room))
				if err != nil || !bytes.Equal(out, want) {
					t.Fatalf("fill(%d) with room for %d returned %d bytes, %v", n, room, len(out), err)
				}
			}
			out, err := i.Call(t.Context(), bound(t, "sum"), want, nil)
			if sum := wit.NewReader(out).U32(); err != nil || n > 0 && sum != uint32(n+14) {
				t.Fatalf("sum of %d bytes = %d, %v; want %d", n, sum, err, n+14)
			}
		}
	})
}

func TestResources(t *testing.T) {
	onBothPaths(t, func(t *testing.T, p Path) {
		h := &things{}
		i := instance(t, theGuest(t), InstanceOptions{Path: p, Host: h})
		call := func(name string, args ...uint32) uint32 {
			t.Helper()
			out, err := i.Call(t.Context(), bound(t, name), u32s(args...), nil)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			return wit.NewReader(out).U32()
		}
		for range 3 {
			a := h.put(40)
			if n := call("take", a); n != 40 || h.get(a) != 0 {
				t.Errorf("take = %d, want 40; the host still holds %d, want 0", n, h.get(a))
			}
			b := h.put(41)
			if n := call("lend", b); n != 41 || h.get(b) != 41 {
				t.Errorf("lend = %d, want 41; the host holds %d, want 41", n, h.get(b))
			}
			c := call("give", 50)
			if h.get(c) != 51 || !slices.Contains(h.dropped, c-1) {
				t.Errorf("give returned rep %d for %d, want 51; dropped %v", c, h.get(c), h.dropped)
			}
		}
		var trap *Trap
		if out, err := i.Call(t.Context(), bound(t, "keep"), u32s(h.put(77)), nil); !errors.As(err, &trap) ||
			!strings.Contains(trap.Message, "borrow") || i.Alive() {
			t.Errorf("keep of a borrowed handle = %x, %v, want a Trap that says so; Alive() = %v, want false", out, err, i.Alive())
		}
	})
}

func TestHostCallErrors(t *testing.T) {
	onBothPaths(t, func(t *testing.T, p Path) {
		for _, text := range []string{"no", "panic"} {
			i := instance(t, theGuest(t), InstanceOptions{Path: p})
			_, err := i.Call(t.Context(), bound(t, "fail"), wit.AppendString(nil, text), nil)
			var trap *Trap
			if !errors.As(err, &trap) || trap.Kind != TrapHost || text == "no" && !errors.Is(err, errAsked) {
				t.Errorf("fail(%q): error %v, want a TrapHost that wraps the host's", text, err)
			}
			if _, err := i.Call(t.Context(), bound(t, "count"), nil, nil); !errors.Is(err, ErrDead) {
				t.Errorf("Call after fail(%q): error %v, want ErrDead", text, err)
			}
		}
	})
}

func TestArgumentsThatDoNotFit(t *testing.T) {
	onBothPaths(t, func(t *testing.T, p Path) {
		i := instance(t, theGuest(t), InstanceOptions{Path: p})
		for _, c := range []struct {
			name string
			args []byte
		}{
			{"flip", nil}, {"flip", []byte{2}}, {"flip", []byte{1, 1}},
			{"fail", wit.AppendString(nil, "\xff")}, {"fail", wit.AppendU32(nil, 1<<31)},
			{"mixed", wit.AppendF32(append(wit.AppendU32(wit.AppendCase([]byte{0}, 6), 0), 0), 0)},
			{"mixed", wit.AppendF32(append(wit.AppendU32(wit.AppendCase([]byte{0}, 0), 8), 0), 0)},
		} {
			if _, err := i.Call(t.Context(), bound(t, c.name), c.args, nil); !errdefs.IsInvalidArgument(err) {
				t.Errorf("%s(%x): error %v, want errdefs.ErrInvalidArgument", c.name, c.args, err)
			}
		}
		if _, err := i.Call(t.Context(), bound(t, "count"), nil, nil); err != nil {
			t.Errorf("the instance did not survive bad arguments: %v", err)
		}
	})
}

// TestGuestBreaksABI: whatever a guest returns, the host reads nothing outside the guest's memory.
func TestGuestBreaksABI(t *testing.T) {
	onBothPaths(t, func(t *testing.T, p Path) {
		for kind := range uint32(8) {
			i := instance(t, theGuest(t), InstanceOptions{Path: p, Host: &things{}})
			out, err := i.Call(t.Context(), bound(t, "bad"), u32s(kind), nil)
			var trap *Trap
			if !errors.As(err, &trap) || p == PathCore && trap.Kind != TrapABI {
				t.Errorf("bad(%d) = %x, %v; want a Trap (TrapABI on the core path)", kind, out, err)
			}
		}
	})
}

// TestTraps is row W2: the call ends with its cause, and the code stays usable.
func TestTraps(t *testing.T) {
	kinds := []TrapKind{TrapUnreachable, TrapOutOfBounds, "integer divide by zero", "undefined element: out of bounds table access"}
	onBothPaths(t, func(t *testing.T, p Path) {
		for kind, want := range kinds {
			i := instance(t, theGuest(t), InstanceOptions{Path: p})
			_, err := i.Call(t.Context(), bound(t, "trap"), u32s(uint32(kind)), nil)
			var trap *Trap
			if !errors.As(err, &trap) || trap.Kind != want || !strings.Contains(trap.Message, "backtrace") {
				t.Errorf("trap(%d): error %v (%+v), want kind %q with a backtrace", kind, err, trap, want)
			}
		}
		i := instance(t, theGuest(t), InstanceOptions{Path: p})
		if _, err := i.Call(t.Context(), bound(t, "count"), nil, nil); err != nil {
			t.Errorf("Call of another instance: %v", err)
		}
	})
}

// TestInterruptAfter ends a call without a tick, where the guest is.
func TestInterruptAfter(t *testing.T) {
	onBothPaths(t, func(t *testing.T, p Path) {
		i := instance(t, theGuest(t), InstanceOptions{Path: p})
		for range 3 { // calls that end before
			i.InterruptAfter(time.Hour)
			if _, err := i.Call(t.Context(), bound(t, "count"), nil, nil); err != nil || i.Backtrace() != nil {
				t.Fatalf("Call: error %v, Backtrace() = %q", err, i.Backtrace())
			}
		}
		i.InterruptAfter(time.Millisecond)
		_, err := i.Call(t.Context(), bound(t, "spin"), u32s(0), nil)
		if !errors.Is(err, ErrKilled) || i.Alive() || len(i.Backtrace()) == 0 || !strings.Contains(i.Backtrace()[0], "function") {
			t.Errorf("spin: error %v, Alive() = %v, Backtrace() = %q; want ErrKilled and the functions", err, i.Alive(), i.Backtrace())
		}
	})
}

func TestExitInACall(t *testing.T) {
	onBothPaths(t, func(t *testing.T, p Path) {
		i := instance(t, theGuest(t), InstanceOptions{Path: p})
		_, err := i.Call(t.Context(), bound(t, "leave"), u32s(7), nil)
		var exit *Exit
		// wasi:cli/exit only distinguishes success and failure.
		if !errors.As(err, &exit) || exit.Code != 7 && p == PathCore && !byPlan || exit.Code == 0 || i.Alive() {
			t.Errorf("leave(7): error %v, want Exit; Alive() = %v, want false", err, i.Alive())
		}
	})
}

func TestWorld(t *testing.T) {
	onBothPaths(t, func(t *testing.T, p Path) {
		var out, errs bytes.Buffer
		i := instance(t, theGuest(t), InstanceOptions{Path: p, Stdout: &out, Stderr: &errs, Env: []string{"A=1", "NAME=x=y", "EMPTY"}})
		if _, err := i.Call(t.Context(), bound(t, "print"), wit.AppendString(nil, "hello\n"), nil); err != nil {
			t.Fatal(err)
		}
		if out.String() != "hello\n" || errs.String() != "6 bytes\n" {
			t.Errorf("stdout %q, stderr %q; want \"hello\\n\", \"6 bytes\\n\"", out.String(), errs.String())
		}
		for name, want := range map[string][]byte{
			"NAME": wit.AppendString(wit.AppendOption(nil, true), "x=y"), "EMPTY": wit.AppendString(wit.AppendOption(nil, true), ""),
			"NONE": wit.AppendOption(nil, false),
		} {
			got, err := i.Call(t.Context(), bound(t, "env"), wit.AppendString(nil, name), nil)
			if err != nil || !bytes.Equal(got, want) {
				t.Errorf("env(%s) = %q, %v; want %q", name, got, err, want)
			}
		}
	})
}

func TestKillAndCancel(t *testing.T) {
	onBothPaths(t, func(t *testing.T, p Path) {
		cause := errors.New("the client went away")
		for _, name := range []string{"spin", "nap", "wait"} {
			args := map[string][]byte{"spin": u32s(0), "nap": u32s(600000), "wait": u32s(600000, 1)}[name]
			ctx, cancel := context.WithCancelCause(t.Context())
			i := instance(t, theGuest(t), InstanceOptions{Path: p})
			time.AfterFunc(30*time.Millisecond, func() { cancel(cause) })
			start := time.Now()
			_, err := i.Call(ctx, bound(t, name), args, nil)
			if took := time.Since(start); !errors.Is(err, cause) || took > time.Second || i.Alive() {
				t.Errorf("%s, cancelled: error %v after %v, want the cause within 1 s", name, err, took)
			}
			i = instance(t, theGuest(t), InstanceOptions{Path: p})
			time.AfterFunc(30*time.Millisecond, i.Kill)
			_, err = i.Call(t.Context(), bound(t, name), args, nil)
			if !errors.Is(err, ErrKilled) && (name != "wait" || !errors.Is(err, context.Canceled)) {
				t.Errorf("%s, killed: error %v, want ErrKilled", name, err)
			}
		}
	})
}
