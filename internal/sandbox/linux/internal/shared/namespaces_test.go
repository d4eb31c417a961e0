package shared

import (
	"fmt"
	"testing"

	"github.com/tripod-run/tripod/internal/sandbox"
)

func TestGroupsOfNode(t *testing.T) {
	const firstID = 1 << 24
	for value, want := range map[string]string{
		"0 2147483647": fmt.Sprintf("%d %d", firstID, firstID+65535), "5 7": fmt.Sprintf("%d %d", firstID+5, firstID+7),
		"1 0": fmt.Sprintf("%d %d", firstID+1, firstID), "70000 70001": "70000 70001", "all": "all",
	} {
		if got := groupsOfNode(value, sandbox.IDRange{First: firstID, Length: sandbox.IDMapLength}); got != want {
			t.Errorf("groupsOfNode(%q) = %q, want %q", value, got, want)
		}
	}
}
