//go:build !wasip1

package tripodgrpc_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"testing"
)

// TestHostCallsDoNotAllocate checks that no variable is allocated on the heap in the functions that call the host while
// other goroutines must not run: those that have checked that the call is open, or have prepared a buffer for the host.
func TestHostCallsDoNotAllocate(t *testing.T) {
	c := exec.CommandContext(t.Context(), "go", "build", "-gcflags=-m", ".")
	c.Env = append(os.Environ(), "GOOS=wasip1", "GOARCH=wasm", "CGO_ENABLED=0")
	out, err := c.CombinedOutput()
	if err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	allocated := regexp.MustCompile(`(?m)^\./(\w+\.go):(\d+):\d+: moved to heap: (\w+)$`).FindAllStringSubmatch(string(out), -1)
	if len(allocated) == 0 {
		t.Fatalf("the compiler reports no variables on the heap:\n%s", out)
	}
	for file, functions := range map[string][]string{
		"raw_wasip1.go":    {"look", "take", "gone"},
		"client_wasip1.go": {"look", "take", "trySend", "finish", "close"},
	} {
		positions := token.NewFileSet()
		parsed, err := parser.ParseFile(positions, file, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		found := 0
		for _, d := range parsed.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok || !slices.Contains(functions, f.Name.Name) {
				continue
			}
			found++
			first, last := positions.Position(f.Pos()).Line, positions.Position(f.End()).Line
			for _, a := range allocated {
				if line, _ := strconv.Atoi(a[2]); a[1] == file && line >= first && line <= last {
					t.Errorf("%s:%d: %s allocates %s, so other goroutines can run before the host call", file, line, f.Name.Name, a[3])
				}
			}
		}
		if found != len(functions) {
			t.Errorf("%s has %d of the functions %q", file, found, functions)
		}
	}
}
