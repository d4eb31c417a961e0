package linux

import (
	"fmt"
	"testing"
)

func TestGroupsOfNode(t *testing.T) {
	for value, want := range map[string]string{
		"0 2147483647": fmt.Sprintf("%d %d", firstID, firstID+65535), "5 7": fmt.Sprintf("%d %d", firstID+5, firstID+7),
		"1 0": fmt.Sprintf("%d %d", firstID+1, firstID), "70000 70001": "70000 70001", "all": "all",
	} {
		if got := groupsOfNode(value, testIDs().Groups); got != want {
			t.Errorf("groupsOfNode(%q) = %q, want %q", value, got, want)
		}
	}
}
