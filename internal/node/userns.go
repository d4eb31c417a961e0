package node

import (
	"fmt"
	"slices"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// assignIDs checks the range of a new pod's user namespace. If the request leaves the range to the node, assignIDs
// chooses a free one and adds it to the pod's configuration, and so to its record: a range is in use as long as the
// record exists. The caller holds the pool's lock. Errors: ErrInvalidArgument, ErrFailedPrecondition (another pod uses
// some of the IDs), ErrResourceExhausted.
func (n *Node) assignIDs(pod *Pod, c sandbox.Capabilities) error {
	options := pod.Config.GetLinux().GetSecurityContext().GetNamespaceOptions().GetUsernsOptions()
	wanted, err := sandbox.ParseIDMap(options)
	switch {
	case err != nil || !c.MapsIDs || !sandbox.WantsUserNamespace(options):
		return err
	case wanted != nil:
		return n.checkOverlap(pod, *wanted)
	}
	free, err := n.freeIDs()
	if err != nil {
		return err
	}
	pod.NodeIDs, pod.Config = true, proto.CloneOf(pod.Config)
	options = pod.Config.Linux.SecurityContext.NamespaceOptions.UsernsOptions
	options.Uids, options.Gids = free.Mappings()
	return nil
}

// checkOverlap refuses a range that another pod uses. A kubelet that replaces a pod's sandbox uses the pod's range
// again, so the pod's other sandboxes do not count, and neither do stopped pods.
func (n *Node) checkOverlap(pod *Pod, wanted sandbox.IDMap) error {
	for _, p := range n.pool.all() {
		other := p.rec.Load()
		used := other.sandboxPod().IDMap()
		if used == nil || !p.backend.Capabilities().MapsIDs || other.State == Killed || samePod(pod.Config, other.Config) {
			continue
		}
		if used.Overlaps(wanted) {
			return fmt.Errorf("linux.security_context.namespace_options.userns_options: pod %s uses some of these IDs: %w", p.id,
				errdefs.ErrFailedPrecondition)
		}
	}
	return nil
}

// samePod reports whether two sandboxes belong to one pod of Kubernetes.
func samePod(a, b *runtimeapi.PodSandboxConfig) bool {
	x, y := a.GetMetadata(), b.GetMetadata()
	return x.GetUid() == y.GetUid() && x.GetName() == y.GetName() && x.GetNamespace() == y.GetNamespace()
}

// freeIDs returns the lowest range of the node that no pod has, not even a stopped one.
func (n *Node) freeIDs() (sandbox.IDMap, error) {
	var used []sandbox.IDMap
	for _, p := range n.pool.all() {
		if m := p.rec.Load().sandboxPod().IDMap(); m != nil {
			used = append(used, *m)
		}
	}
	end := uint64(n.UserRange.First) + uint64(n.UserRange.Length)
	for first := uint64(n.UserRange.First); first+sandbox.IDMapLength <= end; first += sandbox.IDMapLength {
		r := sandbox.IDRange{First: uint32(first), Length: sandbox.IDMapLength}
		m := sandbox.IDMap{Users: r, Groups: r}
		if !slices.ContainsFunc(used, m.Overlaps) {
			return m, nil
		}
	}
	return sandbox.IDMap{},
		fmt.Errorf("no free range for a user namespace: %d pods have one (userns.range in the configuration): %w", len(used),
			errdefs.ErrResourceExhausted)
}

// withMappings returns the configuration of a container in which the pod's mappings are added to all mounts, if the
// node chose the pod's range: the caller could not know it.
func (p *Pod) withMappings(c *runtimeapi.ContainerConfig) *runtimeapi.ContainerConfig {
	m := p.sandboxPod().IDMap()
	if !p.NodeIDs || m == nil || len(c.GetMounts()) == 0 {
		return c
	}
	c = proto.CloneOf(c)
	for _, mount := range c.Mounts {
		if len(mount.UidMappings)+len(mount.GidMappings) == 0 {
			mount.UidMappings, mount.GidMappings = m.Mappings()
		}
	}
	return c
}
