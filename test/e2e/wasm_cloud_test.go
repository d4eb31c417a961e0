package e2e

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/until"
)

// ask sends a GET request to a component and returns the status and the text of the response.
func ask(t *testing.T, ip, path string, headers ...string) string {
	t.Helper()
	return order(t, http.MethodGet, ip, path, nil, headers...)
}

// order sends a request to a component and returns the status and the text of the response.
func order(t *testing.T, method, ip, path string, body io.Reader, headers ...string) string {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, "http://"+net.JoinHostPort(ip, "80")+path, body)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprint(resp.StatusCode, " ", string(text))
}

// TestWasmConfigAndLogging: a component reads its environment and its ConfigMap by wasi:config, sees a new version of the
// ConfigMap without a restart, also while the daemon is away, and logs by wasi:logging.
func TestWasmConfigAndLogging(t *testing.T) {
	image := pushWasm(t, "cloud-c/cloud-c.wasm", "pushed/cloud-c:1")
	volume := t.TempDir()
	publish := func(version, color string) {
		t.Helper()
		dir, tmp := filepath.Join(volume, ".."+version), filepath.Join(volume, "..data_tmp")
		for _, err := range []error{
			os.Mkdir(dir, 0o755), os.WriteFile(filepath.Join(dir, "color"), []byte(color), 0o644),
			os.Symlink(".."+version, tmp), os.Rename(tmp, filepath.Join(volume, "..data")),
		} {
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	publish("1", "blue")
	if err := os.Chmod(volume, 0o755); err != nil { //nolint:gosec // components run as a user without an account
		t.Fatal(err)
	}
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	c := d.RunWasm(t, &harness.PodSpec{Image: image, Container: []harness.ContainerOption{
		mounts(&runtimeapi.Mount{ContainerPath: "/etc/app", HostPath: volume, Readonly: true}),
		func(c *runtimeapi.ContainerConfig) {
			c.Envs = append(c.Envs, &runtimeapi.KeyValue{Key: "MODE", Value: []byte("fast")})
		},
	}})
	ip := c.Pod.IP()
	for path, want := range map[string]string{"/config/color": "200 blue", "/config/MODE": "200 fast", "/config/missing": "404 "} {
		if got := ask(t, ip, path); got != want {
			t.Errorf("%s: got %q, want %q", path, got, want)
		}
	}
	publish("2", "red")
	if got := ask(t, ip, "/config/color"); got != "200 red" {
		t.Errorf("a new version: got %q, want red", got)
	}
	d.Kill()
	publish("3", "green")
	if got := ask(t, ip, "/config/color"); got != "200 green" {
		t.Errorf("a new version without a daemon: got %q, want green", got)
	}
	ask(t, ip, "/log", "x-level", "4", "x-context", "orders", "x-message", "order 7 failed")
	d.Start()
	c.WaitLog(`level=ERROR msg="order 7 failed" context=orders`)
}

// TestWasmBlobstore: a component stores objects on a volume, also while the daemon is away. A worker that is killed during
// a write leaves no part of an object, and neither does it leave its upload.
func TestWasmBlobstore(t *testing.T) {
	image := pushWasm(t, "blobs-c/blobs-c.wasm", "pushed/blobs-c:1")
	volume := t.TempDir()
	if err := os.Chmod(volume, 0o777); err != nil { //nolint:gosec // components run as a user without an account
		t.Fatal(err)
	}
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	run := func(readonly bool) *harness.Container {
		return d.RunWasm(t, &harness.PodSpec{Image: image, Pod: []harness.PodOption{annotate("blobstore", "/objects")},
			Container: []harness.ContainerOption{mounts(&runtimeapi.Mount{ContainerPath: "/objects", HostPath: volume, Readonly: readonly})}})
	}
	c := run(false)
	ip := c.Pod.IP()
	expect := func(want, method, path, body string, headers ...string) {
		t.Helper()
		if got := order(t, method, ip, path, strings.NewReader(body), headers...); got != want {
			t.Errorf("%s %s: got %q, want %q", method, path, got, want)
		}
	}
	expect("200 ", "PUT", "/c", "")
	expect("200 ", "PUT", "/c/a", "hello, world")
	d.Kill()
	expect("200 world", "GET", "/c/a", "", "x-range", "7-11")
	expect("200 a\n", "GET", "/c", "")
	expect("200 ", "POST", "/c/a", "", "x-to", "c/b")
	d.Start()
	if text, err := os.ReadFile(filepath.Join(volume, "c", "b")); string(text) != "hello, world" {
		t.Errorf("the copy is %q, %v", text, err)
	}

	body, half := io.Pipe()
	defer half.Close()
	var cut sync.WaitGroup
	cut.Go(func() {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPut, "http://"+net.JoinHostPort(ip, "80")+"/c/cut", body)
		if err != nil {
			t.Error(err)
			return
		}
		if resp, err := http.DefaultClient.Do(r); err == nil {
			resp.Body.Close()
			t.Errorf("the response without the worker: got %s, want an error", resp.Status)
		}
	})
	if _, err := half.Write([]byte("half of an object")); err != nil {
		t.Fatal(err)
	}
	uploads := func() []string {
		files, err := filepath.Glob(filepath.Join(volume, "..tripod-uploads", "*"))
		if err != nil {
			t.Fatal(err)
		}
		return files
	}
	until.Holds(t, "the object is being written", func() bool { return len(uploads()) == 1 })
	killWorkers(t)
	half.Close()
	cut.Wait()
	c.WaitState(exited)
	c.Start()
	until.Holds(t, "the component answers", func() bool {
		conn, err := net.Dial("tcp", net.JoinHostPort(ip, "80"))
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
	expect("404 ", "HEAD", "/c/cut", "")
	expect("200 ", "PUT", "/c/d", "whole")
	expect("200 whole", "GET", "/c/d", "")
	if left := uploads(); len(left) > 0 {
		t.Errorf("leftovers: %q", left)
	}
	ip = run(true).Pod.IP()
	expect("200 whole", "GET", "/c/d", "")
	expect("502 read-only file system", "POST", "/c/a", "", "x-to", "c/e")
	expect("502 read-only file system", "DELETE", "/c/a", "")

	p := d.RunPodWith(t, harness.PodConfig(t, "wrong", annotate("blobstore", "/elsewhere")), "wasm")
	t.Cleanup(p.Remove)
	_, err := create(d, p, harness.ContainerConfig("c", image))
	if status.Code(err) != codes.InvalidArgument ||
		!strings.Contains(err.Error(), `annotation vimana.host/blobstore: the container has no mount at "/elsewhere"`) {
		t.Errorf("a mount that is missing: %v", err)
	}
}

// killWorkers kills the node's workers.
func killWorkers(t *testing.T) {
	t.Helper()
	for _, pid := range workers(t) {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
}

// TestWasmKeyvalue: components of two pods share the pairs in a Redis server, whose address is in a variable, through the
// pods' networks, also while the daemon is away; the allow-list applies.
func TestWasmKeyvalue(t *testing.T) {
	image := pushWasm(t, "cloud-c/cloud-c.wasm", "pushed/cloud-c:1")
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	run := func(address string, annotations ...string) string {
		t.Helper()
		return d.RunWasm(t, &harness.PodSpec{Image: image,
			Pod: []harness.PodOption{annotate(append([]string{"keyvalue", "$(REDIS_URL)"}, annotations...)...)},
			Container: []harness.ContainerOption{func(c *runtimeapi.ContainerConfig) {
				c.Envs = append(c.Envs, &runtimeapi.KeyValue{Key: "REDIS_URL", Value: []byte(address)})
			}},
		}).Pod.IP()
	}
	address := startRedis(t, d)
	first, second := run(address), run(address)
	add := func(ip, want string) {
		t.Helper()
		if got := ask(t, ip, "/kv", "x-op", "increment", "x-key", "n", "x-value", "1"); got != want {
			t.Errorf("increment: got %q, want %q", got, want)
		}
	}
	add(first, "200 1")
	add(second, "200 2")
	d.Kill()
	add(first, "200 3")
	d.Start()
	add(second, "200 4")
	add(run(address, "egress", "192.0.2.1"), "502 access-denied")
}

// TestWasmKeyvalueOfTheNode: components in two workers share the pairs that the node keeps for their namespace, also while
// the daemon is away. No increment that was confirmed is lost when workers and the daemon are killed, and other namespaces
// see none of it. `tripod keyvalue` lists and removes the pairs.
func TestWasmKeyvalueOfTheNode(t *testing.T) {
	image := pushWasm(t, "cloud-c/cloud-c.wasm", "pushed/cloud-c:1")
	d := harness.StartDaemon(t, harness.Wasm(t, "pod"))
	run := func(name, namespace string) (*harness.Container, string) {
		t.Helper()
		c := d.RunWasm(t, &harness.PodSpec{Name: name, Image: image, Pod: []harness.PodOption{annotate("keyvalue", "node", "egress", "none"),
			func(c *runtimeapi.PodSandboxConfig) { c.Metadata.Namespace = namespace }}})
		return c, c.Pod.IP()
	}
	a, first := run("a", "shop")
	b, second := run("b", "shop")
	_, stranger := run("c", "other")
	kv := func(ip, op, key string, headers ...string) string {
		t.Helper()
		return ask(t, ip, "/kv", append([]string{"x-op", op, "x-key", key}, headers...)...)
	}
	expect := func(what, got, want string) {
		t.Helper()
		if got != want {
			t.Errorf("%s: got %q, want %q", what, got, want)
		}
	}
	expect("set", kv(first, "set", "k", "x-value", "v"), "200 ")
	expect("get", kv(second, "get", "k"), "200 v")
	expect("get in another namespace", kv(stranger, "get", "k"), "404 ")
	d.Kill()
	expect("a batch without a daemon", kv(second, "many", "m", "x-value", "y"), "200 m=y\nm2=y\nm3 is missing\n")
	expect("a swap without a daemon", kv(first, "append", "k", "x-value", "w"), "200 ")
	expect("get without a daemon", kv(second, "get", "k"), "200 vw")

	var confirmed atomic.Int64
	var all sync.WaitGroup
	for _, ip := range []string{first, second} {
		all.Go(func() {
			for {
				r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+net.JoinHostPort(ip, "80")+"/kv", nil)
				if err != nil {
					t.Error(err)
					return
				}
				r.Header = http.Header{"X-Op": {"increment"}, "X-Key": {"n"}, "X-Value": {"1"}}
				resp, err := http.DefaultClient.Do(r)
				if err != nil {
					return // the worker is dead
				}
				resp.Body.Close()
				if resp.StatusCode != http.StatusOK {
					t.Errorf("increment: %s", resp.Status)
					return
				}
				confirmed.Add(1)
			}
		})
	}
	until.Holds(t, "both pods count", func() bool { return confirmed.Load() > 20 })
	killWorkers(t)
	all.Wait()
	d.Start()
	for _, c := range []*harness.Container{a, b} {
		c.WaitState(exited)
		c.Start()
	}
	until.Holds(t, "the component answers", func() bool {
		conn, err := net.Dial("tcp", net.JoinHostPort(first, "80"))
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
	var code, n int64
	if _, err := fmt.Sscan(kv(first, "increment", "n", "x-value", "0"), &code, &n); err != nil || code != 200 || n < confirmed.Load() ||
		n > confirmed.Load()+2 {
		t.Errorf("after the workers were killed: %d, %d, %v; %d increments were confirmed", code, n, err, confirmed.Load())
	}

	tripod, err := harness.Binary()
	if err != nil {
		t.Fatal(err)
	}
	command := func(args ...string) string {
		t.Helper()
		out, err := exec.CommandContext(t.Context(), tripod,
			append([]string{"keyvalue"}, append(args, "--config", d.ConfigPath())...)...).CombinedOutput()
		if err != nil {
			t.Errorf("tripod keyvalue %q: %v: %s", args, err, out)
		}
		return string(out)
	}
	if out := command("ls"); !strings.Contains(out, "shop ") || !strings.Contains(out, "other ") {
		t.Errorf("keyvalue ls: %s", out)
	}
	command("rm", "shop")
	expect("get after rm", kv(first, "get", "k"), "404 ")
	expect("increment after rm", kv(first, "increment", "n", "x-value", "1"), "200 1")
}

// startRedis starts Debian's redis-server on the node and returns its URL for pods.
func startRedis(t *testing.T, d *harness.Daemon) string {
	t.Helper()
	probe := d.RunPodWith(t, harness.PodConfig(t, "probe"), "wasm") // the node has an address in the pods' network from the first pod on
	t.Cleanup(probe.Remove)
	node := harness.NodeAddress(t, probe.IP())
	l, err := net.Listen("tcp", net.JoinHostPort(node, "0"))
	if err != nil {
		t.Fatal(err)
	}
	at := l.Addr().(*net.TCPAddr)
	l.Close()
	c := exec.Command("redis-server", "--bind", node, "--port", fmt.Sprint(at.Port), "--requirepass", "secret", "--save", "", "--dir",
		t.TempDir())
	if err := c.Start(); err != nil {
		t.Fatalf("start redis-server, which hack/setup.sh installs: %v", err)
	}
	t.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait()
	})
	until.Holds(t, "redis-server listens", func() bool {
		conn, err := net.Dial("tcp", at.String())
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
	return "redis://:secret@" + at.String()
}
