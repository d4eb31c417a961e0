package node_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/node"
	"github.com/tripod-run/tripod/test/fake"
)

// TestMissingHandler: a node can do without its default handler. Pods of that handler are refused, with the reason.
func TestMissingHandler(t *testing.T) {
	dir := t.TempDir()
	before := open(t, dir)
	old, err := before.RunSandbox(t.Context(), podConfig("old"), "linux")
	must(t, err)
	before.close()
	b, err := openConfig(dir, func(c *node.Config, _ map[string]*fake.Backend) {
		delete(c.Backends, "linux")
		c.Missing = map[string]error{"linux": errors.New("no OCI runtime"), "runc": errors.New("no OCI runtime")}
	})
	must(t, err)
	t.Cleanup(b.close)
	for _, handler := range []string{"", "linux", "runc"} {
		if _, err := b.RunSandbox(t.Context(), podConfig("new"), handler); !errdefs.IsFailedPrecondition(err) ||
			!strings.Contains(err.Error(), "no OCI runtime") {
			t.Errorf("RunSandbox with the handler %q: got error %v, want failed precondition and the reason", handler, err)
		}
	}
	if _, err := b.RunSandbox(t.Context(), podConfig("new"), "nothing"); !errdefs.IsInvalidArgument(err) {
		t.Errorf("RunSandbox with an unknown handler: got error %v, want invalid argument", err)
	}
	if err := b.StopSandbox(t.Context(), old); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "no OCI runtime") {
		t.Errorf("StopSandbox of a pod of the missing handler: got error %v, want unavailable and the reason", err)
	}
	if _, err := b.RunSandbox(t.Context(), podConfig("component"), "wasm"); err != nil {
		t.Errorf("RunSandbox with the handler wasm: got error %v, want nil", err)
	}
	for _, h := range b.Handlers() {
		if h.Name == "linux" || h.Default {
			t.Errorf("Handlers: got %+v, want neither the missing handler nor a default", h)
		}
	}
}
