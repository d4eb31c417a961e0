package protowit_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/dynamicpb"

	"github.com/tripod-run/tripod/internal/component/protowit"
)

// serialize converts a message from text format to the wire format.
func serialize(t testing.TB, m *protowit.Message, text string) []byte {
	t.Helper()
	msg := dynamicpb.NewMessage(m.Desc)
	if err := prototext.Unmarshal([]byte(text), msg); err != nil {
		t.Fatal(err)
	}
	out, err := proto.MarshalOptions{Deterministic: true}.Marshal(msg)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// wire builds messages by hand.
type wire []byte

func (w wire) varint(n protowire.Number, v uint64) wire {
	return protowire.AppendVarint(protowire.AppendTag(w, n, protowire.VarintType), v)
}

func (w wire) fixed32(n protowire.Number, v uint32) wire {
	return protowire.AppendFixed32(protowire.AppendTag(w, n, protowire.Fixed32Type), v)
}

func (w wire) fixed64(n protowire.Number, v uint64) wire {
	return protowire.AppendFixed64(protowire.AppendTag(w, n, protowire.Fixed64Type), v)
}

func (w wire) bytes(n protowire.Number, b []byte) wire {
	return protowire.AppendBytes(protowire.AppendTag(w, n, protowire.BytesType), b)
}

func (w wire) text(n protowire.Number, s string) wire { return w.bytes(n, []byte(s)) }

func (w wire) group(n protowire.Number, inner wire) wire {
	w = append(protowire.AppendTag(w, n, protowire.StartGroupType), inner...)
	return protowire.AppendTag(w, n, protowire.EndGroupType)
}

// number returns the number of a field.
func number(m *protowit.Message, name string) protowire.Number {
	return m.Desc.Fields().ByName(protoreflect.Name(name)).Number()
}

// TestRows has a case for each rule of the protobuf conformance suite that a message from outside can test (row W3):
// wire bytes and their meaning.
func TestRows(t *testing.T) {
	p3, p2 := compile(t, "proto3.proto").Methods[0].Request, compile(t, "proto2.proto").Methods[0].Request
	n := func(name string) protowire.Number { return number(p3, name) }
	n2 := func(name string) protowire.Number { return number(p2, name) }
	small := func(id uint64, name string) wire { return wire{}.varint(1, id).text(2, name) }
	for _, tc := range []struct {
		name string
		m    *protowit.Message
		in   wire
		want string // text format
	}{
		{"an empty message", p3, nil, ``},
		{"unknown fields are dropped", p3, wire{}.varint(20000, 1).fixed32(20001, 1).fixed64(20002, 1).text(20003, "x").
			group(20004, wire{}.varint(1, 1).group(2, wire{}.text(3, "y"))).text(n("one_string"), "z"), `one_string: "z"`},
		{"a known field of another wire type is an unknown one", p3, wire{}.text(n("one_int32"), "x").varint(n("one_string"), 1), ``},
		{"an unknown number of an enum is kept", p3, wire{}.varint(n("one_color"), 77).varint(n("opt_color"), 78), `one_color: 77 opt_color: 78`},
		{"an unknown number of a closed enum is kept, as in Go", p2, wire{}.varint(n2("closed"), 77), `closed: 77`},
		{"unknown numbers in lists, maps and oneofs are kept", p3, wire{}.varint(n("list_color"), 77).bytes(n("list_color"), []byte{1, 78}).
			bytes(n("map_color"), wire{}.text(1, "k").varint(2, 79)).varint(n("pick_color"), 80),
			`list_color: [77, COLOR_RED, 78] map_color { key: "k" value: 79 } pick_color: 80`},
		{"a negative enum has ten bytes", p3, wire{}.varint(n("one_color"), 0xfffffffffffffffe), `one_color: COLOR_NEGATIVE`},
		{"an enum is cut to 32 bits", p3, wire{}.varint(n("one_color"), 1<<32|1), `one_color: COLOR_RED`},
		{"the first name of an alias", p3, wire{}.bytes(n("one_small"), wire{}.bytes(3, wire{}.bytes(2, wire{}.varint(3, 1)))),
			`one_small { inner { deep { type: ONE } } }`},
		{"a negative int32 has ten bytes", p3, wire{}.varint(n("one_int32"), 1<<64-5), `one_int32: -5`},
		{"a negative int32 of five bytes", p3, wire{}.varint(n("one_int32"), 0xfffffffb), `one_int32: -5`},
		{"int32 and uint32 are cut to 32 bits", p3, wire{}.varint(n("one_int32"), 1<<40|7).varint(n("one_uint32"), 1<<40|8),
			`one_int32: 7 one_uint32: 8`},
		{"sint32 is cut to 32 bits", p3, wire{}.varint(n("one_sint32"), 1<<40|3), `one_sint32: -2`},
		{"the ends of sint64", p3, wire{}.varint(n("one_sint64"), 1<<64-1).varint(n("list_sint64"), 1<<64-2),
			`one_sint64: -9223372036854775808 list_sint64: 9223372036854775807`},
		{"any other number is true", p3, wire{}.varint(n("one_bool"), 1<<63), `one_bool: true`},
		{"a varint in more bytes than it needs", p3, append(protowire.AppendTag(nil, n("one_uint64"), protowire.VarintType),
			0x81, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x00), `one_uint64: 1`},
		{"a tag in more bytes than it needs", p3, wire{0x80 | byte(n("one_int32")<<3), 0x80, 0x80, 0x00, 5}, `one_int32: 5`},
		{"the last value of a scalar wins", p3, wire{}.varint(n("one_int32"), 1).text(n("one_string"), "a").varint(n("one_int32"), 2).
			text(n("one_string"), "b"), `one_int32: 2 one_string: "b"`},
		{"the last one wins even if it is the default", p3, wire{}.varint(n("one_int32"), 1).varint(n("one_int32"), 0).
			varint(n("opt_int32"), 1).varint(n("opt_int32"), 0), `opt_int32: 0`},
		{"the parts of a message are merged", p3, wire{}.bytes(n("one_small"), small(1, "a").varint(4, 1)).varint(n("one_int32"), 3).
			bytes(n("one_small"), wire{}.text(2, "b").varint(4, 2)), `one_int32: 3 one_small { id: 1 name: "b" codes: [1, 2] }`},
		{"parts without a gap are merged too", p3, wire{}.bytes(n("one_small"), small(1, "a")).bytes(n("one_small"), wire{}.varint(4, 2)),
			`one_small { id: 1 name: "a" codes: 2 }`},
		{"parts are merged at every level", p3, wire{}.bytes(n("one_small"), wire{}.bytes(3, wire{}.bytes(1, []byte("x")))).
			bytes(n("one_small"), wire{}.bytes(3, wire{}.bytes(2, wire{}.varint(1, 3)))), `one_small { inner { data: "x" deep { depth: -2 } } }`},
		{"the parts of a recursive message are merged", p3, wire{}.bytes(n("tree"), wire{}.text(1, "a").bytes(2, nil)).
			bytes(n("tree"), wire{}.text(1, "b").bytes(2, wire{}.text(1, "c"))), `tree { label: "b" children {} children { label: "c" } }`},
		{"the last member of a oneof wins", p3, wire{}.text(n("pick_string"), "a").varint(n("pick_int32"), 5), `pick_int32: 5`},
		{"a member of a oneof may be the default", p3, wire{}.varint(n("pick_int32"), 0), `pick_int32: 0`},
		{"the parts of a member are merged", p3, wire{}.bytes(n("pick_small"), small(1, "a")).bytes(n("pick_small"), wire{}.text(2, "b")),
			`pick_small { id: 1 name: "b" }`},
		{"but not over another member", p3, wire{}.bytes(n("pick_small"), small(1, "a")).varint(n("pick_bool"), 1).
			bytes(n("pick_small"), wire{}.text(2, "b")), `pick_small { name: "b" }`},
		{"lists, packed and not, in pieces", p3, wire{}.bytes(n("list_int32"), []byte{1, 2}).varint(n("one_int32"), 9).varint(n("list_int32"), 3).
			bytes(n("list_int32"), nil).bytes(n("list_int32"), []byte{4}), `one_int32: 9 list_int32: [1, 2, 3, 4]`},
		{"packed, where unpacked is declared", p3, wire{}.bytes(n("other_sint32"), []byte{1, 2}).bytes(n("other_double"), make([]byte, 8)),
			`other_sint32: [-1, 1] other_double: 0`},
		{"unpacked, where packed is declared", p3,
			wire{}.varint(n("list_bool"), 1).varint(n("list_bool"), 0).fixed32(n("list_float"), 0x3f800000),
			`list_bool: [true, false] list_float: 1`},
		{"the last entry of a key wins", p3, wire{}.bytes(n("map_int32"), wire{}.varint(1, 1).varint(2, 10)).
			bytes(n("map_int32"), wire{}.varint(1, 2).varint(2, 20)).bytes(n("map_int32"), wire{}.varint(1, 1).varint(2, 30)),
			`map_int32 { key: 1 value: 30 } map_int32 { key: 2 value: 20 }`},
		{"entries replace messages, they do not merge them", p3, wire{}.bytes(n("map_small"), wire{}.text(1, "k").bytes(2, small(1, "a"))).
			bytes(n("map_small"), wire{}.text(1, "k").bytes(2, wire{}.varint(4, 7))), `map_small { key: "k" value { codes: 7 } }`},
		{"entries without key or value", p3, wire{}.bytes(n("map_int32"), nil).bytes(n("map_small"), wire{}.text(1, "k")).
			bytes(n("map_string"), wire{}.text(2, "v")),
			`map_int32 { key: 0 value: 0 } map_small { key: "k" value {} } map_string { key: "" value: "v" }`},
		{"the value before the key, twice, with an unknown field", p3,
			wire{}.bytes(n("map_int32"), wire{}.varint(2, 1).varint(9, 9).varint(1, 4).varint(2, 5)),
			`map_int32 { key: 4 value: 5 }`},
		{"the value of an entry in parts", p3,
			wire{}.bytes(n("map_small"), wire{}.text(1, "k").bytes(2, small(1, "a")).bytes(2, wire{}.text(2, "b"))),
			`map_small { key: "k" value { id: 1 name: "b" } }`},
		{"optional fields show their presence", p3, wire{}.varint(n("opt_int32"), 0).text(n("opt_string"), "").bytes(n("opt_small"), nil),
			`opt_int32: 0 opt_string: "" opt_small {}`},
		{"large field numbers", p3, wire{}.bytes(5000, small(3, "far")).varint(536870911, 4), `far { id: 3 name: "far" } farther: 4`},
		{"messages without fields", p3,
			wire{}.bytes(n("many_empty"), nil).bytes(n("many_empty"), wire{}.varint(1, 1)).bytes(n("pick_empty"), nil),
			`many_empty {} many_empty {} pick_empty {}`},
		{"wrappers", p3, wire{}.bytes(n("wrap_int32"), wire{}.varint(1, 5)).bytes(n("wrap_string"), nil).bytes(n("wraps"), wire{}.text(1, "x")).
			bytes(n("wrap_map"), wire{}.text(1, "k").bytes(2, wire{}.varint(1, 6))),
			`wrap_int32 { value: 5 } wrap_string {} wraps { value: "x" } wrap_map { key: "k" value { value: 6 } }`},
		{"a group", p2, wire{}.group(n2("grouped"), wire{}.varint(501, 1).bytes(503, small(2, "x"))),
			`Grouped { id: 1 smalls { id: 2 name: "x" } }`},
		{"a group in parts", p2,
			wire{}.group(n2("grouped"), wire{}.varint(501, 1)).varint(n2("one_int32"), 2).group(n2("grouped"), wire{}.text(502, "x")),
			`one_int32: 2 Grouped { id: 1 name: "x" }`},
		{"an extension is an unknown field", p2, wire{}.text(1000, "x"), ``},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if v := verdict(t, tc.m, tc.in); v != "" {
				t.Fatal(v)
			}
			want := dynamicpb.NewMessage(tc.m.Desc)
			if err := prototext.Unmarshal([]byte(tc.want), want); err != nil {
				t.Fatal(err)
			}
			flat, err := tc.m.Decode(nil, tc.in)
			if err != nil {
				t.Fatal(err)
			}
			if got := fromFlat(t, tc.m, flat); !proto.Equal(got, want) {
				t.Errorf("Decode(%x):\ngot  %v\nwant %v", tc.in, got, want)
			}
		})
	}
}

// TestMalformed has messages that must be refused, each with the path of the field.
func TestMalformed(t *testing.T) {
	p3, p2 := compile(t, "proto3.proto").Methods[0].Request, compile(t, "proto2.proto").Methods[0].Request
	n := func(name string) protowire.Number { return number(p3, name) }
	n2 := func(name string) protowire.Number { return number(p2, name) }
	wide := compile(t, "names.proto").Methods[0].Request
	head := func(n protowire.Number, typ protowire.Type, more ...byte) wire {
		return append(protowire.AppendTag(nil, n, typ), more...)
	}
	deep := func(levels int) wire {
		var b wire
		for range levels {
			b = wire{}.bytes(2, b) // Tree.children
		}
		return wire{}.bytes(n("tree"), b)
	}
	for _, tc := range []struct {
		name string
		m    *protowit.Message
		in   wire
		want string
	}{
		{"a tag that is cut off", p3, wire{0x80}, "the message ends"},
		{"a varint that is cut off", p3, head(n("one_int32"), protowire.VarintType, 0x80), "one_int32: the message ends"},
		{"a varint of eleven bytes", p3, head(n("one_int32"), protowire.VarintType, bytes.Repeat([]byte{0x80}, 11)...), "one_int32: a varint"},
		{"a tenth byte of more than one bit", p3, head(n("one_uint64"), protowire.VarintType, append(bytes.Repeat([]byte{0xff}, 9), 2)...),
			"one_uint64: a varint"},
		{"a fixed32 that is cut off", p3, head(n("one_float"), protowire.Fixed32Type, 1, 2, 3), "one_float: the message ends"},
		{"a fixed64 that is cut off", p3, head(n("one_double"), protowire.Fixed64Type, 1, 2, 3, 4, 5, 6, 7), "one_double: the message ends"},
		{"a string that is cut off", p3, head(n("one_string"), protowire.BytesType, 5, 'a'), "one_string: the message ends"},
		{"a length of 2^63", p3, head(n("one_bytes"), protowire.BytesType, append(bytes.Repeat([]byte{0xff}, 9), 1)...),
			"one_bytes: the message ends"},
		{"field number 0", p3, wire{0x00, 1}, "field number"},
		{"a field number beyond the last", p3, wire{}.varint(536870911+1, 1), "field number"},
		{"wire type 6", p3, wire{byte(n("one_int32"))<<3 | 6}, "one_int32: a wire type"},
		{"an end of no group", p3, head(n("one_int32"), protowire.EndGroupType), "one_int32: the end of a group"},
		{"a group without end", p3, head(20000, protowire.StartGroupType, 8, 1), "the message ends"},
		{"the end of another group", p3, append(head(20000, protowire.StartGroupType), head(20001, protowire.EndGroupType)...),
			"the end of a group"},
		{"a string that is not UTF-8", p3, wire{}.text(n("one_string"), "\xff"), "one_string: a string that is not UTF-8"},
		{"one that a later one replaces", p3, wire{}.text(n("one_string"), "\xc3").text(n("one_string"), "x"),
			"one_string: a string that is not UTF-8"},
		{"a surrogate", p3, wire{}.text(n("one_string"), "\xed\xa0\x80"), "not UTF-8"},
		{"in a list", p3, wire{}.text(n("list_string"), "a").text(n("list_string"), "\xff"), "list_string[1]: a string"},
		{"as a key", p3, wire{}.bytes(n("map_string"), wire{}.text(1, "\xff")), "map_string[0].key: a string"},
		{"deep inside", p3, wire{}.bytes(n("many_small"), nil).bytes(n("many_small"),
			wire{}.bytes(3, wire{}.bytes(2, wire{}.bytes(2, wire{}.text(1, "\xff"))))),
			"many_small[1].inner.deep.counts[0].key: a string"},
		{"in a recursive message", p3, wire{}.bytes(n("tree"), wire{}.bytes(2, nil).bytes(2, wire{}.bytes(3, wire{}.text(2, "\xff")))),
			"tree.children[1].branch.note: a string"},
		{"in a member of a oneof that another one replaces", p3,
			wire{}.bytes(n("pick_small"), wire{}.bytes(3, wire{0x80})).varint(n("pick_int32"), 1),
			"pick_small.inner: the message ends"},
		{"a packed list that is cut off", p3, wire{}.bytes(n("list_int32"), []byte{1, 0x80}), "list_int32[1]: the message ends"},
		{"a packed list of fixed numbers that is cut off", p3, wire{}.bytes(n("list_fixed32"), make([]byte, 9)),
			"list_fixed32[2]: the message ends"},
		{"101 levels", p3, deep(101), "nested more than 100 deep"},
		{"101 levels of unknown groups", p3, func() wire {
			var b wire
			for range 102 {
				b = wire{}.group(20000, b)
			}
			return b
		}(), "nested more than 100 deep"},
		{"a million levels", p3, bytes.Repeat(head(20000, protowire.StartGroupType), 1_000_000), "nested more than 100 deep"},
		{"a required field is missing", p2, wire{}.bytes(n2("musts"), wire{}.varint(1, 1)), "musts[0].need: a required field"},
		{"in a group", p2, wire{}.group(n2("groups"), nil), "groups[0].key: a required field"},
		{"in a recursive message", p2, wire{}.group(n2("groups"), wire{}.text(511, "k").bytes(512, wire{}.bytes(n2("must"), nil))),
			"groups[0].self.must.id: a required field"},
		{"a message that grows too much", wide, bytes.Repeat(wire{}.bytes(1, nil), 1<<17), "grows too much"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := tc.m.Decode(nil, tc.in)
			if err == nil {
				t.Fatal("Decode accepted the message")
			}
			if !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %q does not contain %q", err, tc.want)
			}
			var e *protowit.Error
			if !errors.As(err, &e) || !errors.Is(err, errdefs.ErrInvalidArgument) && !errors.Is(err, errdefs.ErrResourceExhausted) {
				t.Errorf("error %#v, want an *Error with ErrInvalidArgument or ErrResourceExhausted", err)
			}
			if v := verdict(t, tc.m, tc.in); v != "" {
				t.Error(v)
			}
		})
	}
}

// TestDepth: the maximum depth is allowed.
func TestDepth(t *testing.T) {
	m := compile(t, "proto3.proto").Methods[0].Request
	var b wire
	for range 99 {
		b = wire{}.bytes(2, b)
	}
	if v := verdict(t, m, wire{}.bytes(number(m, "tree"), b)); v != "" {
		t.Error(v)
	}
	if _, err := m.Decode(nil, wire{}.bytes(number(m, "tree"), b)); err != nil {
		t.Error(err)
	}
}

// TestFloats: bits survive in both directions, including those of -0.0 (which is not a default), infinities and NaN
// with a payload.
func TestFloats(t *testing.T) {
	m := compile(t, "proto3.proto").Methods[0].Request
	for _, bits := range []uint64{1 << 63, 0x7ff0000000000000, 0xfff0000000000000, 0x7ff8000000000001, 0xfff7ffffffffffff, 1} {
		in := wire{}.fixed64(number(m, "one_double"), bits)
		flat, err := m.Decode(nil, in)
		if err != nil {
			t.Fatal(err)
		}
		if got := binary.LittleEndian.Uint64(flat); got != bits {
			t.Errorf("Decode of %#x = %#x", bits, got)
		}
		if out, err := m.Encode(nil, flat); err != nil || !bytes.Equal(out, in) {
			t.Errorf("Encode(Decode(%x)) = %x, %v", []byte(in), out, err)
		}
	}
	in := wire{}.fixed32(number(m, "one_float"), 1<<31)
	flat, err := m.Decode(nil, in)
	if err != nil {
		t.Fatal(err)
	}
	if out, err := m.Encode(nil, flat); err != nil || !bytes.Equal(out, in) {
		t.Errorf("Encode(Decode(%x)) of a 32-bit -0.0 = %x, %v", []byte(in), out, err)
	}
}

// TestManyKeys: duplicate keys are found among few and many entries, without and with the hash table.
func TestManyKeys(t *testing.T) {
	m := compile(t, "proto3.proto").Methods[0].Request
	for _, n := range []int{2, 8, 9, 100, 5000} {
		var in wire
		for i := range n {
			in = in.bytes(number(m, "map_int64"), wire{}.varint(1, uint64(i%(n/2+1))).varint(2, uint64(i)))
			in = in.bytes(number(m, "map_small"), wire{}.text(1, fmt.Sprint(i%3)).bytes(2, wire{}.varint(1, uint64(i))))
		}
		if v := verdict(t, m, in); v != "" {
			t.Errorf("%d entries: %s", n, v)
		}
	}
}

// TestDefaultsAreNotSent: a default value is omitted in fields without presence, but sent in fields with presence.
func TestDefaultsAreNotSent(t *testing.T) {
	m := compile(t, "proto3.proto").Methods[0].Request
	flat, err := m.Decode(nil, wire{}.varint(number(m, "one_int32"), 0).text(number(m, "one_string"), "").varint(number(m, "opt_bool"), 0))
	if err != nil {
		t.Fatal(err)
	}
	out, err := m.Encode([]byte("before"), flat)
	if want := "before" + string(wire{}.varint(number(m, "opt_bool"), 0)); err != nil || string(out) != want {
		t.Errorf("Encode = %x, %v; want %x", out, err, want)
	}
}

var raceEnabled bool

// TestNoAllocations: a conversion only allocates space in its destination.
func TestNoAllocations(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector makes sync.Pool drop items at random")
	}
	m := compile(t, "greet.proto").Methods[5].Request
	in := serialize(t, m, `text: "x" data: "y" numbers: [1, 2] requests { name: "a" } counts { key: "k" value: 1 } tree { children {} } request { name: "b" }`)
	flat, err := m.Decode(nil, in)
	if err != nil {
		t.Fatal(err)
	}
	a, b := make([]byte, 0, 1<<16), make([]byte, 0, 1<<16)
	if n := testing.AllocsPerRun(1000, func() {
		if _, err := m.Decode(a, in); err != nil {
			t.Fatal(err)
		}
		if _, err := m.Encode(b, flat); err != nil {
			t.Fatal(err)
		}
	}); n >= 1 {
		t.Errorf("%v allocations per conversion, want 0", n)
	}
}

// TestGuestMistakes: what a guest returns is checked before it is sent.
func TestGuestMistakes(t *testing.T) {
	m := compile(t, "greet.proto").Methods[5].Request
	good, err := m.Decode(nil, serialize(t, m, `text: "text" tree { label: "label" children { label: "leaf" } }`))
	if err != nil {
		t.Fatal(err)
	}
	leaf := string(wire{}.text(1, "leaf"))
	for name, tc := range map[string]struct {
		flat []byte
		want string
	}{
		"a string that is not UTF-8": {bytes.Replace(good, []byte("text"), []byte("te\xfft"), 1), "text: the guest's string is not UTF-8"},
		"a nested one": {bytes.Replace(good, []byte("label"), []byte("labe\xff"), 1),
			"tree.label: the guest's string is not UTF-8"},
		"a message that is none": {bytes.Replace(good, []byte(leaf), []byte("\x0a\x44leaf"), 1),
			"tree.children[0]: the guest's bytes are not a valid greet.v1.Tree: label: "},
		"flat bytes that are cut off":      {good[:len(good)-1], "not of its type"},
		"flat bytes with some behind them": {append(bytes.Clone(good), 0), "not of its type"},
		"a bool of 2":                      {append([]byte{2}, good[1:]...), "b: the guest's value is not of its type"},
		"nothing":                          {nil, "not of its type"},
	} {
		_, err := m.Encode(nil, tc.flat)
		if err == nil || !strings.Contains(err.Error(), tc.want) || !errors.Is(err, errdefs.ErrInternal) {
			t.Errorf("%s: Encode: error %v, want %q", name, err, tc.want)
		}
	}
}

// TestConcurrent: a schema is safe for concurrent use.
func TestConcurrent(t *testing.T) {
	m := compile(t, "greet.proto").Methods[5].Request
	var group sync.WaitGroup
	for i := range 8 {
		in := serialize(t, m, fmt.Sprintf(`text: "%d" counts { key: "%d" value: %d } requests { name: "%d" } tree { children { label: "%d" } }`,
			i, i, i, i, i))
		group.Go(func() {
			for range 500 {
				flat, err := m.Decode(nil, in)
				if err != nil {
					t.Error(err)
					return
				}
				if out, err := m.Encode(nil, flat); err != nil || !bytes.Equal(out, in) {
					t.Errorf("Encode(Decode(%x)) = %x, %v", in, out, err)
					return
				}
			}
		})
	}
	group.Wait()
}
