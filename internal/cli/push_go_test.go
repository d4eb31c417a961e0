package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
)

// TestPushGo: a directory with a gRPC server in Go becomes an image with the descriptors that the program has linked in.
// The same sources make the same image.
func TestPushGo(t *testing.T) {
	args := []string{examples + "greeter-go", "registry.example/greeter:1", "--dry-run", "-o", "json"}
	first, err := pushTo(t, args...)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"world": "grpc-raw"`, `"greet.v1.Greeter"`, "protobuf.descriptorset"} {
		if !strings.Contains(first, want) {
			t.Errorf("output %s; want %s in it", first, want)
		}
	}
	if again, err := pushTo(t, append(args, "--service", "greet.v1.Greeter")...); err != nil || again != first {
		t.Errorf("second build, with its only service by name: %s, %v; want the same image", again, err)
	}
	_, err = pushTo(t, append(args, "--service", "greet.v1.Other")...)
	if want := "the program does not serve greet.v1.Other; it serves greet.v1.Greeter"; !errdefs.IsInvalidArgument(err) ||
		!strings.Contains(err.Error(), want) {
		t.Errorf("push with another service: %v; want ErrInvalidArgument with %q", err, want)
	}
}

// TestPushGoRefused: what cannot be served is refused before the push, with the reason.
func TestPushGoRefused(t *testing.T) {
	library, broken, empty := t.TempDir(), t.TempDir(), t.TempDir()
	for file, text := range map[string]string{
		library + "/go.mod": "module example.com/x\n\ngo 1.26\n", library + "/x.go": "package x\n",
		broken + "/go.mod": "module example.com/x\n\ngo 1.26\n", broken + "/main.go": "package main\n\nfunc main() { missing() }\n",
	} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	refused := func(path, want string, more ...string) {
		t.Helper()
		_, err := pushTo(t, append([]string{path, "registry.example/x:1", "--dry-run"}, more...)...)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("push of %s: error %v; want %q", path, err, want)
		}
	}
	refused(library, "the package is x, not main")
	refused(broken, "undefined: missing")
	refused(empty, "go list in "+empty)
	refused(filepath.Join(examples, "command-go"), "does not import github.com/tripod-run/tripod/sdk/go")
	refused(filepath.Join(examples, "raw-c/raw-c.wasm"), "use --proto or --descriptors")
	t.Setenv("PATH", empty)
	_, err := pushTo(t, library, "registry.example/x:1", "--dry-run")
	if !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "Go toolchain (go) in PATH") {
		t.Errorf("push without Go: %v; want ErrUnavailable", err)
	}
}
