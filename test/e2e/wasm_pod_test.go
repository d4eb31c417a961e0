package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// args sets the arguments of a component.
func args(argv ...string) harness.ContainerOption {
	return func(c *runtimeapi.ContainerConfig) { c.Args = argv }
}

// labels sets the labels that name the pod's component.
func labels(domain, server, version string) harness.PodOption {
	return func(c *runtimeapi.PodSandboxConfig) {
		c.Labels["vimana.host/domain"], c.Labels["vimana.host/server"], c.Labels["vimana.host/version"] = domain, server, version
	}
}

// createIn creates a container in a new pod and returns the error.
func createIn(t *testing.T, d *harness.Daemon, image string, opts ...harness.PodOption) (*harness.Pod, string, error) {
	t.Helper()
	d.Pull(t, image)
	p := d.RunPodWith(t, harness.PodConfig(t, "wasm", opts...), "wasm")
	t.Cleanup(p.Remove)
	id, err := create(d, p, harness.ContainerConfig("c", image))
	return p, id, err
}

// TestWasmNames: with labels, the pod's ID is component#n and the container's ID also has the attempt; without labels,
// both are ordinary IDs. The image must contain the component that the labels name.
func TestWasmNames(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	named := labels("example.com", "greet.Greeter", "1.0.0")
	for i, image := range []string{harness.NamedGreeter, harness.CalledGreeter} {
		p, id, err := createIn(t, d, image, named)
		if want := fmt.Sprintf("example.com:greet.Greeter@1.0.0#%d", i); err != nil || p.ID != want || id != want+".1" {
			t.Errorf("IDs: got pod %s, container %s, error %v; want %s and %[4]s.1", p.ID, id, err, want)
		}
	}
	p, _, err := createIn(t, d, harness.GreeterJS, named) // the labels name greeter-c, not this image
	wantCode(t, err, codes.InvalidArgument)
	other := harness.ContainerConfig("c", harness.NamedGreeter, func(c *runtimeapi.ContainerConfig) {
		c.Labels = map[string]string{"vimana.host/domain": "example.com", "vimana.host/server": "greet.Greeter", "vimana.host/version": "1.0.1"}
	})
	_, err = create(d, p, other)
	wantCode(t, err, codes.InvalidArgument)
	if p, id, err := createIn(t, d, harness.GreeterC); err != nil || len(p.ID) != 64 || len(id) != 64 || id == p.ID {
		t.Errorf("IDs without labels: got pod %s, container %s, error %v; want two of 64 digits", p.ID, id, err)
	}
	_, err = d.CRI().RunPodSandbox(context.Background(), &runtimeapi.RunPodSandboxRequest{
		Config: harness.PodConfig(t, "wasm", labels("example.com", "greet.Greeter", "one")), RuntimeHandler: "wasm",
	})
	wantCode(t, err, codes.InvalidArgument)
}

// TestWasmRestart: a stopped component can be started again, at the same address.
func TestWasmRestart(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	c, s := startComponent(t, d, harness.GreeterC, greeter)
	for range 3 {
		c.Stop(5 * time.Second)
		if st := c.Status(); st.State != exited || st.ExitCode != 0 || st.Reason != "Completed" {
			t.Errorf("status after the stop: got %v, want Completed with code 0", st)
		}
		if conn, err := net.DialTimeout("tcp", net.JoinHostPort(s.ip, "80"), 5*time.Second); err == nil {
			conn.Close()
			t.Error("connection to a stopped component succeeded, want an error")
		}
		c.Start()
		if ip := c.Pod.IP(); ip != s.ip {
			t.Errorf("address after the restart: got %s, want %s", ip, s.ip)
		}
		s.until(greeter+"/SayHello", `{"name":"Ada"}`)
		s.callQUIC(greeter+"/SayHello", `{"name":"Ada"}`)
	}
}

// TestWasmDrains: requests in progress when a component is stopped are answered, or ended by force after the grace
// period.
func TestWasmDrains(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	c, s := startComponent(t, d, harness.FaultsC, faults)
	short := s.followGRPC(t.Context(), faults+"/Tick", `{"count":20,"intervalMs":50}`)
	harness.Eventually(t, waitLimit, short.more(2))
	c.Stop(20 * time.Second)
	<-short.over
	if n, err := short.state(); n != 20 || !errors.Is(err, io.EOF) {
		t.Errorf("stream within the grace period: got %d messages, error %v; want 20 and EOF", n, err)
	}
	if st := c.Status(); st.ExitCode != 0 || st.Reason != "Completed" {
		t.Errorf("status: got %v, want Completed with code 0", st)
	}
	c.Start()
	s.until(faults+"/Echo", `{}`)
	endless := s.followGRPC(t.Context(), faults+"/Tick", `{"intervalMs":50}`)
	harness.Eventually(t, waitLimit, endless.more(2))
	begin := time.Now()
	c.Stop(time.Second)
	<-endless.over
	if _, err := endless.state(); errors.Is(err, io.EOF) {
		t.Error("end of an interrupted stream: got EOF, want an error")
	}
	if took := time.Since(begin); took < time.Second || took > 10*time.Second {
		t.Errorf("the component ended after %s, want 1s to 10s", took)
	}
	if st := c.Status(); st.ExitCode != 137 {
		t.Errorf("status: got %v, want exit code 137", st)
	}
}

// TestWasmStandardStreams tests logs, attach with kubectl's two protocols and with `tripod attach`, and port-forward.
func TestWasmStandardStreams(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	c, s := startComponent(t, d, harness.FaultsC, faults)
	for i, p := range harness.Protocols {
		var out, errout lockedBuffer
		ctx, cancel := context.WithTimeout(t.Context(), waitLimit)
		over := make(chan error, 1)
		go func() {
			_, err := harness.Stream(ctx, p, c.AttachURL(false, false), streamTo(&out, &errout))
			over <- err
		}()
		line := fmt.Sprintf("line %d", i)
		harness.Eventually(t, waitLimit, func() error {
			s.call(faults+"/Print", fmt.Sprintf(`{"stdout":"%s\n","stderr":"err %s\n"}`, line, line))
			if !strings.Contains(out.String(), line) || !strings.Contains(errout.String(), "err "+line) {
				return fmt.Errorf("%s: output of attach: got stdout %q, stderr %q; want %q in both", p, out.String(), errout.String(), line)
			}
			return nil
		})
		cancel()
		<-over
	}
	c.WaitLog("line 0")
	logged := c.Logs()
	if got := harness.Text(logged, "stderr"); !strings.Contains(got, "err line 1") {
		t.Errorf("log of stderr: got %q, want \"err line 1\" in it", got)
	}
	command := tripod(t, d, "attach", c.ID)
	var out lockedBuffer
	command.Stdout = &out
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	harness.Eventually(t, waitLimit, func() error {
		s.call(faults+"/Print", `{"stdout":"by tripod\n"}`)
		if !strings.Contains(out.String(), "by tripod") {
			return fmt.Errorf("output of tripod attach: got %q, want \"by tripod\" in it", out.String())
		}
		return nil
	})
	c.Stop(time.Second)
	if err := command.Wait(); err != nil {
		t.Errorf("tripod attach after the container's end: %v", err)
	}
	c.Start()
	forwarded := dialWith(t, c.Pod.Forward(t, 80), insecureCredentials)
	forwarded.reflected = s.reflected
	if got := forwarded.call(faults+"/Echo", `{"data":"aGk="}`); got != `{"data":"aGk="}` {
		t.Errorf("call over port-forward: got %s, want the echo", got)
	}
}

// TestWasmCommands tests programs that exit by themselves, with arguments, environment, files, input and exit codes.
func TestWasmCommands(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	data := t.TempDir()
	if err := errors.Join(os.Chmod(data, 0o777), os.WriteFile(filepath.Join(data, "in"), []byte("from a volume\n"), 0o644)); err != nil {
		t.Fatal(err)
	}
	volume := mounts(&runtimeapi.Mount{HostPath: data, ContainerPath: "/data"},
		&runtimeapi.Mount{HostPath: data, ContainerPath: "/ro", Readonly: true})
	run := func(code int32, opts ...harness.ContainerOption) (*runtimeapi.ContainerStatus, string) {
		t.Helper()
		c := d.RunWasm(t, &harness.PodSpec{Image: harness.CommandGo, Container: opts})
		st := c.WaitExit(code)
		return st, harness.Text(c.Logs(), "")
	}
	st, log := run(0, volume, env("GREETING", "hello"),
		args("env", "GREETING", "cat", "/data/in", "write", "/data/out", "written", "err", "to stderr"))
	if log != "hello\nfrom a volume\nto stderr\n" || st.Reason != "Completed" || st.FinishedAt < st.StartedAt {
		t.Errorf("command: got output %q, status %v; want three lines and Completed", log, st)
	}
	if out, err := os.ReadFile(filepath.Join(data, "out")); err != nil || string(out) != "written\n" {
		t.Errorf("file of the command: got %q, error %v; want written", out, err)
	}
	if st, log := run(7, args("out", "last words", "exit", "7")); st.Reason != "Error" || log != "last words\n" {
		t.Errorf("failing command: got status %v, output %q; want reason Error and its output", st, log)
	}
	if _, log := run(1, volume, args("write", "/ro/out", "x")); !strings.Contains(strings.ToLower(log), "read-only") &&
		!strings.Contains(strings.ToLower(log), "not permitted") && !strings.Contains(strings.ToLower(log), "not capable") {
		t.Errorf("write to a read-only volume: got output %q, want a refusal", log)
	}
	if _, log := run(1, args("cat", "/etc/passwd")); strings.Contains(log, "root:") {
		t.Error("the component read a file of the node")
	}
	if st, log := run(2, args("panic")); st.Reason != "Error" || !strings.Contains(log, "asked to") {
		t.Errorf("panicking command: got status %v, output %q; want reason Error and the panic", st, log)
	}
	// The image's entrypoint is a .wasm file. Environment and arguments come from the image.
	c := d.RunWasm(t, &harness.PodSpec{Image: harness.WasmRootfs})
	c.WaitExit(0)
	if log := harness.Text(c.Logs(), "stdout"); !strings.HasPrefix(log, "hello from the image\n") {
		t.Errorf("log: got %q, want \"hello from the image\" at its beginning", log)
	}
	// A command that must be killed.
	c = d.RunWasm(t, &harness.PodSpec{Image: harness.CommandGo, Container: []harness.ContainerOption{args("spin")}})
	c.Stop(time.Second)
	if st := c.Status(); st.ExitCode != 137 {
		t.Errorf("status of the killed command: got %v, want exit code 137", st)
	}
	// Input by attach. Without stdin_once, the end of a session's input does not reach the guest.
	c = d.RunWasm(t, &harness.PodSpec{Image: harness.CommandGo,
		Container: []harness.ContainerOption{args("stdin"), func(c *runtimeapi.ContainerConfig) { c.Stdin = true }}})
	for _, p := range harness.HalfClosing {
		o := streamTo(io.Discard, io.Discard)
		o.Stdin = strings.NewReader("typed\n")
		if _, err := harness.Stream(t.Context(), p, c.AttachURL(true, false), o); err != nil {
			t.Error(err)
		}
	}
	if st := c.Status(); st.State != running {
		t.Errorf("state after the clients' input ended: got %v, want running", st.State)
	}
	c.Stop(time.Second)
	// With stdin_once, the end of input reaches the guest.
	c = d.RunWasm(t, &harness.PodSpec{Image: harness.CommandGo,
		Container: []harness.ContainerOption{args("stdin"), func(c *runtimeapi.ContainerConfig) { c.Stdin, c.StdinOnce = true, true }}})
	var out lockedBuffer
	o := streamTo(&out, io.Discard)
	o.Stdin = strings.NewReader("typed\n")
	if _, err := harness.Stream(t.Context(), harness.SPDY, c.AttachURL(true, false), o); err != nil {
		t.Error(err)
	}
	c.WaitExit(0)
	if log := harness.Text(c.Logs(), "stdout"); log != "typed\n" {
		t.Errorf("log: got %q, want typed; output of the client %q", log, out.String())
	}
}

// TestWasmHTTP calls a wasi:http component over HTTP/1.1, HTTP/2 and HTTP/3.
func TestWasmHTTP(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	c := d.RunWasm(t, &harness.PodSpec{Image: harness.HelloHTTP})
	ip := c.Pod.IP()
	get(t, "http://"+ip+"/")
	curl := func(args ...string) string {
		out, err := exec.CommandContext(t.Context(), "curl", append([]string{"-sS", "--max-time", "20"}, args...)...).CombinedOutput()
		if err != nil {
			return fmt.Sprintf("%v: %s", err, out)
		}
		return string(out)
	}
	for what, try := range map[string][2]string{
		"HTTP/1.1":          {curl("--http1.1", "-H", "x-name: Ada", "http://"+ip+"/a?b=c"), "hello from /a?b=c, Ada\n"},
		"h2c":               {curl("--http2-prior-knowledge", "http://"+ip+"/a"), "hello from /a\n"},
		"HTTP/2 over TLS":   {curl("-k", "--http2", "https://"+ip+"/a"), "hello from /a\n"},
		"a body":            {curl("-d", "some body", "http://"+ip+"/echo"), "some body"},
		"a status":          {curl("-o", "/dev/null", "-w", "%{http_code}", "http://"+ip+"/status/404"), "404"},
		"a trap":            {curl("-o", "/dev/null", "-w", "%{http_code}", "http://"+ip+"/trap"), "500"},
		"after the trap":    {curl("http://" + ip + "/b"), "hello from /b\n"},
		"HTTP/3 is offered": {curl("-k", "-o", "/dev/null", "-w", "%header{alt-svc}", "https://"+ip+"/"), `h3=":443"; ma=86400`},
	} {
		if what == "HTTP/3 is offered" && strings.Contains(try[0], `h3=":443"`) {
			continue
		}
		if try[0] != try[1] {
			t.Errorf("%s: got %q, want %q", what, try[0], try[1])
		}
	}
	h3 := overHTTP3(t, anyCertificate)
	resp, err := h3.Post("https://"+ip+"/echo", "text/plain", bytes.NewReader(bytes.Repeat([]byte("x"), 300_000)))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if n, err := io.Copy(io.Discard, resp.Body); n != 300_000 || err != nil || resp.StatusCode != http.StatusOK {
		t.Errorf("echo over HTTP/3: got %d bytes, status %s, error %v; want 300000 bytes", n, resp.Status, err)
	}
	c.WaitLog("/trap")
}

// TestWasmImages: for a kubelet, components are ordinary images.
func TestWasmImages(t *testing.T) {
	ctx := context.Background()
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	before := imageBytes(t, d)
	c := d.RunWasm(t, &harness.PodSpec{Image: harness.GreeterC})
	d.Pull(t, harness.CommandGo)
	list, err := d.Images().ListImages(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, im := range list {
		names = append(names, im.RepoTags...)
		if im.Size == 0 || im.Id == "" || len(im.RepoDigests) != 1 {
			t.Errorf("listed image: got %v, want an ID, a size and one digest", im)
		}
	}
	if !slices.Contains(names, harness.GreeterC) || !slices.Contains(names, harness.CommandGo) {
		t.Errorf("listed images: got %v, want both components among them", names)
	}
	st, err := d.Images().ImageStatus(ctx, &runtimeapi.ImageSpec{Image: harness.GreeterC}, true)
	if err != nil || st.Image.GetId() != c.Status().ImageId {
		t.Errorf("image status: got %v, error %v; want the container's ID %s", st.GetImage(), err, c.Status().ImageId)
	}
	harness.Eventually(t, waitLimit, func() error {
		if after := imageBytes(t, d); after < before+2_000_000 {
			return fmt.Errorf("usage in ImageFsInfo: got %d bytes, want at least 2000000 more than %d", after, before)
		}
		return nil
	})
	for _, image := range []string{harness.GreeterC, harness.CommandGo} { // while it runs, and while it does not
		if err := d.Images().RemoveImage(ctx, &runtimeapi.ImageSpec{Image: image}); err != nil {
			t.Errorf("RemoveImage %s: %v", image, err)
		}
	}
	harness.Eventually(t, waitLimit, func() error {
		if after := imageBytes(t, d); after > before+1_000_000 {
			return fmt.Errorf("usage in ImageFsInfo after the removal: got %d bytes, was %d", after, before)
		}
		return nil
	})
	dial(t, c.Pod.IP(), greeter).call(greeter+"/SayHello", `{"name":"Ada"}`)
}

// imageBytes returns the disk usage of the images.
func imageBytes(t *testing.T, d *harness.Daemon) uint64 {
	t.Helper()
	info, err := d.Images().ImageFsInfo(context.Background())
	if err != nil || len(info.ImageFilesystems) == 0 {
		t.Fatalf("ImageFsInfo: got %v, error %v; want a file system of images", info, err)
	}
	return info.ImageFilesystems[0].GetUsedBytes().GetValue()
}

// TestWasmOwnWorkerMetrics: a pod with a worker of its own also has the metrics of the worker's cgroup.
func TestWasmOwnWorkerMetrics(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "pod"))
	c, _ := startComponent(t, d, harness.FaultsC, faults)
	values := checkMetrics(t, d, c, cgroupMetrics)
	checkDescribed(t, d, c, except(append([]string{"container_spec_cpu_quota"}, diskMetrics...)...))
	if values["container_processes"] != 1 || values["container_threads"] < 2 {
		t.Errorf("metrics: got %v, want one process with several threads", values)
	}
}

// TestWasmStats checks the stats of a pod's guests.
func TestWasmStats(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	c, s := startComponent(t, d, harness.FaultsC, faults)
	cpu := func() uint64 {
		st, err := d.Runtime().ContainerStats(context.Background(), c.ID)
		if err != nil {
			t.Fatal(err)
		}
		return st.GetCpu().GetUsageCoreNanoSeconds().GetValue()
	}
	known := slices.DeleteFunc(slices.Clone(knownMetrics), func(name string) bool { return name == "container_spec_cpu_quota" })
	checkMetrics(t, d, c, known)
	checkDescribed(t, d, c, func(name string) bool {
		return slices.Contains(known, name) || slices.Contains(networkMetrics, name) || name == "container_requests_total"
	})
	before := cpu()
	s.call(faults+"/Spin", `{"milliseconds":1000}`)
	// The range is wide, because a guest that computes for long has a lower priority.
	harness.Eventually(t, waitLimit, func() error {
		if used := cpu() - before; used < 10e6 || used > 2e9 {
			return fmt.Errorf("CPU time in one second: got %d ns, want 10e6 to 2e9", used)
		}
		return nil
	})
}
