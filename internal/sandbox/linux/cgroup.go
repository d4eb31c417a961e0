package linux

import (
	"maps"
	"os"
	"path"
	"strings"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// cgroups names the cgroups of pods and containers in the host's tree:
//
//	cgroupfs   <pod's cgroup>/tripod-<container>
//	systemd    <pod's slice>/tripod-<container>.scope
type cgroups struct{ cgroup.Tree }

func openCgroups(driver, parent string) (cgroups, error) {
	tree, err := cgroup.Open(driver, parent)
	return cgroups{tree}, err
}

// pod returns the path of the pod's cgroup, which is the parent of its containers' cgroups. The second result reports
// whether Tripod creates and removes that cgroup.
func (g cgroups) pod(p *sandbox.Pod) (string, bool) {
	return g.Pod(p.Config.GetLinux().GetCgroupParent(), p.ID)
}

// container returns the container's cgroup in the OCI runtime's notation (cgroupsPath) and its path in the hierarchies.
func (g cgroups) container(p *sandbox.Pod, id string) (oci, dir string) {
	pod, _ := g.pod(p)
	if g.Driver == cgroup.DriverSystemd {
		return path.Base(pod) + ":" + strings.TrimSuffix(cgroup.Mark, "-") + ":" + id, path.Join(pod, cgroup.Mark+id+".scope")
	}
	dir = path.Join(pod, cgroup.Mark+id)
	return dir, dir
}

// limit sets the limits of the whole pod on the pod's own cgroup, which it creates if necessary. It does nothing with
// the systemd driver, or if the request names a parent cgroup: a caller that names a parent, such as the kubelet, sets
// the limits on that parent.
func (g cgroups) limit(p *sandbox.Pod) error {
	linux := p.Config.GetLinux()
	dir, ours := g.pod(p)
	if !ours || linux.GetCgroupParent() != "" || g.Driver == cgroup.DriverSystemd {
		return nil
	}
	return g.Apply(dir, g.Limits(linux.GetResources(), linux.GetOverhead()))
}

// withoutCPU leaves out the v1 hierarchy that divides CPU time.
func (g cgroups) withoutCPU() cgroups {
	if !g.V2 {
		g.Roots = maps.Clone(g.Roots)
		delete(g.Roots, g.Hierarchy("cpu"))
	}
	return g
}

func exists(name string) bool {
	_, err := os.Lstat(name)
	return err == nil
}
