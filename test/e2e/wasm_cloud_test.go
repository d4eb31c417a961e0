package e2e

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// ask sends a request to examples/wasm/cloud-c and returns the status and the text of the response.
func ask(t *testing.T, ip, path string, headers ...string) string {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+net.JoinHostPort(ip, "80")+path, nil)
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
