package harness

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// Earlier builds the programs of an earlier commit, once, into build/previous, and returns the path of its tripod. The
// other programs are beside it.
func Earlier(t *testing.T, commit string) string {
	t.Helper()
	if os.Getenv("TRIPOD_TEST_FULL") == "" {
		t.Skip("building another commit takes minutes: make test-all does it (TRIPOD_TEST_FULL=1)")
	}
	if err := exec.Command("git", "-C", Root(), "cat-file", "-e", commit+"^{commit}").Run(); err != nil {
		t.Skipf("this repository does not have the commit %s: %v", commit, err)
	}
	bin := filepath.Join(Root(), "build", "previous", commit)
	if _, err := os.Stat(bin); err == nil {
		return filepath.Join(bin, "tripod")
	}
	source := filepath.Join(Dir(), "previous")
	t.Cleanup(func() { os.RemoveAll(source) })
	draft := bin + ".new"
	err := command("sh", "-c", "mkdir -p "+source+" && git archive "+commit+" | tar -x -C "+source)
	for _, program := range []string{"tripod", "tripod-wasm", "tripod-vmwrap", "tripod-agent"} {
		cgo := "CGO_ENABLED=0"
		if program == "tripod-wasm" {
			cgo = "CGO_ENABLED=1"
		}
		if err == nil {
			err = command("env", cgo, "go", "build", "-C", source, "-o", filepath.Join(draft, program), "./cmd/"+program)
		}
	}
	if err := errors.Join(err, os.RemoveAll(bin), os.Rename(draft, bin)); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(bin, "tripod")
}
