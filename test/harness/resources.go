package harness

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/vishvananda/netlink"

	"github.com/tripod-run/tripod/test/harness/testns"
)

// Resources holds the things that a node can leave behind. For each kind of thing, it has readable names and their
// counts.
type Resources struct {
	// Processes are the processes of this PID namespace except the daemon: "PID@STARTTIME COMMAND".
	Processes map[string]int
	// Mounts are the mounts of this mount namespace: "MOUNTPOINT TYPE (ROOT)". They include pinned namespaces.
	Mounts map[string]int
	// Cgroups are the paths of cgroups below CgroupParent, in every hierarchy, that contain processes or are named
	// after a pod or a container.
	Cgroups map[string]int
	// Links are the network interfaces of this network namespace except bridges. Rules are the per-pod iptables chains
	// of this network namespace.
	Links, Rules map[string]int
	// Leases are the paths of files named after an IP address, which the CNI plugin host-local makes.
	Leases map[string]int
	// Paths are the netns files, and all files and directories that are named after a pod or a container.
	Paths map[string]int
	// Files are the daemon's open files, counted by kind. Snapshots are the directories of its snapshotter. Files and
	// Snapshots are nil unless the daemon is running. Compare them only between two Resources of the same daemon, both
	// taken after the daemon has pulled its images and run a Linux container of each.
	Files, Snapshots map[string]int
}

// Snapshot returns the current resources. If a daemon is given, the resources include the daemon's files, even if the
// daemon is stopped.
func Snapshot(d *Daemon) Resources {
	r := Resources{Processes: processes(), Mounts: mounts(), Cgroups: cgroups(), Links: links(), Rules: rules()}
	dirs := []string{"/run", "/var/lib/cni"}
	if d != nil {
		dirs = append(dirs, d.Root)
		if d.Running() {
			maps.DeleteFunc(r.Processes, func(name string, _ int) bool { return strings.HasPrefix(name, strconv.Itoa(d.Pid())+"@") })
			r.Files, r.Snapshots = openFiles(d.Pid()), snapshots(d.Root)
		}
		// Like the daemon, a session carrier may run as long as the node does. Its files count as the daemon's.
		for _, pid := range d.Carriers() {
			if r.Files != nil {
				for kind, n := range openFiles(pid) {
					r.Files[kind] += n
				}
			}
			maps.DeleteFunc(r.Processes, func(name string, _ int) bool { return strings.HasPrefix(name, strconv.Itoa(pid)+"@") })
		}
		// The state directory and its netns directory are mounts while the node is up, so they are not leaks.
		maps.DeleteFunc(r.Mounts, func(name string, _ int) bool {
			return strings.HasPrefix(name, d.State+" ") || strings.HasPrefix(name, d.State+"/netns ")
		})
	}
	r.Leases, r.Paths = walk(dirs)
	return r
}

// Leaks returns an error that names what exists only in the later Resources. It compares open files and snapshots only
// if both Resources have them.
func (r Resources) Leaks(after Resources) error {
	kinds := []struct {
		name          string
		before, after map[string]int
	}{
		{"process", r.Processes, after.Processes}, {"mount", r.Mounts, after.Mounts}, {"cgroup", r.Cgroups, after.Cgroups},
		{"network link", r.Links, after.Links}, {"iptables chain", r.Rules, after.Rules}, {"IP lease", r.Leases, after.Leases},
		{"path", r.Paths, after.Paths},
	}
	var errs []error
	for _, k := range kinds {
		errs = append(errs, surplus(k.name, k.before, k.after)...)
	}
	if r.Files != nil && after.Files != nil {
		errs = append(errs, surplus("open file of the daemon", r.Files, after.Files)...)
		errs = append(errs, surplus("snapshot", r.Snapshots, after.Snapshots)...)
	}
	return errors.Join(errs...)
}

func surplus(kind string, before, after map[string]int) []error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(after)) {
		if n := after[name] - before[name]; n > 0 && after[name] > 1 {
			errs = append(errs, fmt.Errorf("%s (%d more): %s", kind, n, name))
		} else if n > 0 {
			errs = append(errs, fmt.Errorf("%s: %s", kind, name))
		}
	}
	return errs
}

// killNew kills processes and detaches mounts that are newer than the snapshot.
func (r Resources) killNew() {
	for name := range processes() {
		pid, _, _ := strings.Cut(name, "@")
		if n, err := strconv.Atoi(pid); err == nil && r.Processes[name] == 0 {
			_ = syscall.Kill(n, syscall.SIGKILL)
		}
	}
	for name, n := range mounts() {
		path, _, _ := strings.Cut(name, " ")
		for range n - r.Mounts[name] {
			_ = syscall.Unmount(path, syscall.MNT_DETACH)
		}
	}
}

// processes returns the live processes in the test's PID namespace, except its init and the test itself.
func processes() map[string]int {
	found := map[string]int{}
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == 1 || pid == os.Getpid() {
			continue
		}
		stat, err := os.ReadFile("/proc/" + e.Name() + "/stat")
		if err != nil {
			continue
		}
		// PID (COMM) STATE PPID …; the start time is field 22, the 20th after the name.
		f := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
		if len(f) < 20 || f[0] == "Z" || f[0] == "X" {
			continue
		}
		cmd, _ := os.ReadFile("/proc/" + e.Name() + "/cmdline")
		cmd = bytes.ReplaceAll(bytes.TrimRight(cmd, "\x00"), []byte{0}, []byte{' '})
		found[fmt.Sprintf("%d@%s %.200s", pid, f[19], cmd)] = 1
	}
	return found
}

func mounts() map[string]int {
	found := map[string]int{}
	// PID 1 is in the same namespaces as the calling thread, which may have entered another node's (testns.Nested).
	data, _ := os.ReadFile("/proc/1/mountinfo")
	for line := range strings.Lines(string(data)) {
		before, after, _ := strings.Cut(line, " - ")
		if b, a := strings.Fields(before), strings.Fields(after); len(b) > 4 && len(a) > 0 {
			found[fmt.Sprintf("%s %s (%s)", b[4], a[0], b[3])]++
		}
	}
	return found
}

// cgroups returns the cgroups below CgroupParent, in every hierarchy, that contain a process or are named after a pod
// or a container. The other cgroups are parents, which are made once, or belong to the kubelet.
func cgroups() map[string]int {
	found := map[string]int{}
	// crun makes cgroups below unified, too. In a world, that is an ordinary directory.
	for _, root := range append(testns.CgroupRoots(), "/sys/fs/cgroup/unified") {
		_ = filepath.WalkDir(root+CgroupParent(), func(path string, e fs.DirEntry, err error) error {
			if err == nil && e.IsDir() {
				procs, _ := os.ReadFile(filepath.Join(path, "cgroup.procs"))
				if len(procs) > 0 || namedAfter.MatchString(e.Name()) {
					found[path] = 1
				}
			}
			return nil
		})
	}
	return found
}

func links() map[string]int {
	found := map[string]int{}
	all, _ := netlink.LinkList()
	for _, l := range all {
		if l.Type() != "bridge" { // the embedded network's bridge outlives its pods
			found[l.Attrs().Name+" "+l.Type()] = 1
		}
	}
	return found
}

func removeBridge(name string) {
	if l, err := netlink.LinkByName(name); err == nil {
		_ = netlink.LinkDel(l)
	}
}

// podChain matches the chains that CNI plugins make for a pod: masquerading (bridge) and host ports (portmap).
var podChain = regexp.MustCompile(`(?m)^:(CNI-(?:DN-|SN-)?[0-9a-f]{8,}) `)

func rules() map[string]int {
	found := map[string]int{}
	for _, program := range []string{"iptables-save", "ip6tables-save"} {
		out, _ := exec.Command(program).Output()
		for _, m := range podChain.FindAllStringSubmatch(string(out), -1) {
			found[program+": "+m[1]] = 1
		}
	}
	return found
}

// namedAfter matches the ID of a pod or container in a name.
var namedAfter = regexp.MustCompile(`[0-9a-f]{64}`)

// walk finds files named after an address (leases of host-local), and paths named after a pod. It skips image content,
// which is also named by 64 hexadecimal digits.
func walk(dirs []string) (leases, paths map[string]int) {
	leases, paths = map[string]int{}, map[string]int{}
	for _, dir := range dirs {
		_ = filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
			if err != nil {
				return nil
			}
			name := e.Name()
			if e.IsDir() && (name == "blobs" || name == "ingest" || strings.HasSuffix(path, "/fs")) {
				return fs.SkipDir
			}
			if _, err := netip.ParseAddr(name); err == nil && !e.IsDir() {
				leases[path] = 1
			}
			if namedAfter.MatchString(name) || filepath.Base(filepath.Dir(path)) == "netns" {
				paths[path] = 1
				if e.IsDir() {
					return fs.SkipDir
				}
			}
			return nil
		})
	}
	return leases, paths
}

// openFiles counts a process's descriptors by kind. The kind is the target of the descriptor's link, without the number
// in brackets.
func openFiles(pid int) map[string]int {
	found := map[string]int{}
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		target, err := os.Readlink(filepath.Join(dir, e.Name()))
		if err != nil {
			continue
		}
		kind := target
		switch {
		case !strings.HasPrefix(target, "anon_inode:"):
			kind, _, _ = strings.Cut(target, ":[") // without the inode
		case strings.Contains(target, "pidfd") && ended(pid, e.Name()):
			kind += " of an ended process"
		}
		found[kind]++
	}
	return found
}

// ended reports whether a process's pidfd is of a process that has ended (proc_pid_fdinfo(5)).
func ended(pid int, fd string) bool {
	info, err := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%s", pid, fd))
	return err == nil && strings.Contains(string(info), "\nPid:\t-1\n")
}

// snapshots returns the numbered directories in every directory named "snapshots".
func snapshots(root string) map[string]int {
	found := map[string]int{}
	_ = filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.IsDir() {
			return nil
		}
		if _, err := strconv.Atoi(e.Name()); err == nil && filepath.Base(filepath.Dir(path)) == "snapshots" {
			found[path] = 1
			return fs.SkipDir
		}
		return nil
	})
	return found
}
