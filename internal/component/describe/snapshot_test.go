package describe

import (
	"bytes"
	"context"
	"strings"
	"testing"

	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
)

// TestNoSnapshot checks what is said about guests whose initialization must run for each request.
func TestNoSnapshot(t *testing.T) {
	for main, want := range map[string]string{
		"tripodgrpc.Serve(server)": "",
		"time.Sleep(time.Millisecond); rand.Uint64(); tripodgrpc.Serve(server)":   "", // renewed, and monotonic
		"for range 100 { waste = make([]byte, 1<<20) }; tripodgrpc.Serve(server)": "", // with garbage collections
		"time.Now(); tripodgrpc.Serve(server)":                                    "the time of day",
		"crand.Text(); tripodgrpc.Serve(server)":                                  "random values",
	} {
		d, err := Run(t.Context(), buildWith(t, "var waste []byte", register+main))
		if err != nil || d.NoWarmUp != "" || (d.NoSnapshot == "") != (want == "") || !strings.Contains(d.NoSnapshot, want) {
			t.Errorf("main with %q: %+v, %v; want %q", main, d, err, want)
		}
	}
}

// TestNoWarmUp checks what is said about guests that do in their warm-up what each request must do for itself.
func TestNoWarmUp(t *testing.T) {
	for warmUp, want := range map[string]string{
		"time.Now()":    "the time of day",
		`panic("cold")`: "panic: cold",
	} {
		d, err := Run(t.Context(), buildWith(t, "", register+"tripodgrpc.Warm(func(context.Context) { "+warmUp+" }); tripodgrpc.Serve(server)"))
		if err != nil || d.NoSnapshot != "" || !strings.Contains(d.NoWarmUp, want) {
			t.Errorf("warm-up with %q: %+v, %v; want %q", warmUp, d, err, want)
		}
	}
}

// random gives a guest a number of bytes for the Go runtime that are the same in all instances, and then others.
type random struct{ same, other *bytes.Reader }

func (r *random) Read(p []byte) (int, error) {
	if r.same.Len() > 0 {
		return r.same.Read(p)
	}
	return r.other.Read(p)
}

// TestRenew checks that a guest in Go that continues from a snapshot has random values of its own. Two instances have the
// same values up to the snapshot, and others after it, with prepare and, to see the difference, without it.
func TestRenew(t *testing.T) {
	wasm := buildWith(t, `type service struct{ pb.UnimplementedTestServiceServer }

func (service) FullDuplexCall(pb.TestService_FullDuplexCallServer) error {
	return fmt.Errorf("%x %v", rand.Uint64(), map[int]int{1: 2})
}`, "pb.RegisterTestServiceServer(server, service{}); tripodgrpc.Serve(server)")
	ctx := t.Context()
	r := wazero.NewRuntimeWithConfig(ctx, wazero.NewRuntimeConfigInterpreter())
	defer r.Close(ctx)
	code, err := r.CompileModule(ctx, wasm)
	if err != nil {
		t.Fatal(err)
	}
	if err := imports(ctx, r, code); err != nil {
		t.Fatal(err)
	}
	// says returns what the handler says in an instance that gets the given random values after its initialization.
	says := func(prepare bool, other byte) string {
		source := &random{bytes.NewReader(bytes.Repeat([]byte{7}, 32)), bytes.NewReader(bytes.Repeat([]byte{other}, 10000))}
		m, err := r.InstantiateModule(ctx, code, wazero.NewModuleConfig().WithStartFunctions("_initialize").WithName("").
			WithStdout(t.Output()).WithStderr(t.Output()).WithSysNanotime().WithRandSource(source))
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close(ctx)
		if prepare {
			for n, name := range []string{"tripod:grpc/snapshot@0.1.0#prepare", "tripod:grpc/warm@0.1.0#warm"} {
				at := uint32(call(ctx, t, m, name))
				failed, _ := m.Memory().ReadByte(at)
				if renewed, _ := m.Memory().ReadUint32Le(at + 4); failed != 0 || int(renewed) < 2+n {
					t.Fatalf("%s failed (%d), or answers for %d instead of a seed and %d collections", name, failed, renewed, n+1)
				}
			}
		}
		const name = "/grpc.testing.TestService/FullDuplexCall"
		to := call(ctx, t, m, "cabi_realloc", 0, 0, 1, uint64(len(name)))
		m.Memory().Write(uint32(to), []byte(name))
		at := uint32(call(ctx, t, m, "tripod:grpc/handler@0.1.0#handle", to, uint64(len(name)), to, 0, 0, 0, 0, 0))
		text, err := list(m.Memory(), at+8, 1, maxText) // the message of the status, after its code
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	if first, second := says(false, 1), says(false, 2); first != second {
		t.Fatalf("without prepare: %q and %q; want the same, or this test shows nothing", first, second)
	}
	if first, second := says(true, 1), says(true, 2); first == second || !strings.HasPrefix(first, "101010101010101 ") {
		t.Errorf("with prepare: %q and %q; want the values from after the snapshot", first, second)
	}
}

func call(ctx context.Context, t *testing.T, m api.Module, name string, args ...uint64) uint64 {
	t.Helper()
	results, err := m.ExportedFunction(name).Call(ctx, args...)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return results[0]
}
