package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	cgroups "github.com/containerd/cgroups/v3"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/lazyregexp"
	"github.com/tripod-run/tripod/internal/process"
)

// The cgroup drivers, by their names in the kubelet's configuration.
const (
	DriverCgroupfs = "cgroupfs"
	DriverSystemd  = "systemd"
)

// Mark is the prefix of the names of our cgroups.
const Mark = "tripod-"

// ID matches the part after Mark in the names of pods' and containers' cgroups.
var ID = lazyregexp.New(`^[0-9a-f]{64}$`)

// Tree describes the host's cgroup hierarchies. Paths of cgroups are relative to the roots of the hierarchies.
type Tree struct {
	// Driver is DriverCgroupfs or DriverSystemd. Parent is the path or slice for pods that name no parent.
	Driver, Parent string
	V2             bool
	// Roots maps the hierarchies to their mount points. The key is the list of a v1 hierarchy's controllers, such as
	// "cpu,cpuacct", or "" on v2.
	Roots map[string]string
	// Beside is the directory of a v2 hierarchy beside those of v1, or empty. crun makes a cgroup there for each container and
	// leaves it.
	Beside string
}

// Mount is the mount point of the cgroup file system on every distribution.
const Mount = "/sys/fs/cgroup"

// IsV2 reports whether this host has only cgroup v2. Without a cgroup file system, it returns errdefs.ErrUnavailable.
func IsV2() (bool, error) {
	mode := cgroups.Mode()
	if mode == cgroups.Unavailable {
		return false, fmt.Errorf("no cgroup file system at %s: mount it: %w", Mount, errdefs.ErrUnavailable)
	}
	return mode == cgroups.Unified, nil
}

// Open finds the hierarchies of this host. The given parent is for pods that name no parent.
func Open(driver, parent string) (Tree, error) {
	if driver != DriverCgroupfs && driver != DriverSystemd {
		return Tree{}, fmt.Errorf("cgroup driver %q is neither cgroupfs nor systemd: %w", driver, errdefs.ErrInvalidArgument)
	}
	v2, err := IsV2()
	if err != nil {
		return Tree{}, err
	}
	g := Tree{Driver: driver, Parent: parent, V2: v2, Roots: map[string]string{}}
	if err := g.ValidParent(parent); err != nil {
		return Tree{}, err
	}
	if g.V2 {
		g.Roots[""] = Mount
		return g, nil
	}
	entries, err := os.ReadDir(Mount)
	if err != nil {
		return Tree{}, err
	}
	if beside := filepath.Join(Mount, "unified"); exists(beside) {
		g.Beside = beside
	}
	for _, e := range entries {
		dir := filepath.Join(Mount, e.Name())
		if _, err := os.Stat(filepath.Join(dir, "tasks")); e.IsDir() && err == nil {
			g.Roots[e.Name()] = dir
		}
	}
	return g, nil
}

// ValidParent returns errdefs.ErrInvalidArgument if the form of a cgroup parent is wrong for the driver.
func (g Tree) ValidParent(parent string) error {
	ok := parent == "" || path.IsAbs(parent) && path.Clean(parent) == parent
	if g.Driver == DriverSystemd {
		ok = parent == "" || strings.HasSuffix(parent, ".slice") && !strings.Contains(path.Base(parent), "--")
	}
	if !ok {
		return fmt.Errorf("linux.cgroup_parent %q is invalid for the %s driver (cgroupfs needs an absolute path, systemd the name of a slice): %w",
			parent, g.Driver, errdefs.ErrInvalidArgument)
	}
	return nil
}

// Pod returns the path of a pod's cgroup, and whether the cgroup is ours to create and remove. The given parent comes
// from the pod's configuration and can be empty:
//
//	cgroupfs   <parent>/tripod-<key>                 ours
//	systemd    <parent>                              with a parent, which is the pod's own slice: not ours
//	           tripod.slice/tripod-<key>.slice       without a parent: ours
func (g Tree) Pod(parent, key string) (string, bool) {
	if g.Driver == DriverCgroupfs {
		if parent == "" {
			parent = g.Parent
		}
		return path.Join(parent, Mark+key), true
	}
	if parent == "" {
		// A dash in the name of a slice means nesting: tripod-KEY.slice is a child of tripod.slice.
		return ExpandSlice(strings.TrimSuffix(path.Base(g.Parent), ".slice") + "-" + key + ".slice"), true
	}
	return ExpandSlice(path.Base(parent)), false
}

// ExpandSlice returns the path of a slice (systemd.slice(5)): /a.slice/a-b.slice for a-b.slice.
func ExpandSlice(name string) string {
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

// Hierarchy returns the key, in Roots, of the hierarchy that has the controller.
func (g Tree) Hierarchy(controller string) string {
	if g.V2 {
		return ""
	}
	for name := range g.Roots {
		if slices.Contains(strings.Split(name, ","), controller) {
			return name
		}
	}
	return controller
}

// Apply sets limits on a cgroup. It creates the cgroup in the hierarchies that the limits need. It can also change the
// limits of a cgroup with processes. If the kernel cannot take a memory limit because the processes use more, the error
// is errdefs.ErrFailedPrecondition.
//
// With the systemd driver, the limits are properties of the cgroup's unit.
func (g Tree) Apply(dir string, writes []Write) error {
	if g.isUnit(dir) {
		return units.limit(filepath.Join(g.Roots[""], dir), writes)
	}
	var refused []Write
	for _, w := range writes {
		err := g.write(dir, w)
		if errors.Is(err, unix.EINVAL) {
			// The kernel checks a v1 file against the present values of the others: a shorter period needs the smaller
			// quota first. So repeat the write after the others.
			refused = append(refused, w)
			continue
		}
		if err != nil {
			return err
		}
	}
	for _, w := range refused {
		if err := g.write(dir, w); err != nil {
			return err
		}
	}
	return nil
}

func (g Tree) write(dir string, w Write) error {
	if err := g.Make(w.Controller, dir); err != nil {
		return err
	}
	err := os.WriteFile(filepath.Join(g.Roots[g.Hierarchy(w.Controller)], dir, w.File), []byte(w.Value), 0o644)
	switch {
	case err == nil:
		return nil
	case w.Lifts && errors.Is(err, fs.ErrPermission): // nobody can create a file in a cgroup, so the kernel lacks this one
		return nil
	case errors.Is(err, unix.EBUSY):
		return fmt.Errorf("limit %s to %s: its processes use more: %w: %w", w.Controller, w.Value, err, errdefs.ErrFailedPrecondition)
	}
	return fmt.Errorf("limit %s: %w", w.Controller, err)
}

// Create creates a cgroup in every hierarchy, ready for processes.
func (g Tree) Create(dir string) error {
	if g.isUnit(dir) {
		unit := path.Base(dir)
		return units.hold(context.Background(), unit, path.Base(path.Dir(dir)),
			"Tripod "+strings.TrimPrefix(strings.TrimSuffix(unit, ".service"), Mark))
	}
	for controller, root := range g.Roots {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			return fmt.Errorf("make cgroup: %w", err)
		}
		if controller == "cpuset" {
			inheritCPUSet(root, dir)
		}
	}
	return nil
}

// Make creates a cgroup in the hierarchy of one controller. On v2, it enables the controller from the root down.
func (g Tree) Make(controller, dir string) error {
	root, ok := g.Roots[g.Hierarchy(controller)]
	if !ok {
		return fmt.Errorf("the host has no cgroup controller %q: %w", controller, errdefs.ErrNotImplemented)
	}
	if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
		return fmt.Errorf("make cgroup: %w", err)
	}
	if !g.V2 {
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

// Dirs returns the paths of the cgroup's directories, one for each hierarchy, even if they do not exist.
func (g Tree) Dirs(dir string) []string {
	dirs := make([]string, 0, len(g.Roots))
	for _, root := range g.Roots {
		dirs = append(dirs, filepath.Join(root, dir))
	}
	return dirs
}

// left returns the directories of a cgroup that can be left when its processes have ended.
func (g Tree) left(dir string) []string {
	dirs := g.Dirs(dir)
	if g.Beside != "" {
		dirs = append(dirs, filepath.Join(g.Beside, dir))
	}
	return dirs
}

// Remove removes one of our cgroups and the cgroups below it, which must have no processes. A missing cgroup is not an
// error. The kernel releases a cgroup a moment after its last process was reaped, so Remove retries a busy cgroup until
// ctx ends.
func (g Tree) Remove(ctx context.Context, dir string) error {
	if !g.named(dir) {
		return nil // not ours
	}
	if g.isUnit(dir) {
		if err := units.stop(ctx, path.Base(dir)); err != nil {
			return err
		}
	}
	var errs []error
	for _, full := range g.left(dir) {
		errs = append(errs, removeCgroup(ctx, full))
	}
	return errors.Join(errs...)
}

// named reports whether the name of a cgroup is one that we give: it has Mark, or is that of a pod's slice below the default parent.
func (g Tree) named(dir string) bool {
	name := path.Base(dir)
	return strings.HasPrefix(name, Mark) ||
		g.isUnit(dir) && path.Ext(name) == ".slice" && strings.HasPrefix(name, strings.TrimSuffix(path.Base(g.Parent), ".slice")+"-")
}

func removeCgroup(ctx context.Context, full string) error {
	for {
		err := unix.Rmdir(full)
		switch {
		case err == nil, errors.Is(err, unix.ENOENT):
			return nil
		case errors.Is(err, unix.ENOTEMPTY): // Beside is an ordinary directory, in which crun has made files
			return os.RemoveAll(full)
		case !errors.Is(err, unix.EBUSY):
			return fmt.Errorf("remove cgroup %s: %w", full, err)
		}
		entries, readErr := os.ReadDir(full)
		if readErr != nil && !errors.Is(readErr, fs.ErrNotExist) {
			return readErr
		}
		hasChildren := false
		for _, e := range entries {
			if e.IsDir() {
				hasChildren = true
				if err := removeCgroup(ctx, filepath.Join(full, e.Name())); err != nil {
					return err
				}
			}
		}
		if hasChildren {
			continue
		}
		// Poll, because on v1 no event shows that the kernel has cleaned up.
		select {
		case <-ctx.Done():
			return fmt.Errorf("remove cgroup %s: %w (processes: %v)", full, err, Procs(full))
		case <-time.After(2 * time.Millisecond):
		}
	}
}

// Kill kills every process in a cgroup and in the cgroups below it.
func (g Tree) Kill(ctx context.Context, dir string) error {
	if g.V2 {
		full := filepath.Join(g.Roots[""], dir)
		err := os.WriteFile(filepath.Join(full, "cgroup.kill"), []byte("1"), 0)
		if err == nil || errors.Is(err, fs.ErrNotExist) && !exists(full) {
			return nil
		}
	}
	return g.killFrozen(ctx, dir)
}

// killFrozen implements Kill for kernels without cgroup.kill. It freezes the cgroup first, because frozen processes can
// neither fork nor end, so no other process can get their PIDs.
func (g Tree) killFrozen(ctx context.Context, dir string) error {
	freezer, file, on, off := g.Roots["freezer"], "freezer.state", "FROZEN", "THAWED"
	if g.V2 {
		freezer, file, on, off = g.Roots[""], "cgroup.freeze", "1", "0"
	}
	full := filepath.Join(freezer, dir)
	if freezer == "" {
		full = filepath.Join(g.Roots["pids"], dir)
	}
	for {
		_ = os.WriteFile(filepath.Join(full, file), []byte(on), 0)
		pids := Procs(full)
		for _, pid := range pids {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		_ = os.WriteFile(filepath.Join(full, file), []byte(off), 0)
		if len(pids) == 0 {
			return nil
		}
		// Frozen processes receive the signal when they thaw, so the loop ends after one or two rounds.
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

// Procs lists the processes in a cgroup's directory and in the directories below it.
func Procs(full string) (pids []int) {
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

// Names returns the names, without Mark, of our cgroups directly below the default parent, of which most are IDs of pods and
// containers.
func (g Tree) Names() (names []string) {
	parent := g.Parent
	if g.Driver == DriverSystemd {
		parent = ExpandSlice(path.Base(g.Parent))
	}
	for _, full := range g.left(parent) {
		entries, _ := os.ReadDir(full)
		for _, e := range entries {
			if name, ours := strings.CutPrefix(e.Name(), Mark); ours && e.IsDir() {
				names = append(names, strings.TrimSuffix(strings.TrimSuffix(name, ".slice"), ".scope"))
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

func exists(name string) bool {
	_, err := os.Lstat(name)
	return err == nil
}

// For each cgroup on the path, inheritCPUSet copies the CPUs and memory nodes of the parent, unless the cgroup already
// has some. A cgroup whose cpuset is empty accepts no processes.
func inheritCPUSet(root, dir string) {
	parent := root
	for part := range strings.SplitSeq(strings.Trim(dir, "/"), "/") {
		child := filepath.Join(parent, part)
		for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
			have, _ := os.ReadFile(filepath.Join(child, file))
			if strings.TrimSpace(string(have)) != "" {
				continue
			}
			if value, err := os.ReadFile(filepath.Join(parent, file)); err == nil {
				_ = os.WriteFile(filepath.Join(child, file), value, 0o644)
			}
		}
		parent = child
	}
}

// Start starts cmd in an existing cgroup, so that cmd runs there from its first instruction. If dir is "", cmd runs in
// the cgroup of the calling process. cmd must have SysProcAttr, and must not have a context. If prepare is not nil,
// Start calls prepare on the thread that starts cmd, so prepare can change that thread, for example its mount
// namespace. The thread ends after the start, so only cmd inherits the change. If the cgroup does not exist, Start
// returns errdefs.ErrFailedPrecondition.
func (g Tree) Start(cmd *exec.Cmd, dir string, prepare func() error) error {
	if dir != "" && g.V2 {
		at, err := os.OpenFile(filepath.Join(g.Roots[""], dir), unix.O_PATH|unix.O_DIRECTORY, 0)
		if err != nil {
			return fmt.Errorf("open the cgroup: %w (%w)", err, errdefs.ErrFailedPrecondition)
		}
		defer at.Close()
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(at.Fd())
	}
	run, wait := guard.Part(func() error {
		if dir != "" {
			if err := g.Enter(dir); err != nil {
				return fmt.Errorf("enter the cgroup: %w (%w)", err, errdefs.ErrFailedPrecondition)
			}
		}
		if prepare != nil {
			if err := prepare(); err != nil {
				return err
			}
		}
		return cmd.Start()
	})
	go process.OnOwnThread(run)
	return wait()
}

// Joinable returns an error if Join would fail because the cgroup is missing.
func (g Tree) Joinable(dir string) error {
	for _, full := range g.Dirs(dir) {
		if _, err := os.Stat(full); err != nil {
			return fmt.Errorf("check the cgroup: %w", err)
		}
	}
	return nil
}

// Join moves a process into a cgroup.
func (g Tree) Join(dir string, pid int) error {
	for _, full := range g.Dirs(dir) {
		if err := os.WriteFile(filepath.Join(full, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0); err != nil {
			return fmt.Errorf("move process %d into cgroup %s: %w: %w", pid, dir, err, errdefs.ErrFailedPrecondition)
		}
	}
	return nil
}

// Enter moves the calling thread into an existing cgroup, in all v1 hierarchies, so that its children start there. The
// goroutine must be locked to the thread, which must not be the main thread. Moving another thread or process would
// cost an RCU grace period per hierarchy, over 1 ms each. On v2, Enter does nothing, because children can be created in
// their cgroup (SysProcAttr.CgroupFD).
func (g Tree) Enter(dir string) error {
	if g.V2 {
		return nil
	}
	for _, full := range g.Dirs(dir) {
		// "0" means the calling thread. Writing the thread's ID instead would cost the grace period.
		if err := os.WriteFile(filepath.Join(full, "tasks"), []byte("0"), 0); err != nil {
			return err
		}
	}
	return nil
}
