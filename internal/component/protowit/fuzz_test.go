package protowit_test

import (
	"errors"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/tripod-run/tripod/internal/component/protowit"
)

// stricter reports whether an error comes from a rule that the oracle does not have: proto2 strings must be UTF-8,
// unknown groups have the same nesting limit, growth is limited, and map entries need their required fields even if a
// later entry has the same key.
func stricter(err error) bool {
	return strings.Contains(err.Error(), "must_map[") && strings.Contains(err.Error(), "required") ||
		strings.Contains(err.Error(), "UTF-8") || strings.Contains(err.Error(), "nested more than") ||
		errors.Is(err, errdefs.ErrResourceExhausted)
}

func testMessages(t testing.TB) []*protowit.Message {
	var all []*protowit.Message
	for _, file := range []string{"proto3.proto", "proto2.proto", "editions.proto"} {
		all = append(all, compile(t, file).Methods[0].Request)
	}
	return all
}

// FuzzTranscode compares Decode and Encode with google.golang.org/protobuf on arbitrary bytes.
func FuzzTranscode(f *testing.F) {
	messages := testMessages(f)
	for i := range messages {
		for seed := range uint64(40) {
			f.Add(byte(i), randomMessage(messages[i].Desc, rand.New(rand.NewPCG(seed, 1)), 0))
		}
	}
	f.Fuzz(func(t *testing.T, which byte, in []byte) {
		if v := verdict(t, messages[int(which)%len(messages)], in); v != "" {
			t.Fatalf("%x: %s", in, v)
		}
	})
}

// TestTranscodeRandom does the same on mostly well-formed messages, with the freedoms of the wire format: fields
// shuffled, repeated, split, packed or not, with unknown fields in between.
func TestTranscodeRandom(t *testing.T) {
	rounds := uint64(1000)
	if testing.Short() {
		rounds = 200
	}
	accepted := 0
	for _, m := range testMessages(t) {
		for seed := range rounds {
			in := randomMessage(m.Desc, rand.New(rand.NewPCG(seed, 2)), 0)
			if v := verdict(t, m, in); v != "" {
				t.Fatalf("%s, seed %d: %x: %s", m.Desc.FullName(), seed, in, v)
			}
			if _, err := m.Decode(nil, in); err == nil {
				accepted++
			}
		}
	}
	if accepted < int(rounds) {
		t.Errorf("only %d of %d messages were well-formed, so this tests little", accepted, 3*rounds)
	}
}

// FuzzEncode feeds Encode with bytes that no engine would pass: it refuses them or makes a message, but never panics.
func FuzzEncode(f *testing.F) {
	messages := testMessages(f)
	for i, m := range messages {
		for seed := range uint64(20) {
			if flat, err := m.Decode(nil, randomMessage(m.Desc, rand.New(rand.NewPCG(seed, 3)), 0)); err == nil {
				f.Add(byte(i), flat)
			}
		}
	}
	f.Fuzz(func(t *testing.T, which byte, flat []byte) {
		m := messages[int(which)%len(messages)]
		out, err := m.Encode(nil, flat)
		if err != nil {
			if !errors.Is(err, errdefs.ErrInternal) {
				t.Fatalf("Encode(%x): error %v, want errdefs.ErrInternal", flat, err)
			}
			return
		}
		if _, err := parse(m.Desc, out); err != nil {
			t.Fatalf("Encode(%x) = %x, which the oracle cannot read: %v", flat, out, err)
		}
	})
}

// randomMessage makes a random message in wire format.
func randomMessage(md protoreflect.MessageDescriptor, r *rand.Rand, depth int) []byte {
	var out []byte
	fds := md.Fields()
	for range fds.Len() {
		fd := fds.Get(r.IntN(fds.Len()))
		if r.IntN(3) == 0 || depth > 3 && fd.Message() != nil {
			continue
		}
		out = append(out, randomField(fd, r, depth)...)
		if r.IntN(12) == 0 {
			out = append(out, randomUnknown(r)...)
		}
	}
	// Set required fields mostly, because otherwise few messages would be accepted.
	for n := range fds.Len() {
		if fd := fds.Get(n); fd.Cardinality() == protoreflect.Required && r.IntN(60) != 0 {
			out = append(out, randomField(fd, r, depth)...)
		}
	}
	if r.IntN(400) == 0 && len(out) > 0 {
		out = out[:r.IntN(len(out))]
	}
	return out
}

func randomField(fd protoreflect.FieldDescriptor, r *rand.Rand, depth int) []byte {
	if fd.IsList() && packable(fd.Kind()) && r.IntN(2) == 0 {
		var packed []byte
		for range r.IntN(5) {
			packed = append(packed, randomValue(fd, r, depth)...)
		}
		return protowire.AppendBytes(protowire.AppendTag(nil, fd.Number(), protowire.BytesType), packed)
	}
	if r.IntN(300) == 0 {
		return wrongType(fd, r)
	}
	out := protowire.AppendTag(nil, fd.Number(), wireType(fd.Kind()))
	out = append(out, randomValue(fd, r, depth)...)
	if fd.Kind() == protoreflect.GroupKind {
		out = protowire.AppendTag(out, fd.Number(), protowire.EndGroupType)
	}
	return out
}

// wrongType appends a field with the wrong wire type, which makes it an unknown field.
func wrongType(fd protoreflect.FieldDescriptor, r *rand.Rand) []byte {
	return append(protowire.AppendTag(nil, fd.Number(), protowire.Fixed64Type), make([]byte, 8)...)
}

func packable(k protoreflect.Kind) bool {
	return wireType(k) != protowire.BytesType && wireType(k) != protowire.StartGroupType
}

func wireType(k protoreflect.Kind) protowire.Type {
	switch k {
	case protoreflect.Fixed32Kind, protoreflect.Sfixed32Kind, protoreflect.FloatKind:
		return protowire.Fixed32Type
	case protoreflect.Fixed64Kind, protoreflect.Sfixed64Kind, protoreflect.DoubleKind:
		return protowire.Fixed64Type
	case protoreflect.StringKind, protoreflect.BytesKind, protoreflect.MessageKind:
		return protowire.BytesType
	case protoreflect.GroupKind:
		return protowire.StartGroupType
	}
	return protowire.VarintType
}

func randomValue(fd protoreflect.FieldDescriptor, r *rand.Rand, depth int) []byte {
	switch wireType(fd.Kind()) {
	case protowire.Fixed32Type:
		return protowire.AppendFixed32(nil, uint32(randomBits(r)))
	case protowire.Fixed64Type:
		return protowire.AppendFixed64(nil, randomBits(r))
	case protowire.VarintType:
		if fd.Enum() != nil && r.IntN(4) != 0 {
			values := fd.Enum().Values()
			return protowire.AppendVarint(nil, uint64(int64(values.Get(r.IntN(values.Len())).Number())))
		}
		return protowire.AppendVarint(nil, randomBits(r))
	case protowire.StartGroupType:
		return randomMessage(fd.Message(), r, depth+1)
	}
	switch {
	case fd.Message() != nil:
		return protowire.AppendBytes(nil, randomMessage(fd.Message(), r, depth+1))
	case fd.Kind() == protoreflect.BytesKind:
		return protowire.AppendBytes(nil, []byte{byte(r.Uint32()), 0xff})
	case r.IntN(300) == 0:
		return protowire.AppendBytes(nil, []byte{0xc3})
	}
	return protowire.AppendString(nil, []string{"", "a", "b", "grüße", "\x00", "日本"}[r.IntN(6)])
}

func randomBits(r *rand.Rand) uint64 {
	switch r.IntN(5) {
	case 0:
		return uint64(r.IntN(3))
	case 1:
		return -uint64(r.IntN(300))
	case 2:
		return 1 << 63 // -0.0, for example
	case 3:
		return uint64(r.Uint32())
	}
	return r.Uint64()
}

func randomUnknown(r *rand.Rand) []byte {
	n := protowire.Number(20000 + r.IntN(3))
	out := protowire.AppendTag(nil, n, protowire.StartGroupType)
	out = protowire.AppendTag(out, 1, protowire.BytesType)
	out = protowire.AppendString(out, "unknown")
	return protowire.AppendTag(out, n, protowire.EndGroupType)
}
