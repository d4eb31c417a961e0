package e2e

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/client-go/tools/remotecommand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	crilogs "k8s.io/cri-client/pkg/logs"

	"github.com/tripod-run/tripod/test/harness"
)

// kubeResize tests an in-place resize. The kubelet changes the pod's cgroup, the runtime the container's. To raise
// limits it begins with the pod, to lower them with the container.
func kubeResize(t *testing.T, k *kubelet) {
	ctx := context.Background()
	c := &kubeContainer{name: "c", image: harness.Busybox, command: sleeps(""),
		limits: limits{cpuRequest: 100, cpuLimit: 200, memory: 32 << 20}}
	p := k.newPod("resize", c)
	k.limitPod(p, c.limits)
	s := k.states(p, "c running")
	for _, to := range []limits{
		{cpuRequest: 500, cpuLimit: 1000, memory: 64 << 20}, {cpuRequest: 200, cpuLimit: 1500, memory: 64 << 20},
		{cpuRequest: 100, cpuLimit: 100, memory: 24 << 20},
	} {
		k.limitPod(p, limits{cpuRequest: to.cpuRequest, cpuLimit: max(to.cpuLimit, c.limits.cpuLimit), memory: max(to.memory, c.limits.memory)})
		_, err := k.runtime.UpdatePodSandboxResources(ctx, &runtimeapi.UpdatePodSandboxResourcesRequest{
			PodSandboxId: s.sandbox().Id, Resources: to.linux(), Overhead: &runtimeapi.LinuxContainerResources{},
		})
		k.must(err)
		k.must(k.runtime.UpdateContainerResources(ctx, s.of(c).Id, &runtimeapi.ContainerResources{Linux: to.linux()}))
		k.limitPod(p, to)
		c.limits = to
		now := k.status(p).of(c)
		if got, want := now.GetResources().GetLinux(), to.linux(); got.CpuShares != want.CpuShares || got.CpuQuota != want.CpuQuota ||
			got.CpuPeriod != want.CpuPeriod || got.MemoryLimitInBytes != want.MemoryLimitInBytes {
			t.Errorf("resources in the status: got %v, want %v", got, want)
		}
		if got := k.limitsIn(k.containerCgroup(p, now.Id)); got != to {
			t.Errorf("limits of the cgroup: got %+v, want %+v", got, to)
		}
	}
	// -1 removes a limit, also of swap if the node accounts for it.
	none := c.limits.linux()
	none.CpuQuota, none.MemoryLimitInBytes, none.MemorySwapLimitInBytes = -1, -1, -min(none.MemorySwapLimitInBytes, 1)
	k.limitPod(p, limits{cpuRequest: 100})
	k.must(k.runtime.UpdateContainerResources(ctx, s.of(c).Id, &runtimeapi.ContainerResources{Linux: none}))
	if got := k.limitsIn(k.containerCgroup(p, s.of(c).Id)); got.cpuLimit != 0 || got.memory != 0 {
		t.Errorf("limits of the cgroup: got %+v, want none", got)
	}
	now := k.status(p).of(c)
	if r := now.GetResources().GetLinux(); r.GetCpuQuota() > 0 || r.GetMemoryLimitInBytes() > 0 || now.Id != s.of(c).Id ||
		now.StartedAt != s.of(c).StartedAt {
		t.Errorf("want the same start of container %s and no limits, got %v", s.of(c).Id, now)
	}
	// The CPU manager sets only the CPUs, every ten seconds. All other limits stay.
	k.must(k.runtime.UpdateContainerResources(ctx, s.of(c).Id,
		&runtimeapi.ContainerResources{Linux: &runtimeapi.LinuxContainerResources{CpusetCpus: "0"}}))
	if got := k.limitsIn(k.containerCgroup(p, s.of(c).Id)); got.cpuRequest != 100 || got.cpuLimit != 0 {
		t.Errorf("limits of the cgroup: got %+v, want a CPU request of 100 and no limit", got)
	}
	// A container with exclusive CPUs has no limit of CPU time.
	exclusive := &kubeContainer{name: "exclusive", image: harness.Busybox, command: sleeps(""), limits: limits{cpuRequest: 1000},
		change: func(c *runtimeapi.ContainerConfig) {
			c.Linux.Resources.CpuQuota, c.Linux.Resources.CpusetCpus = -1, "0"
		}}
	p.containers = append(p.containers, exclusive)
	s = k.states(p, "c running, exclusive running")
	if got := k.limitsIn(k.containerCgroup(p, s.of(exclusive).Id)); got.cpuLimit != 0 {
		t.Errorf("limits of the cgroup: got %+v, want no CPU limit", got)
	}
}

// containerCgroup returns the path of a container's cgroup in each hierarchy.
func (k *kubelet) containerCgroup(p *kubePod, id string) string {
	k.t.Helper()
	root := cgroupRoot("memory")
	var found string
	_ = filepath.WalkDir(filepath.Join(root, k.cgroup(p)), func(path string, e os.DirEntry, err error) error {
		if err == nil && e.IsDir() && strings.Contains(e.Name(), id) {
			found = strings.TrimPrefix(path, root)
		}
		return nil
	})
	if found == "" {
		k.t.Fatalf("found no cgroup of container %s below the pod's", id)
	}
	return found
}

func onV2() bool {
	_, err := os.Stat("/sys/fs/cgroup/cgroup.controllers")
	return err == nil
}

// cgroupRoot returns the directory of the hierarchy that has a controller.
func cgroupRoot(controller string) string {
	if onV2() {
		return "/sys/fs/cgroup"
	}
	return filepath.Join("/sys/fs/cgroup", controller)
}

// memoryLimitFile is the file of a cgroup's memory limit.
func memoryLimitFile() string {
	if onV2() {
		return "memory.max"
	}
	return "memory.limit_in_bytes"
}

// limitPod sets the limits of the pod's cgroup, like the kubelet.
func (k *kubelet) limitPod(p *kubePod, l limits) {
	k.t.Helper()
	r := l.linux()
	write := func(root, file, value string) {
		k.must(os.WriteFile(filepath.Join(root, k.cgroup(p), file), []byte(value), 0o644))
	}
	quota, memory := "-1", "-1"
	if l.memory > 0 {
		memory = strconv.FormatInt(l.memory, 10)
	}
	if r.CpuQuota > 0 {
		quota = strconv.FormatInt(r.CpuQuota, 10)
	}
	if onV2() {
		write(cgroupRoot("memory"), "memory.max", strings.Replace(memory, "-1", "max", 1))
		write(cgroupRoot("cpu"), "cpu.max", strings.Replace(quota, "-1", "max", 1)+" 100000")
		return
	}
	write(cgroupRoot("memory"), "memory.limit_in_bytes", memory)
	write(cgroupRoot("cpu"), "cpu.cfs_quota_us", quota)
	write(cgroupRoot("cpu"), "cpu.shares", strconv.FormatInt(r.CpuShares, 10))
}

// limitsIn reads the limits of a cgroup.
func (k *kubelet) limitsIn(cgroup string) limits {
	k.t.Helper()
	number := func(root, file string) int64 {
		data, err := os.ReadFile(filepath.Join(root, cgroup, file))
		k.must(err)
		n, _ := strconv.ParseInt(strings.Fields(string(data))[0], 10, 64) // "max" is none
		if n < 0 || n > 1<<60 {                                           // v1 shows a missing memory limit as the largest number of pages
			return 0
		}
		return n
	}
	if onV2() {
		// Inverts weight = 1 + (shares-2)*9999/262142, rounded to hundreds of thousandths of a CPU.
		shares := (number(cgroupRoot("cpu"), "cpu.weight")-1)*262142/9999 + 2
		return limits{cpuRequest: (shares*1000/1024 + 50) / 100 * 100, cpuLimit: number(cgroupRoot("cpu"), "cpu.max") / 100,
			memory: number(cgroupRoot("memory"), "memory.max")}
	}
	return limits{
		cpuRequest: (number(cgroupRoot("cpu"), "cpu.shares")*1000 + 1023) / 1024, cpuLimit: number(cgroupRoot("cpu"), "cpu.cfs_quota_us") / 100,
		memory: number(cgroupRoot("memory"), "memory.limit_in_bytes"),
	}
}

// kubeIdentity checks the effects of a pod's security context, from inside the container and in its status.
func kubeIdentity(t *testing.T, k *kubelet) {
	c := &kubeContainer{name: "c", image: harness.Busybox, command: sleeps("")}
	c.change = func(config *runtimeapi.ContainerConfig) {
		sc := config.Linux.SecurityContext
		sc.RunAsUser, sc.RunAsGroup = &runtimeapi.Int64Value{Value: 1000}, &runtimeapi.Int64Value{Value: 3000}
		sc.SupplementalGroups = []int64{2000}
		sc.ReadonlyRootfs, sc.NoNewPrivs = true, true
		sc.Seccomp = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault}
		sc.Capabilities = &runtimeapi.Capability{DropCapabilities: []string{"ALL"}}
	}
	p := k.newPod("identity", c)
	p.sysctls = map[string]string{"net.ipv4.ip_unprivileged_port_start": "0"}
	s := k.states(p, "c running")
	exec := func(script string) string {
		t.Helper()
		out, errout, err := k.runtime.ExecSync(context.Background(), s.of(c).Id, shell(script), 0)
		if err != nil {
			t.Errorf("exec %q: %v\n%s", script, err, errout)
		}
		return strings.TrimSpace(string(out))
	}
	for script, want := range map[string]string{
		"id -u; id -g; id -G": "1000\n3000\n3000 2000",
		"hostname":            "identity",
		"cat /etc/hosts":      "127.0.0.1\tlocalhost",
		"cat /var/run/secrets/kubernetes.io/serviceaccount/token":                      "secret",
		"touch /var/run/secrets/kubernetes.io/serviceaccount/x 2>&1 || echo read-only": "touch: /var/run/secrets/kubernetes.io/serviceaccount/x: Read-only file system\nread-only",
		"touch /x 2>/dev/null || echo read-only":                                       "read-only",
		"touch /data/x && echo written":                                                "written",
		"echo x >/dev/termination-log && echo written":                                 "written",
		"grep -E '^(NoNewPrivs|Seccomp|CapEff|CapBnd):' /proc/self/status":             "CapEff:\t0000000000000000\nCapBnd:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2",
		"echo $KUBERNETES_SERVICE_HOST ${EMPTY-unset}":                                 "10.96.0.1",
		"cat /etc/resolv.conf":                                                         "search ns.svc.cluster.local svc.cluster.local cluster.local\nnameserver 10.96.0.10\noptions ndots:5",
		"cat /proc/sys/net/ipv4/ip_unprivileged_port_start":                            "0",
		"cat /proc/1/oom_score_adj":                                                    "1000",
		"ls /sys/firmware | wc -l; wc -c </proc/keys":                                  "0\n0",
	} {
		if got := exec(script); got != want {
			t.Errorf("%s: got\n%s\nwant\n%s", script, got, want)
		}
	}
	if u := s.of(c).GetUser().GetLinux(); u.GetUid() != 1000 || u.GetGid() != 3000 || !slices.Contains(u.GetSupplementalGroups(), 2000) {
		t.Errorf("user in the status: got %v, want 1000:3000 with group 2000", u)
	}
	if i := s.of(c); i.Image.GetImage() != harness.Busybox || i.ImageId != k.ensureImage(harness.Busybox) || i.ImageRef == "" {
		t.Errorf("image in the status: got %v, ref %s, ID %s; want %s", i.Image, i.ImageRef, i.ImageId, harness.Busybox)
	}
}

// kubeStats checks the figures that the kubelet uses without testing whether they are set.
func kubeStats(t *testing.T, k *kubelet) {
	ctx := context.Background()
	c := &kubeContainer{name: "c", image: harness.Busybox, command: sleeps("dd if=/dev/zero of=/x bs=1M count=2")}
	done := &kubeContainer{name: "done", image: harness.Busybox, command: shell("exit 0")}
	p := k.newPod("stats", c, done)
	p.restart = restartOnFailure
	h := k.newPod("host-stats", &kubeContainer{name: "h", image: harness.Busybox, command: sleeps("")})
	h.hostNetwork = true
	k.states(h, "h running")
	s := k.states(p, "c running, done exited")
	all, err := k.runtime.ListContainerStats(ctx, &runtimeapi.ContainerStatsFilter{})
	k.must(err)
	seen := 0
	for _, stats := range all {
		if stats.Attributes.GetLabels()["io.kubernetes.pod.uid"] == "" || stats.Attributes.GetMetadata().GetName() == "" {
			t.Errorf("attributes: got %v, want the pod's UID and a name", stats.Attributes)
		}
		if stats.Attributes.Id == s.of(c).Id {
			seen++
			checkFigures(t, stats)
		}
	}
	if seen != 1 {
		t.Errorf("stats of the container: got %d, want 1", seen)
	}
	pods, err := k.runtime.ListPodSandboxStats(ctx, &runtimeapi.PodSandboxStatsFilter{})
	k.must(err)
	for _, stats := range pods {
		l := stats.GetLinux()
		if stats.GetAttributes().GetMetadata().GetUid() == "" || l.GetCpu().GetUsageCoreNanoSeconds() == nil ||
			l.GetMemory().GetWorkingSetBytes() == nil || l.GetProcess().GetProcessCount() == nil {
			t.Errorf("pod stats: got %v, want a UID, CPU, memory and process figures", stats)
		}
		if l.GetNetwork() != nil && (l.Network.DefaultInterface == nil || l.Network.Timestamp == 0) {
			t.Errorf("network figures: got %v, want a default interface and a time", l.Network)
		}
		for _, c := range l.GetContainers() {
			checkFigures(t, c)
		}
	}
	if len(pods) < 2 {
		t.Errorf("pod stats: got %v, want at least two pods", pods)
	}
}

func checkFigures(t *testing.T, s *runtimeapi.ContainerStats) {
	t.Helper()
	layer := s.GetWritableLayer()
	if err := syscall.Statfs(layer.GetFsId().GetMountpoint(), new(syscall.Statfs_t)); err != nil || layer.GetUsedBytes() == nil ||
		layer.GetInodesUsed() == nil {
		t.Errorf("writable layer: got %v, error %v; want a mount point, bytes and inodes", layer, err)
	}
	if s.GetCpu().GetTimestamp() == 0 || s.GetCpu().GetUsageCoreNanoSeconds().GetValue() == 0 || s.GetMemory().GetTimestamp() == 0 ||
		s.GetMemory().GetWorkingSetBytes().GetValue() == 0 {
		t.Errorf("container stats: got %v, want CPU and memory figures with their times", s)
	}
}

// kubeLogs reads a log like kubectl logs -f, over a rotation and until the container's end.
func kubeLogs(t *testing.T, k *kubelet) {
	ctx := context.Background()
	c := &kubeContainer{name: "c", image: harness.Busybox,
		command: shell("echo before; echo oops >&2; until test -e /data/go; do usleep 10000; done; echo after; sleep 1; echo last")}
	p := k.newPod("logs", c)
	p.restart = restartNever
	s := k.states(p, "c running")
	var stdout, stderr buffer
	ended := make(chan error, 1)
	opts := &crilogs.LogOptions{Follow: true}
	go func() { ended <- crilogs.ReadLogs(ctx, s.of(c).LogPath, s.of(c).Id, opts, k.runtime, &stdout, &stderr) }()
	stdout.wait(t, "before\n")
	stderr.wait(t, "oops\n")
	k.must(os.Rename(s.of(c).LogPath, s.of(c).LogPath+".20261121-090000"))
	k.must(k.runtime.ReopenContainerLog(ctx, s.of(c).Id))
	if _, err := os.Stat(s.of(c).LogPath); err != nil {
		t.Errorf("log after a rotation: %v", err)
	}
	k.must(os.WriteFile(filepath.Join(k.dir(p), "emptydir", "go"), nil, 0o644))
	select {
	case err := <-ended:
		k.must(err)
	case <-time.After(waitLimit):
		t.Fatal("following the log did not end with the container")
	}
	if got := stdout.String(); got != "before\nafter\nlast\n" {
		t.Errorf("followed log: got %q, want three lines", got)
	}
}

// kubeCopy copies a file like kubectl cp: as an archive to tar's standard input, and back from its output.
func kubeCopy(t *testing.T, k *kubelet) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c := &kubeContainer{name: "c", image: harness.Busybox, command: sleeps("")}
	s := k.states(k.newPod("cp", c), "c running")
	content := make([]byte, 12<<20)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(content)
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	k.must(w.WriteHeader(&tar.Header{Name: "tmp/copied", Size: int64(len(content)), Mode: 0o644, Typeflag: tar.TypeReg}))
	_, err := w.Write(content)
	k.must(errors.Join(err, w.Close()))
	for _, protocol := range harness.Protocols {
		exec := func(stdin io.Reader, stdout io.Writer, argv ...string) {
			t.Helper()
			var stderr bytes.Buffer
			resp, err := k.runtime.Exec(ctx,
				&runtimeapi.ExecRequest{ContainerId: s.of(c).Id, Cmd: argv, Stdin: stdin != nil, Stdout: true, Stderr: true})
			k.must(err)
			code, err := harness.Stream(ctx, protocol, resp.Url, remotecommand.StreamOptions{Stdin: stdin, Stdout: stdout, Stderr: &stderr})
			if err != nil || code != 0 {
				t.Errorf("%s %q: got code %d, error %v, stderr %s; want success", protocol, argv, code, err, &stderr)
			}
		}
		if protocol == harness.SPDY { // version 4 over WebSocket cannot signal the end of tar's input; the kubelet speaks SPDY
			exec(&archive, io.Discard, "tar", "-xmf", "-", "-C", "/")
		}
		var back bytes.Buffer
		exec(nil, &back, "tar", "cf", "-", "/tmp/copied")
		r := tar.NewReader(&back)
		if _, err := r.Next(); err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(r)
		if err != nil || sha256.Sum256(got) != sha256.Sum256(content) {
			t.Errorf("%s: copied file: got %d bytes, error %v; want the bytes sent", protocol, len(got), err)
		}
	}
}

// kubeImages: image garbage collection finds images in use by the containers' image IDs, and removes images by ID.
func kubeImages(t *testing.T, k *kubelet) {
	ctx := context.Background()
	c := &kubeContainer{name: "c", image: harness.Busybox, command: sleeps("")}
	s := k.states(k.newPod("images", c), "c running")
	unused := k.ensureImage(harness.StopSignal)
	images, err := k.images.ListImages(ctx, nil)
	k.must(err)
	containers, err := k.runtime.ListContainers(ctx, nil)
	k.must(err)
	for _, i := range images {
		inUse := slices.ContainsFunc(containers, func(c *runtimeapi.Container) bool { return c.ImageId == i.Id })
		if i.Size == 0 || i.Id == s.of(c).ImageId && !inUse || i.Id == unused && (inUse || i.Pinned) {
			t.Errorf("image: got %v, in use: %t; want a size, no pin, and use only by the pod's container", i, inUse)
		}
	}
	k.must(k.images.RemoveImage(ctx, &runtimeapi.ImageSpec{Image: unused}))
	k.must(k.images.RemoveImage(ctx, &runtimeapi.ImageSpec{Image: unused})) // another collection at the same time
	if resp, err := k.images.ImageStatus(ctx, &runtimeapi.ImageSpec{Image: harness.StopSignal}, false); err != nil || resp.Image != nil {
		t.Errorf("status of a removed image: got %v with error %v, want neither", resp, err)
	}
}

// kubeHostNetwork tests a static pod on the node's network whose RuntimeClass has a handler.
func kubeHostNetwork(t *testing.T, k *kubelet) {
	c := &kubeContainer{name: "c", image: harness.Busybox, command: sleeps("")}
	p := k.newPod("host", c)
	p.hostNetwork, p.handler = true, "linux"
	// only for the scheduler; a pod on the node's network needs no mapping
	p.ports = []*runtimeapi.PortMapping{{ContainerPort: 6443, HostPort: 6443}}
	s := k.states(p, "c running")
	sandbox := s.sandbox()
	if n := sandbox.GetLinux().GetNamespaces().GetOptions().GetNetwork(); n != runtimeapi.NamespaceMode_NODE ||
		sandbox.RuntimeHandler != "linux" {
		t.Errorf("sandbox: got %v, want the handler linux on the node's network", sandbox)
	}
	out, _, err := k.runtime.ExecSync(context.Background(), s.of(c).Id, shell("hostname; readlink /proc/self/ns/net"), 0)
	k.must(err)
	name, err := os.Hostname()
	k.must(err)
	netns, err := os.Readlink("/proc/self/ns/net")
	k.must(err)
	if got := strings.TrimSpace(string(out)); got != name+"\n"+netns {
		t.Errorf("host name and network namespace: got %s, want %s, %s", got, name, netns)
	}
}

// kubeNodePod tests a pod like those of kubectl debug node/NAME and of a node's agents: a privileged pod that mounts
// the node's root directory with all mounts below it. Other pods are created and removed meanwhile, and leave nothing.
func kubeNodePod(t *testing.T, k *kubelet) {
	other := func(name string) *kubePod {
		p := k.newPod(name, &kubeContainer{name: "c", image: harness.Busybox, command: sleeps("")})
		p.grace = 2
		k.states(p, "c running")
		return p
	}
	before := other("before")
	agent := &kubeContainer{name: "agent", image: harness.Busybox, command: sleeps(""), change: func(c *runtimeapi.ContainerConfig) {
		sc := c.Linux.SecurityContext
		sc.Privileged, sc.MaskedPaths, sc.ReadonlyPaths = true, nil, nil
		c.Mounts = append(c.Mounts, &runtimeapi.Mount{ContainerPath: "/host", HostPath: "/"},
			&runtimeapi.Mount{ContainerPath: "/kubelet", HostPath: k.root, Propagation: runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL})
	}}
	p := k.newPod("agent", agent)
	p.hostNetwork, p.ofNode = true, true
	s := k.states(p, "agent running")
	after := other("after")
	script := fmt.Sprintf("chroot /host /bin/sh -c 'test -e %s' && tr '\\0' ' ' </proc/%d/cmdline && mkdir /kubelet/csi && mount -t tmpfs csi /kubelet/csi", k.d.Socket, k.d.Pid())
	out, errout, err := k.runtime.ExecSync(context.Background(), s.of(agent).Id, shell(script), 0)
	if err != nil || !strings.Contains(string(out), "daemon") {
		t.Errorf("script in the agent: got stdout %s, stderr %s, error %v", out, errout, err)
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if k.must(err); !strings.Contains(string(mounts), filepath.Join(k.root, "csi")) {
		t.Error("the agent's mount for pods is missing on the node")
	}
	k.remove(before)
	k.remove(after)
	k.must(syscall.Unmount(filepath.Join(k.root, "csi"), 0))
}
