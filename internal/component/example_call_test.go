//go:build cgo

package component_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/tripod-run/tripod/internal/component/engine"
	"github.com/tripod-run/tripod/internal/component/protowit"
	"github.com/tripod-run/tripod/internal/component/wit"
)

// This example loads a component and calls a function that it exports:
//
//	echo: func(ctx: context, request: payload) -> result<payload, status>
func Example_call() {
	ctx := context.Background()
	wasm, err := os.ReadFile(echoDir + "echo-c.wasm")
	if err != nil {
		log.Fatal(err)
	}
	e, err := engine.New(engine.Config{})
	if err != nil {
		log.Fatal(err)
	}
	image, err := e.Compile(ctx, wasm, engine.CompileOptions{})
	if err != nil {
		log.Fatal(err)
	}
	code, err := e.Load(image, engine.Host{})
	if err != nil {
		log.Fatal(err)
	}
	defer code.Close()

	// A function's type is checked once, here.
	payload := &wit.Type{Kind: wit.Record, Fields: []wit.Field{{Name: "data", Type: &wit.Type{Kind: wit.List, Elem: &wit.Type{Kind: wit.U8}}}}}
	echo, err := code.Func(engine.Signature{
		Interface: "proto:echo-v1/echo", Name: "echo", Params: []*wit.Type{protowit.ContextType, payload},
		Result: &wit.Type{Kind: wit.Result, Ok: payload, Err: protowit.StatusType},
	})
	if err != nil {
		log.Fatal(err)
	}
	instance, err := code.Instantiate(ctx, engine.InstanceOptions{MaxMemory: 16 << 20, Deadline: time.Second})
	if err != nil {
		log.Fatal(err)
	}
	defer instance.Close()

	// The context: method, peer, no timeout, no metadata. Then the request.
	args := wit.AppendString(nil, "/echo.v1.Echo/Echo")
	args = wit.AppendString(args, "192.0.2.1:1234")
	args = wit.AppendOption(args, false)
	args = wit.AppendLen(args, 0)
	args = wit.AppendBytes(args, []byte("hello"))
	flat, err := instance.Call(ctx, echo, args, nil)
	if err != nil {
		log.Fatal(err)
	}
	result := wit.NewReader(flat)
	if result.Case(2) == 0 {
		fmt.Printf("ok: %s\n", result.Bytes())
	}
	// Output: ok: hello
}
