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
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/client-go/tools/remotecommand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	criclient "k8s.io/cri-client/pkg"
	crilogs "k8s.io/cri-client/pkg/logs"
	utilexec "k8s.io/utils/exec"

	"github.com/tripod-run/tripod/test/harness"
)

// sleeps is a command that runs until it is asked to end, and says when it is.
func sleeps(before string) []string {
	return []string{"sh", "-c", before + "\ntrap 'echo asked to end; exit 0' TERM; sleep 3600 & wait"}
}

func shell(script string) []string { return []string{"sh", "-c", script} }

// TestKubeletStartUp asks what a kubelet asks before it runs the first pod.
func TestKubeletStartUp(t *testing.T) {
	ctx := context.Background()
	d := harness.StartDaemon(t)
	k := newKubelet(t, d)
	v, err := k.runtime.Version(ctx, "v1")
	k.must(err)
	if _, err := version.ParseSemantic(v.RuntimeVersion); err != nil || v.Version != "0.1.0" {
		t.Errorf("%v: %v", v, err)
	}
	s, err := k.runtime.Status(ctx, false)
	k.must(err)
	for _, c := range s.Status.Conditions {
		if !c.Status {
			t.Errorf("condition %v", c)
		}
	}
	var handlers []string
	for _, h := range s.RuntimeHandlers {
		handlers = append(handlers, h.Name)
	}
	if !slices.Contains(handlers, "") || !slices.Contains(handlers, "linux") || !s.Features.GetSupplementalGroupsPolicy() {
		t.Errorf("handlers %q, features %v", handlers, s.Features)
	}
	config, err := k.runtime.RuntimeConfig(ctx)
	k.must(err)
	if got := config.GetLinux().GetCgroupDriver(); got != runtimeapi.CgroupDriver_CGROUPFS {
		t.Errorf("cgroup driver %v", got)
	}
	k.must(k.runtime.UpdateRuntimeConfig(ctx, &runtimeapi.RuntimeConfig{NetworkConfig: &runtimeapi.NetworkConfig{PodCidr: "10.244.0.0/24"}}))
	fs, err := k.images.ImageFsInfo(ctx)
	k.must(err)
	for _, u := range slices.Concat(fs.ImageFilesystems, fs.ContainerFilesystems) {
		// The mount point is given to statfs(2), the numbers are used without a look whether they are there.
		if err := syscall.Statfs(u.GetFsId().GetMountpoint(), new(syscall.Statfs_t)); err != nil || u.UsedBytes == nil || u.InodesUsed == nil || u.Timestamp == 0 {
			t.Errorf("file system %v: %v", u, err)
		}
	}
	if len(fs.ImageFilesystems) != 1 || len(fs.ContainerFilesystems) != 1 {
		t.Errorf("%v", fs)
	}
	// What the kubelet has an answer to when the runtime does not have it.
	_, err = d.CRI().UpdatePodSandboxResources(ctx, &runtimeapi.UpdatePodSandboxResourcesRequest{PodSandboxId: "x"})
	wantCode(t, err, codes.Unimplemented)
	_, err = k.runtime.ListMetricDescriptors(ctx)
	wantCode(t, err, codes.Unimplemented)
}

// TestKubelet plays what happens to the pods of a node.
func TestKubelet(t *testing.T) {
	d := harness.StartDaemon(t)
	for name, test := range map[string]func(*testing.T, *kubelet){
		"Deployment":                 kubeDeployment,
		"crash loop":                 kubeCrashLoop,
		"Job":                        kubeJob,
		"start that fails":           kubeStartFails,
		"debug container":            kubeDebug,
		"shared processes":           kubeSharedProcesses,
		"lost sandbox":               kubeLostSandbox,
		"termination":                kubeTermination,
		"restarted kubelet":          kubeRestarted,
		"resize":                     kubeResize,
		"identity":                   kubeIdentity,
		"stats":                      kubeStats,
		"logs":                       kubeLogs,
		"cp":                         kubeCopy,
		"images":                     kubeImages,
		"host network and handler":   kubeHostNetwork,
		"events instead of relists":  kubeEvents,
		"what is not there any more": kubeNotFound,
	} {
		t.Run(name, func(t *testing.T) {
			k := newKubelet(t, d)
			test(t, k)
			newKubelet(t, d).relist()
		})
	}
}

// kubeDeployment is a pod as most are: init containers in their order, a sidecar, a server with probes, hooks and a
// host port, and its end in the opposite order.
func kubeDeployment(t *testing.T, k *kubelet) {
	ctx := context.Background()
	web := &kubeContainer{
		name: "web", image: harness.Httpd, limits: limits{cpuRequest: 100, cpuLimit: 500, memory: 128 << 20},
		postStart: shell("echo post >>/data/order"), preStop: shell("echo pre >>/data/order"),
		change: func(c *runtimeapi.ContainerConfig) { c.Linux.SecurityContext.NoNewPrivs = false },
	}
	p := k.newPod("web", web)
	p.grace = 3 // httpd has no handler of SIGTERM
	p.init = []*kubeContainer{
		{name: "first", image: harness.Busybox, command: shell("echo first >>/data/order")},
		{name: "sidecar", image: harness.Busybox, sidecar: true, command: shell("echo sidecar >>/data/order; trap 'echo sidecar ends >>/data/order; exit 0' TERM; sleep 3600 & wait")},
		{name: "last", image: harness.Busybox, command: shell("grep -q sidecar /data/order && echo last >>/data/order")},
	}
	port := freePort(t)
	p.ports = []*runtimeapi.PortMapping{{ContainerPort: 80, HostPort: port}, {ContainerPort: 8080}}
	s := k.states(p, "first exited, sidecar running, last exited, web running")
	ip := s.sandbox().GetNetwork().GetIp()
	get(t, "http://"+net.JoinHostPort(ip, "80")+"/") // an HTTP probe comes from the node
	get(t, fmt.Sprintf("http://127.0.0.1:%d/", port))

	exec := func(timeout time.Duration, argv ...string) error {
		_, _, err := k.runtime.ExecSync(ctx, s.of(web).Id, argv, timeout)
		return err
	}
	if err := exec(time.Second, "true"); err != nil {
		t.Errorf("exec probe: %v", err)
	}
	if exit, ok := errors.AsType[utilexec.ExitError](exec(time.Second, "sh", "-c", "exit 3")); !ok || exit.ExitStatus() != 3 {
		t.Errorf("failing exec probe: %v", exit)
	}
	if err := exec(time.Second, "sleep", "60"); !errors.Is(err, criclient.ErrCommandTimedOut) {
		t.Errorf("slow exec probe: %v", err)
	}
	if again := k.states(p, "first exited, sidecar running, last exited, web running"); again.of(web).Id != s.of(web).Id || len(again.containers) != 4 {
		t.Errorf("a pod that is as it should be was changed: %v", again.containers)
	}
	p.deleted = true
	k.sync(p, k.status(p))
	order, err := os.ReadFile(filepath.Join(k.dir(p), "emptydir", "order"))
	k.must(err)
	if got, want := strings.Join(lines(string(order)), ", "), "first, sidecar, last, post, pre, sidecar ends"; got != want {
		t.Errorf("%s; want %s", got, want)
	}
	k.remove(p)
}

func freePort(t *testing.T) int32 {
	t.Helper()
	l, err := net.Listen("tcp", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return int32(l.Addr().(*net.TCPAddr).Port)
}

// kubeCrashLoop: each attempt has its number, its log and its last words, and the dead before the last are collected.
func kubeCrashLoop(t *testing.T, k *kubelet) {
	c := &kubeContainer{name: "c", image: harness.Busybox, command: shell("n=$(cat /data/n || echo 0); echo $((n+1)) >/data/n; echo run $n; " +
		"test $n -lt 3 || exec sleep 3600; echo out of luck $n >/dev/termination-log; exit 4")}
	p := k.newPod("crash", c)
	k.wait(p, func(s *podStatus) error {
		for _, status := range s.containers {
			if status.State != exited {
				continue
			}
			n := int(status.Metadata.Attempt)
			if status.ExitCode != 4 || status.Reason != "Error" || status.Message != "" || status.FinishedAt < status.StartedAt || status.StartedAt < status.CreatedAt {
				t.Errorf("attempt %d: %v", n, status)
			}
			if got, want := k.lastWords(status), fmt.Sprintf("out of luck %d\n", n); got != want {
				t.Errorf("attempt %d: last words %q, want %q", n, got, want)
			}
			if got := harness.Text(harness.ReadLog(t, status.LogPath), "stdout"); got != fmt.Sprintf("run %d\n", n) || filepath.Base(status.LogPath) != fmt.Sprintf("%d.log", n) {
				t.Errorf("attempt %d: log %q in %s", n, got, status.LogPath)
			}
		}
		if s.state(c) != "running" || s.of(c).Metadata.Attempt != 3 {
			return fmt.Errorf("the container is %v", s.of(c))
		}
		return nil
	})
	if s := k.status(p); len(s.containers) != 2 || s.containers[1].Metadata.Attempt != 2 {
		t.Errorf("besides the running one and the last dead: %v", s.containers)
	}
}

// lastWords is a container's termination message, which is found by the mounts of its status.
func (k *kubelet) lastWords(c *runtimeapi.ContainerStatus) string {
	for _, m := range c.Mounts {
		if m.ContainerPath == "/dev/termination-log" {
			data, err := os.ReadFile(m.HostPath)
			k.must(err)
			return string(data)
		}
	}
	k.t.Errorf("no /dev/termination-log among the mounts %v", c.Mounts)
	return ""
}

func kubeJob(t *testing.T, k *kubelet) {
	c := &kubeContainer{name: "c", image: harness.Busybox, command: shell("exit 3")}
	p := k.newPod("never", c)
	p.restart = restartNever
	s := k.wait(p, func(s *podStatus) error {
		if len(s.sandboxes) != 1 || s.sandbox() != nil || s.state(c) != "exited" {
			return fmt.Errorf("%v", s)
		}
		return nil
	})
	k.sync(p, k.status(p))
	if again := k.status(p); len(again.sandboxes) != 1 || len(again.containers) != 1 || again.of(c).ExitCode != 3 {
		t.Errorf("a pod that has failed was %v, is %v", s, again)
	}
	c = &kubeContainer{name: "c", image: harness.Busybox, command: shell("test -e /data/second || { touch /data/second; exit 1; }")}
	p = k.newPod("on-failure", c)
	p.restart = restartOnFailure
	if s := k.states(p, "c exited"); s.of(c).Metadata.Attempt > 1 {
		t.Errorf("%v", s.containers)
	}
	k.wait(p, func(s *podStatus) error {
		if c := s.of(c); c.Metadata.Attempt != 1 || c.ExitCode != 0 || c.Reason != "Completed" {
			return fmt.Errorf("%v", c)
		}
		return nil
	})
}

// kubeStartFails: a program that is not there, and one that runs out of its memory.
func kubeStartFails(t *testing.T, k *kubelet) {
	missing := &kubeContainer{name: "missing", image: harness.Busybox, command: []string{"/no/such/program"}}
	p := k.newPod("missing", missing)
	p.restart = restartNever
	s := k.states(p, "missing exited")
	if c := s.of(missing); c.ExitCode != 128 || c.Reason != "StartError" || !strings.Contains(c.Message, "/no/such/program") {
		t.Errorf("%v", c)
	}
	if _, err := os.Stat(s.of(missing).LogPath); err != nil {
		t.Errorf("kubectl logs: %v", err)
	}
	hungry := &kubeContainer{name: "hungry", image: harness.Busybox, limits: limits{memory: 16 << 20}, command: shell("x=$(yes | head -c 64000000); echo $x | wc -c")}
	p = k.newPod("hungry", hungry)
	p.restart = restartNever
	if c := k.states(p, "hungry exited").of(hungry); c.Reason != "OOMKilled" || c.ExitCode != 137 {
		t.Errorf("%v", c)
	}
}

// kubeDebug is kubectl debug --target: an ephemeral container among the processes of another, joined by kubectl attach.
func kubeDebug(t *testing.T, k *kubelet) {
	main := &kubeContainer{name: "main", image: harness.Busybox, command: []string{"sleep", "7654"}}
	p := k.newPod("debug", main)
	k.states(p, "main running")
	p.ephemeral = []*kubeContainer{{name: "debugger", image: harness.Busybox, target: "main", command: []string{"sh"}, change: func(c *runtimeapi.ContainerConfig) {
		c.Stdin, c.Tty = true, true
	}}}
	s := k.states(p, "main running, debugger running")
	resp, err := k.runtime.Attach(context.Background(), &runtimeapi.AttachRequest{ContainerId: s.of(p.ephemeral[0]).Id, Stdin: true, Stdout: true, Tty: true})
	k.must(err)
	session := startSession(t, harness.SPDY, resp.Url, true)
	session.say("ps -o args\n")
	session.stdout.wait(t, "sleep 7654")
	session.say("exit\n")
	s = k.states(p, "main running, debugger exited")
	k.sync(p, s)
	if again := k.status(p); len(again.containers) != 2 {
		t.Errorf("an ephemeral container was started again: %v", again.containers)
	}
}

// kubeSharedProcesses: containers of a pod with shareProcessNamespace signal each other; when the pod's own process is
// gone, so is the sandbox.
func kubeSharedProcesses(t *testing.T, k *kubelet) {
	a := &kubeContainer{name: "a", image: harness.Busybox, command: []string{"sleep", "7655"}}
	b := &kubeContainer{name: "b", image: harness.Busybox, command: sleeps("")}
	p := k.newPod("shared", a, b)
	p.sharePID = true
	s := k.states(p, "a running, b running")
	if _, _, err := k.runtime.ExecSync(context.Background(), s.of(b).Id, shell(`for p in /proc/[0-9]*; do tr '\0' ' ' <$p/cmdline | grep -q '^sleep 7655' && kill -9 ${p#/proc/}; done; true`), 0); err != nil {
		t.Error(err)
	}
	s = k.wait(p, func(s *podStatus) error {
		if c := s.of(a); c.State != running || c.Metadata.Attempt != 1 {
			return fmt.Errorf("%v", c)
		}
		return nil
	})
	first := s.sandbox().Id
	killPause(t, first)
	s = k.wait(p, func(s *podStatus) error {
		if s.sandbox() == nil || s.sandbox().Metadata.Attempt != 1 || s.state(a) != "running" || s.state(b) != "running" {
			return fmt.Errorf("%v", s)
		}
		return nil
	})
	for _, sandbox := range s.sandboxes[1:] {
		if sandbox.Id != first || sandbox.State == ready {
			t.Errorf("%v", sandbox)
		}
	}
}

// killPause kills the process that holds a pod's PID namespace: the one in the cgroup that is named after the pod, and
// after no container.
func killPause(t *testing.T, podID string) {
	t.Helper()
	files, _ := filepath.Glob("/proc/[0-9]*/cgroup")
	for _, file := range files {
		cgroups, _ := os.ReadFile(file)
		if !slices.ContainsFunc(lines(string(cgroups)), func(line string) bool { return strings.HasSuffix(strings.TrimSuffix(line, ".scope"), podID) }) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err == nil {
			err = syscall.Kill(pid, syscall.SIGKILL)
		}
		if err != nil {
			t.Fatal(err)
		}
		return
	}
	t.Fatalf("pod %s has no process of its own", podID)
}

// kubeLostSandbox: a sandbox that somebody stopped behind the kubelet's back is followed by the next attempt, in which
// all begins anew.
func kubeLostSandbox(t *testing.T, k *kubelet) {
	c := &kubeContainer{name: "c", image: harness.Busybox, command: sleeps("")}
	p := k.newPod("lost", c)
	p.init = []*kubeContainer{{name: "init", image: harness.Busybox, command: shell("echo x >>/data/inits")}}
	first := k.states(p, "init exited, c running")
	k.must(k.runtime.StopPodSandbox(context.Background(), first.sandbox().Id))
	if s := k.status(p); s.sandbox() != nil || s.state(c) != "exited" || s.sandboxes[0].GetNetwork().GetIp() != "" {
		t.Errorf("stopped: %v", s)
	}
	second := k.wait(p, func(s *podStatus) error {
		if s.sandbox().GetMetadata().GetAttempt() != 1 || s.state(c) != "running" {
			return fmt.Errorf("%v", s)
		}
		return nil
	})
	if second.of(c).Metadata.Attempt != 1 || second.sandbox().GetNetwork().GetIp() == "" {
		t.Errorf("%v", second)
	}
	inits, err := os.ReadFile(filepath.Join(k.dir(p), "emptydir", "inits"))
	k.must(err)
	if string(inits) != "x\nx\n" {
		t.Errorf("init containers ran %q", inits)
	}
	k.must(k.runtime.StopContainer(context.Background(), second.of(c).Id, 2))
	k.wait(p, func(s *podStatus) error { // the old sandbox goes when its last container has been collected
		if len(s.sandboxes) != 1 || s.state(c) != "running" {
			return fmt.Errorf("%v", s)
		}
		return nil
	})
}

// kubeTermination: SIGTERM and patience, or not, and a second order with less of it.
func kubeTermination(t *testing.T, k *kubelet) {
	ctx := context.Background()
	polite := &kubeContainer{name: "polite", image: harness.Busybox, command: sleeps("")}
	deaf := &kubeContainer{name: "deaf", image: harness.Busybox, command: shell("trap '' TERM; while :; do sleep 1; done")}
	p := k.newPod("end", polite, deaf)
	s := k.states(p, "polite running, deaf running")
	begin := time.Now()
	k.must(k.runtime.StopContainer(ctx, s.of(polite).Id, 30))
	if took := time.Since(begin); took > 10*time.Second {
		t.Errorf("one that ends when it is asked to took %v", took)
	}
	if got := harness.Text(harness.ReadLog(t, s.of(polite).LogPath), "stdout"); got != "asked to end\n" {
		t.Errorf("%q", got)
	}
	long := make(chan error, 1)
	go func() { long <- k.runtime.StopContainer(ctx, s.of(deaf).Id, 600) }()
	harness.Eventually(t, waitLimit, func() error { // the first order is under way
		if k.status(p).state(deaf) != "running" {
			return errors.New("not running")
		}
		return nil
	})
	begin = time.Now()
	p.grace, p.deleted = 2, true // kubectl delete --force --grace-period=0 is 2 seconds in the end
	k.sync(p, k.status(p))
	k.must(<-long)
	if took := time.Since(begin); took < time.Second || took > 15*time.Second {
		t.Errorf("a forced end took %v", took)
	}
	if c := k.status(p).of(deaf); c.State != exited || c.ExitCode != 137 {
		t.Errorf("%v", c)
	}
	for range 2 { // each again, in any order, after the cgroup is gone
		k.must(k.runtime.StopContainer(ctx, s.of(deaf).Id, 2))
		k.must(k.runtime.StopPodSandbox(ctx, s.sandbox().Id))
	}
	k.remove(p)
}

// kubeRestarted: another kubelet finds the pods as they are, leaves those alone that run, and makes anew what the one
// before had only created. The daemon is restarted as well.
func kubeRestarted(t *testing.T, k *kubelet) {
	ctx := context.Background()
	up := &kubeContainer{name: "up", image: harness.Busybox, command: sleeps("")}
	half := &kubeContainer{name: "half", image: harness.Busybox, command: sleeps("")}
	p := k.newPod("restarted", up)
	p.grace = 2
	s := k.states(p, "up running")
	id, err := k.runtime.CreateContainer(ctx, s.sandbox().Id, k.containerConfig(p, half, k.ensureImage(half.image), 0), k.sandboxConfig(p, 0))
	k.must(err)
	before := k.relist()
	k.d.Restart()
	k = newKubelet(t, k.d)
	if after := k.relist(); fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("was\n%v, is\n%v", before, after)
	}
	p.containers = append(p.containers, half)
	again := k.states(p, "up running, half running")
	if again.of(up).String() != s.of(up).String() || again.sandbox().Id != s.sandbox().Id {
		t.Errorf("was\n%v, is\n%v", s.of(up), again.of(up))
	}
	if again.of(half).Metadata.Attempt != 1 || again.of(half).Id == id {
		t.Errorf("%v", again.of(half))
	}
	k.remove(p)
}

// kubeResize is an in-place resize: the pod's cgroup is the kubelet's, the container's the runtime's. Raising begins
// with the pod, lowering with the container.
func kubeResize(t *testing.T, k *kubelet) {
	ctx := context.Background()
	c := &kubeContainer{name: "c", image: harness.Busybox, command: sleeps(""), limits: limits{cpuRequest: 100, cpuLimit: 200, memory: 32 << 20}}
	p := k.newPod("resize", c)
	k.limitPod(p, c.limits)
	s := k.states(p, "c running")
	for _, to := range []limits{
		{cpuRequest: 500, cpuLimit: 1000, memory: 64 << 20}, {cpuRequest: 200, cpuLimit: 1500, memory: 64 << 20}, {cpuRequest: 100, cpuLimit: 100, memory: 24 << 20},
	} {
		k.limitPod(p, limits{cpuRequest: to.cpuRequest, cpuLimit: max(to.cpuLimit, c.limits.cpuLimit), memory: max(to.memory, c.limits.memory)})
		k.must(k.runtime.UpdateContainerResources(ctx, s.of(c).Id, &runtimeapi.ContainerResources{Linux: to.linux()}))
		k.limitPod(p, to)
		c.limits = to
		now := k.status(p).of(c)
		if got, want := now.GetResources().GetLinux(), to.linux(); got.CpuShares != want.CpuShares || got.CpuQuota != want.CpuQuota ||
			got.CpuPeriod != want.CpuPeriod || got.MemoryLimitInBytes != want.MemoryLimitInBytes {
			t.Errorf("the status tells %v, want %v", got, want)
		}
		if got := k.limitsIn(k.containerCgroup(p, now.Id)); got != to {
			t.Errorf("the cgroup has %+v, want %+v", got, to)
		}
	}
	// Without a limit on CPU time.
	none := c.limits.linux()
	none.CpuQuota = -1
	k.limitPod(p, limits{cpuRequest: 100, memory: c.limits.memory})
	k.must(k.runtime.UpdateContainerResources(ctx, s.of(c).Id, &runtimeapi.ContainerResources{Linux: none}))
	if got := k.limitsIn(k.containerCgroup(p, s.of(c).Id)); got.cpuLimit != 0 {
		t.Errorf("the cgroup has %+v", got)
	}
	if now := k.status(p).of(c); now.GetResources().GetLinux().GetCpuQuota() > 0 || now.Id != s.of(c).Id || now.StartedAt != s.of(c).StartedAt {
		t.Errorf("%v", now)
	}
}

// containerCgroup is a container's cgroup below the pod's, as a path in every hierarchy.
func (k *kubelet) containerCgroup(p *kubePod, id string) string {
	k.t.Helper()
	root := memoryRoot()
	var found string
	_ = filepath.WalkDir(filepath.Join(root, k.cgroup(p)), func(path string, e os.DirEntry, err error) error {
		if err == nil && e.IsDir() && strings.Contains(e.Name(), id) {
			found = strings.TrimPrefix(path, root)
		}
		return nil
	})
	if found == "" {
		k.t.Fatalf("container %s has no cgroup below the pod's", id)
	}
	return found
}

func onV2() bool {
	_, err := os.Stat("/sys/fs/cgroup/cgroup.controllers")
	return err == nil
}

func memoryRoot() string {
	if onV2() {
		return "/sys/fs/cgroup"
	}
	return "/sys/fs/cgroup/memory"
}

func cpuRoot() string {
	if onV2() {
		return "/sys/fs/cgroup"
	}
	return "/sys/fs/cgroup/cpu"
}

// limitPod sets the limits of the pod's cgroup, as the kubelet does.
func (k *kubelet) limitPod(p *kubePod, l limits) {
	k.t.Helper()
	r := l.linux()
	write := func(root, file, value string) {
		k.must(os.WriteFile(filepath.Join(root, k.cgroup(p), file), []byte(value), 0o644))
	}
	quota := "-1"
	if r.CpuQuota > 0 {
		quota = strconv.FormatInt(r.CpuQuota, 10)
	}
	if onV2() {
		write(memoryRoot(), "memory.max", strconv.FormatInt(l.memory, 10))
		write(cpuRoot(), "cpu.max", strings.Replace(quota, "-1", "max", 1)+" 100000")
		return
	}
	write(memoryRoot(), "memory.limit_in_bytes", strconv.FormatInt(l.memory, 10))
	write(cpuRoot(), "cpu.cfs_quota_us", quota)
	write(cpuRoot(), "cpu.shares", strconv.FormatInt(r.CpuShares, 10))
}

// limitsIn reads the limits of a cgroup.
func (k *kubelet) limitsIn(cgroup string) limits {
	k.t.Helper()
	number := func(root, file string) int64 {
		data, err := os.ReadFile(filepath.Join(root, cgroup, file))
		k.must(err)
		n, _ := strconv.ParseInt(strings.Fields(string(data))[0], 10, 64) // "max" is none
		return max(n, 0)
	}
	if onV2() {
		// The weight is 1 + (shares-2)*9999/262142; back, to the nearest hundred thousandths of a CPU.
		shares := (number(cpuRoot(), "cpu.weight")-1)*262142/9999 + 2
		return limits{cpuRequest: (shares*1000/1024 + 50) / 100 * 100, cpuLimit: number(cpuRoot(), "cpu.max") / 100, memory: number(memoryRoot(), "memory.max")}
	}
	return limits{
		cpuRequest: (number(cpuRoot(), "cpu.shares")*1000 + 1023) / 1024, cpuLimit: number(cpuRoot(), "cpu.cfs_quota_us") / 100,
		memory: number(memoryRoot(), "memory.limit_in_bytes"),
	}
}

// kubeIdentity: what a container is in a pod with a security context, as it sees it itself and as the status tells it.
func kubeIdentity(t *testing.T, k *kubelet) {
	c := &kubeContainer{name: "c", image: harness.Busybox, command: sleeps("")}
	c.change = func(config *runtimeapi.ContainerConfig) {
		sc := config.Linux.SecurityContext
		sc.RunAsUser, sc.RunAsGroup = &runtimeapi.Int64Value{Value: 1000}, &runtimeapi.Int64Value{Value: 3000}
		sc.SupplementalGroups = []int64{2000}
		sc.ReadonlyRootfs = true
		sc.Capabilities = &runtimeapi.Capability{DropCapabilities: []string{"ALL"}}
	}
	p := k.newPod("identity", c)
	s := k.states(p, "c running")
	exec := func(script string) string {
		t.Helper()
		out, errout, err := k.runtime.ExecSync(context.Background(), s.of(c).Id, shell(script), 0)
		if err != nil {
			t.Errorf("%s: %v\n%s", script, err, errout)
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
		"cat /proc/1/oom_score_adj":                                                    "999",
		"ls /sys/firmware | wc -l; wc -c </proc/keys":                                  "0\n0",
	} {
		if got := exec(script); got != want {
			t.Errorf("%s:\n%s\nwant\n%s", script, got, want)
		}
	}
	if u := s.of(c).GetUser().GetLinux(); u.GetUid() != 1000 || u.GetGid() != 3000 || !slices.Contains(u.GetSupplementalGroups(), 2000) {
		t.Errorf("the status tells the user %v", u)
	}
	if i := s.of(c); i.Image.GetImage() != harness.Busybox || i.ImageId != k.ensureImage(harness.Busybox) || i.ImageRef == "" {
		t.Errorf("the status tells the image %v, %s, %s", i.Image, i.ImageRef, i.ImageId)
	}
}

// kubeStats: the figures that the kubelet uses without a look whether they are there.
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
			t.Errorf("attributes %v", stats.Attributes)
		}
		if stats.Attributes.Id == s.of(c).Id {
			seen++
			checkFigures(t, stats)
		}
	}
	if seen != 1 {
		t.Errorf("%d figures of the container", seen)
	}
	pods, err := k.runtime.ListPodSandboxStats(ctx, &runtimeapi.PodSandboxStatsFilter{})
	k.must(err)
	for _, stats := range pods {
		l := stats.GetLinux()
		if stats.GetAttributes().GetMetadata().GetUid() == "" || l.GetCpu().GetUsageCoreNanoSeconds() == nil || l.GetMemory().GetWorkingSetBytes() == nil || l.GetProcess().GetProcessCount() == nil {
			t.Errorf("%v", stats)
		}
		if l.GetNetwork() != nil && (l.Network.DefaultInterface == nil || l.Network.Timestamp == 0) {
			t.Errorf("network without an interface: %v", l.Network)
		}
		for _, c := range l.GetContainers() {
			checkFigures(t, c)
		}
	}
	if len(pods) < 2 {
		t.Errorf("%v", pods)
	}
}

func checkFigures(t *testing.T, s *runtimeapi.ContainerStats) {
	t.Helper()
	layer := s.GetWritableLayer()
	if err := syscall.Statfs(layer.GetFsId().GetMountpoint(), new(syscall.Statfs_t)); err != nil || layer.GetUsedBytes() == nil || layer.GetInodesUsed() == nil {
		t.Errorf("writable layer %v: %v", layer, err)
	}
	if s.GetCpu().GetTimestamp() == 0 || s.GetCpu().GetUsageCoreNanoSeconds().GetValue() == 0 || s.GetMemory().GetTimestamp() == 0 || s.GetMemory().GetWorkingSetBytes().GetValue() == 0 {
		t.Errorf("%v", s)
	}
}

// kubeLogs reads a log as kubectl logs -f does, over a rotation and to the container's end.
func kubeLogs(t *testing.T, k *kubelet) {
	ctx := context.Background()
	c := &kubeContainer{name: "c", image: harness.Busybox, command: shell("echo before; echo oops >&2; until test -e /data/go; do usleep 10000; done; echo after; sleep 1; echo last")}
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
		t.Errorf("after a rotation: %v", err)
	}
	k.must(os.WriteFile(filepath.Join(k.dir(p), "emptydir", "go"), nil, 0o644))
	select {
	case err := <-ended:
		k.must(err)
	case <-time.After(waitLimit):
		t.Fatal("kubectl logs -f does not end with the container")
	}
	if got := stdout.String(); got != "before\nafter\nlast\n" {
		t.Errorf("%q", got)
	}
}

// kubeCopy is kubectl cp in both directions: an archive through tar's standard input, and back through its output.
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
			resp, err := k.runtime.Exec(ctx, &runtimeapi.ExecRequest{ContainerId: s.of(c).Id, Cmd: argv, Stdin: stdin != nil, Stdout: true, Stderr: true})
			k.must(err)
			code, err := harness.Stream(ctx, protocol, resp.Url, remotecommand.StreamOptions{Stdin: stdin, Stdout: stdout, Stderr: &stderr})
			if err != nil || code != 0 {
				t.Errorf("%s %q: %d, %v, %s", protocol, argv, code, err, &stderr)
			}
		}
		if protocol == harness.SPDY { // version 4 over WebSocket cannot tell tar that its input has ended; the kubelet speaks SPDY
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
			t.Errorf("%s: %d bytes came back, %v", protocol, len(got), err)
		}
	}
}

// kubeImages: image garbage collection finds what is in use by the containers' image IDs, and removes by ID.
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
			t.Errorf("%v, in use: %t", i, inUse)
		}
	}
	k.must(k.images.RemoveImage(ctx, &runtimeapi.ImageSpec{Image: unused}))
	k.must(k.images.RemoveImage(ctx, &runtimeapi.ImageSpec{Image: unused})) // another collection at the same time
	if resp, err := k.images.ImageStatus(ctx, &runtimeapi.ImageSpec{Image: harness.StopSignal}, false); err != nil || resp.Image != nil {
		t.Errorf("%v, %v", resp, err)
	}
}

// kubeHostNetwork is a static pod on the node's network, of a RuntimeClass with a handler.
func kubeHostNetwork(t *testing.T, k *kubelet) {
	c := &kubeContainer{name: "c", image: harness.Busybox, command: sleeps("")}
	p := k.newPod("host", c)
	p.hostNetwork, p.handler = true, "linux"
	s := k.states(p, "c running")
	sandbox := s.sandbox()
	if n := sandbox.GetLinux().GetNamespaces().GetOptions().GetNetwork(); n != runtimeapi.NamespaceMode_NODE || sandbox.RuntimeHandler != "linux" {
		t.Errorf("%v", sandbox)
	}
	out, _, err := k.runtime.ExecSync(context.Background(), s.of(c).Id, shell("hostname; readlink /proc/self/ns/net"), 0)
	k.must(err)
	name, err := os.Hostname()
	k.must(err)
	netns, err := os.Readlink("/proc/self/ns/net")
	k.must(err)
	if got := strings.TrimSpace(string(out)); got != name+"\n"+netns {
		t.Errorf("%s, want %s, %s", got, name, netns)
	}
}

// kubeEvents is evented PLEG: every event has the pod and all of its containers as they were right after it.
func kubeEvents(t *testing.T, k *kubelet) {
	ctx, cancel := context.WithTimeout(context.Background(), waitLimit)
	defer cancel()
	stream, err := k.d.CRI().GetContainerEvents(ctx, &runtimeapi.GetEventsRequest{})
	k.must(err)
	_, err = stream.Header()
	k.must(err)
	c := &kubeContainer{name: "c", image: harness.Busybox, command: shell("exit 0")}
	p := k.newPod("events", c)
	p.restart = restartNever
	s := k.wait(p, func(s *podStatus) error {
		if s.state(c) != "exited" || s.sandbox() != nil {
			return fmt.Errorf("%v", s)
		}
		return nil
	})
	sandbox, container := s.sandboxes[0].Id, s.of(c).Id
	k.remove(p)
	var got []string
	last := int64(0)
	for !slices.Contains(got, "pod DELETED") {
		e, err := stream.Recv()
		if err != nil {
			t.Fatalf("%v after %v", err, got)
		}
		if e.PodSandboxStatus.GetMetadata().GetUid() != p.uid {
			continue
		}
		kind := strings.TrimSuffix(strings.TrimPrefix(e.ContainerEventType.String(), "CONTAINER_"), "_EVENT")
		who := map[string]string{sandbox: "pod ", container: "c "}[e.ContainerId]
		got = append(got, who+kind)
		if e.CreatedAt < last || e.PodSandboxStatus.GetId() != sandbox || len(e.PodSandboxStatus.Labels) == 0 {
			t.Errorf("%s: %v", who+kind, e)
		}
		last = e.CreatedAt
		states := map[string]runtimeapi.ContainerState{"c CREATED": created, "c STARTED": running, "c STOPPED": exited}
		if want, ok := states[who+kind]; ok && (len(e.ContainersStatuses) != 1 || e.ContainersStatuses[0].State != want) {
			t.Errorf("%s: %v", who+kind, e.ContainersStatuses)
		}
		if who+kind == "c DELETED" && len(e.ContainersStatuses) != 0 {
			t.Errorf("%s: %v", who+kind, e.ContainersStatuses)
		}
	}
	if want := "pod CREATED, pod STARTED, c CREATED, c STARTED, c STOPPED, pod STOPPED, c DELETED, pod DELETED"; strings.Join(got, ", ") != want {
		t.Errorf("%s\nwant %s", strings.Join(got, ", "), want)
	}
}

// kubeNotFound: what was removed is NotFound to those who ask, and no error to those who remove.
func kubeNotFound(t *testing.T, k *kubelet) {
	ctx := context.Background()
	c := &kubeContainer{name: "c", image: harness.Busybox, command: sleeps("")}
	p := k.newPod("gone", c)
	p.grace = 2
	s := k.states(p, "c running")
	k.remove(p)
	sandbox, container := s.sandboxes[0].Id, s.of(c).Id
	_, sandboxErr := k.runtime.PodSandboxStatus(ctx, sandbox, false)
	_, containerErr := k.runtime.ContainerStatus(ctx, container, false)
	_, _, execErr := k.runtime.ExecSync(ctx, container, []string{"true"}, time.Second)
	_, createErr := k.runtime.CreateContainer(ctx, sandbox, k.containerConfig(p, c, k.ensureImage(c.image), 1), k.sandboxConfig(p, 0))
	for what, err := range map[string]error{"PodSandboxStatus": sandboxErr, "ContainerStatus": containerErr, "ExecSync": execErr, "CreateContainer": createErr} {
		if status.Code(err) != codes.NotFound {
			t.Errorf("%s: %v", what, err)
		}
	}
	k.must(errors.Join(k.runtime.StopPodSandbox(ctx, sandbox), k.runtime.RemovePodSandbox(ctx, sandbox), k.runtime.RemoveContainer(ctx, container)))
	if err := k.runtime.StopContainer(ctx, container, 1); err != nil && status.Code(err) != codes.NotFound {
		t.Error(err)
	}
	k.must(os.RemoveAll(k.dir(p)))
	k.must(os.RemoveAll(k.logDir(p)))
}
