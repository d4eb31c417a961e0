package e2e

import (
	"context"
	"errors"
	"fmt"
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
	"k8s.io/apimachinery/pkg/util/version"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	criclient "k8s.io/cri-client/pkg"
	utilexec "k8s.io/utils/exec"

	"github.com/tripod-run/tripod/test/harness"
)

// sleeps returns a command that runs the script before, runs until SIGTERM, and then prints a line.
func sleeps(before string) []string {
	return []string{"sh", "-c", before + "\ntrap 'echo asked to end; exit 0' TERM; sleep 3600 & wait"}
}

func shell(script string) []string { return []string{"sh", "-c", script} }

// TestKubeletStartUp makes the calls that a kubelet makes before it runs the first pod.
func TestKubeletStartUp(t *testing.T) {
	ctx := context.Background()
	d := harness.StartDaemon(t)
	k := newKubelet(t, d)
	v, err := k.runtime.Version(ctx, "v1")
	k.must(err)
	if _, err := version.ParseSemantic(v.RuntimeVersion); err != nil || v.Version != "0.1.0" {
		t.Errorf("got the version %v (%v), want API 0.1.0 and a semantic version", v, err)
	}
	s, err := k.runtime.Status(ctx, false)
	k.must(err)
	for _, c := range s.Status.Conditions {
		if !c.Status {
			t.Errorf("condition: got %v, want true", c)
		}
	}
	var handlers []string
	for _, h := range s.RuntimeHandlers {
		handlers = append(handlers, h.Name)
	}
	if !slices.Contains(handlers, "") || !slices.Contains(handlers, "linux") || !s.Features.GetSupplementalGroupsPolicy() {
		t.Errorf("got handlers %q, features %v; want the handlers \"\" and linux, and SupplementalGroupsPolicy", handlers, s.Features)
	}
	config, err := k.runtime.RuntimeConfig(ctx)
	k.must(err)
	if got := config.GetLinux().GetCgroupDriver(); got != runtimeapi.CgroupDriver_CGROUPFS {
		t.Errorf("cgroup driver: got %v, want cgroupfs", got)
	}
	fs, err := k.images.ImageFsInfo(ctx)
	k.must(err)
	for _, u := range slices.Concat(fs.ImageFilesystems, fs.ContainerFilesystems) {
		// The kubelet passes the mount point to statfs(2) and uses the numbers without testing whether they are set.
		if err := syscall.Statfs(u.GetFsId().GetMountpoint(), new(syscall.Statfs_t)); err != nil || u.UsedBytes == nil || u.InodesUsed == nil ||
			u.Timestamp == 0 {
			t.Errorf("file system: got %v, error %v; want a mount point, bytes, inodes and a time", u, err)
		}
	}
	if len(fs.ImageFilesystems) != 1 || len(fs.ContainerFilesystems) != 1 {
		t.Errorf("ImageFsInfo: got %v, want one file system of images and one of containers", fs)
	}
	streaming, err := criclient.NewRemoteRuntimeServiceBuilder().WithEndpoint("unix://" +
		d.Socket).WithConnectionTimeout(waitLimit).WithUseStreaming(true).Build(ctx)
	k.must(err)
	_, podsErr := streaming.ListPodSandbox(ctx, nil)
	_, containersErr := streaming.ListContainers(ctx, nil)
	_, statsErr := streaming.ListContainerStats(ctx, nil)
	_, podStatsErr := streaming.ListPodSandboxStats(ctx, nil)
	k.must(errors.Join(podsErr, containersErr, statsErr, podStatsErr, streaming.Close(ctx)))
	_, err = d.CRI().UpdatePodSandboxResources(ctx, &runtimeapi.UpdatePodSandboxResourcesRequest{PodSandboxId: "x"})
	wantCode(t, err, codes.NotFound)
	_, err = k.runtime.ListMetricDescriptors(ctx)
	k.must(err)
}

// TestKubeletTellsThePodCIDR sets the node's range of pod addresses while pods run. Those pods keep their addresses,
// and new pods can reach them.
func TestKubeletTellsThePodCIDR(t *testing.T) {
	ctx := context.Background()
	k := newKubelet(t, harness.StartDaemon(t))
	tell := func(cidr string) {
		t.Helper()
		k.must(k.runtime.UpdateRuntimeConfig(ctx, &runtimeapi.RuntimeConfig{NetworkConfig: &runtimeapi.NetworkConfig{PodCidr: cidr}}))
	}
	server := &kubeContainer{name: "web", image: harness.Httpd}
	client := &kubeContainer{name: "c", image: harness.Busybox, command: sleeps("")}
	before := k.newPod("before", server)
	old := k.states(before, "web running")
	for range 2 { // the kubelet repeats it
		tell("10.244.7.0/24")
		after := k.newPod("after", client)
		s := k.states(after, "c running")
		if ip := s.sandbox().GetNetwork().GetIp(); !strings.HasPrefix(ip, "10.244.7.") {
			t.Errorf("address of a new pod: got %s, want 10.244.7.x", ip)
		}
		url := "http://" + old.sandbox().GetNetwork().GetIp() + "/"
		request := fmt.Sprintf("printf 'GET / HTTP/1.0\\r\\n\\r\\n' | nc -w 5 %s 80 | grep -q '200 OK'", old.sandbox().GetNetwork().GetIp())
		if _, errout, err := k.runtime.ExecSync(ctx, s.of(client).Id, shell(request), 0); err != nil {
			t.Errorf("request from the new pod to the old one: %v: %s", err, errout)
		}
		get(t, url)
		k.remove(after)
	}
	if again := k.status(before); again.sandbox().String() != old.sandbox().String() {
		t.Errorf("sandbox status of the old pod: got %v, want %v", again.sandbox(), old.sandbox())
	}
}

// TestKubeletWaitsForTheNetwork: a pod installs the node's network plugin, as with a DaemonSet. Other pods wait for it.
func TestKubeletWaitsForTheNetwork(t *testing.T) {
	ctx := context.Background()
	d := harness.StartDaemon(t, harness.Set("network.default.enabled", false))
	k := newKubelet(t, d)
	networkReady := func() error {
		s, err := k.runtime.Status(ctx, false)
		k.must(err)
		for _, c := range s.Status.Conditions {
			if c.Type == runtimeapi.NetworkReady && !c.Status {
				return errors.New(c.Message)
			}
		}
		return nil
	}
	if err := networkReady(); err == nil || !strings.Contains(err.Error(), "net.d") {
		t.Errorf("NetworkReady without a configuration: got %v, want a message that names net.d", err)
	}
	waiting := k.newPod("waiting", &kubeContainer{name: "c", image: harness.Busybox, command: sleeps("")})
	_, err := d.CRI().RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: k.sandboxConfig(waiting, 0)})
	wantCode(t, err, codes.FailedPrecondition)
	if s := k.status(waiting); len(s.sandboxes) != 0 {
		t.Errorf("sandboxes of a refused pod: got %v, want none", s.sandboxes)
	}
	list := fmt.Sprintf(`{"cniVersion": "1.0.0", "name": "installed", "plugins": [{"type": "bridge", "bridge": %q, "isGateway": true,
		"ipam": {"type": "host-local", "subnet": "10.199.0.0/24", "dataDir": %q}}]}`, d.Bridge, filepath.Join(d.Dir, "leases"))
	plugin := k.newPod("plugin",
		&kubeContainer{name: "p", image: harness.Busybox,
			command: sleeps("echo '" + list + "' >/net.d/new && mv /net.d/new /net.d/10-installed.conflist"),
			change: func(c *runtimeapi.ContainerConfig) {
				c.Mounts = append(c.Mounts, &runtimeapi.Mount{ContainerPath: "/net.d", HostPath: filepath.Join(d.Dir, "net.d")})
			}})
	plugin.hostNetwork = true
	k.states(plugin, "p running")
	harness.Eventually(t, waitLimit, networkReady)
	if ip := k.states(waiting, "c running").sandbox().GetNetwork().GetIp(); !strings.HasPrefix(ip, "10.199.0.") {
		t.Errorf("address of the pod: got %s, want 10.199.0.x", ip)
	}
}

// TestKubelet runs the scenarios of a node's pods with both OCI runtimes.
func TestKubelet(t *testing.T) {
	for _, runtime := range []string{"crun", "runc"} {
		t.Run(runtime, func(t *testing.T) { playAll(t, harness.StartDaemon(t, harness.Set("linux.runtime", runtime))) })
	}
}

func playAll(t *testing.T, d *harness.Daemon) {
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
		"node's own pod":             kubeNodePod,
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

// kubeDeployment tests a typical pod: ordered init containers, a sidecar, a server with probes, hooks and a host port.
// The pod ends in the opposite order.
func kubeDeployment(t *testing.T, k *kubelet) {
	ctx := context.Background()
	web := &kubeContainer{
		name: "web", image: harness.Httpd, limits: limits{cpuRequest: 100, cpuLimit: 500, memory: 128 << 20},
		postStart: shell("echo post >>/data/order"), preStop: shell("echo pre >>/data/order"),
	}
	p := k.newPod("web", web)
	p.grace = 3 // because httpd ignores SIGTERM
	p.init = []*kubeContainer{
		{name: "first", image: harness.Busybox, command: shell("echo first >>/data/order")},
		{name: "sidecar", image: harness.Busybox, sidecar: true,
			command: shell("echo sidecar >>/data/order; trap 'echo sidecar ends >>/data/order; exit 0' TERM; sleep 3600 & wait")},
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
		t.Errorf("successful exec probe: %v", err)
	}
	if exit, ok := errors.AsType[utilexec.ExitError](exec(time.Second, "sh", "-c", "exit 3")); !ok || exit.ExitStatus() != 3 {
		t.Errorf("failing exec probe: got %v, want exit status 3", exit)
	}
	if err := exec(time.Second, "sleep", "60"); !errors.Is(err, criclient.ErrCommandTimedOut) {
		t.Errorf("slow exec probe: got error %v, want a timeout", err)
	}
	if again := k.states(p, "first exited, sidecar running, last exited, web running"); again.of(web).Id != s.of(web).Id ||
		len(again.containers) != 4 {
		t.Errorf("containers of an unchanged pod: got %v, want the same as before", again.containers)
	}
	p.deleted = true
	k.sync(p, k.status(p))
	order, err := os.ReadFile(filepath.Join(k.dir(p), "emptydir", "order"))
	k.must(err)
	if got, want := strings.Join(lines(string(order)), ", "), "first, sidecar, last, post, pre, sidecar ends"; got != want {
		t.Errorf("order of the steps: got %s, want %s", got, want)
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

// kubeCrashLoop: each attempt has its own number, log and termination message. All dead attempts except the last are
// removed.
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
			if status.ExitCode != 4 || status.Reason != "Error" || status.Message != "" || status.FinishedAt < status.StartedAt ||
				status.StartedAt < status.CreatedAt {
				t.Errorf("status of attempt %d: got %v, want exit code 4, reason Error and valid times", n, status)
			}
			if got, want := k.terminationMessage(status), fmt.Sprintf("out of luck %d\n", n); got != want {
				t.Errorf("termination message of attempt %d: got %q, want %q", n, got, want)
			}
			if got := harness.Text(harness.ReadLog(t, status.LogPath), "stdout"); got != fmt.Sprintf("run %d\n", n) ||
				filepath.Base(status.LogPath) != fmt.Sprintf("%d.log", n) {
				t.Errorf("log of attempt %d: got %q in %s, want \"run %d\" in %d.log", n, got, status.LogPath, n, n)
			}
		}
		if s.state(c) != "running" || s.of(c).Metadata.Attempt != 3 {
			return fmt.Errorf("container: got %v, want attempt 3 running", s.of(c))
		}
		return nil
	})
	if s := k.status(p); len(s.containers) != 2 || s.containers[1].Metadata.Attempt != 2 {
		t.Errorf("attempts: got %v, want only the running one and the last dead one", s.containers)
	}
}

// terminationMessage returns a container's termination message, whose file is among the mounts of its status.
func (k *kubelet) terminationMessage(c *runtimeapi.ContainerStatus) string {
	for _, m := range c.Mounts {
		if m.ContainerPath == "/dev/termination-log" {
			data, err := os.ReadFile(m.HostPath)
			k.must(err)
			return string(data)
		}
	}
	k.t.Errorf("mounts in the status: got %v, want /dev/termination-log among them", c.Mounts)
	return ""
}

func kubeJob(t *testing.T, k *kubelet) {
	c := &kubeContainer{name: "c", image: harness.Busybox, command: shell("exit 3")}
	p := k.newPod("never", c)
	p.restart = restartNever
	s := k.wait(p, func(s *podStatus) error {
		if len(s.sandboxes) != 1 || s.sandbox() != nil || s.state(c) != "exited" {
			return fmt.Errorf("want container c exited and its one sandbox stopped, got %v", s)
		}
		return nil
	})
	k.sync(p, k.status(p))
	if again := k.status(p); len(again.sandboxes) != 1 || len(again.containers) != 1 || again.of(c).ExitCode != 3 {
		t.Errorf("status of a failed pod after another sync: got %v, want %v", again, s)
	}
	c = &kubeContainer{name: "c", image: harness.Busybox, command: shell("test -e /data/second || { touch /data/second; exit 1; }")}
	p = k.newPod("on-failure", c)
	p.restart = restartOnFailure
	if s := k.states(p, "c exited"); s.of(c).Metadata.Attempt > 1 {
		t.Errorf("want at most two attempts, got %v", s.containers)
	}
	k.wait(p, func(s *podStatus) error {
		if c := s.of(c); c.Metadata.Attempt != 1 || c.ExitCode != 0 || c.Reason != "Completed" {
			return fmt.Errorf("want the second attempt Completed with code 0, got %v", c)
		}
		return nil
	})
}

// kubeStartFails tests a container whose program is missing, and one that exceeds its memory limit.
func kubeStartFails(t *testing.T, k *kubelet) {
	missing := &kubeContainer{name: "missing", image: harness.Busybox, command: []string{"/no/such/program"}}
	p := k.newPod("missing", missing)
	p.restart = restartNever
	s := k.states(p, "missing exited")
	if c := s.of(missing); c.ExitCode != 128 || c.Reason != "StartError" || !strings.Contains(c.Message, "/no/such/program") {
		t.Errorf("status: got %v, want StartError, code 128 and the program's name", c)
	}
	if _, err := os.Stat(s.of(missing).LogPath); err != nil {
		t.Errorf("log of the container that did not start: %v", err)
	}
	hungry := &kubeContainer{name: "hungry", image: harness.Busybox, limits: limits{memory: 16 << 20},
		command: shell("x=$(yes | head -c 64000000); echo $x | wc -c")}
	p = k.newPod("hungry", hungry)
	p.restart = restartNever
	if c := k.states(p, "hungry exited").of(hungry); c.Reason != "OOMKilled" || c.ExitCode != 137 {
		t.Errorf("want OOMKilled with code 137, got %v", c)
	}
}

// kubeDebug tests kubectl debug --target: an ephemeral container in another container's PID namespace, with kubectl
// attach.
func kubeDebug(t *testing.T, k *kubelet) {
	main := &kubeContainer{name: "main", image: harness.Busybox, command: []string{"sleep", "7654"}}
	p := k.newPod("debug", main)
	k.states(p, "main running")
	p.ephemeral = []*kubeContainer{{name: "debugger", image: harness.Busybox, target: "main", command: []string{"sh"},
		change: func(c *runtimeapi.ContainerConfig) {
			c.Stdin, c.Tty = true, true
		}}}
	s := k.states(p, "main running, debugger running")
	resp, err := k.runtime.Attach(context.Background(),
		&runtimeapi.AttachRequest{ContainerId: s.of(p.ephemeral[0]).Id, Stdin: true, Stdout: true, Tty: true})
	k.must(err)
	session := startSession(t, harness.SPDY, resp.Url, true)
	session.send("ps -o args\n")
	session.stdout.wait(t, "sleep 7654")
	session.send("exit\n")
	s = k.states(p, "main running, debugger exited")
	k.sync(p, s)
	if again := k.status(p); len(again.containers) != 2 {
		t.Errorf("containers after another sync: got %v, want no restart of the ephemeral container", again.containers)
	}
}

// kubeSharedProcesses: containers of a pod with shareProcessNamespace can signal each other. If the pod's init process
// is killed, the sandbox ends.
func kubeSharedProcesses(t *testing.T, k *kubelet) {
	a := &kubeContainer{name: "a", image: harness.Busybox, command: []string{"sleep", "7655"}}
	b := &kubeContainer{name: "b", image: harness.Busybox, command: sleeps("")}
	p := k.newPod("shared", a, b)
	p.sharePID = true
	s := k.states(p, "a running, b running")
	// A container runs before its runtime has become its program.
	kill := `until [ "$killed" ]; do for p in /proc/[0-9]*; do tr '\0' ' ' <$p/cmdline | grep -q '^sleep 7655' && kill -9 ${p#/proc/} && killed=1; done; done; true`
	if _, _, err := k.runtime.ExecSync(context.Background(), s.of(b).Id, shell(kill), time.Minute); err != nil {
		t.Error(err)
	}
	s = k.wait(p, func(s *podStatus) error {
		if c := s.of(a); c.State != running || c.Metadata.Attempt != 1 {
			return fmt.Errorf("want the second attempt running, got %v", c)
		}
		return nil
	})
	first := s.sandbox().Id
	killPause(t, first)
	s = k.wait(p, func(s *podStatus) error {
		if s.sandbox() == nil || s.sandbox().Metadata.Attempt != 1 || s.state(a) != "running" || s.state(b) != "running" {
			return fmt.Errorf("want a second sandbox with both containers running, got %v", s)
		}
		return nil
	})
	for _, sandbox := range s.sandboxes[1:] {
		if sandbox.Id != first || sandbox.State == ready {
			t.Errorf("other sandbox: got %v, want only the stopped %s", sandbox, first)
		}
	}
}

// killPause kills the process that holds a pod's PID namespace, which is in the cgroup named after the pod rather than
// after a container.
func killPause(t *testing.T, podID string) {
	t.Helper()
	files, _ := filepath.Glob("/proc/[0-9]*/cgroup")
	for _, file := range files {
		cgroups, _ := os.ReadFile(file)
		if !slices.ContainsFunc(lines(string(cgroups)),
			func(line string) bool { return strings.HasSuffix(strings.TrimSuffix(line, ".scope"), podID) }) {
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
	t.Fatalf("found no init process of pod %s", podID)
}
