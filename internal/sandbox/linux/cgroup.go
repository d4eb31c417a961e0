package linux

import (
	"os"
	"path"
	"strings"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// cgroups is the host's tree with the names of pods and containers in it:
//
//	cgroupfs   <pod's>/tripod-<container>
//	systemd    <pod's slice>/tripod-<container>.scope
type cgroups struct{ cgroup.Tree }

func openCgroups(driver, parent string) (cgroups, error) {
	tree, err := cgroup.Open(driver, parent)
	return cgroups{tree}, err
}

// pod is the path of the pod's cgroup, below which its containers' are, and whether it is ours alone.
func (g cgroups) pod(p *sandbox.Pod) (string, bool) {
	return g.Pod(p.Config.GetLinux().GetCgroupParent(), p.ID)
}

// container is the container's cgroup as the OCI runtime is told it (cgroupsPath), and its path in the hierarchies.
func (g cgroups) container(p *sandbox.Pod, id string) (oci, dir string) {
	pod, _ := g.pod(p)
	if g.Driver == cgroup.DriverSystemd {
		return path.Base(pod) + ":" + strings.TrimSuffix(cgroup.Mark, "-") + ":" + id, path.Join(pod, cgroup.Mark+id+".scope")
	}
	dir = path.Join(pod, cgroup.Mark+id)
	return dir, dir
}

// limit makes the pod's own cgroup and sets what the pod as a whole may use, when the caller left the pod's cgroup to
// us. A caller that names a parent (the kubelet does) limits the pod there.
func (g cgroups) limit(p *sandbox.Pod) error {
	linux := p.Config.GetLinux()
	dir, ours := g.pod(p)
	if !ours || linux.GetCgroupParent() != "" || g.Driver == cgroup.DriverSystemd {
		return nil
	}
	return g.Apply(dir, g.Limits(linux.GetResources(), linux.GetOverhead()))
}

func exists(name string) bool {
	_, err := os.Lstat(name)
	return err == nil
}
