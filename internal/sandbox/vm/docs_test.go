package vm

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
)

// TestHarmlessIsDocumented: docs/vm-fields.md ends with the table of fields that are accepted without effect.
func TestHarmlessIsDocumented(t *testing.T) {
	var table strings.Builder
	for _, field := range slices.Sorted(maps.Keys(Harmless)) {
		fmt.Fprintf(&table, "| %s | %s |\n", field, Harmless[field])
	}
	doc, err := os.ReadFile("../../../docs/vm-fields.md")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasSuffix(string(doc), table.String()) {
		t.Errorf("docs/vm-fields.md does not end with\n%s", table.String())
	}
}

// TestCheckNetwork: the test's host can connect a tap to a link.
func TestCheckNetwork(t *testing.T) {
	if f := checkNetwork(t.Context(), true); !f.OK {
		t.Errorf("%s: %s", f.Subject, f.Detail)
	}
}
