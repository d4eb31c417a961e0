package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// cdiFile describes a character device with all that comes with it.
const cdiFile = `{"cdiVersion": "0.6.0", "kind": "test.tripod/dev", "devices": [
  {"name": "null", "containerEdits": {
    "deviceNodes": [{"path": "/dev/injected", "hostPath": "/dev/null"}], "env": ["INJECTED=yes"],
    "mounts": [{"hostPath": "/etc/hostname", "containerPath": "/injected", "options": ["ro", "bind"]}]}},
  {"name": "zero", "containerEdits": {"deviceNodes": [{"path": "/dev/second", "hostPath": "/dev/zero"}]}}
]}`

// TestCDI: containers get devices by name, from the CRI's field and from annotations, also a driver's that is installed
// later. Unknown devices, and those that a kind cannot have, are refused by name.
func TestCDI(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "node"), harness.VM(t))
	p := startPod(t, d)
	config := harness.ContainerConfig("c", harness.Busybox, harness.Sleep())
	config.CDIDevices = []*runtimeapi.CDIDevice{{Name: "test.tripod/dev=null"}}
	config.Annotations = map[string]string{"cdi.k8s.io/plugin": "test.tripod/dev=zero"}
	d.Pull(t, harness.Busybox)
	_, err := create(d, p, config)
	wantCode(t, err, codes.InvalidArgument)
	if err == nil || !strings.Contains(err.Error(), `"test.tripod/dev=null"`) {
		t.Errorf("unknown device: got error %v, want one with its name", err)
	}
	dir := filepath.Join(d.Dir, "cdi")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "test.json"), []byte(cdiFile), 0o644); err != nil {
		t.Fatal(err)
	}
	c := p.Run(config)
	if out := c.Must("sh", "-c",
		"echo x >/dev/injected && test -s /injected && head -c 3 /dev/second | wc -c; echo $INJECTED"); out != "3\nyes\n" {
		t.Errorf("output: got %q, want that both devices work", out)
	}
	for handler, image := range map[string]string{"vm": harness.Guest, "wasm": harness.CommandGo} {
		p := d.RunPodWith(t, harness.PodConfig(t, handler), handler)
		t.Cleanup(p.Remove)
		d.Pull(t, image)
		for _, by := range []func(*runtimeapi.ContainerConfig){
			func(c *runtimeapi.ContainerConfig) { c.CDIDevices = config.CDIDevices },
			func(c *runtimeapi.ContainerConfig) { c.Annotations = config.Annotations },
		} {
			_, err := create(d, p, harness.ContainerConfig("c", image, by))
			wantCode(t, err, codes.Unimplemented)
			if err == nil || !strings.Contains(err.Error(), "test.tripod/dev") && !strings.Contains(err.Error(), "CDI_devices") {
				t.Errorf("CreateContainer with handler %s: got error %v, want one that names the device", handler, err)
			}
		}
	}
}
