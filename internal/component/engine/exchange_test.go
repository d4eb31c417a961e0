package engine

import (
	"slices"
	"testing"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// TestExchange checks which messages of a call need no host function, and in which order the host sees the others. One
// instance serves all calls.
func TestExchange(t *testing.T) {
	const iface = "tripod:grpc/raw@0.1.0"
	var log []string
	note := func(what string, result []byte) func(*HostCall, []byte) ([]byte, error) {
		return func(_ *HostCall, args []byte) ([]byte, error) {
			entry := what
			if what == "send" {
				entry += " " + string(wit.NewReader(args).Bytes())
			}
			log = append(log, entry)
			return result, nil
		}
	}
	done := &wit.Type{Kind: wit.Result, Err: tStr}
	received := &wit.Type{Kind: wit.Result, Err: tStr,
		Ok: &wit.Type{Kind: wit.Variant, Name: "received", Cases: []wit.Case{{Name: "message", Type: tU32}, {Name: "end"}}}}
	opts := rawOptions()
	opts.ModuleHost.Funcs = []HostFunc{
		{Interface: iface, Name: "receive", Params: []*wit.Type{tBool}, Result: received, Role: RoleReceive,
			Call: note("receive", u32s(0, 0, 4))},
		{Interface: iface, Name: "take", Result: tBytes, Role: RoleTake, Call: note("take", wit.AppendBytes(nil, []byte("host")))},
		{Interface: iface, Name: "send", Params: []*wit.Type{tBytes}, Result: done, Role: RoleSend, Call: note("send", u32s(0))},
	}
	// handle receives a message, takes it, sends it as often as its parameter says, and returns its size.
	var body bin
	body.i32(1).i32(100).u8(0x10, 0).i32(120).u8(0x10, 1)                                    // receive(true), take()
	body.u8(0x03, 0x40).i32(120).u8(0x28, 2, 0).i32(124).u8(0x28, 2, 0).i32(140).u8(0x10, 2) // loop: send(message)
	body.u8(0x20, 0).i32(1).u8(0x6b, 0x22, 0, 0x0d, 0, 0x0b).i32(108).u8(0x28, 2, 0)         // while --p0 > 0; the size
	c, f := loadedServer(t, coreMod{
		imports: []coreFn{{module: iface, name: "receive", params: 2}, {module: iface, name: "take", params: 1},
			{module: iface, name: "send", params: 3}},
		funcs: []coreFn{{name: rawHandler + ".0#handle", params: 1, results: 1, body: body}},
	}, opts)
	i := instance(t, c, InstanceOptions{})
	sent := func(m []byte) { log = append(log, "sent "+string(m)) }
	message := wit.AppendBytes(nil, []byte("request"))
	for _, x := range []struct {
		name  string
		times uint32
		Exchange
		size uint32
		want []string
	}{
		{"one request, one response", 1, Exchange{message, sent}, 7, []string{"sent request"}},
		{"one request, three responses", 3, Exchange{message, sent}, 7, []string{"sent request", "send request", "send request"}},
		{"one request, a stream of responses", 2, Exchange{message, nil}, 7, []string{"send request", "send request"}},
		{"none", 1, Exchange{}, 4, []string{"receive", "take", "send host"}},
		{"an empty request", 1, Exchange{wit.AppendBytes(nil, nil), sent}, 0, []string{"sent "}},
	} {
		log = nil
		out, err := i.CallExchange(t.Context(), f, u32s(x.times), nil, x.Exchange)
		if err != nil || string(out) != string(u32s(x.size)) || !slices.Equal(log, x.want) {
			t.Errorf("%s: handle = %x, %v; the host sees %q; want %d and %q", x.name, out, err, log, x.size, x.want)
		}
	}
}
