package wasi

import (
	"errors"
	"testing"
	"time"
)

// TestEnvironment checks the interfaces without streams.
func TestEnvironment(t *testing.T) {
	g := newGuest(t, Options{Args: []string{"program", "-v"}, Env: []string{"A=1", "B=x=y", "C"}})
	r := g.call("wasi:cli/environment", "get-arguments")
	if n, a, b := r.Len(), r.String(), r.String(); n != 2 || a != "program" || b != "-v" {
		t.Errorf("get-arguments = %d: %q, %q", n, a, b)
	}
	r = g.call("wasi:cli/environment", "get-environment")
	want := [][2]string{{"A", "1"}, {"B", "x=y"}, {"C", ""}}
	if n := r.Len(); n != len(want) {
		t.Fatalf("get-environment has %d variables, want %d", n, len(want))
	}
	for _, w := range want {
		if name, value := r.String(), r.String(); name != w[0] || value != w[1] {
			t.Errorf("variable %q = %q, want %q", name, value, w)
		}
	}
	for _, f := range [][2]string{{"environment", "initial-cwd"}, {"terminal-stdin", "get-terminal-stdin"},
		{"terminal-stdout", "get-terminal-stdout"}, {"terminal-stderr", "get-terminal-stderr"}} {
		if g.call("wasi:cli/"+f[0], f[1]).Option() {
			t.Errorf("%s returned a value, want none", f[1])
		}
	}
	r = g.call("wasi:clocks/wall-clock", "now")
	if seconds, ns := r.U64(), r.U32(); time.Since(time.Unix(int64(seconds), int64(ns))).Abs() > time.Minute {
		t.Errorf("wall-clock: %d s, %d ns", seconds, ns)
	}
	if r := g.call("wasi:clocks/wall-clock", "resolution"); r.U64() != 0 || r.U32() != 1 {
		t.Error("resolution of the wall clock is not 1 ns")
	}
}

func TestExit(t *testing.T) {
	g := newGuest(t, Options{})
	for code, status := range [][]byte{u32(0), u32(1)} {
		_, err := g.try("wasi:cli/exit", "exit", status)
		var exit *Exit
		if !errors.As(err, &exit) || exit.Code != code {
			t.Errorf("exit with status %x: %v, want code %d", status, err, code)
		}
	}
}

// TestRandom: random numbers differ, and a guest cannot make the host keep more than maxRandom bytes of them.
func TestRandom(t *testing.T) {
	g := newGuest(t, Options{})
	for iface, f := range map[string][2]string{
		"wasi:random/random":   {"get-random-bytes", "get-random-u64"},
		"wasi:random/insecure": {"get-insecure-random-bytes", "get-insecure-random-u64"},
	} {
		if a, b := string(g.call(iface, f[0], u64(16)).Bytes()), string(g.call(iface, f[0], u64(16)).Bytes()); len(a) != 16 || a == b {
			t.Errorf("%s returned %x and %x", f[0], a, b)
		}
		if a, b := g.call(iface, f[1]).U64(), g.call(iface, f[1]).U64(); a == b {
			t.Errorf("%s returned the same number twice", f[1])
		}
		if n := len(g.call(iface, f[0], u64(maxRandom)).Bytes()); n != maxRandom || g.out != nil {
			t.Errorf("%s returned %d bytes, and the host keeps %d", f[0], n, cap(g.out))
		}
		for _, n := range []uint64{maxRandom + 1, 1 << 63, 1<<64 - 1} {
			if _, err := g.try(iface, f[0], u64(n)); !errors.Is(err, ErrRandom) {
				t.Errorf("%s(%d): error %v, want ErrRandom", f[0], n, err)
			}
		}
	}
	r := g.call("wasi:random/insecure-seed", "insecure-seed")
	if a, b := r.U64(), r.U64(); a == b {
		t.Error("insecure-seed returned the same number twice")
	}
}
