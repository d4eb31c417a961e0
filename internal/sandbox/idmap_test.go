package sandbox

import (
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestParseIDMap(t *testing.T) {
	one := func(container, host, length uint32) []*runtimeapi.IDMapping {
		return []*runtimeapi.IDMapping{{ContainerId: container, HostId: host, Length: length}}
	}
	good := one(0, 1<<16, IDMapLength)
	for name, c := range map[string]struct {
		options *runtimeapi.UserNamespace
		refused string // part of the error
		mapped  bool
	}{
		"no options":         {nil, "", false},
		"the node's":         {&runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_NODE}, "", false},
		"the node's, mapped": {&runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_NODE, Uids: good, Gids: good}, "mode POD", false},
		"any":                {&runtimeapi.UserNamespace{}, "", false},
		"one":                {&runtimeapi.UserNamespace{Uids: good, Gids: good}, "", true},
		"other groups":       {&runtimeapi.UserNamespace{Uids: good, Gids: one(0, 1<<20, IDMapLength)}, "", true},
		"two":                {&runtimeapi.UserNamespace{Uids: append(one(0, 1<<17, IDMapLength), good...), Gids: good}, "exactly one", false},
		"no groups":          {&runtimeapi.UserNamespace{Uids: good}, "gids", false},
		"ID 0 not mapped":    {&runtimeapi.UserNamespace{Uids: one(1, 1<<16, IDMapLength), Gids: good}, "ID 0", false},
		"too few":            {&runtimeapi.UserNamespace{Uids: one(0, 1<<16, 1000), Gids: good}, "1000 IDs", false},
		"the node's root":    {&runtimeapi.UserNamespace{Uids: good, Gids: one(0, 0, IDMapLength)}, "node's ID 0", false},
		"past the end":       {&runtimeapi.UserNamespace{Uids: one(0, 1<<32-1<<16, IDMapLength), Gids: good}, "beyond", false},
		"CONTAINER":          {&runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_CONTAINER, Uids: good, Gids: good}, "CONTAINER", false},
		"TARGET":             {&runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_TARGET}, "TARGET", false},
	} {
		m, err := ParseIDMap(c.options)
		if (err != nil) != (c.refused != "") || err != nil && (!errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), c.refused)) {
			t.Errorf("%s: error = %v, want %q", name, err, c.refused)
		}
		if (m != nil) != c.mapped {
			t.Errorf("%s: map = %v", name, m)
		}
	}
}

func TestIDRangesOverlap(t *testing.T) {
	a := IDRange{First: 100, Length: 10}
	for b, want := range map[IDRange]bool{
		{First: 90, Length: 10}: false, {First: 110, Length: 1}: false, {First: 91, Length: 10}: true, {First: 109, Length: 5}: true,
		{First: 102, Length: 1}: true, {First: 0, Length: 1<<32 - 1}: true,
	} {
		if a.Overlaps(b) != want || b.Overlaps(a) != want {
			t.Errorf("%v and %v overlap: %t, want %t", a, b, !want, want)
		}
	}
}
