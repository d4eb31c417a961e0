package component_test

import (
	"context"
	"fmt"
	"log"

	"google.golang.org/protobuf/proto"

	"github.com/tripod-run/tripod/internal/component/protowit"
	"github.com/tripod-run/tripod/internal/component/protowit/protosource"
	"github.com/tripod-run/tripod/internal/component/wit"
)

// echoDir contains a component that answers each request with the request, and its .proto file.
const echoDir = "../../examples/wasm/echo-c/"

// This example converts a message of a gRPC service to the values that a component receives, and back.
func Example_protobuf() {
	source, err := protosource.Compile(context.Background(), []string{echoDir + "echo.proto"}, nil)
	if err != nil {
		log.Fatal(err)
	}
	set, err := proto.Marshal(source.Set)
	if err != nil {
		log.Fatal(err)
	}
	schema, err := protowit.Parse(set)
	if err != nil {
		log.Fatal(err)
	}
	echo := schema.Methods[0]
	fmt.Println(echo.Procedure, "is", echo.Interface+"#"+echo.Function)
	field := echo.Request.Type.Fields[0]
	fmt.Printf("record %s { %s: %s }\n", echo.Request.Type, field.Name, field.Type)

	message := []byte("\x0a\x05hello") // field 1: 5 bytes
	flat, err := echo.Request.Decode(nil, message)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("data = %s\n", wit.NewReader(flat).Bytes())
	back, err := echo.Request.Encode(nil, flat)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%q\n", back)
	// Output:
	// /echo.v1.Echo/Echo is proto:echo-v1/echo#echo
	// record payload { data: list<u8> }
	// data = hello
	// "\n\x05hello"
}
