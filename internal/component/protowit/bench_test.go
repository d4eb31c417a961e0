package protowit_test

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/tripod-run/tripod/internal/component/protowit"
)

// benchCase is a message to convert. generated is the same type in generated code, or nil.
type benchCase struct {
	name      string
	m         *protowit.Message
	wire      []byte
	generated proto.Message
}

// benchCases are a small request, a large bytes field, a message with every kind of field, and one for which generated
// code exists: a FileDescriptorProto, which has strings, enums, lists and nested messages.
func benchCases(b *testing.B) []benchCase {
	greet := compile(b, "greet.proto")
	hello := greet.Methods[0].Request
	everything := greet.Methods[5].Request
	all := compile(b, "proto3.proto").Methods[0].Request
	timestamp := &timestamppb.Timestamp{Seconds: 1, Nanos: 2}
	file := protodesc.ToFileDescriptorProto(greet.Methods[0].Desc.ParentFile())
	file.SourceCodeInfo = nil
	return []benchCase{
		{"hello", hello, serialize(b, hello, `name: "world" count: 3`), nil},
		{"1MiB", everything, append([]byte{0x4a, 0x80, 0x80, 0x40}, bytes.Repeat([]byte{'x'}, 1<<20)...), nil},
		{"random", all, randomWellFormed(b, all), nil},
		{"timestamp", selfMessage(b, timestamp), marshal(b, timestamp), timestamp},
		{"file", selfMessage(b, file), marshal(b, file), file},
	}
}

func marshal(b *testing.B, m proto.Message) []byte {
	out, err := proto.Marshal(m)
	if err != nil {
		b.Fatal(err)
	}
	return out
}

func randomWellFormed(b *testing.B, m *protowit.Message) []byte {
	for seed := range uint64(100) {
		in := randomMessage(m.Desc, rand.New(rand.NewPCG(seed, 4)), 0)
		if _, err := m.Decode(nil, in); err == nil {
			return in
		}
	}
	b.Fatal("the generator made no well-formed message")
	return nil
}

// selfMessage plans a message for which generated code exists, with a service that takes it.
func selfMessage(b *testing.B, m proto.Message) *protowit.Message {
	md := m.ProtoReflect().Descriptor()
	name := "." + string(md.FullName())
	set := &descriptorpb.FileDescriptorSet{File: []*descriptorpb.FileDescriptorProto{
		protodesc.ToFileDescriptorProto(md.ParentFile()),
		{
			Name: proto.String("bench.proto"), Package: proto.String("bench"), Dependency: []string{md.ParentFile().Path()},
			Service: []*descriptorpb.ServiceDescriptorProto{{Name: proto.String("S"), Method: []*descriptorpb.MethodDescriptorProto{
				{Name: proto.String("M"), InputType: &name, OutputType: &name},
			}}},
		},
	}}
	s, err := protowit.Compile(set)
	if err != nil {
		b.Fatal(err)
	}
	return s.Methods[0].Request
}

func BenchmarkDecode(b *testing.B) {
	for _, c := range benchCases(b) {
		b.Run(c.name+"/protowit", func(b *testing.B) {
			b.SetBytes(int64(len(c.wire)))
			b.ReportAllocs()
			var dst []byte
			for b.Loop() {
				var err error
				if dst, err = c.m.Decode(dst[:0], c.wire); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run(c.name+"/dynamicpb", func(b *testing.B) {
			unmarshalLoop(b, c.wire, func() proto.Message { return dynamicpb.NewMessage(c.m.Desc) })
		})
		if c.generated != nil {
			b.Run(c.name+"/generated", func(b *testing.B) {
				unmarshalLoop(b, c.wire, func() proto.Message { return c.generated.ProtoReflect().New().Interface() })
			})
		}
	}
}

func unmarshalLoop(b *testing.B, wire []byte, make func() proto.Message) {
	b.SetBytes(int64(len(wire)))
	b.ReportAllocs()
	for b.Loop() {
		if err := proto.Unmarshal(wire, make()); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkEncode(b *testing.B) {
	for _, c := range benchCases(b) {
		flat, err := c.m.Decode(nil, c.wire)
		if err != nil {
			b.Fatal(err)
		}
		b.Run(c.name+"/protowit", func(b *testing.B) {
			b.SetBytes(int64(len(c.wire)))
			b.ReportAllocs()
			var dst []byte
			for b.Loop() {
				if dst, err = c.m.Encode(dst[:0], flat); err != nil {
					b.Fatal(err)
				}
			}
		})
		dynamic := dynamicpb.NewMessage(c.m.Desc)
		if err := proto.Unmarshal(c.wire, dynamic); err != nil {
			b.Fatal(err)
		}
		b.Run(c.name+"/dynamicpb", func(b *testing.B) { marshalLoop(b, dynamic, len(c.wire)) })
		if c.generated != nil {
			b.Run(c.name+"/generated", func(b *testing.B) { marshalLoop(b, c.generated, len(c.wire)) })
		}
	}
}

func marshalLoop(b *testing.B, m proto.Message, size int) {
	b.SetBytes(int64(size))
	b.ReportAllocs()
	var dst []byte
	for b.Loop() {
		var err error
		if dst, err = (proto.MarshalOptions{}).MarshalAppend(dst[:0], m); err != nil {
			b.Fatal(err)
		}
	}
}
