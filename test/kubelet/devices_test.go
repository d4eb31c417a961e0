package kubelet

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tripod-run/tripod/test/harness/kube"
	"github.com/tripod-run/tripod/test/loopdev"
)

// startPeer starts the program hack/kube/peers.
func startPeer(t *testing.T, args ...string) *stream {
	t.Helper()
	program, err := kube.Peers()
	if err != nil {
		t.Fatal(err)
	}
	peer := start(t, exec.Command(program, args...))
	t.Cleanup(peer.stop)
	return peer
}

// TestDevicePlugin: containers get the devices of a device plugin, by the kubelet's own means and by CDI, and each device
// belongs to one container.
func TestDevicePlugin(t *testing.T) {
	c := kube.Shared(t)
	n := c.Namespace(t)
	plugin := startPeer(t, "device-plugin")
	plugin.await(n, "registered")
	for _, name := range []string{"first", "second"} {
		n.Apply(kinds[0].fill(fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  restartPolicy: Never
  containers:
  - name: c
    image: BUSYBOX
    command: [sh, -c, "head -c 3 /dev/gadget | wc -c; head -c 4 /dev/$GADGETS | wc -c; echo $GADGETS $CDI_DEVICE; grep -c tripod.test /cdi.json; sleep 3600"]
    resources: {limits: {tripod.test/gadget: 1}}
`, name)))
	}
	used := map[string]bool{}
	for _, name := range []string{"first", "second"} {
		log := strings.Fields(n.WaitLog("\n1\n", kube.Timeout, name))
		if len(log) != 5 || log[0] != "3" || log[1] != "4" || log[2] != log[3] || !strings.HasPrefix(log[2], "gadget-") {
			t.Errorf("log of %s: got %q, want 3 and 4 bytes from the devices, and the same device from the plugin and by CDI", name, log)
			continue
		}
		used[log[2]] = true
	}
	if len(used) != 2 {
		t.Errorf("devices of the two pods: got %v, want two", used)
	}
}

// claim is a ResourceClaimTemplate for the device of a driver, and the class of the devices.
const claim = `
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: tripod-test}
spec: {selectors: [{cel: {expression: device.driver == "dra.tripod.test"}}]}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: device}
spec: {spec: {devices: {requests: [{name: device, exactly: {deviceClassName: tripod-test}}]}}}
---
apiVersion: v1
kind: Pod
metadata: {name: user}
spec:
  runtimeClassName: RUNTIME
  terminationGracePeriodSeconds: GRACE
  resourceClaims: [{name: device, resourceClaimTemplateName: device}]
  containers:
  - name: web
    image: WEB
    readinessProbe: {httpGet: {port: 80}, periodSeconds: 1}
    resources: {requests: {cpu: 50m}, limits: {memory: 128Mi}, claims: [{name: device}]}
`

// TestDRA: a DRA driver gives a character device to a container and a block device to a machine, both by CDI. When the
// pod has ended, the driver gets the device back. Components are refused the device by name.
func TestDRA(t *testing.T) {
	c := kube.Shared(t)
	for _, test := range []struct {
		kind   kind
		device func(*testing.T, *kube.Cluster) string
		look   string // prints "claimed" in the pod, if the device is there
	}{
		{kinds[0], func(*testing.T, *kube.Cluster) string { return "/dev/zero" },
			`test -n "$CDI_DEVICE" && test "$(head -c 3 /dev/claimed | wc -c)" = 3 && echo claimed`},
		{kinds[1], func(*testing.T, *kube.Cluster) string { return "/dev/zero" }, ""},
		{kinds[2], loopDevice, `for disk in /dev/vd?; do head -c 7 $disk; echo; done | grep claimed`},
	} {
		t.Run(test.kind.name, func(t *testing.T) {
			k, n := test.kind, c.Namespace(t)
			driver := startPeer(t, "dra", c.Kubeconfig(), filepath.Join(c.Dir, "kubelet"), kube.NodeName, test.device(t, c))
			driver.await(n, "published")
			t.Cleanup(func() { n.Kubectl("delete", "deviceclass", "tripod-test", "--wait=false") })
			n.Apply(k.fill(claim))
			driver.await(n, "prepared")
			if test.look == "" {
				waitEvent(n, "user", "CDI")
			} else {
				n.WaitReady("user", k.boots)
				n.Await("the device in the pod", k.boots, func() error {
					out, err := n.TryKubectl("exec", "user", "--", "sh", "-c", test.look)
					return contains(out, err, "claimed")
				})
			}
			n.Kubectl("delete", "pod", "user", "--wait=false")
			driver.await(n, "unprepared")
		})
	}
}

// loopDevice returns a block device whose content begins with "claimed".
func loopDevice(t *testing.T, c *kube.Cluster) string {
	t.Helper()
	file := filepath.Join(c.Dir, "block")
	content := make([]byte, 1<<20)
	copy(content, "claimed")
	if err := os.WriteFile(file, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return loopdev.Attach(t, file)
}
