package wit_test

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/tripod-run/tripod/internal/component/wit"
	"github.com/tripod-run/tripod/internal/component/wit/wittest"
)

var (
	boolT = &wit.Type{Kind: wit.Bool}
	u8    = &wit.Type{Kind: wit.U8}
	u16   = &wit.Type{Kind: wit.U16}
	u32   = &wit.Type{Kind: wit.U32}
	u64   = &wit.Type{Kind: wit.U64}
	f32   = &wit.Type{Kind: wit.F32}
	f64   = &wit.Type{Kind: wit.F64}
	str   = &wit.Type{Kind: wit.String}
)

func list(t *wit.Type) *wit.Type   { return &wit.Type{Kind: wit.List, Elem: t} }
func option(t *wit.Type) *wit.Type { return &wit.Type{Kind: wit.Option, Elem: t} }

func record(parts ...*wit.Type) *wit.Type {
	t := &wit.Type{Kind: wit.Record}
	for i, p := range parts {
		t.Fields = append(t.Fields, wit.Field{Name: string(rune('a' + i)), Type: p})
	}
	return t
}

func variant(parts ...*wit.Type) *wit.Type {
	t := &wit.Type{Kind: wit.Variant}
	for i, p := range parts {
		t.Cases = append(t.Cases, wit.Case{Name: string(rune('a' + i)), Type: p})
	}
	return t
}

func many(kind wit.Kind, n int) *wit.Type {
	return &wit.Type{Kind: kind, Cases: make([]wit.Case, n)}
}

// TestLayout compares layouts with figures worked out by hand from the Canonical ABI.
func TestLayout(t *testing.T) {
	for _, tc := range []struct {
		typ         *wit.Type
		size, align uint32
		flat        string // i: i32, I: i64, f: f32, F: f64; -: more than 16
	}{
		{boolT, 1, 1, "i"}, {u16, 2, 2, "i"}, {u64, 8, 8, "I"}, {f32, 4, 4, "f"}, {str, 8, 4, "ii"}, {list(u64), 8, 4, "ii"},
		{record(u8, u64, u8), 24, 8, "iIi"},
		{record(u8, u16, u8), 6, 2, "iii"},
		{option(u8), 2, 1, "ii"}, {option(u64), 16, 8, "iI"}, {option(str), 12, 4, "iii"},
		{variant(nil, u8, nil), 2, 1, "ii"},
		{variant(f32, u32), 8, 4, "ii"}, {variant(f32, f32), 8, 4, "if"}, {variant(f32, f64), 16, 8, "iI"}, {variant(u64, f64), 16, 8, "iI"},
		{variant(str, record(f32, f64, u8)), 32, 8, "iiIi"},
		{&wit.Type{Kind: wit.Result}, 1, 1, "i"}, {&wit.Type{Kind: wit.Result, Err: str}, 12, 4, "iii"},
		{many(wit.Enum, 256), 1, 1, "i"}, {many(wit.Enum, 257), 2, 2, "i"}, {many(wit.Enum, 65537), 4, 4, "i"},
		{many(wit.Flags, 8), 1, 1, "i"}, {many(wit.Flags, 9), 2, 2, "i"}, {many(wit.Flags, 17), 4, 4, "i"}, {many(wit.Flags, 33), 8, 4, "ii"},
		{&wit.Type{Kind: wit.Own, Name: "x#r"}, 4, 4, "i"},
		{record(str, str, str, str, str, str, str, str), 64, 4, "iiiiiiiiiiiiiiii"},
		{record(str, str, str, str, str, str, str, str, u8), 68, 4, "-"},
		{option(record(str, str, str, str, str, str, str, str)), 68, 4, "-"},
	} {
		size, align := tc.typ.Layout()
		flat := "-"
		if cores, ok := tc.typ.Flatten(); ok {
			flat = ""
			for _, c := range cores {
				flat += string("iIfF"[c])
			}
		}
		if size != tc.size || align != tc.align || flat != tc.flat {
			t.Errorf("%v: size %d, align %d, flat %s, want %d, %d, %s", tc.typ, size, align, flat, tc.size, tc.align, tc.flat)
		}
	}
}

// TestLayoutOfBombs: types that double at each level take no time, and their size saturates.
func TestLayoutOfBombs(t *testing.T) {
	bomb := u64
	for range 100 {
		bomb = record(bomb, bomb)
	}
	if size, align := bomb.Layout(); size < math.MaxUint32-8 || align != 8 {
		t.Errorf("size %d, align %d", size, align)
	}
	if _, ok := bomb.Flatten(); ok {
		t.Error("flattened a type of 2^100 fields")
	}
	if err := wit.Equal(bomb, bomb); err != nil {
		t.Error(err)
	}
	wit.Program([]*wit.Type{bomb}, nil)
}

func TestEqual(t *testing.T) {
	enum := func(names ...string) *wit.Type {
		e := &wit.Type{Kind: wit.Enum}
		for _, n := range names {
			e.Cases = append(e.Cases, wit.Case{Name: n})
		}
		return e
	}
	named := record(u8)
	named.Name = "named"
	own := func(name string) *wit.Type { return &wit.Type{Kind: wit.Own, Name: name} }
	for _, tc := range []struct {
		a, b *wit.Type
		want string // "": equal
	}{
		{u8, u8, ""}, {u8, u16, "u8, not u16"}, {named, record(u8), ""}, {nil, nil, ""}, {u8, nil, "u8, not _"},
		{record(u8, option(list(u8))), record(u8, option(list(u32))), "b?[]: u8, not u32"},
		{record(u8), record(u8, u8), "1 fields"},
		{record(variant(nil, u8)), record(variant(nil, nil)), "a.b: u8, not _"},
		{enum("a", "b"), enum("a", "c"), `case 1 is "b", not "c"`}, {enum("a"), enum("a", "b"), "1 cases"},
		{own("i#r"), own("i#s"), "own<i#r>, not own<i#s>"}, {own("i#r"), own(""), ""},
		{&wit.Type{Kind: wit.Result, Ok: u8}, &wit.Type{Kind: wit.Result, Err: u8}, "ok: u8, not _"},
		{&wit.Type{Kind: wit.Tuple, Fields: []wit.Field{{Type: u8}}}, &wit.Type{Kind: wit.Tuple, Fields: []wit.Field{{Type: str}}},
			"0: u8, not string"},
	} {
		err := wit.Equal(tc.a, tc.b)
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%v and %v: %v, want %q", tc.a, tc.b, err, tc.want)
		}
	}
}

// TestReaderRefuses checks bytes that are not a value of their type.
func TestReaderRefuses(t *testing.T) {
	char := &wit.Type{Kind: wit.Char}
	for _, tc := range []struct {
		typ  *wit.Type
		flat []byte
		want string
	}{
		{boolT, []byte{2}, "a bool of 2"}, {u64, []byte{1, 2}, "8 bytes needed, 2 left"},
		{char, wit.AppendU32(nil, 0xd800), "not a Unicode scalar value"}, {char, wit.AppendU32(nil, 0x110000), "not a Unicode scalar value"},
		{str, wit.AppendString(nil, "\xff"), "not UTF-8"}, {str, wit.AppendU32(nil, 5), "5 elements in 0 bytes"},
		{list(u64), wit.AppendU32(nil, math.MaxUint32), "4294967295 elements"},
		{option(u8), wit.AppendU32(nil, 2), "case 2 of 2"}, {many(wit.Flags, 3), wit.AppendU32(nil, 8), "flags 0x8, but the type has 3"},
		{many(wit.Enum, 3), wit.AppendU32(nil, 3), "case 3 of 3"},
	} {
		r := wit.NewReader(tc.flat)
		r.Check(tc.typ)
		if r.Err() == nil || !strings.Contains(r.Err().Error(), tc.want) {
			t.Errorf("%v of %x: %v, want %q", tc.typ, tc.flat, r.Err(), tc.want)
		}
	}
}

// TestReader reads what the Append functions wrote.
func TestReader(t *testing.T) {
	b := wit.AppendBool(nil, true)
	b = wit.AppendU8(b, 2)
	b = wit.AppendU16(b, 3)
	b = wit.AppendU32(b, 4)
	b = wit.AppendU64(b, 5)
	b = wit.AppendF32(b, 6)
	b = wit.AppendF64(b, 7)
	b = wit.AppendString(b, "eight")
	b = wit.AppendBytes(b, []byte{9})
	b = wit.AppendOption(b, false)
	b = wit.AppendOption(b, true)
	b = wit.AppendCase(b, 12)
	r := wit.NewReader(b)
	if !r.Bool() || r.U8() != 2 || r.U16() != 3 || r.U32() != 4 || r.U64() != 5 || r.F32() != 6 || r.F64() != 7 || r.String() != "eight" ||
		string(r.Bytes()) != "\x09" || r.Option() || !r.Option() || r.Case(13) != 12 || r.Err() != nil || len(r.Rest()) != 0 ||
		r.Pos() != len(b) {
		t.Errorf("the Reader returned other values; error %v, %d bytes left", r.Err(), len(r.Rest()))
	}
	if r.U8() != 0 || r.Err() == nil || r.Bytes() != nil || r.U64() != 0 {
		t.Error("reads past the end returned values or no error")
	}
}

// TestProgram rebuilds the types from the table, walking it as the C half does.
func TestProgram(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for range 500 {
		params := []*wit.Type{wittest.Type(r), wittest.Type(r)}
		result := wittest.Type(r)
		p := &program{t: t, b: wit.Program(params, result)}
		if p.word(0) != wit.ProgramMagic || int(p.word(1)) != len(p.b) || p.word(6) != 2 {
			t.Fatalf("wrong header %x of %d bytes", p.b[:32], len(p.b))
		}
		for i, want := range append(params, result) {
			node := p.word(8 + i)
			if i == 2 {
				node = p.word(7)
			}
			if err := wit.Equal(p.typ(node), want); err != nil {
				t.Fatalf("type %d: %v", i, err)
			}
		}
	}
	if p := (&program{t: t, b: wit.Program(nil, nil)}); p.word(7) != wit.NoNode || p.word(2) != 0 {
		t.Error("Program(nil, nil) has types")
	}
}

type program struct {
	t *testing.T
	b []byte
}

func (p *program) word(i int) uint32 { return binary.LittleEndian.Uint32(p.b[4*i:]) }

func (p *program) name(offset uint32) string {
	names := p.b[len(p.b)-int(p.word(5)):]
	s, _, _ := strings.Cut(string(names[offset:]), "\x00")
	return s
}

func (p *program) typ(node uint32) *wit.Type {
	if node == wit.NoNode {
		return nil
	}
	at := 8 + int(p.word(6)) + 10*int(node)
	t := &wit.Type{Kind: wit.Kind(p.word(at)), Name: p.name(p.word(at + 1))}
	children := 8 + int(p.word(6)) + 10*int(p.word(2)) + 3*int(p.word(at+2))
	var offsets []uint32
	for i := range int(p.word(at + 3)) {
		child, name := p.word(children+3*i), p.name(p.word(children+3*i+2))
		offsets = append(offsets, p.word(children+3*i+1))
		if child != wit.NoNode && child >= node {
			p.t.Fatalf("node %d refers to %d", node, child)
		}
		switch t.Kind {
		case wit.List:
			t.Elem = p.typ(child)
		case wit.Option:
			if name == "some" {
				t.Elem = p.typ(child)
			}
		case wit.Result:
			if name == "ok" {
				t.Ok = p.typ(child)
			} else {
				t.Err = p.typ(child)
			}
		case wit.Record, wit.Tuple:
			t.Fields = append(t.Fields, wit.Field{Name: name, Type: p.typ(child)})
		default:
			t.Cases = append(t.Cases, wit.Case{Name: name, Type: p.typ(child)})
		}
	}
	p.layout(t, at, offsets)
	return t
}

// layout compares the figures of a node with those of the type.
func (p *program) layout(t *wit.Type, at int, offsets []uint32) {
	size, align := t.Layout()
	if p.word(at+4) != size || p.word(at+5) != align {
		p.t.Fatalf("%v: size %d, align %d, want %d, %d", t, p.word(at+4), p.word(at+5), size, align)
	}
	if t.Payloads() != nil {
		if d, o := t.Payload(); p.word(at+6) != d || p.word(at+7) != o {
			p.t.Fatalf("%v: discriminant %d, payload at %d, want %d, %d", t, p.word(at+6), p.word(at+7), d, o)
		}
	}
	for i, want := range t.Offsets() {
		if offsets[i] != want {
			p.t.Fatalf("%v: field %d at %d, want %d", t, i, offsets[i], want)
		}
	}
	flat, ok := t.Flatten()
	if count := p.word(at + 9); ok && int(count) != len(flat) || !ok && count != wit.NoNode {
		p.t.Fatalf("%v: %d core values, want %d, %v", t, count, len(flat), ok)
	}
	cores := p.b[len(p.b)-int(p.word(5))-int(p.word(4)):]
	for i, c := range flat {
		if cores[int(p.word(at+8))+i] != byte(c) {
			p.t.Fatalf("%v: core value %d has another type in the table", t, i)
		}
	}
}

// TestRandomValues: Check accepts values of random types, and refuses truncated ones.
func TestRandomValues(t *testing.T) {
	r := rand.New(rand.NewPCG(2, 2))
	for range 2000 {
		typ := wittest.Type(r)
		flat := wittest.Append(nil, r, typ)
		c := wit.NewReader(flat)
		if c.Check(typ); c.Err() != nil || len(c.Rest()) != 0 {
			t.Fatalf("%v: %v, %d bytes left", typ, c.Err(), len(c.Rest()))
		}
		c = wit.NewReader(flat[:r.IntN(len(flat))])
		if c.Check(typ); c.Err() == nil {
			t.Fatalf("%v: Check accepted a truncated value", typ)
		}
	}
}

// FuzzReader: no bytes make the reader panic.
func FuzzReader(f *testing.F) {
	f.Add(uint64(1), []byte{1, 2, 3})
	f.Fuzz(func(t *testing.T, seed uint64, flat []byte) {
		r := wit.NewReader(flat)
		r.Check(wittest.Type(rand.New(rand.NewPCG(seed, 0))))
		if r.Pos() > len(flat) {
			t.Fatal("Check read past the end")
		}
	})
}
