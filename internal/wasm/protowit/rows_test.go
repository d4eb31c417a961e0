package protowit_test

import (
	"testing"

	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/dynamicpb"

	"github.com/tripod-run/tripod/internal/wasm/protowit"
)

// serialize makes the bytes of a message from its text form.
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
