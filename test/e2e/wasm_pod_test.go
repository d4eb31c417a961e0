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

// labels names the component that the pod is to run.
func labels(domain, server, version string) harness.PodOption {
	return func(c *runtimeapi.PodSandboxConfig) {
		c.Labels["vimana.host/domain"], c.Labels["vimana.host/server"], c.Labels["vimana.host/version"] = domain, server, version
	}
}

// createIn asks for a container of an image in a new pod, without expecting to get it.
func createIn(t *testing.T, d *harness.Daemon, image string, opts ...harness.PodOption) (*harness.Pod, string, error) {
	t.Helper()
	d.Pull(t, image)
	p := d.RunPodWith(t, harness.PodConfig(t, "wasm", opts...), "wasm")
	t.Cleanup(p.Remove)
	id, err := create(d, p, harness.ContainerConfig("c", image))
	return p, id, err
}

// TestWasmNames: component#n by labels, an ID like any other without, and only the component that the labels say. The
// container's ID counts the attempts.
func TestWasmNames(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	named := labels("example.com", "greet.Greeter", "1.0.0")
	for i, image := range []string{harness.NamedGreeter, harness.CalledGreeter} {
		p, id, err := createIn(t, d, image, named)
		if want := fmt.Sprintf("example.com:greet.Greeter@1.0.0#%d", i); err != nil || p.ID != want || id != want+".1" {
			t.Errorf("pod %s, container %s, %v; want %s and %[4]s.1", p.ID, id, err, want)
		}
	}
	p, _, err := createIn(t, d, harness.GreeterJS, named) // greeter-c is the very image that is also called so
	wantCode(t, err, codes.InvalidArgument)
	other := harness.ContainerConfig("c", harness.NamedGreeter, func(c *runtimeapi.ContainerConfig) {
		c.Labels = map[string]string{"vimana.host/domain": "example.com", "vimana.host/server": "greet.Greeter", "vimana.host/version": "1.0.1"}
	})
	_, err = create(d, p, other)
	wantCode(t, err, codes.InvalidArgument)
	if p, id, err := createIn(t, d, harness.GreeterC); err != nil || len(p.ID) != 64 || len(id) != 64 || id == p.ID {
		t.Errorf("without labels: pod %s, container %s, %v", p.ID, id, err)
	}
	_, err = d.CRI().RunPodSandbox(context.Background(), &runtimeapi.RunPodSandboxRequest{
		Config: harness.PodConfig(t, "wasm", labels("example.com", "greet.Greeter", "one")), RuntimeHandler: "wasm",
	})
	wantCode(t, err, codes.InvalidArgument)
}

// TestWasmRestart: a stopped component starts again, on the address that it had.
func TestWasmRestart(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	c, s := startComponent(t, d, harness.GreeterC, greeter)
	for range 3 {
		c.Stop(5 * time.Second)
		if st := c.Status(); st.State != exited || st.ExitCode != 0 || st.Reason != "Completed" {
			t.Errorf("after a stop: %v", st)
		}
		if conn, err := net.DialTimeout("tcp", net.JoinHostPort(s.ip, "80"), 5*time.Second); err == nil {
			conn.Close()
			t.Error("a stopped component takes connections")
		}
		c.Start()
		if ip := c.Pod.IP(); ip != s.ip {
			t.Errorf("the address went from %s to %s", s.ip, ip)
		}
		s.until(greeter+"/SayHello", `{"name":"Ada"}`)
		s.callQUIC(greeter+"/SayHello", `{"name":"Ada"}`)
	}
}

// TestWasmDrains: what is under way when a component is stopped is answered, or ended by force after the grace period.
func TestWasmDrains(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	c, s := startComponent(t, d, harness.FaultsC, faults)
	short := s.followGRPC(t.Context(), faults+"/Tick", `{"count":20,"intervalMs":50}`)
	harness.Eventually(t, waitLimit, short.more(2))
	c.Stop(20 * time.Second)
	<-short.over
	if n, err := short.state(); n != 20 || !errors.Is(err, io.EOF) {
		t.Errorf("a stream that fits into the grace period: %d messages, %v", n, err)
	}
	if st := c.Status(); st.ExitCode != 0 || st.Reason != "Completed" {
		t.Errorf("want Completed with code 0, got %v", st)
	}
	c.Start()
	s.until(faults+"/Echo", `{}`)
	endless := s.followGRPC(t.Context(), faults+"/Tick", `{"intervalMs":50}`)
	harness.Eventually(t, waitLimit, endless.more(2))
	begin := time.Now()
	c.Stop(time.Second)
	<-endless.over
	if _, err := endless.state(); errors.Is(err, io.EOF) {
		t.Error("a stream that was cut off ends as if it were whole")
	}
	if took := time.Since(begin); took < time.Second || took > 10*time.Second {
		t.Errorf("it was ended after %s", took)
	}
	if st := c.Status(); st.ExitCode != 137 {
		t.Errorf("want the exit code 137, got %v", st)
	}
}

// TestWasmStandardStreams: logs, attach by kubectl's two protocols and by `tripod attach`, and port-forward.
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
				return fmt.Errorf("%s: attached sees %q and %q", p, out.String(), errout.String())
			}
			return nil
		})
		cancel()
		<-over
	}
	c.WaitLog("line 0")
	logged := c.Logs()
	if got := harness.Text(logged, "stderr"); !strings.Contains(got, "err line 1") {
		t.Errorf("log of stderr: %q", got)
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
			return fmt.Errorf("tripod attach shows %q", out.String())
		}
		return nil
	})
	c.Stop(time.Second)
	if err := command.Wait(); err != nil {
		t.Errorf("tripod attach ended with %v when the container did", err)
	}
	c.Start()
	forwarded := dialWith(t, c.Pod.Forward(t, 80), insecureCredentials)
	forwarded.reflected = s.reflected
	if got := forwarded.call(faults+"/Echo", `{"data":"aGk="}`); got != `{"data":"aGk="}` {
		t.Errorf("over port-forward: %s", got)
	}
}

// TestWasmCommands: programs that run to their end, with arguments, environment, files, input and exit codes.
func TestWasmCommands(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	data := t.TempDir()
	if err := errors.Join(os.Chmod(data, 0o777), os.WriteFile(filepath.Join(data, "in"), []byte("from a volume\n"), 0o644)); err != nil {
		t.Fatal(err)
	}
	volume := mounts(&runtimeapi.Mount{HostPath: data, ContainerPath: "/data"}, &runtimeapi.Mount{HostPath: data, ContainerPath: "/ro", Readonly: true})
	run := func(code int32, opts ...harness.ContainerOption) (*runtimeapi.ContainerStatus, string) {
		t.Helper()
		c := d.RunWasm(t, &harness.PodSpec{Image: harness.CommandGo, Container: opts})
		st := c.WaitExit(code)
		return st, harness.Text(c.Logs(), "")
	}
	st, log := run(0, volume, env("GREETING", "hello"), args("env", "GREETING", "cat", "/data/in", "write", "/data/out", "written", "err", "to stderr"))
	if log != "hello\nfrom a volume\nto stderr\n" || st.Reason != "Completed" || st.FinishedAt < st.StartedAt {
		t.Errorf("%q, %v", log, st)
	}
	if out, err := os.ReadFile(filepath.Join(data, "out")); err != nil || string(out) != "written\n" {
		t.Errorf("written: %q, %v", out, err)
	}
	if st, log := run(7, args("out", "last words", "exit", "7")); st.Reason != "Error" || log != "last words\n" {
		t.Errorf("%v, %q", st, log)
	}
	if _, log := run(1, volume, args("write", "/ro/out", "x")); !strings.Contains(strings.ToLower(log), "read-only") && !strings.Contains(strings.ToLower(log), "not permitted") && !strings.Contains(strings.ToLower(log), "not capable") {
		t.Errorf("a write to a read-only volume: %q", log)
	}
	if _, log := run(1, args("cat", "/etc/passwd")); strings.Contains(log, "root:") {
		t.Error("a component reads files of the node")
	}
	if st, log := run(2, args("panic")); st.Reason != "Error" || !strings.Contains(log, "asked to") {
		t.Errorf("%v, %q", st, log)
	}
	// An image whose entrypoint is a .wasm file, with the environment and arguments of the image.
	c := d.RunWasm(t, &harness.PodSpec{Image: harness.WasmRootfs})
	c.WaitExit(0)
	if log := harness.Text(c.Logs(), "stdout"); !strings.HasPrefix(log, "hello from the image\n") {
		t.Errorf("%q", log)
	}
	// One that must be ended.
	c = d.RunWasm(t, &harness.PodSpec{Image: harness.CommandGo, Container: []harness.ContainerOption{args("spin")}})
	c.Stop(time.Second)
	if st := c.Status(); st.ExitCode != 137 {
		t.Errorf("a command that computed until it was killed: %v", st)
	}
	// Input, by attach: without stdin_once its end is the session's, and the guest waits for the next client.
	c = d.RunWasm(t, &harness.PodSpec{Image: harness.CommandGo, Container: []harness.ContainerOption{args("stdin"), func(c *runtimeapi.ContainerConfig) { c.Stdin = true }}})
	for _, p := range harness.HalfClosing {
		o := streamTo(io.Discard, io.Discard)
		o.Stdin = strings.NewReader("typed\n")
		if _, err := harness.Stream(t.Context(), p, c.AttachURL(true, false), o); err != nil {
			t.Error(err)
		}
	}
	if st := c.Status(); st.State != running {
		t.Errorf("a guest whose clients have closed their input is %v", st.State)
	}
	c.Stop(time.Second)
	// With it, it is the guest's.
	c = d.RunWasm(t, &harness.PodSpec{Image: harness.CommandGo, Container: []harness.ContainerOption{args("stdin"), func(c *runtimeapi.ContainerConfig) { c.Stdin, c.StdinOnce = true, true }}})
	var out lockedBuffer
	o := streamTo(&out, io.Discard)
	o.Stdin = strings.NewReader("typed\n")
	if _, err := harness.Stream(t.Context(), harness.SPDY, c.AttachURL(true, false), o); err != nil {
		t.Error(err)
	}
	c.WaitExit(0)
	if log := harness.Text(c.Logs(), "stdout"); log != "typed\n" {
		t.Errorf("the log has %q, the client %q", log, out.String())
	}
}

// TestWasmHTTP asks a wasi:http component with curl, over HTTP/1.1 and HTTP/2.
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
			t.Errorf("%s: %q, want %q", what, try[0], try[1])
		}
	}
	h3 := overHTTP3(t, anyCertificate)
	resp, err := h3.Post("https://"+ip+"/echo", "text/plain", bytes.NewReader(bytes.Repeat([]byte("x"), 300_000)))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if n, err := io.Copy(io.Discard, resp.Body); n != 300_000 || err != nil || resp.StatusCode != http.StatusOK {
		t.Errorf("over HTTP/3: %d bytes, %s, %v", n, resp.Status, err)
	}
	c.WaitLog("/trap")
}

// TestWasmImages: components are images like others, for a kubelet that knows nothing of them.
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
			t.Errorf("image %v", im)
		}
	}
	if !slices.Contains(names, harness.GreeterC) || !slices.Contains(names, harness.CommandGo) {
		t.Errorf("the list has %v", names)
	}
	st, err := d.Images().ImageStatus(ctx, &runtimeapi.ImageSpec{Image: harness.GreeterC}, true)
	if err != nil || st.Image.GetId() != c.Status().ImageId {
		t.Errorf("%v, %v; the container has %s", st.GetImage(), err, c.Status().ImageId)
	}
	harness.Eventually(t, waitLimit, func() error {
		if after := imageBytes(t, d); after < before+2_000_000 {
			return fmt.Errorf("ImageFsInfo went from %d to %d bytes", before, after)
		}
		return nil
	})
	for _, image := range []string{harness.GreeterC, harness.CommandGo} { // removal while it runs, and when nobody does
		if err := d.Images().RemoveImage(ctx, &runtimeapi.ImageSpec{Image: image}); err != nil {
			t.Errorf("RemoveImage %s: %v", image, err)
		}
	}
	harness.Eventually(t, waitLimit, func() error {
		if after := imageBytes(t, d); after > before+1_000_000 {
			return fmt.Errorf("ImageFsInfo is at %d after the removal, it was at %d", after, before)
		}
		return nil
	})
	dial(t, c.Pod.IP(), greeter).call(greeter+"/SayHello", `{"name":"Ada"}`)
}

// imageBytes is how much the images take.
func imageBytes(t *testing.T, d *harness.Daemon) uint64 {
	t.Helper()
	info, err := d.Images().ImageFsInfo(context.Background())
	if err != nil || len(info.ImageFilesystems) == 0 {
		t.Fatalf("got %v with error %v, want a file system of images", info, err)
	}
	return info.ImageFilesystems[0].GetUsedBytes().GetValue()
}

// TestWasmStats: figures of the pod's guests.
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
	before := cpu()
	s.call(faults+"/Spin", `{"milliseconds":1000}`)
	// How much of that second the guest got is the machine's matter: one that computes for long stands behind others.
	harness.Eventually(t, waitLimit, func() error {
		if used := cpu() - before; used < 10e6 || used > 2e9 {
			return fmt.Errorf("%d ns of CPU for a second of the clock", used)
		}
		return nil
	})
}
