package node_test

import (
	"strings"
	"testing"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/guard"
)

// TestN12PanicAtEveryFailPoint panics once at each fail point of the lifecycle. The process survives, the panic is
// counted, the node removes its pods, and the same calls then succeed.
func TestN12PanicAtEveryFailPoint(t *testing.T) {
	failpoint.Needed(t)
	for _, point := range failpoint.Names() {
		if !strings.HasPrefix(point, "node.") && !strings.HasPrefix(point, "fake.") {
			continue
		}
		t.Run(point, func(t *testing.T) {
			dir := t.TempDir()
			before := guard.Total()
			must(t, failpoint.Arm(point, "1*panic"))
			t.Cleanup(func() { _ = failpoint.Arm(point, "") })
			if err := crashScript(t.Context(), dir); err != nil && !strings.Contains(err.Error(), "a defect of tripod") {
				t.Errorf("the script: got error %v, want one about a defect", err)
			}
			if n := guard.Total() - before; n != 1 {
				t.Fatalf("got %d panics, want 1", n)
			}
			b := open(t, dir)
			for _, p := range b.Pods() {
				must(t, b.RemoveSandbox(t.Context(), p.ID))
			}
			b.close()
			if err := crashScript(t.Context(), dir); err != nil {
				t.Errorf("the script after the panic: %v", err)
			}
		})
	}
}
