package spec

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"unsafe"

	"github.com/containerd/containerd/v2/pkg/cap"
	"golang.org/x/sys/unix"
)

// Host describes what this machine supports. Probe fills it once, at start; after that it is read-only.
type Host struct {
	// CgroupV2 means that only the unified hierarchy is mounted at /sys/fs/cgroup.
	CgroupV2 bool
	// Controllers are the usable cgroup controllers: cpu, cpuset, memory, pids, blkio (v1), io (v2), hugetlb and others.
	Controllers map[string]bool
	// HugepageSizes are the machine's huge page sizes in the CRI's form: 64KB, 2MB, 1GB.
	HugepageSizes []string
	// SwapAccounting means that swap can be limited.
	SwapAccounting bool
	// CPUQuota means that the cpu controller supports CFS bandwidth (quota and period).
	CPUQuota bool
	// Seccomp means that the kernel can filter system calls.
	Seccomp bool
	// SeccompNotify means that the kernel can ask the daemon about system calls.
	SeccompNotify bool
	// AppArmor and SELinux mean that the security module is enabled. The backend clears SELinux if the policy has no labels
	// for containers.
	AppArmor, SELinux bool
	// AppArmorProfile is the loaded default profile. It is "" if there is none. Probe leaves it empty.
	AppArmorProfile string
	// OwnOOMScore is the lowest oom_score_adj that we may set: -1000 with CAP_SYS_RESOURCE, otherwise our own.
	OwnOOMScore int
	// Caps are the full names of the capabilities in our bounding set. Containers can get only these.
	Caps []string
	// RecursiveReadOnly means that the kernel can make a tree of mounts read-only (mount_setattr, Linux 5.12). The
	// backend clears it if the OCI runtime lacks the option "rro".
	RecursiveReadOnly bool
	// UserNamespaces is the reason why pods cannot have user namespaces; nil if they can. The backend sets it after a
	// trial, because the answer also depends on the OCI runtime.
	UserNamespaces error
	// Runtime says what the OCI runtime knows. Probe leaves it empty.
	Runtime Runtime
	// Name is the node's host name, which containers on the host network see.
	Name string

	// root is the directory in which /sys, /proc and /dev are looked up: "/" except in tests.
	root string
}

// Probe examines the machine that it runs on.
func Probe() (Host, error) { return ProbeAt("/") }

// ProbeAt is like Probe, but reads /proc and /sys below root, so that tests can simulate a machine. It always tests the
// system calls of the real kernel.
func ProbeAt(root string) (Host, error) {
	h := Host{root: root, Controllers: map[string]bool{}}
	h.CgroupV2 = h.exists("sys/fs/cgroup/cgroup.controllers")
	var err error
	if h.CgroupV2 {
		err = h.probeV2()
	} else {
		err = h.probeV1()
	}
	if err != nil {
		return Host{}, err
	}
	if h.HugepageSizes, err = h.hugepageSizes(); err != nil {
		return Host{}, err
	}
	if err := h.probeProcess(); err != nil {
		return Host{}, err
	}
	h.AppArmor = strings.HasPrefix(h.line("sys/module/apparmor/parameters/enabled"), "Y")
	h.SELinux = h.exists("sys/fs/selinux/enforce")
	h.SeccompNotify = canNotify()
	h.Name = h.line("proc/sys/kernel/hostname")
	h.RecursiveReadOnly = !errors.Is(unix.MountSetattr(-1, "", unix.AT_EMPTY_PATH, &unix.MountAttr{}), unix.ENOSYS)
	return h, nil
}

// probeV1 considers a controller usable if its hierarchy is mounted where every OCI runtime looks for it.
func (h *Host) probeV1() error {
	entries, err := os.ReadDir(h.path("sys/fs/cgroup"))
	if err != nil {
		return fmt.Errorf("find cgroups: %w (are cgroups mounted at /sys/fs/cgroup?)", err)
	}
	for _, e := range entries {
		if e.Name() == "unified" || !h.exists("sys/fs/cgroup/"+e.Name()+"/cgroup.procs") {
			continue
		}
		for name := range strings.SplitSeq(e.Name(), ",") {
			h.Controllers[name] = true
		}
	}
	h.SwapAccounting = h.exists("sys/fs/cgroup/memory/memory.memsw.limit_in_bytes")
	h.CPUQuota = h.exists("sys/fs/cgroup/cpu/cpu.cfs_quota_us")
	return nil
}

func (h *Host) probeV2() error {
	controllers, err := os.ReadFile(h.path("sys/fs/cgroup/cgroup.controllers"))
	if err != nil {
		return fmt.Errorf("find cgroup controllers: %w", err)
	}
	for _, name := range strings.Fields(string(controllers)) {
		h.Controllers[name] = true
	}
	// The root cgroup has no limits, so look for the limits' files in its children.
	h.SwapAccounting = h.match("sys/fs/cgroup/*/memory.swap.max")
	h.CPUQuota = h.match("sys/fs/cgroup/*/cpu.max")
	return nil
}

// hugepageSizes returns the machine's huge page sizes. It parses directory names such as hugepages-2048kB.
func (h *Host) hugepageSizes() ([]string, error) {
	entries, err := os.ReadDir(h.path("sys/kernel/mm/hugepages"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("find huge page sizes: %w", err)
	}
	var sizes []uint64
	for _, e := range entries {
		kb, ok := strings.CutPrefix(strings.TrimSuffix(e.Name(), "kB"), "hugepages-")
		if n, err := strconv.ParseUint(kb, 10, 32); ok && err == nil {
			sizes = append(sizes, n<<10)
		}
	}
	slices.Sort(sizes)
	names := make([]string, len(sizes))
	for i, n := range sizes {
		names[i] = pageSizeName(n)
	}
	return names, nil
}

// probeProcess finds what this process can pass on to containers: capabilities and its oom_score_adj.
func (h *Host) probeProcess() error {
	f, err := os.Open(h.path("proc/self/status"))
	if err != nil {
		return fmt.Errorf("find our own capabilities: %w", err)
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		key, value, _ := strings.Cut(lines.Text(), ":")
		switch value = strings.TrimSpace(value); key {
		case "CapBnd":
			bits, err := strconv.ParseUint(value, 16, 64)
			if err != nil {
				return fmt.Errorf("capability bounding set %q: %w", value, err)
			}
			h.Caps, _ = cap.FromBitmap(bits)
		case "Seccomp":
			h.Seccomp = true
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("find our own capabilities: %w", err)
	}
	h.OwnOOMScore, err = h.lowestOOMScore()
	return err
}

func (h *Host) lowestOOMScore() (int, error) {
	if slices.Contains(h.Caps, "CAP_SYS_RESOURCE") {
		return -1000, nil
	}
	n, err := strconv.Atoi(h.line("proc/self/oom_score_adj"))
	if err != nil {
		return 0, fmt.Errorf("our own oom_score_adj: %w", err)
	}
	return n, nil
}

func (h *Host) path(name string) string { return filepath.Join("/", h.root, name) }

func (h *Host) exists(name string) bool {
	_, err := os.Stat(h.path(name))
	return err == nil
}

func (h *Host) match(pattern string) bool {
	found, err := filepath.Glob(h.path(pattern))
	return err == nil && len(found) > 0
}

// line returns the first line of a file, or "" if it cannot be read.
func (h *Host) line(name string) string {
	text, _ := os.ReadFile(h.path(name))
	first, _, _ := strings.Cut(string(text), "\n")
	return first
}

// canNotify reports whether the kernel has the action SECCOMP_RET_USER_NOTIF (Linux 5.0).
func canNotify() bool {
	action := uint32(unix.SECCOMP_RET_USER_NOTIF)
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_GET_ACTION_AVAIL, 0, uintptr(unsafe.Pointer(&action)))
	return errno == 0
}
