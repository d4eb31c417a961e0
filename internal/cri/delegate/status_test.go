package delegate

import (
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func usage(path string, bytes uint64) *runtimeapi.FilesystemUsage {
	return &runtimeapi.FilesystemUsage{
		Timestamp: 1, FsId: &runtimeapi.FilesystemIdentifier{Mountpoint: path},
		UsedBytes: &runtimeapi.UInt64Value{Value: bytes}, InodesUsed: &runtimeapi.UInt64Value{Value: 1},
	}
}

func TestJoinUsage(t *testing.T) {
	a, b := t.TempDir(), t.TempDir() // on one file system
	got := joinUsage([]*runtimeapi.FilesystemUsage{usage(a, 100), usage(b, 20), usage(a, 100), usage("/proc", 3),
		usage("/no/such/directory", 7)})
	want := []struct {
		path          string
		bytes, inodes uint64
	}{{a, 120, 2}, {"/proc", 3, 1}, {"/no/such/directory", 7, 1}}
	if len(got) != len(want) {
		t.Fatalf("got %v, want %d entries", got, len(want))
	}
	for i, w := range want {
		if g := got[i]; g.GetFsId().GetMountpoint() != w.path || g.GetUsedBytes().GetValue() != w.bytes ||
			g.GetInodesUsed().GetValue() != w.inodes {
			t.Errorf("entry %d: got %v, want %+v", i, g, w)
		}
	}
}

func TestJoinConditions(t *testing.T) {
	condition := func(name string, status bool) *runtimeapi.RuntimeCondition {
		return &runtimeapi.RuntimeCondition{Type: name, Status: status, Reason: "R", Message: "M"}
	}
	own := &runtimeapi.RuntimeStatus{Conditions: []*runtimeapi.RuntimeCondition{condition(runtimeapi.RuntimeReady, true),
		condition(runtimeapi.NetworkReady, false)}}
	theirs := &runtimeapi.RuntimeStatus{Conditions: []*runtimeapi.RuntimeCondition{
		condition(runtimeapi.RuntimeReady, false), condition(runtimeapi.NetworkReady, false),
		condition("ContainerdHasNoDeprecationWarnings", false),
	}}
	joinConditions(own, "c", theirs, nil)
	want := []string{
		"RuntimeReady false DelegateNotReady delegate c: R: M", "NetworkReady false R M",
		"DelegateReady/c false DelegateNotReady delegate c: R: M; delegate c: R: M",
	}
	if len(own.Conditions) != len(want) {
		t.Fatalf("got %v, want %v", own.Conditions, want)
	}
	for i, c := range own.Conditions {
		got := c.GetType() + " " + map[bool]string{true: "true", false: "false"}[c.GetStatus()] + " " + c.GetReason() + " " + c.GetMessage()
		if got != want[i] {
			t.Errorf("condition %d: got %q, want %q", i, got, want[i])
		}
	}
}
