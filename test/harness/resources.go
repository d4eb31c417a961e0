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
)

// Resources are what a node can leave behind, each kind as a set of readable names.
type Resources struct {
	// Processes of this PID namespace but the daemon's own: "PID@STARTTIME COMMAND".
	Processes map[string]int
	// Mounts of this mount namespace: "MOUNTPOINT TYPE (ROOT)"; pinned namespaces are among them.
	Mounts map[string]int
	// Cgroups below CgroupParent in every hierarchy, as paths: those of pods and containers, and those in use.
	Cgroups map[string]int
	// Links are network interfaces of this network namespace that are not bridges, Rules its per-pod iptables chains.
	Links, Rules map[string]int
	// Leases are IP addresses that a host-local directory holds: "FILE".
	Leases map[string]int
	// Paths are the files and directories named after a pod or container, and netns files.
	Paths map[string]int
	// Files are the daemon's open files by kind, with their number, and Snapshots the directories of its snapshotter.
	// Both are there only when the daemon ran: they compare two moments of one daemon, with its images pulled.
	Files, Snapshots map[string]int
}

// Snapshot looks at what there is now; d, which may be nil and may be stopped, adds what is the daemon's own.
func Snapshot(d *Daemon) Resources {
	r := Resources{Processes: processes(), Mounts: mounts(), Cgroups: cgroups(), Links: links(), Rules: rules()}
	dirs := []string{"/run", "/var/lib/cni"}
	if d != nil {
		dirs = append(dirs, d.Root)
		if d.Running() {
			maps.DeleteFunc(r.Processes, func(name string, _ int) bool { return strings.HasPrefix(name, strconv.Itoa(d.Pid())+"@") })
			r.Files, r.Snapshots = openFiles(d.Pid()), snapshots(d.Root)
		}
		// The state directory, and in it that of pinned namespaces, is a mount of its own for as long as the node is up.
		maps.DeleteFunc(r.Mounts, func(name string, _ int) bool {
			return strings.HasPrefix(name, d.State+" ") || strings.HasPrefix(name, d.State+"/netns ")
		})
	}
	r.Leases, r.Paths = walk(dirs)
	return r
}

// Leaks describes what is in after but not in r, and is nil when there is nothing. Open files and snapshots are
// compared when both sides have them.
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
		errs = append(errs, more(k.name, k.before, k.after)...)
	}
	if r.Files != nil && after.Files != nil {
		errs = append(errs, more("open file of the daemon", r.Files, after.Files)...)
		errs = append(errs, more("snapshot", r.Snapshots, after.Snapshots)...)
	}
	return errors.Join(errs...)
}

func more(kind string, before, after map[string]int) []error {
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

// endNew kills the processes that were not there at the snapshot and detaches the mounts.
func (r Resources) endNew() {
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

// processes lists those of this PID namespace, which is the test's own, but for the dead.
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
	data, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(data)) {
		before, after, _ := strings.Cut(line, " - ")
		if b, a := strings.Fields(before), strings.Fields(after); len(b) > 4 && len(a) > 0 {
			found[fmt.Sprintf("%s %s (%s)", b[4], a[0], b[3])]++
		}
	}
	return found
}

// cgroups lists those below CgroupParent, in every hierarchy, that are named after a pod or container or hold a
// process. Others are a parent's, which is made once, or the kubelet's.
func cgroups() map[string]int {
	found := map[string]int{}
	data, _ := os.ReadFile("/proc/self/mounts")
	for line := range strings.Lines(string(data)) {
		f := strings.Fields(line)
		if len(f) < 3 || (f[2] != "cgroup" && f[2] != "cgroup2") {
			continue
		}
		_ = filepath.WalkDir(f[1]+CgroupParent(), func(path string, e fs.DirEntry, err error) error {
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
		if l.Type() != "bridge" { // the embedded network's, which outlives its pods
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

// podChain matches the chains that CNI plugins make for one pod: masquerading (bridge) and host ports (portmap).
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

// namedAfter matches what only a pod or a container has in its name.
var namedAfter = regexp.MustCompile(`[0-9a-f]{64}`)

// walk finds what is named after an address (leases of host-local) or after a pod. Content is left out: it is named
// by 64 hexadecimal digits as well, and belongs to images.
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

// openFiles counts a process's descriptors; numbers that differ from one file of a kind to the next are left out.
func openFiles(pid int) map[string]int {
	found := map[string]int{}
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if target, err := os.Readlink(filepath.Join(dir, e.Name())); err == nil {
			kind, _, _ := strings.Cut(target, ":[")
			found[kind]++
		}
	}
	return found
}

// snapshots lists the numbered directories below every directory called snapshots.
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
