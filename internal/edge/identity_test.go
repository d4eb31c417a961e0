package edge

import (
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/tripod-run/tripod/internal/config"
)

func TestIdentityIsMadeOnceAndKept(t *testing.T) {
	file := filepath.Join(t.TempDir(), "identity.json")
	c := config.Default().Edge
	c.Runtimes = []config.EdgeRuntime{{Name: "min"}, {Name: "named", UUID: "11111111-0000-4000-8000-000000000001"}}
	first, err := identify(file, c)
	if err != nil {
		t.Fatal(err)
	}
	if first.Manager == "" || first.Runtimes["wasm"] == "" || first.Runtimes["min"] == "" || first.Runtimes["wasm"] == first.Runtimes["min"] {
		t.Errorf("made %+v", first)
	}
	if got := first.Runtimes["named"]; got != c.Runtimes[1].UUID {
		t.Errorf("the configured uuid became %q", got)
	}
	again, err := identify(file, c)
	if err != nil || !reflect.DeepEqual(first, again) {
		t.Errorf("the second time %+v, %v, want %+v", again, err, first)
	}
	c.Runtimes = append(c.Runtimes, config.EdgeRuntime{Name: "new"})
	c.UUID = "22222222-0000-4000-8000-000000000001"
	third, err := identify(file, c)
	if err != nil || third.Manager != c.UUID || third.Runtimes["new"] == "" || third.Runtimes["wasm"] != first.Runtimes["wasm"] {
		t.Errorf("with another runtime %+v, %v", third, err)
	}
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(file), ".*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestDamagedIdentityIsRefused(t *testing.T) {
	file := filepath.Join(t.TempDir(), "identity.json")
	if err := os.WriteFile(file, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := identify(file, config.Default().Edge); err == nil {
		t.Error("a new identity would make an orchestrator take the node for another")
	}
}
