package sandbox

import (
	"fmt"
	"math"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// IDMapLength is the number of IDs that every user namespace must have. Images use IDs up to 65535.
const IDMapLength = 1 << 16

// IDMap says which of the node's users and groups are a pod's users and groups, from 0 upwards.
type IDMap struct{ Users, Groups IDRange }

// IDRange is the range of the node's IDs from First to First+Length-1.
type IDRange struct{ First, Length uint32 }

// Overlaps reports whether the ranges have an ID in common.
func (r IDRange) Overlaps(o IDRange) bool {
	return uint64(r.First) < uint64(o.First)+uint64(o.Length) && uint64(o.First) < uint64(r.First)+uint64(r.Length)
}

// Overlaps reports whether the maps have a user or a group of the node in common.
func (m IDMap) Overlaps(o IDMap) bool {
	return m.Users.Overlaps(o.Users) || m.Groups.Overlaps(o.Groups)
}

// WantsUserNamespace reports whether a request asks for a user namespace of the pod. Kubelets that know no user
// namespaces send no options.
func WantsUserNamespace(u *runtimeapi.UserNamespace) bool {
	return u != nil && u.GetMode() != runtimeapi.NamespaceMode_NODE
}

// ParseIDMap returns the map of a request for a user namespace. It returns nil if the request asks for none, or leaves
// the choice of the range to the node. The error is errdefs.ErrInvalidArgument.
func ParseIDMap(u *runtimeapi.UserNamespace) (*IDMap, error) {
	const field = "linux.security_context.namespace_options.userns_options"
	switch mappings := len(u.GetUids()) + len(u.GetGids()); {
	case u == nil:
		return nil, nil
	case u.GetMode() != runtimeapi.NamespaceMode_POD && u.GetMode() != runtimeapi.NamespaceMode_NODE:
		return nil, fmt.Errorf("%s.mode: %s is not one of POD, NODE: %w", field, u.GetMode(), errdefs.ErrInvalidArgument)
	case mappings == 0:
		return nil, nil
	case u.GetMode() == runtimeapi.NamespaceMode_NODE:
		return nil, fmt.Errorf("%s: mappings need mode POD: %w", field, errdefs.ErrInvalidArgument)
	}
	users, err := parseIDRange(u.GetUids())
	if err != nil {
		return nil, fmt.Errorf("%s.uids: %w: %w", field, err, errdefs.ErrInvalidArgument)
	}
	groups, err := parseIDRange(u.GetGids())
	if err != nil {
		return nil, fmt.Errorf("%s.gids: %w: %w", field, err, errdefs.ErrInvalidArgument)
	}
	return &IDMap{users, groups}, nil
}

func parseIDRange(mappings []*runtimeapi.IDMapping) (IDRange, error) {
	if len(mappings) != 1 {
		return IDRange{}, fmt.Errorf("%d mappings, but a user namespace has exactly one", len(mappings))
	}
	r, id := IDRange{mappings[0].GetHostId(), mappings[0].GetLength()}, mappings[0].GetContainerId()
	switch {
	case id != 0:
		return r, fmt.Errorf("the mapping begins with container ID %d, but ID 0 must be mapped", id)
	case r.Length < IDMapLength:
		return r, fmt.Errorf("the mapping has %d IDs, but images need %d", r.Length, IDMapLength)
	case r.First == 0:
		return r, fmt.Errorf("the mapping includes the node's ID 0")
	case uint64(r.First)+uint64(r.Length) > math.MaxUint32:
		return r, fmt.Errorf("the mapping ends beyond the last ID, %d", uint32(math.MaxUint32)-1)
	}
	return r, nil
}

// IDMap returns the map of the pod's user namespace; nil if the pod has none. The configuration is known to be valid.
func (p *Pod) IDMap() *IDMap {
	m, _ := ParseIDMap(p.Config.GetLinux().GetSecurityContext().GetNamespaceOptions().GetUsernsOptions())
	return m
}

// Mappings returns the ranges in the CRI's form.
func (m IDMap) Mappings() (uids, gids []*runtimeapi.IDMapping) {
	return m.Users.mapping(), m.Groups.mapping()
}

func (r IDRange) mapping() []*runtimeapi.IDMapping {
	return []*runtimeapi.IDMapping{{HostId: r.First, Length: r.Length}}
}

// SameMappings reports whether a mount's mappings are those of the map.
func (m IDMap) SameMappings(uids, gids []*runtimeapi.IDMapping) bool {
	wantUIDs, wantGIDs := m.Mappings()
	return len(uids) == 1 && len(gids) == 1 && proto.Equal(uids[0], wantUIDs[0]) && proto.Equal(gids[0], wantGIDs[0])
}
