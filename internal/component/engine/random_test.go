package engine

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// randomType returns a random type without resources.
func randomType(r *rand.Rand, depth int) *wit.Type {
	kinds := []wit.Kind{
		wit.Bool, wit.S8, wit.U8, wit.S16, wit.U16, wit.S32, wit.U32, wit.S64, wit.U64, wit.F32,
		wit.F64, wit.Char, wit.String, wit.Enum, wit.Flags,
	}
	if depth > 0 {
		kinds = append(kinds, wit.List, wit.List, wit.Record, wit.Tuple, wit.Variant, wit.Option, wit.Result)
	}
	t := &wit.Type{Kind: kinds[r.IntN(len(kinds))]}
	sub := func() *wit.Type { return randomType(r, depth-1) }
	maybe := func() *wit.Type {
		if r.IntN(3) == 0 {
			return nil
		}
		return sub()
	}
	switch t.Kind {
	case wit.List, wit.Option:
		t.Elem = sub()
	case wit.Record, wit.Tuple:
		for k := range 1 + r.IntN(5) {
			f := wit.Field{Type: sub()}
			if t.Kind == wit.Record {
				f.Name = fmt.Sprintf("f%d", k)
			}
			t.Fields = append(t.Fields, f)
		}
	case wit.Variant:
		for k := range 1 + r.IntN(4) {
			t.Cases = append(t.Cases, wit.Case{Name: fmt.Sprintf("c%d", k), Type: maybe()})
		}
	case wit.Enum:
		n := 1 + r.IntN(5)
		if r.IntN(10) == 0 {
			n = 300 // needs a discriminant of two bytes
		}
		for k := range n {
			t.Cases = append(t.Cases, wit.Case{Name: fmt.Sprintf("e%d", k)})
		}
	case wit.Flags:
		for k := range 1 + r.IntN(32) { // wasmtime's component API supports no more
			t.Cases = append(t.Cases, wit.Case{Name: fmt.Sprintf("g%d", k)})
		}
	case wit.Result:
		t.Ok, t.Err = maybe(), maybe()
	}
	return t
}

// randomValue appends a random flat value of the type.
func randomValue(r *rand.Rand, t *wit.Type, b []byte) []byte {
	switch t.Kind {
	case wit.Bool:
		return append(b, byte(r.IntN(2)))
	case wit.S8, wit.U8:
		return append(b, byte(r.Uint32()))
	case wit.S16, wit.U16:
		return wit.AppendU16(b, uint16(r.Uint32()))
	case wit.S32, wit.U32:
		return wit.AppendU32(b, r.Uint32())
	case wit.S64, wit.U64:
		return wit.AppendU64(b, r.Uint64())
	case wit.F32:
		return wit.AppendF32(b, []float32{0, float32(math.Copysign(0, -1)), 1.5, float32(math.Inf(1)), r.Float32()}[r.IntN(5)])
	case wit.F64:
		return wit.AppendF64(b, []float64{0, math.Copysign(0, -1), -2.5, math.Inf(-1), r.NormFloat64()}[r.IntN(5)])
	case wit.Char:
		return wit.AppendU32(b, []uint32{0, 'a', 0xd7ff, 0xe000, 0x10ffff}[r.IntN(5)])
	case wit.String:
		return wit.AppendString(b, []string{"", "a", "größer", "日本", "🐙 and more than eight bytes"}[r.IntN(5)])
	case wit.List:
		n := r.IntN(5)
		b = wit.AppendLen(b, n)
		for range n {
			b = randomValue(r, t.Elem, b)
		}
		return b
	case wit.Record, wit.Tuple:
		for _, f := range t.Fields {
			b = randomValue(r, f.Type, b)
		}
		return b
	case wit.Flags:
		for n := len(t.Cases); n > 0; n -= 32 {
			b = wit.AppendU32(b, r.Uint32()&(1<<min(n, 32)-1))
		}
		return b
	}
	payloads := t.Payloads()
	which := r.IntN(len(payloads))
	if b = wit.AppendCase(b, which); payloads[which] != nil {
		b = randomValue(r, payloads[which], b)
	}
	return b
}

// echoOf returns a signature whose core function receives one pointer and returns it: its parameters are too many for
// core values, the first of them is the result, and a tuple is never passed in one core value.
func echoOf(t *wit.Type) signature {
	u32 := &wit.Type{Kind: wit.U32}
	pair := &wit.Type{Kind: wit.Tuple, Fields: []wit.Field{{Type: t}, {Type: u32}}}
	sig := signature{params: []*wit.Type{pair}, result: pair}
	for range wit.MaxFlat {
		sig.params = append(sig.params, u32)
	}
	return sig
}

// guest compiles and loads a component or command.
func guest(t *testing.T, e *Engine, wasm []byte, host Host) *Code {
	t.Helper()
	return guestBy(t, e, wasm, host, CompileOptions{Both: true})
}

func guestBy(t *testing.T, e *Engine, wasm []byte, host Host, options CompileOptions) *Code {
	t.Helper()
	options.Provided = func(string) bool { return true }
	img, err := e.Compile(t.Context(), wasm, options)
	if err != nil {
		t.Fatalf("Compile: %v", err)
	}
	c, err := e.Load(img, host)
	if err != nil {
		t.Fatalf("Load: %v", err)
	}
	t.Cleanup(c.Close)
	return c
}

func instance(t *testing.T, c *Code, o InstanceOptions) *Instance {
	t.Helper()
	i, err := c.Instantiate(t.Context(), o)
	if err != nil {
		t.Fatalf("Instantiate on the %v path: %v", o.Path, err)
	}
	t.Cleanup(i.Close)
	return i
}

// TestDifferential sends random values of random types through a guest that returns them, directly and through a host
// function, on both paths, and on the core path with all core modules. The output must equal the input.
func TestDifferential(t *testing.T) {
	e := testEngine(t)
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	for n := range 120 {
		typ := randomType(r, 3)
		sig := echoOf(typ)
		var seen []byte
		host := Host{Funcs: []HostFunc{{
			Name: "ask", Params: sig.params, Result: sig.result,
			Call: func(_ *HostCall, args []byte) ([]byte, error) {
				seen = bytes.Clone(args)
				return args[:len(args)-4*wit.MaxFlat], nil
			},
		}}}
		var ask, room bin
		size, align := sig.result.Layout()
		room.i32(0).i32(0).i32(int32(align)).i32(int32(size)).u8(0x10, 3, 0x22, 1) // space for the answer
		ask.u8(0x20, 0)
		ask.raw(room)
		ask.u8(0x10, 0, 0x20, 1)
		m := coreMod{
			imports: []coreFn{{module: rootModule, name: "ask", params: 2}},
			funcs: []coreFn{
				{name: "echo", params: 1, results: 1, body: []byte{0x20, 0}},
				{name: "relay", params: 1, results: 1, body: ask},
			},
		}
		wasm := wrapped(m, map[string]signature{"echo": sig, "relay": sig}, "ask", sig)
		c := guest(t, e, wasm, host)
		byPlan := guestBy(t, e, wasm, host, CompileOptions{plan: true})
		if c.Path() != PathCore || byPlan.img.Plan == nil {
			t.Fatalf("no core path: %s%s", c.WhyComponent(), byPlan.WhyComponent())
		}
		for _, on := range []struct {
			*Code
			path Path
		}{{c, PathCore}, {c, PathComponent}, {byPlan, PathCore}} {
			c, path := on.Code, on.path
			i := instance(t, c, InstanceOptions{Path: path})
			for k := range 8 {
				for _, name := range []string{"echo", "relay"} {
					in := wit.AppendU32(randomValue(r, typ, nil), r.Uint32())
					args := append(bytes.Clone(in), make([]byte, 4*wit.MaxFlat)...)
					f, err := c.Func(Signature{Name: name, Params: sig.params, Result: sig.result})
					if err != nil {
						t.Fatal(err)
					}
					out, err := i.Call(t.Context(), f, args, nil)
					if err != nil || !bytes.Equal(out, in) {
						t.Fatalf("seed %d, type %d (%v), value %d, %s on the %v path:\n in  %x\n out %x\n %v",
							seed, n, typ, k, name, path, in, out, err)
					}
					if name == "relay" && !bytes.Equal(seen, args) {
						t.Fatalf("seed %d, %v: the host got %x, want %x", seed, typ, seen, args)
					}
				}
			}
			i.Close()
		}
	}
}

var shared *Engine

// testEngine returns an engine that all tests share, as in a worker.
// quickTests makes the tests compile their guests by Winch: what holds for optimised code holds for quick code.
var quickTests = os.Getenv("TRIPOD_TEST_QUICK") != ""

func testEngine(t testing.TB) *Engine {
	t.Helper()
	if shared == nil {
		e, err := New(Config{Instances: 300, Overflow: 10, Quick: quickTests})
		if err != nil {
			t.Fatal(err)
		}
		shared = e
	}
	return shared
}
