package protowit_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/protowit"
)

// Codings of the metadata: 4*kind + mode.
const (
	implicit, packed, explicit, expanded = 0, 1, 2, 3

	metaBytes, metaString, metaInt32, metaDouble = 0, 4, 16, 60
)

func metaScalar(number uint64, name string, coding uint64) wire {
	return wire{}.varint(1, number).text(2, name).varint(3, coding)
}

func metaCompound(number uint64, name string, coding, message uint64, variants ...wire) wire {
	w := wire{}.varint(1, number).text(2, name).varint(4, coding).varint(5, message)
	for _, v := range variants {
		w = w.bytes(6, v)
	}
	return w
}

func metaMethod(name, function string, arity, request, response uint64) wire {
	return wire{}.text(1, name).bytes(2, wire{}.text(1, function).varint(2, arity).varint(3, request).varint(4, response))
}

func metaMessage(fields ...wire) wire {
	var w wire
	for _, f := range fields {
		w = w.bytes(1, f)
	}
	return w
}

// sampleMetadata has a service with the four arities over two messages, one of which contains itself.
func sampleMetadata() wire {
	value := func(number uint64, name string) wire { return wire{}.varint(1, number).text(2, name) }
	service := wire{}.text(1, "a.b.Thing").bytes(2, wire{}.
		bytes(2, metaMethod("DoIt", "do-it", 0, 0, 1)).bytes(2, metaMethod("Many", "many", 1, 0, 1)).
		bytes(2, metaMethod("Take", "take-all", 2, 0, 1)).bytes(2, metaMethod("Both", "both", 3, 0, 1)))
	first := metaMessage(
		metaScalar(1, "%list", metaString+expanded), metaScalar(2, "some-number", metaInt32+explicit), metaScalar(3, "ratios", metaDouble+packed),
		metaCompound(4, "mood", 0, 0, value(1, "happy"), value(0, "unknown"), value(1, "glad")),
		metaCompound(0, "pick", 8, 0, metaScalar(5, "text", metaString), metaCompound(6, "other", 6, 1),
			metaCompound(7, "kind", 0, 0, value(3, "three"), value(4, "four"))),
		metaCompound(8, "selves", 7, 0))
	second := metaMessage(metaScalar(1, "data", metaBytes+implicit))
	return wire{}.bytes(1, service).bytes(2, first).bytes(2, second)
}

func TestMetadata(t *testing.T) {
	s, err := protowit.ParseMetadata(sampleMetadata())
	if err != nil {
		t.Fatal(err)
	}
	text := s.Document()
	for _, want := range []string{
		"package proto:a-b;", "  record metadata-message0 {\n    %list: list<string>,\n    some-number: option<s32>,\n    ratios: list<f64>,\n",
		"    mood: metadata-message0-enum-mood,\n    pick: option<metadata-message0-pick>,\n",
		"selves: list<list<u8>>", "    unknown,\n    happy,\n    unrecognized(s32),", "    three,\n    four,\n    unrecognized(s32),",
		"    text(string),\n    other(metadata-message1),\n    kind(metadata-message0-enum-kind),",
		"  record metadata-message1 {\n    data: list<u8>,\n",
		"many: func(context: context, request: metadata-message0, replies: borrow<metadata-message1-writer>) -> result<_, status>",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the WIT lacks %q:\n%s", want, text)
		}
	}
	arities := make(map[string][2]bool)
	for _, m := range s.Methods {
		arities[m.Procedure+" "+m.Function] = [2]bool{m.Reader != nil, m.Writer != nil}
	}
	for key, want := range map[string][2]bool{
		"/a.b.Thing/DoIt do-it": {false, false}, "/a.b.Thing/Many many": {false, true},
		"/a.b.Thing/Take take-all": {true, false}, "/a.b.Thing/Both both": {true, true},
	} {
		if got, ok := arities[key]; !ok || got != want {
			t.Errorf("%s: streams %v, present %v, want %v", key, got, ok, want)
		}
	}
	in := wire{}.text(1, "a").text(1, "b").varint(2, 0).bytes(3, make([]byte, 16)).varint(4, 99).
		bytes(6, wire{}.bytes(1, []byte{1})).bytes(8, wire{}.varint(2, 7))
	if v := verdict(t, s.Methods[0].Request, in); v != "" {
		t.Error(v)
	}
}

// TestMetadataRefused: the error says what is wrong with the metadata.
func TestMetadataRefused(t *testing.T) {
	service := func(m wire) wire { return wire{}.bytes(1, wire{}.text(1, "a.S").bytes(2, wire{}.bytes(2, m))) }
	message := func(fields ...wire) wire {
		return service(metaMethod("M", "m", 0, 0, 0)).bytes(2, metaMessage(fields...))
	}
	for name, tc := range map[string]struct {
		in   wire
		want string
	}{
		"nothing":              {nil, "no file in the set"},
		"no protobuf":          {wire("hello"), "metadata: "},
		"a message too far":    {service(metaMethod("M", "m", 0, 7, 0)), `method "M" of "a.S": message 7 does not exist, there are 0`},
		"an arity":             {service(metaMethod("M", "m", 9, 0, 0)).bytes(2, nil), "arity 9"},
		"a nested one too far": {message(metaCompound(1, "f", 6, 3)), `field "f": message 3 does not exist, there are 1`},
		"a scalar coding":      {message(metaScalar(1, "f", 64)), "scalar coding 64"},
		"a compound coding":    {message(metaCompound(1, "f", 12, 0)), "compound coding 12"},
		"an empty enum":        {message(metaCompound(1, "f", 0, 0)), "an enum has no values"},
		"an empty oneof":       {message(metaCompound(1, "f", 8, 0)), "has no members"},
		"field number 0":       {message(metaScalar(0, "f", 0)), "number"},
		"one number twice":     {message(metaScalar(1, "f", 0), metaScalar(1, "g", 0)), "conflicting fields"},
		"a name that is none":  {message(metaScalar(1, "1 f", 0)), "name"},
		"the first version": {wire{}.bytes(1, wire{}.text(1, "a.S").bytes(2, wire{}.bytes(2, wire{}.text(1, "M").
			bytes(2, wire{}.text(1, "m").bytes(3, nil))))), "older version"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := protowit.ParseMetadata(tc.in)
			if err == nil || !strings.Contains(err.Error(), tc.want) || !errors.Is(err, errdefs.ErrInvalidArgument) {
				t.Errorf("ParseMetadata: error %v, want %q", err, tc.want)
			}
		})
	}
}

// FuzzMetadata: any bytes give a schema or an ErrInvalidArgument.
func FuzzMetadata(f *testing.F) {
	f.Add([]byte(sampleMetadata()))
	f.Add([]byte(wire{}.bytes(2, metaMessage(metaScalar(1, "x", 12)))))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := protowit.ParseMetadata(b)
		if err != nil {
			if !errors.Is(err, errdefs.ErrInvalidArgument) {
				t.Fatal(err)
			}
			return
		}
		s.Document()
		for _, m := range s.Methods {
			if v := verdict(t, m.Request, b); v != "" {
				t.Fatal(v)
			}
		}
	})
}

// FuzzParse does the same for descriptor sets.
func FuzzParse(f *testing.F) {
	for _, file := range []string{"greet.proto", "proto2.proto", "editions.proto", "names.proto"} {
		f.Add(descriptorSet(f, file))
	}
	f.Add([]byte(wire{}.bytes(1, wire{}.text(1, "x.proto").bytes(6, wire{}.text(1, "S")))))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := protowit.Parse(b)
		if err != nil {
			if !errors.Is(err, errdefs.ErrInvalidArgument) {
				t.Fatal(err)
			}
			return
		}
		s.Document()
		for _, m := range s.Methods {
			_, _ = m.Request.Decode(nil, b[:min(len(b), 1000)])
		}
	})
}
