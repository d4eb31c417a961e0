package vm

import (
	"testing"
)

// TestCheckNetwork: the test's host can connect a tap to a link.
func TestCheckNetwork(t *testing.T) {
	if f := checkNetwork(t.Context(), true); !f.OK {
		t.Errorf("%s: %s", f.Subject, f.Detail)
	}
}
