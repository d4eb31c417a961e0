package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// limits are a container's resources: CPU request and limit in thousandths of a CPU, memory limit in bytes; 0 means
// none.
type limits struct{ cpuRequest, cpuLimit, memory int64 }

// linux converts the limits to a kubelet's message: always complete, with a limit for every size of huge pages, and on
// cgroup v2 with values for the memory controller's files.
func (l limits) linux() *runtimeapi.LinuxContainerResources {
	const period = 100_000
	r := &runtimeapi.LinuxContainerResources{
		CpuPeriod: period, CpuShares: max(2, l.cpuRequest*1024/1000), MemoryLimitInBytes: l.memory, OomScoreAdj: 999,
	}
	if l == (limits{}) {
		r.OomScoreAdj = 1000
	}
	if onV2() {
		r.Unified = map[string]string{"memory.min": "0", "memory.low": "0", "memory.oom.group": "1"}
		if swap, _ := filepath.Glob("/sys/fs/cgroup/*/memory.swap.max"); len(swap) > 0 {
			r.Unified["memory.swap.max"] = "0"
		}
	}
	if _, err := os.Stat("/sys/fs/cgroup/memory/memory.memsw.limit_in_bytes"); err == nil {
		r.MemorySwapLimitInBytes = l.memory // no swap
	}
	if l.cpuLimit > 0 {
		r.CpuQuota = max(1000, l.cpuLimit*period/1000)
	}
	sizes, _ := filepath.Glob("/sys/kernel/mm/hugepages/hugepages-*kB")
	for _, dir := range sizes {
		kb, _ := strconv.Atoi(strings.TrimSuffix(strings.TrimPrefix(filepath.Base(dir), "hugepages-"), "kB"))
		name := fmt.Sprintf("%dKB", kb)
		if kb >= 1<<20 {
			name = fmt.Sprintf("%dGB", kb>>20)
		} else if kb >= 1<<10 {
			name = fmt.Sprintf("%dMB", kb>>10)
		}
		r.HugepageLimits = append(r.HugepageLimits, &runtimeapi.HugepageLimit{PageSize: name})
	}
	return r
}

// sandboxConfig returns the configuration of the sandbox with this attempt number.
func (k *kubelet) sandboxConfig(p *kubePod, attempt uint32) *runtimeapi.PodSandboxConfig {
	c := &runtimeapi.PodSandboxConfig{
		Metadata:     &runtimeapi.PodSandboxMetadata{Name: p.name, Namespace: "ns", Uid: p.uid, Attempt: attempt},
		LogDirectory: k.logDir(p),
		DnsConfig: &runtimeapi.DNSConfig{
			Servers: []string{"10.96.0.10"}, Searches: []string{"ns.svc.cluster.local", "svc.cluster.local", "cluster.local"},
			Options: []string{"ndots:5"},
		},
		PortMappings: p.ports,
		Labels: map[string]string{"app": p.name, "io.kubernetes.pod.name": p.name, "io.kubernetes.pod.namespace": "ns",
			"io.kubernetes.pod.uid": p.uid},
		Annotations: map[string]string{"kubernetes.io/config.seen": "2026-11-21T09:00:00.000000000Z", "kubernetes.io/config.source": "api"},
		Linux: &runtimeapi.LinuxPodSandboxConfig{
			CgroupParent: k.cgroup(p),
			SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
				NamespaceOptions: p.namespaces(), Privileged: p.ofNode,
				Seccomp: &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault},
			},
			Sysctls:   p.sysctls,
			Overhead:  &runtimeapi.LinuxContainerResources{},
			Resources: &runtimeapi.LinuxContainerResources{CpuPeriod: 100_000, CpuShares: 2},
		},
	}
	if onV2() {
		c.Linux.Resources.Unified = map[string]string{"memory.oom.group": "1"}
	}
	if !p.hostNetwork {
		c.Hostname = p.name
	}
	return c
}

// namespaces returns the namespace options of the pod and its containers. Each container has its own PID namespace
// unless the pod shares one.
func (p *kubePod) namespaces() *runtimeapi.NamespaceOption {
	n := &runtimeapi.NamespaceOption{
		Pid: runtimeapi.NamespaceMode_CONTAINER, UsernsOptions: &runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_NODE},
	}
	if p.sharePID {
		n.Pid = runtimeapi.NamespaceMode_POD
	}
	if p.hostNetwork {
		n.Network = runtimeapi.NamespaceMode_NODE
	}
	if p.ofNode {
		n.Pid, n.Ipc = runtimeapi.NamespaceMode_NODE, runtimeapi.NamespaceMode_NODE
	}
	return n
}

// containerConfig returns the configuration of the container with this attempt number, and creates the files that it
// mounts.
func (k *kubelet) containerConfig(p *kubePod, c *kubeContainer, imageRef string, attempt uint32) *runtimeapi.ContainerConfig {
	k.t.Helper()
	dir := k.dir(p)
	token, data, hosts, message := filepath.Join(dir, "token"), filepath.Join(dir, "emptydir"), filepath.Join(dir, "etc-hosts"),
		filepath.Join(dir, fmt.Sprintf("%s-%d", c.name, time.Now().UnixNano()))
	for _, d := range []string{token, data, filepath.Join(k.logDir(p), c.name)} {
		k.must(os.MkdirAll(d, 0o777))
		k.must(os.Chmod(d, 0o777))
	}
	for file, text := range map[string]string{filepath.Join(token, "token"): "secret", hosts: "127.0.0.1\tlocalhost\n", message: ""} {
		k.must(os.WriteFile(file, []byte(text), 0o666))
		k.must(os.Chmod(file, 0o666))
	}
	config := &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: c.name, Attempt: attempt},
		Image:    &runtimeapi.ImageSpec{Image: imageRef, UserSpecifiedImage: c.image},
		Command:  c.command,
		LogPath:  fmt.Sprintf("%s/%d.log", c.name, attempt),
		Envs:     []*runtimeapi.KeyValue{{Key: "KUBERNETES_SERVICE_HOST", Value: []byte("10.96.0.1")}, {Key: "EMPTY"}},
		Labels: map[string]string{
			"io.kubernetes.container.name": c.name, "io.kubernetes.pod.name": p.name, "io.kubernetes.pod.namespace": "ns",
			"io.kubernetes.pod.uid": p.uid,
		},
		Annotations: map[string]string{
			"io.kubernetes.container.hash": "2aa0ffb5", "io.kubernetes.container.restartCount": strconv.Itoa(int(attempt)),
			"io.kubernetes.container.terminationMessagePath": "/dev/termination-log", "io.kubernetes.container.terminationMessagePolicy": "File",
			"io.kubernetes.pod.terminationGracePeriod": strconv.FormatInt(p.grace, 10),
		},
		Mounts: []*runtimeapi.Mount{
			{ContainerPath: "/data", HostPath: data},
			{ContainerPath: "/var/run/secrets/kubernetes.io/serviceaccount", HostPath: token, Readonly: true, RecursiveReadOnly: false},
			{ContainerPath: "/etc/hosts", HostPath: hosts},
			{ContainerPath: "/dev/termination-log", HostPath: message},
		},
		Linux: &runtimeapi.LinuxContainerConfig{
			Resources: c.limits.linux(),
			SecurityContext: &runtimeapi.LinuxContainerSecurityContext{
				NamespaceOptions: p.namespaces(),
				Seccomp:          &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Unconfined},
				MaskedPaths:      slices.Clone(kubeMaskedPaths),
				ReadonlyPaths:    []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"},
			},
		},
	}
	sc := config.Linux.SecurityContext
	sc.RunAsUser, sc.RunAsUsername = k.imageUser(c.image)
	if p.restricted {
		if sc.RunAsUser.GetValue() == 0 {
			k.t.Fatalf("container has runAsNonRoot and image will run as root (user %v %q)", sc.RunAsUser, sc.RunAsUsername)
		}
		sc.NoNewPrivs, sc.Capabilities = true, &runtimeapi.Capability{DropCapabilities: []string{"ALL"}}
		sc.Seccomp.ProfileType = runtimeapi.SecurityProfile_RuntimeDefault
	}
	if c.change != nil {
		c.change(config)
	}
	return config
}

// imageUser returns the user with which the kubelet runs a container if the pod names none: the image's user, otherwise
// root.
func (k *kubelet) imageUser(image string) (*runtimeapi.Int64Value, string) {
	k.t.Helper()
	resp, err := k.images.ImageStatus(context.Background(), &runtimeapi.ImageSpec{Image: image}, false)
	k.must(err)
	switch {
	case resp.Image.GetUid() != nil:
		return resp.Image.GetUid(), ""
	case resp.Image.GetUsername() != "":
		return nil, resp.Image.GetUsername()
	}
	return &runtimeapi.Int64Value{}, ""
}

// kubeMaskedPaths are the paths that procMount: Default hides. Some kernels do not have all of them.
var kubeMaskedPaths = []string{
	"/proc/asound", "/proc/acpi", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list",
	"/proc/timer_stats",
	"/proc/sched_debug", "/proc/scsi", "/sys/firmware", "/sys/devices/virtual/powercap",
}

// hierarchies returns the mount points of the cgroup hierarchies that a kubelet manages.
func (k *kubelet) hierarchies() []string {
	all, err := filepath.Glob("/sys/fs/cgroup/*/tasks")
	k.must(err)
	dirs := []string{}
	for _, file := range all {
		dirs = append(dirs, filepath.Dir(file))
	}
	if len(dirs) == 0 {
		return []string{"/sys/fs/cgroup"}
	}
	return dirs
}

func (k *kubelet) makeCgroup(p *kubePod) {
	for _, root := range k.hierarchies() {
		dir := root
		for part := range strings.SplitSeq(strings.Trim(k.cgroup(p), "/"), "/") {
			above := dir
			dir = filepath.Join(dir, part)
			k.must(os.MkdirAll(dir, 0o755))
			for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
				have, err := os.ReadFile(filepath.Join(dir, file))
				if err != nil || strings.TrimSpace(string(have)) != "" {
					continue
				}
				value, err := os.ReadFile(filepath.Join(above, file))
				k.must(err)
				k.must(os.WriteFile(filepath.Join(dir, file), value, 0o644))
			}
		}
	}
}

// destroyCgroup removes the pod's cgroup and all cgroups below it, while the runtime still knows the pod. A kubelet
// kills processes in it; here it must contain none.
func (k *kubelet) destroyCgroup(p *kubePod) {
	k.t.Helper()
	for _, root := range k.hierarchies() {
		top := filepath.Join(root, k.cgroup(p))
		var dirs []string
		_ = filepath.WalkDir(top, func(path string, e os.DirEntry, err error) error {
			if err == nil && e.IsDir() {
				dirs = append(dirs, path)
			}
			return nil
		})
		slices.Reverse(dirs)
		for _, dir := range dirs {
			harness.Eventually(k.t, 5*time.Second, func() error {
				if err := os.Remove(dir); err != nil && !os.IsNotExist(err) {
					procs, _ := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
					return fmt.Errorf("%w (processes %q)", err, procs)
				}
				return nil
			})
		}
	}
}
