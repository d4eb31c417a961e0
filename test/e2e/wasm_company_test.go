package e2e

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/api"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// attempt sets the attempt number of a container, as a kubelet does that restarts it.
func attempt(n uint32) harness.ContainerOption {
	return func(c *runtimeapi.ContainerConfig) { c.Metadata.Attempt = n }
}

// emptyDir returns a mount of a new directory that every user can write to.
func emptyDir(t *testing.T, at string) *runtimeapi.Mount {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "shared")
	if err := os.Mkdir(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o777); err != nil { // whatever the umask
		t.Fatal(err)
	}
	return &runtimeapi.Mount{HostPath: dir, ContainerPath: at}
}

// companyPod runs a pod of handler linux, for components beside ordinary containers.
func companyPod(t *testing.T, d *harness.Daemon, opts ...harness.PodOption) *harness.Pod {
	t.Helper()
	p := d.RunPodWith(t, harness.PodConfig(t, "company", opts...), "linux")
	t.Cleanup(p.Remove)
	return p
}

// TestComponentBesideContainers: in a pod of handler linux, components and ordinary containers share the network, the
// volumes and the cgroup. Each ends and restarts on its own, and all go on while the daemon is dead.
func TestComponentBesideContainers(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	p := companyPod(t, d)
	shared := emptyDir(t, "/shared")

	// Init containers: a Linux program writes a file, a component reads it and writes another.
	p.Run(harness.ContainerConfig("write", harness.Busybox, mounts(shared), harness.Shell("echo from linux >/shared/a"))).WaitExit(0)
	read := p.Run(harness.ContainerConfig("read", harness.CommandGo, mounts(shared), args("cat", "/shared/a")))
	read.WaitExit(0)
	if got := harness.Text(read.Logs(), "stdout"); got != "from linux\n" {
		t.Errorf("output of the component: got %q, want the file of the Linux container", got)
	}
	p.Run(harness.ContainerConfig("reply", harness.CommandGo, mounts(shared), args("write", "/shared/b", "from wasm"))).WaitExit(0)
	p.Run(harness.ContainerConfig("fails", harness.CommandGo, args("exit", "7"))).WaitExit(7)

	sidecar := p.Run(harness.ContainerConfig("sidecar", harness.Busybox, mounts(shared), harness.Sleep()))
	if got := sidecar.Must("cat", "/shared/b"); got != "from wasm\n" {
		t.Errorf("file of the component: got %q", got)
	}
	web := p.Run(harness.ContainerConfig("web", harness.HelloHTTP))
	call := func() string { return sidecar.Must("wget", "-q", "-O", "-", "http://127.0.0.1/x") }
	if got := call(); !strings.Contains(got, "hello from") {
		t.Errorf("answer on the pod's loopback: got %q", got)
	}
	address := "http://" + net.JoinHostPort(p.IP(), "80") + "/"
	get(t, address)

	// The worker of a component is a process of the container's own cgroup below the pod's.
	pid := mainPid(t, d, web)
	groups, err := os.ReadFile(fmt.Sprintf("/proc/%v/cgroup", pid))
	if err != nil || !strings.Contains(string(groups), "tripod-"+p.ID+"/tripod-wasm-pod-"+web.ID) {
		t.Errorf("cgroup of the worker: got %q (%v), want one below the pod's", groups, err)
	}

	// While the daemon is dead, everything goes on. The next daemon knows it all.
	d.Kill()
	get(t, address)
	d.Start()
	if got := call(); !strings.Contains(got, "hello from") {
		t.Errorf("answer after the daemon's death: got %q", got)
	}
	if now := mainPid(t, d, web); now != pid {
		t.Errorf("worker after the daemon's death: got pid %v, want %v", now, pid)
	}

	// The component ends and is started again, as a new attempt; the sidecar stays.
	began := sidecar.Status().StartedAt
	web.Stop(10 * time.Second)
	if st := web.Status(); st.State != exited || st.ExitCode != 0 || st.Reason != "Completed" {
		t.Errorf("status after the stop: got %v, want Completed with code 0", st)
	}
	if _, err := os.Stat(fmt.Sprintf("/proc/%v", pid)); err == nil {
		t.Errorf("the worker %v of a stopped component still exists", pid)
	}
	next := p.Run(harness.ContainerConfig("web", harness.HelloHTTP, attempt(1)))
	if got := call(); !strings.Contains(got, "hello from") {
		t.Errorf("answer of the next attempt: got %q", got)
	}
	web.Remove()
	if st := sidecar.Status(); st.State != running || st.StartedAt != began {
		t.Errorf("sidecar: got %v, want the one that ran before", st)
	}
	// A worker that is killed ends its container alone.
	if err := syscall.Kill(mainPid(t, d, next), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if st := next.WaitState(exited); st.ExitCode != 137 {
		t.Errorf("status after the worker was killed: got %v, want exit code 137", st)
	}
	if st := sidecar.Status(); st.State != running {
		t.Errorf("sidecar: got %v, want it running", st)
	}
	p.Run(harness.ContainerConfig("web", harness.HelloHTTP, attempt(2)))
	call()
}

// TestComponentsInLinuxPods tests what a component in a pod of handler linux shares with other kinds of container, and
// what is its own.
func TestComponentsInLinuxPods(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	for _, image := range []string{harness.HelloHTTP, harness.CommandGo, harness.HugeMemoryWasm, harness.UnknownImportWasm} {
		d.Pull(t, image)
	}
	for name, test := range map[string]func(*testing.T, *harness.Daemon){
		"memory":    testForeignMemory,
		"ports":     testForeignPorts,
		"exec":      testForeignExec,
		"streams":   testForeignStreams,
		"fields":    testForeignFields,
		"images":    testForeignImages,
		"resize":    testForeignResize,
		"node":      testForeignOnTheNode,
		"users":     testForeignUsers,
		"manifest":  testForeignManifest,
		"plugins":   testForeignPlugins,
		"two names": testTwoComponents,
	} {
		t.Run(name, func(t *testing.T) { test(t, d) })
	}
}

// testForeignMemory: a component and its worker together have the memory limit. Beyond it, the kernel ends them alone. An
// idle worker needs less than the part that is kept for it.
func testForeignMemory(t *testing.T, d *harness.Daemon) {
	limit := resources(&runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 64 << 20})
	p := companyPod(t, d)
	sidecar := p.Run(harness.ContainerConfig("sidecar", harness.Busybox, harness.Sleep()))
	id, err := create(d, p, harness.ContainerConfig("huge", harness.HugeMemoryWasm, limit))
	if err != nil {
		t.Fatal(err)
	}
	_, err = d.CRI().StartContainer(t.Context(), &runtimeapi.StartContainerRequest{ContainerId: id})
	if wantCode(t, err, codes.ResourceExhausted); err != nil && !strings.Contains(err.Error(), "its limit is 48 MiB") {
		t.Errorf("start of a component that declares 4 GiB: got error %v, want its limit without the worker's part", err)
	}
	idle := p.Run(harness.ContainerConfig("idle", harness.HelloHTTP, limit))
	stats, err := d.Runtime().ContainerStats(t.Context(), idle.ID)
	if err != nil {
		t.Fatal(err)
	}
	if used := stats.GetMemory().GetWorkingSetBytes().GetValue(); used < 1<<20 || used > 16<<20 {
		t.Errorf("memory of an idle component: got %d bytes, want 1 to 16 MiB", used)
	}
	pod, err := d.Runtime().PodSandboxStats(t.Context(), p.ID)
	if err != nil {
		t.Fatal(err)
	}
	if whole, part := pod.GetLinux().GetMemory().GetWorkingSetBytes().GetValue(),
		stats.GetMemory().GetWorkingSetBytes().GetValue(); whole < part {
		t.Errorf("memory of the pod: got %d bytes, want at least the component's %d", whole, part)
	}
	if got := len(pod.GetLinux().GetContainers()); got != 2 {
		t.Errorf("statistics of the pod: got %d containers, want the two that run", got)
	}
	// The kernel holds the limit: where nothing is left for the worker, it ends the worker and nothing else.
	file := filepath.Join("/sys/fs/cgroup/memory", cgroupOf(t, idle, "memory"), "memory.limit_in_bytes")
	used, err := strconv.Atoi(cgroupFile(t, idle, "memory", "memory.usage_in_bytes"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(strconv.Itoa(used+128<<10)), 0o644); err != nil {
		t.Fatal(err)
	}
	url, client := "http://"+net.JoinHostPort(p.IP(), "80")+"/", &http.Client{Timeout: 5 * time.Second}
	for range 32 {
		go func() { _, _ = harness.Fetch(t.Context(), client, url) }()
	}
	if st := idle.WaitState(exited); st.ExitCode != 137 || st.Reason != "OOMKilled" {
		t.Errorf("status: got %v, want OOMKilled with code 137", st)
	}
	if st := sidecar.Status(); st.State != running {
		t.Errorf("sidecar: got %v, want it running", st)
	}
}

// testForeignPorts: a port that another container uses is an error with the port and what to do.
func testForeignPorts(t *testing.T, d *harness.Daemon) {
	p := companyPod(t, d)
	sidecar := p.Run(harness.ContainerConfig("sidecar", harness.Busybox, harness.Shell("exec httpd -f -p 80 -h /")))
	harness.Eventually(t, waitLimit, func() error {
		if _, _, code := sidecar.ExecSync("wget", "-q", "-O", "/dev/null", "http://127.0.0.1/etc/passwd"); code != 0 {
			return fmt.Errorf("the sidecar does not listen yet: code %d", code)
		}
		return nil
	})
	id, err := create(d, p, harness.ContainerConfig("web", harness.HelloHTTP))
	if err != nil {
		t.Fatal(err)
	}
	_, err = d.CRI().StartContainer(t.Context(), &runtimeapi.StartContainerRequest{ContainerId: id})
	if wantCode(t, err, codes.FailedPrecondition); err != nil &&
		(!strings.Contains(err.Error(), "port 80/tcp") || !strings.Contains(err.Error(), "vimana.host/cleartext-port.web")) {
		t.Errorf("error: got %v, want the port and the annotation", err)
	}
}

// testForeignExec: exec is refused with what can be done instead.
func testForeignExec(t *testing.T, d *harness.Daemon) {
	c := companyPod(t, d).Run(harness.ContainerConfig("web", harness.HelloHTTP))
	_, err := d.CRI().ExecSync(t.Context(), &runtimeapi.ExecSyncRequest{ContainerId: c.ID, Cmd: []string{"sh"}})
	wantCode(t, err, codes.Unimplemented)
	resp, urlErr := d.Runtime().Exec(t.Context(), &runtimeapi.ExecRequest{ContainerId: c.ID, Cmd: []string{"sh"}, Stdout: true})
	if urlErr != nil {
		t.Fatal(urlErr)
	}
	_, streamErr := harness.Stream(t.Context(), harness.Protocols[0], resp.Url, streamTo(io.Discard, nil))
	for what, err := range map[string]error{"ExecSync": err, "Exec": streamErr} {
		if err == nil || !strings.Contains(err.Error(), "no exec") || !strings.Contains(err.Error(), "kubectl debug") {
			t.Errorf("%s: got error %v, want one that says what can be done instead", what, err)
		}
	}
}

// testForeignStreams: attach, standard input and the log.
func testForeignStreams(t *testing.T, d *harness.Daemon) {
	p := companyPod(t, d)
	c := p.Run(harness.ContainerConfig("cat", harness.CommandGo, args("stdin"),
		func(c *runtimeapi.ContainerConfig) { c.Stdin, c.StdinOnce = true, true }))
	text := strings.Repeat("a line of input\n", 20_000)
	var out, errout lockedBuffer
	o := streamTo(&out, &errout)
	o.Stdin = strings.NewReader(text)
	if _, err := harness.Stream(t.Context(), harness.Protocols[0], c.AttachURL(true, false), o); err != nil {
		t.Errorf("attach: %v", err)
	}
	c.WaitExit(0)
	if got := out.String(); got != text {
		t.Errorf("attached output: got %d bytes, want %d", len(got), len(text))
	}
	if got := harness.Text(c.Logs(), "stdout"); got != text {
		t.Errorf("log: got %d bytes, want %d", len(got), len(text))
	}
}

// testForeignFields: what a component cannot have is refused by name.
func testForeignFields(t *testing.T, d *harness.Daemon) {
	p := companyPod(t, d)
	for field, option := range map[string]harness.ContainerOption{
		"tty":                                   func(c *runtimeapi.ContainerConfig) { c.Tty, c.Stdin = true, true },
		"working_dir":                           func(c *runtimeapi.ContainerConfig) { c.WorkingDir = "/tmp" },
		"linux.security_context.privileged":     harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) { s.Privileged = true }),
		"linux.resources.memory_limit_in_bytes": resources(&runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 20 << 20}),
	} {
		_, err := create(d, p, harness.ContainerConfig("c", harness.CommandGo, option))
		if status.Code(err) != codes.InvalidArgument && status.Code(err) != codes.Unimplemented || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: got error %v, want one that names the field", field, err)
		}
	}
}

// testForeignImages: a container image whose entrypoint is a .wasm file is a component. A faulty one is refused.
func testForeignImages(t *testing.T, d *harness.Daemon) {
	p := companyPod(t, d)
	p.Run(harness.ContainerConfig("rootfs", harness.WasmRootfs, args("exit", "3"))).WaitExit(3)
	_, err := create(d, p, harness.ContainerConfig("faulty", harness.UnknownImportWasm))
	if wantCode(t, err, codes.InvalidArgument); err != nil && !strings.Contains(err.Error(), "env.missing") {
		t.Errorf("creation of a component with an unknown import: got error %v, want one that names it", err)
	}
}

// testForeignResize: limits change in place.
func testForeignResize(t *testing.T, d *harness.Daemon) {
	c := companyPod(t, d).Run(harness.ContainerConfig("web", harness.HelloHTTP,
		resources(&runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 64 << 20})))
	_, err := d.CRI().UpdateContainerResources(t.Context(),
		&runtimeapi.UpdateContainerResourcesRequest{ContainerId: c.ID, Linux: &runtimeapi.LinuxContainerResources{
			MemoryLimitInBytes: 96 << 20, CpuQuota: 50_000, CpuPeriod: 100_000,
		}})
	if err != nil {
		t.Fatal(err)
	}
	if got := c.Status().GetResources().GetLinux().GetMemoryLimitInBytes(); got != 96<<20 {
		t.Errorf("memory limit: got %d, want 96 MiB", got)
	}
	if got := cgroupFile(t, c, "memory", "memory.limit_in_bytes"); got != strconv.Itoa(96<<20) {
		t.Errorf("memory limit of the cgroup: got %s, want 96 MiB", got)
	}
}

// testForeignOnTheNode: on the host network a component has the node's ports.
func testForeignOnTheNode(t *testing.T, d *harness.Daemon) {
	p := companyPod(t, d, harness.HostNetwork(), annotate("cleartext-port", "18099", "tls", "off"))
	p.Run(harness.ContainerConfig("web", harness.HelloHTTP))
	if got := get(t, "http://127.0.0.1:18099/"); !strings.Contains(got, "hello from") {
		t.Errorf("answer: got %q", got)
	}
}

// testTwoComponents: two components of a pod have ports of their own by annotations with their names.
func testTwoComponents(t *testing.T, d *harness.Daemon) {
	p := companyPod(t, d, annotate("cleartext-port.a", "8001", "cleartext-port.b", "8002", "tls", "off"))
	for name, port := range map[string]string{"a": "8001", "b": "8002"} {
		p.Run(harness.ContainerConfig(name, harness.HelloHTTP))
		get(t, "http://"+net.JoinHostPort(p.IP(), port)+"/")
	}
}

// testForeignUsers: in a pod with a user namespace, a component serves in the pod's network, and shares files that
// everybody can read.
func testForeignUsers(t *testing.T, d *harness.Daemon) {
	u := usersOf(1 << 22)
	p := companyPod(t, d, inUsers(u))
	shared := emptyDir(t, "/shared")
	p.Run(harness.ContainerConfig("write", harness.CommandGo, mappedBind(u, shared.HostPath, "/shared"),
		args("write", "/shared/a", "from wasm"))).WaitExit(0)
	sidecar := p.Run(harness.ContainerConfig("sidecar", harness.Busybox, mappedBind(u, shared.HostPath, "/shared"), harness.Sleep()))
	if got := sidecar.Must("cat", "/shared/a"); got != "from wasm\n" {
		t.Errorf("file of the component: got %q", got)
	}
	p.Run(harness.ContainerConfig("web", harness.HelloHTTP))
	if got := sidecar.Must("wget", "-q", "-O", "-", "http://127.0.0.1/x"); !strings.Contains(got, "hello from") {
		t.Errorf("answer: got %q", got)
	}
}

// testForeignPlugins: plugins of the node follow a component, and adjust what the CRI can express.
func testForeignPlugins(t *testing.T, d *harness.Daemon) {
	adjustment := &api.ContainerAdjustment{}
	adjustment.AddEnv("BY", "plugin")
	plugin := connectPlugin(t, d, "00", "company",
		&nriPlugin{onCreate: func(*api.PodSandbox, *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate) {
			return adjustment, nil
		}})
	c := companyPod(t, d).Run(harness.ContainerConfig("env", harness.CommandGo, args("env")))
	c.WaitExit(0)
	if !strings.Contains(harness.Text(c.Logs(), "stdout"), "BY=plugin\n") {
		t.Errorf("environment: got %q, want the plugin's variable", harness.Text(c.Logs(), "stdout"))
	}
	plugin.waitCalls(t, c.ID, containerCalls[:5]...)
	c.Pod.Remove()
	plugin.waitCalls(t, c.ID, containerCalls...)
}

// testForeignManifest: `tripod run -f` runs components as an init container and as a sidecar.
func testForeignManifest(t *testing.T, d *harness.Daemon) {
	r := manifestRun{t, d, filepath.Join(t.TempDir(), "volumes")}
	_, stderr, code := r.run(`
apiVersion: v1
kind: Pod
metadata: {name: mixed, annotations: {vimana.host/cleartext-port.web: "8080", vimana.host/tls: "off"}}
spec:
  restartPolicy: Never
  initContainers:
  - {name: write, image: `+harness.CommandGo+`, args: [write, /v/a, hello], volumeMounts: [{name: v, mountPath: /v}]}
  - {name: web, image: `+harness.HelloHTTP+`, restartPolicy: Always}
  containers:
  - name: main
    image: `+harness.Busybox+`
    command: [sh, -c, 'test "$(cat /v/a)" = hello && wget -q -O - http://127.0.0.1:8080/x | grep "hello from"']
    volumeMounts: [{name: v, mountPath: /v}]
  volumes: [{name: v, emptyDir: {}}]
`, "--rm")
	if code != 0 {
		t.Errorf("run -f: got exit code %d and %q, want 0", code, stderr)
	}
}
