package linux

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/stats"
	"github.com/tripod-run/tripod/sandbox"
)

// The cgroup drivers, by their names in the kubelet's configuration.
const (
	driverCgroupfs = "cgroupfs"
	driverSystemd  = "systemd"
)

// cgroupMark begins the names of all cgroups of ours.
const cgroupMark = "tripod-"

// cgroups knows the host's hierarchies and how pods and containers are named in them:
//
//	cgroupfs   <parent>/tripod-<pod>/tripod-<container>      the pod's cgroup is ours
//	systemd    <parent slice>/tripod-<container>.scope       with a parent; the slice is the pod's
//	           tripod.slice/tripod-<pod>.slice/tripod-<container>.scope    without one
type cgroups struct {
	driver, parent string
	v2             bool
	// roots are the mount points of the hierarchies by name, which is that of their controllers; on v2 the one of "".
	roots map[string]string
}

func openCgroups(driver, parent string) (cgroups, error) {
	if driver != driverCgroupfs && driver != driverSystemd {
		return cgroups{}, fmt.Errorf("cgroup driver %q is neither cgroupfs nor systemd: %w", driver, errdefs.ErrInvalidArgument)
	}
	root, err := stats.Detect()
	if err != nil {
		return cgroups{}, err
	}
	g := cgroups{driver: driver, parent: parent, v2: root.V2, roots: map[string]string{}}
	if err := g.validParent(parent); err != nil {
		return cgroups{}, err
	}
	if g.v2 {
		g.roots[""] = root.Mount
		return g, nil
	}
	entries, err := os.ReadDir(root.Mount)
	if err != nil {
		return cgroups{}, err
	}
	for _, e := range entries {
		dir := filepath.Join(root.Mount, e.Name())
		if _, err := os.Stat(filepath.Join(dir, "tasks")); e.IsDir() && err == nil {
			g.roots[e.Name()] = dir
		}
	}
	return g, nil
}

// validParent refuses a cgroup parent of the wrong form for the driver.
func (g cgroups) validParent(parent string) error {
	ok := parent == "" || path.IsAbs(parent) && path.Clean(parent) == parent
	if g.driver == driverSystemd {
		ok = parent == "" || strings.HasSuffix(parent, ".slice") && !strings.Contains(path.Base(parent), "--")
	}
	if !ok {
		return fmt.Errorf("linux.cgroup_parent %q is not what the %s driver takes (an absolute path, or the name of a slice): %w",
			parent, g.driver, errdefs.ErrInvalidArgument)
	}
	return nil
}

// pod is the path of the pod's cgroup, below which its containers' are, and whether it is ours alone.
func (g cgroups) pod(p *sandbox.Pod) (string, bool) {
	parent := p.Config.GetLinux().GetCgroupParent()
	if g.driver == driverCgroupfs {
		if parent == "" {
			parent = g.parent
		}
		return path.Join(parent, cgroupMark+p.ID), true
	}
	if parent == "" {
		// A dash in the name of a slice nests: tripod-ID.slice lies in tripod.slice.
		return expandSlice(strings.TrimSuffix(path.Base(g.parent), ".slice") + "-" + p.ID + ".slice"), true
	}
	return expandSlice(path.Base(parent)), false
}

// container is the container's cgroup as the OCI runtime is told it (cgroupsPath), and its path in the hierarchies.
func (g cgroups) container(p *sandbox.Pod, id string) (oci, dir string) {
	pod, _ := g.pod(p)
	if g.driver == driverSystemd {
		return path.Base(pod) + ":" + strings.TrimSuffix(cgroupMark, "-") + ":" + id, path.Join(pod, cgroupMark+id+".scope")
	}
	dir = path.Join(pod, cgroupMark+id)
	return dir, dir
}

// expandSlice gives the path of a slice (systemd.slice(5)): a-b.slice lies in a.slice.
func expandSlice(name string) string {
	stem := strings.TrimSuffix(name, ".slice")
	if stem == "-" || stem == "" {
		return "/"
	}
	dir, prefix := "/", ""
	for part := range strings.SplitSeq(stem, "-") {
		prefix += part
		dir = path.Join(dir, prefix+".slice")
		prefix += "-"
	}
	return dir
}

// limit makes the pod's own cgroup and sets what the pod as a whole may use, when the caller left the pod's cgroup to
// us. A caller that names a parent (the kubelet does) limits the pod there.
func (g cgroups) limit(p *sandbox.Pod) error {
	linux := p.Config.GetLinux()
	dir, ours := g.pod(p)
	if !ours || linux.GetCgroupParent() != "" || g.driver == driverSystemd {
		return nil
	}
	for _, w := range g.limits(linux.GetResources(), linux.GetOverhead()) {
		full := filepath.Join(g.roots[g.hierarchy(w.controller)], dir)
		if err := g.make(w.controller, dir); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(full, w.file), []byte(w.value), 0o644); err != nil {
			return fmt.Errorf("limit the pod's %s: %w", w.controller, err)
		}
	}
	return nil
}

type cgroupWrite struct{ controller, file, value string }

// limits gives the files to write for a pod: the sum of its containers' resources and its overhead. What has no limit
// in the resources has none with an overhead either.
func (g cgroups) limits(res, over *runtimeapi.LinuxContainerResources) (w []cgroupWrite) {
	number := func(v int64) string { return strconv.FormatInt(v, 10) }
	if v := res.GetMemoryLimitInBytes(); v > 0 {
		file := "memory.limit_in_bytes"
		if g.v2 {
			file = "memory.max"
		}
		w = append(w, cgroupWrite{"memory", file, number(v + over.GetMemoryLimitInBytes())})
	}
	if v := res.GetCpuQuota(); v > 0 {
		period := res.GetCpuPeriod()
		if period <= 0 {
			period = 100_000
		}
		if over.GetCpuPeriod() == period {
			v += over.GetCpuQuota()
		}
		if g.v2 {
			w = append(w, cgroupWrite{"cpu", "cpu.max", number(v) + " " + number(period)})
		} else {
			w = append(w, cgroupWrite{"cpu", "cpu.cfs_period_us", number(period)}, cgroupWrite{"cpu", "cpu.cfs_quota_us", number(v)})
		}
	}
	if v := res.GetCpuShares(); v > 0 {
		v = min(max(v+over.GetCpuShares(), 2), 262144)
		if g.v2 {
			// The conversion of the OCI runtimes: [2, 262144] to [1, 10000].
			w = append(w, cgroupWrite{"cpu", "cpu.weight", number(1 + ((v-2)*9999)/262142)})
		} else {
			w = append(w, cgroupWrite{"cpu", "cpu.shares", number(v)})
		}
	}
	return w
}

// liftQuota removes the limit on CPU time of a cgroup that is there.
func (g cgroups) liftQuota(dir string) error {
	file, value := "cpu.cfs_quota_us", "-1"
	if g.v2 {
		file, value = "cpu.max", "max"
	}
	return os.WriteFile(filepath.Join(g.roots[g.hierarchy("cpu")], dir, file), []byte(value), 0o644)
}

// hierarchy is the key in roots of the hierarchy that has the controller. On v1 one may have several: cpu,cpuacct.
func (g cgroups) hierarchy(controller string) string {
	if g.v2 {
		return ""
	}
	for name := range g.roots {
		if slices.Contains(strings.Split(name, ","), controller) {
			return name
		}
	}
	return controller
}

// make makes a cgroup in the hierarchy of one controller, enabled all the way down on v2.
func (g cgroups) make(controller, dir string) error {
	root, ok := g.roots[g.hierarchy(controller)]
	if !ok {
		return fmt.Errorf("the host has no cgroup controller %q: %w", controller, errdefs.ErrNotImplemented)
	}
	if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
		return fmt.Errorf("make cgroup: %w", err)
	}
	if !g.v2 {
		return nil
	}
	at := root
	for part := range strings.SplitSeq(strings.Trim(dir, "/"), "/") {
		if err := os.WriteFile(filepath.Join(at, "cgroup.subtree_control"), []byte("+"+controller), 0o644); err != nil {
			return fmt.Errorf("enable controller %s: %w", controller, err)
		}
		at = filepath.Join(at, part)
	}
	return nil
}

// dirs gives the cgroup's directory in each hierarchy, whether it is there or not.
func (g cgroups) dirs(dir string) []string {
	dirs := make([]string, 0, len(g.roots))
	for _, root := range g.roots {
		dirs = append(dirs, filepath.Join(root, dir))
	}
	return dirs
}

// remove removes a cgroup and the empty ones below it in all hierarchies. What is not there is fine. The kernel lets
// go of a cgroup a moment after its last process was reaped, so a busy one is tried again until ctx ends.
func (g cgroups) remove(ctx context.Context, dir string) error {
	if dir == "" || dir == "/" || !strings.HasPrefix(path.Base(dir), cgroupMark) {
		return nil // not ours
	}
	var errs []error
	for _, full := range g.dirs(dir) {
		errs = append(errs, removeCgroup(ctx, full))
	}
	return errors.Join(errs...)
}

func removeCgroup(ctx context.Context, full string) error {
	for {
		err := unix.Rmdir(full)
		switch {
		case err == nil, errors.Is(err, unix.ENOENT):
			return nil
		case !errors.Is(err, unix.EBUSY):
			return fmt.Errorf("remove cgroup %s: %w", full, err)
		}
		entries, readErr := os.ReadDir(full)
		if readErr != nil && !errors.Is(readErr, fs.ErrNotExist) {
			return readErr
		}
		below := false
		for _, e := range entries {
			if e.IsDir() {
				below = true
				if err := removeCgroup(ctx, filepath.Join(full, e.Name())); err != nil {
					return err
				}
			}
		}
		if below {
			continue
		}
		// There is no event for "may be removed now" on v1; the wait is for the kernel's own clean-up.
		select {
		case <-ctx.Done():
			return fmt.Errorf("remove cgroup %s: %w (processes: %v)", full, err, procsIn(full))
		case <-time.After(2 * time.Millisecond):
		}
	}
}

// kill ends every process of a cgroup and returns when there is none left that runs.
func (g cgroups) kill(ctx context.Context, dir string) error {
	if g.v2 {
		full := filepath.Join(g.roots[""], dir)
		err := os.WriteFile(filepath.Join(full, "cgroup.kill"), []byte("1"), 0)
		if err == nil || errors.Is(err, fs.ErrNotExist) && !exists(full) {
			return nil
		}
	}
	return g.killFrozen(ctx, dir)
}

// killFrozen is kill for kernels without cgroup.kill: nothing can fork, or end and lend its PID to another process,
// while the cgroup is frozen.
func (g cgroups) killFrozen(ctx context.Context, dir string) error {
	freezer, file, on, off := g.roots["freezer"], "freezer.state", "FROZEN", "THAWED"
	if g.v2 {
		freezer, file, on, off = g.roots[""], "cgroup.freeze", "1", "0"
	}
	full := filepath.Join(freezer, dir)
	if freezer == "" {
		full = filepath.Join(g.roots["pids"], dir)
	}
	for {
		_ = os.WriteFile(filepath.Join(full, file), []byte(on), 0)
		pids := procsIn(full)
		for _, pid := range pids {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		_ = os.WriteFile(filepath.Join(full, file), []byte(off), 0)
		if len(pids) == 0 {
			return nil
		}
		// Frozen processes take the signal when they thaw, so the loop ends after a round or two.
		for _, pid := range pids {
			if p, err := process.Open(pid); err == nil {
				err = p.Wait(ctx)
				p.Close()
				if err != nil {
					return err
				}
			}
		}
	}
}

// procsIn lists the processes of one cgroup directory and of those below it.
func procsIn(full string) (pids []int) {
	_ = filepath.WalkDir(full, func(name string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return nil
		}
		raw, _ := os.ReadFile(filepath.Join(name, "cgroup.procs"))
		for field := range strings.FieldsSeq(string(raw)) {
			if pid, err := strconv.Atoi(field); err == nil && pid > 0 {
				pids = append(pids, pid)
			}
		}
		return nil
	})
	return pids
}

// marked lists the IDs of pods and containers that have a cgroup of ours directly below the default parent.
func (g cgroups) marked() (ids []string) {
	seen := map[string]bool{}
	parent := g.parent
	if g.driver == driverSystemd {
		parent = expandSlice(path.Base(g.parent))
	}
	for _, full := range g.dirs(parent) {
		entries, _ := os.ReadDir(full)
		for _, e := range entries {
			id := strings.TrimSuffix(strings.TrimPrefix(e.Name(), cgroupMark), ".slice")
			if idPattern.MatchString(id) && strings.HasPrefix(e.Name(), cgroupMark) && !seen[id] {
				seen[id] = true
				ids = append(ids, id)
			}
		}
	}
	return ids
}

func exists(name string) bool {
	_, err := os.Lstat(name)
	return err == nil
}
