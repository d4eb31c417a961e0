package engine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/tripod-run/tripod/internal/component/wasi"
	"github.com/tripod-run/tripod/internal/component/wit"
)

var (
	tBool  = &wit.Type{Kind: wit.Bool}
	tU8    = &wit.Type{Kind: wit.U8}
	tU32   = &wit.Type{Kind: wit.U32}
	tF32   = &wit.Type{Kind: wit.F32}
	tStr   = &wit.Type{Kind: wit.String}
	tBytes = &wit.Type{Kind: wit.List, Elem: tU8}
	tOwn   = &wit.Type{Kind: wit.Own, Name: "test:guest/host@1.0.0#thing"}
	tLend  = &wit.Type{Kind: wit.Borrow, Name: "test:guest/host@1.0.0#thing"}
	tPoint = &wit.Type{Kind: wit.Record, Name: "point", Fields: []wit.Field{
		{Name: "x", Type: &wit.Type{Kind: wit.S16}},
		{Name: "y", Type: &wit.Type{Kind: wit.F64}},
		{Name: "tag", Type: &wit.Type{Kind: wit.Option, Elem: &wit.Type{Kind: wit.Char}}},
	}}
	tShape = &wit.Type{Kind: wit.Variant, Name: "shape", Cases: []wit.Case{
		{Name: "nothing"}, {Name: "dot", Type: tPoint}, {Name: "text", Type: tStr},
		{Name: "many", Type: &wit.Type{Kind: wit.List, Elem: &wit.Type{Kind: wit.U64}}},
		{Name: "small", Type: tF32}, {Name: "tiny", Type: &wit.Type{Kind: wit.S8}},
	}}
	tColours = &wit.Type{Kind: wit.Flags, Cases: []wit.Case{{Name: "red"}, {Name: "green"}, {Name: "blue"}}}
)

// things is the host for testdata/guest.c: numbers that the guest holds as resources.
type things struct {
	mu      sync.Mutex
	numbers map[uint32]uint32
	next    uint32
	dropped []uint32
}

func (h *things) put(n uint32) uint32 {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.numbers == nil {
		h.numbers = make(map[uint32]uint32)
	}
	h.next++
	h.numbers[h.next] = n
	return h.next
}

func (h *things) get(rep uint32) uint32 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.numbers[rep]
}

var errAsked = fmt.Errorf("as requested")

func thingsHost() Host {
	const iface = "test:guest/host@1.0.0" // compatible with the guest's 1.2.0
	number := func(f func(c *HostCall, h *things, r *wit.Reader) uint32) func(*HostCall, []byte) ([]byte, error) {
		return func(c *HostCall, args []byte) ([]byte, error) {
			h, _ := c.Host().(*things)
			return wit.AppendU32(nil, f(c, h, wit.NewReader(args))), nil
		}
	}
	return Host{
		Funcs: []HostFunc{
			{Interface: iface, Name: "[constructor]thing", Params: []*wit.Type{tU32}, Result: tOwn,
				Call: number(func(_ *HostCall, h *things, r *wit.Reader) uint32 { return h.put(r.U32()) })},
			{Interface: iface, Name: "[method]thing.number", Params: []*wit.Type{tLend}, Result: tU32,
				Call: number(func(_ *HostCall, h *things, r *wit.Reader) uint32 { return h.get(r.U32()) })},
			{Interface: iface, Name: "[static]thing.join", Params: []*wit.Type{tOwn, tLend}, Result: tOwn,
				Call: number(func(_ *HostCall, h *things, r *wit.Reader) uint32 { return h.put(h.get(r.U32()) + h.get(r.U32())) })},
			{Interface: iface, Name: "wait", Params: []*wit.Type{tU32}, Result: tU32, Call: hostWait},
			{Interface: iface, Name: "fail", Params: []*wit.Type{tStr}, Call: func(_ *HostCall, args []byte) ([]byte, error) {
				text := wit.NewReader(args).String()
				if text == "panic" {
					panic("as requested")
				}
				return nil, fmt.Errorf("%s: %w", text, errAsked)
			}},
		},
		Resources: []HostResource{{Interface: iface, Name: "thing", Drop: func(host any, rep uint32) {
			h := host.(*things)
			h.mu.Lock()
			defer h.mu.Unlock()
			delete(h.numbers, rep)
			h.dropped = append(h.dropped, rep)
		}}},
	}
}

// hostWait waits for the given milliseconds. From 1000 on it subtracts 1000 and renews the guest's budget, like a
// stream.
func hostWait(c *HostCall, args []byte) ([]byte, error) {
	ms := wit.NewReader(args).U32()
	if ms >= 1000 {
		ms -= 1000
		c.Renew()
	}
	select {
	case <-time.After(time.Duration(ms) * time.Millisecond):
		return wit.AppendU32(nil, 1), nil
	case <-c.Context().Done():
		return nil, context.Cause(c.Context())
	}
}

// guestSigs are the signatures in testdata/guest.wit.
var guestSigs = map[string]signature{
	"mixed": {[]*wit.Type{tU8, tShape, tColours, tBool, tF32}, tShape},
	"sum":   {[]*wit.Type{tBytes}, tU32}, "fill": {[]*wit.Type{tU32}, tBytes}, "flip": {[]*wit.Type{tBool}, tBool},
	"take": {[]*wit.Type{tOwn}, tU32}, "lend": {[]*wit.Type{tLend}, tU32}, "keep": {[]*wit.Type{tLend}, tU32},
	"give": {[]*wit.Type{tU32}, tOwn}, "flood": {[]*wit.Type{tU32}, tU32},
	"wait": {[]*wit.Type{tU32, tU32}, tU32}, "fail": {[]*wit.Type{tStr}, nil},
	"spin": {[]*wit.Type{tU32}, tU32}, "recurse": {nil, tU32}, "grow": {[]*wit.Type{tU32}, tU32},
	"touch": {[]*wit.Type{tU32}, tU32}, "table": {[]*wit.Type{tU32}, tU32}, "trap": {[]*wit.Type{tU32}, tU32},
	"bad": {[]*wit.Type{tU32}, tStr}, "print": {[]*wit.Type{tStr}, nil}, "leave": {[]*wit.Type{tU32}, tU32},
	"count": {nil, tU32}, "env": {[]*wit.Type{tStr}, &wit.Type{Kind: wit.Option, Elem: tStr}}, "nap": {[]*wit.Type{tU32}, tU32},
}

func read(t testing.TB, name string) []byte {
	t.Helper()
	b, err := os.ReadFile("testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// theGuest returns testdata/guest.wasm, loaded once.
func theGuest(t testing.TB) *Code {
	t.Helper()
	c := sharedGuests[byPlan]
	if c == nil {
		e := testEngine(t)
		host, options := thingsHost(), CompileOptions{Both: !byPlan, plan: byPlan}
		options.Provided = func(i string) bool { return i == "test:guest/host@1.2.0" || byPlan && engineProvides(i) }
		if byPlan {
			host = withWASI(host)
		}
		img, err := e.Compile(context.Background(), read(t, "guest.wasm"), options)
		if err != nil {
			t.Fatal(err)
		}
		if c, err = e.Load(img, host); err != nil {
			t.Fatal(err)
		}
		if c.Path() != PathCore || c.World() != WorldGRPC || (c.img.Plan != nil) != byPlan {
			t.Fatalf("Path() = %v (%s), World() = %s, plan %v", c.Path(), c.WhyComponent(), c.World(), c.img.Plan)
		}
		sharedGuests[byPlan] = c
	}
	return c
}

// byPlan makes theGuest and bound return the guest on the core path with all its core modules, instead of the one that
// has both paths. sharedGuests and boundFuncs are indexed by it.
var (
	byPlan       bool
	sharedGuests = make(map[bool]*Code)
)

// withWASI adds WASI to a host. The resources of WASI are kept until the tests end.
func withWASI(h Host) Host {
	interfaces, bound := wasi.Interfaces()
	for _, i := range interfaces {
		for _, r := range i.Resources {
			h.Resources = append(h.Resources, HostResource{Interface: i.Name, Name: r})
		}
	}
	var states sync.Map
	for _, f := range bound {
		h.Funcs = append(h.Funcs, HostFunc{Interface: f.Interface, Name: f.Name, Params: f.Params, Result: f.Result,
			Call: func(c *HostCall, args []byte) ([]byte, error) {
				o := c.inst.opts
				s, _ := states.LoadOrStore(c.inst, wasi.NewState(wasi.Options{
					Args: o.Args, Env: o.Env, Stdin: o.Stdin, Stdout: o.Stdout, Stderr: o.Stderr,
				}))
				out, err := f.Invoke(c.Context(), s.(*wasi.State), args, c.Renew)
				if exit := (*wasi.Exit)(nil); errors.As(err, &exit) {
					err = &Exit{Code: exit.Code}
				}
				return out, err
			}})
	}
	return h
}

// bound binds a function of the guest, once, because a Func lives as long as its Code.
func bound(t testing.TB, name string) *Func {
	t.Helper()
	boundMu.Lock()
	defer boundMu.Unlock()
	if f := boundFuncs[byPlan][name]; f != nil {
		return f
	}
	sig := guestSigs[name]
	f, err := theGuest(t).Func(Signature{Interface: "test:guest/api@1.0.0", Name: name, Params: sig.params, Result: sig.result})
	if err != nil {
		t.Fatal(err)
	}
	boundFuncs[byPlan][name] = f
	return f
}

var (
	boundMu    sync.Mutex
	boundFuncs = map[bool]map[string]*Func{false: {}, true: {}}
)

// u32s returns flat parameters.
func u32s(all ...uint32) (b []byte) {
	for _, v := range all {
		b = wit.AppendU32(b, v)
	}
	return b
}

// onBothPaths runs a test on each path, and on the core path with all core modules of the guest.
func onBothPaths(t *testing.T, f func(t *testing.T, p Path)) {
	for _, p := range []Path{PathCore, PathComponent} {
		t.Run(p.String(), func(t *testing.T) { f(t, p) })
	}
	t.Run("core modules", func(t *testing.T) {
		byPlan = true
		defer func() { byPlan = false }()
		f(t, PathCore)
	})
}
