package describe

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/test/guestbuild"
)

const sdk = "../../../sdk/go"

// build builds a guest with the SDK from the body of its main function.
func build(t *testing.T, main string) []byte {
	t.Helper()
	return buildWith(t, "", main)
}

// buildWith builds a guest with further declarations.
func buildWith(t *testing.T, declarations, main string) []byte {
	t.Helper()
	dir := t.TempDir()
	root, err := filepath.Abs(sdk)
	if err != nil {
		t.Fatal(err)
	}
	mod, err1 := os.ReadFile(filepath.Join(sdk, "go.mod"))
	sum, err2 := os.ReadFile(filepath.Join(sdk, "go.sum"))
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	const module = "github.com/tripod-run/tripod/sdk/go"
	for name, text := range map[string]string{
		"go.mod": strings.Replace(string(mod), module, "example.com/guest", 1) + "\nrequire " + module + " v0.0.0\nreplace " + module + " => " +
			root + "\n",
		"go.sum":  string(sum),
		"main.go": "package main\n\nimport (\n\t\"context\"\n\tcrand \"crypto/rand\"\n\t\"fmt\"\n\t\"math/rand/v2\"\n\t\"os\"\n\t\"time\"\n\n\tpb \"google.golang.org/grpc/interop/grpc_testing\"\n\n\ttripodgrpc \"" + module + "\"\n)\n\nvar _ context.Context\n\nvar _, _, _, _, _, _ = os.Exit, time.Sleep, pb.RegisterTestServiceServer, crand.Text, fmt.Sprint, rand.Uint64\n\nvar server = tripodgrpc.NewServer()\n\n" + declarations + "\n\nfunc main() {\n" + main + "\n}\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	wasm, err := os.ReadFile(guestbuild.Wasm(t, dir, "."))
	if err != nil {
		t.Fatal(err)
	}
	return wasm
}

const register = "pb.RegisterTestServiceServer(server, pb.UnimplementedTestServiceServer{}); "

// TestRun: a guest in Go describes its services, or the error says what its main did instead.
func TestRun(t *testing.T) {
	d, err := Run(t.Context(), build(t, register+"tripodgrpc.Serve(server)"))
	if err != nil || !slices.Equal(d.Services, []string{"grpc.testing.TestService"}) || len(d.Files) == 0 {
		t.Errorf("Run = %+v, %v; want the test service", d, err)
	}
	for main, want := range map[string]string{
		register + "return":          "main returned without a call of tripodgrpc.Serve",
		"tripodgrpc.Serve(server)":   "the server has no services",
		`println("why"); os.Exit(3)`: "exited with code 3; it printed: why",
	} {
		if _, err := Run(t.Context(), build(t, main)); !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), want) {
			t.Errorf("main with %q: error %v; want %q", main, err, want)
		}
	}
}

// TestRunIsBounded: a guest whose main never gets to Serve does not hold its caller.
func TestRunIsBounded(t *testing.T) {
	for _, main := range []string{"for {\n}", "time.Sleep(time.Hour)"} {
		wasm, begin := build(t, main), time.Now()
		_, err := run(t.Context(), wasm, 5*time.Second)
		if took := time.Since(begin); !errors.Is(err, context.DeadlineExceeded) || took > time.Minute {
			t.Errorf("main with %q: error %v after %v; want the deadline", main, err, took)
		}
	}
}

// TestRunMalformed: what is not a guest is refused.
func TestRunMalformed(t *testing.T) {
	if _, err := Run(t.Context(), []byte("\x00asm\x01\x00\x00\x00")); !errors.Is(err, ErrNoExport) {
		t.Errorf("an empty module: %v; want ErrNoExport", err)
	}
	if _, err := Run(t.Context(), []byte("\x00asm\x01\x00\x00\x00\x01")); !errdefs.IsInvalidArgument(err) {
		t.Errorf("a truncated module: %v; want ErrInvalidArgument", err)
	}
	const name = "tripod:grpc/descriptors@0.1.0#describe"
	for what, c := range map[string]struct {
		body string // of describe, without its end
		data string // at address 16
		want string
	}{
		"result out of bounds":   {"\x41\x70", "", "not a result"},     // i32.const -16
		"result not aligned":     {"\x41\x11", "", "not a result"},     // i32.const 17
		"unknown case":           {"\x41\x10", "\x02", "not a result"}, // i32.const 16
		"services out of bounds": {"\x41\x10", "\x00\x00\x00\x00\x00\x00\xff\x7f\x01\x00\x00\x00", "out of bounds"},
		"endless services":       {"\x41\x10", "\x00\x00\x00\x00\x00\x00\x00\x00\xff\xff\xff\x1f", "limit 1000"},
		"endless files":          {"\x41\x10", "\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\xff\xff\xff\xff", "limit"},
		"no services": {"\x41\x10", "\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00",
			"names no services"},
		"error out of bounds": {"\x41\x10", "\x01\x00\x00\x00\x00\x00\xff\x7f\x01\x00\x00\x00", "out of bounds"},
		"trap":                {"\x00", "", "unreachable"},
	} {
		section := func(id byte, content string) string { return string([]byte{id, byte(len(content))}) + content }
		code := "\x00" + c.body + "\x0b"
		data := "\x00\x41\x10\x0b" + string(rune(len(c.data))) + c.data
		module := "\x00asm\x01\x00\x00\x00" + section(1, "\x01\x60\x00\x01\x7f") + section(3, "\x01\x00") + section(5, "\x01\x00\x01") +
			section(7, "\x02\x06memory\x02\x00"+string(rune(len(name)))+name+"\x00\x00") + section(10, "\x01"+string(rune(len(code)))+code) +
			section(11, "\x01"+data)
		if _, err := Run(t.Context(), []byte(module)); !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v; want %q", what, err, c.want)
		}
	}
}
