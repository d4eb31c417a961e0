package e2e

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/loopdev"
)

// TestVMOCIDevices: block devices (volumeDevices) are seen by containers in machines as by containers on the node: with their
// content, their sectors and the permissions asked for. What is written is on the node's device.
func TestVMOCIDevices(t *testing.T) {
	d := harness.StartDaemon(t, harness.VMOCI(t))
	for _, handler := range []string{"linux", harness.OCIHandler} {
		t.Run(handler, func(t *testing.T) {
			const size = 64 << 20
			file := filepath.Join(t.TempDir(), "volume")
			if err := os.WriteFile(file, append([]byte("of the node\n"), make([]byte, size-12)...), 0o600); err != nil {
				t.Fatal(err)
			}
			device := loopdev.Attach(t, file, "--sector-size", "4096")
			with := func(permissions string) harness.ContainerOption {
				return func(c *runtimeapi.ContainerConfig) {
					c.Devices = []*runtimeapi.Device{
						{HostPath: device, ContainerPath: "/dev/volume", Permissions: permissions},
						{HostPath: "/dev/zero", ContainerPath: "/dev/nought", Permissions: "r"},
					}
				}
			}
			p := d.RunPodWith(t, harness.PodConfig(t, "devices"), handler)
			reader := p.Run(harness.ContainerConfig("reader", harness.Busybox, harness.Sleep(), with("r")))
			if got := reader.Must("sh", "-c", "head -c 12 /dev/volume; head -c 2 /dev/nought | od -An -tx1"); got != "of the node\n 00 00\n" {
				t.Errorf("content of the devices: got %q", got)
			}
			if _, stderr, code := reader.ExecSync("sh", "-c", "echo x >/dev/volume"); code == 0 || !strings.Contains(stderr, "not permitted") {
				t.Errorf("write to a device with the permissions r: got code %d, stderr %q; want \"not permitted\"", code, stderr)
			}
			d.Kill()
			d.Start()
			writer := p.Run(harness.ContainerConfig("writer", harness.Busybox, harness.Sleep(), with("rwm")))
			got := writer.Must("sh", "-c", `cd /sys/dev/block/$(printf %d:%d 0x$(stat -c %t /dev/volume) 0x$(stat -c %T /dev/volume))
				cat queue/logical_block_size size; echo of the guest | dd of=/dev/volume conv=notrunc 2>/dev/null; sync`)
			if want := fmt.Sprintf("4096\n%d\n", size/512); got != want {
				t.Errorf("size of a sector, and of the device in blocks of 512 bytes: got %q, want %q", got, want)
			}
			p.Remove()
			if raw, err := os.ReadFile(device); err != nil || !bytes.HasPrefix(raw, []byte("of the guest\n")) {
				t.Errorf("the device begins with %.20q (error %v), want %q", raw, err, "of the guest\n")
			}
		})
	}
}

// TestVMOCIModules: the guest's kernel loads modules when containers need them: for a tunnel's device, for links and for the
// rules with which service meshes redirect connections. The programs and libraries are the node's.
func TestVMOCIModules(t *testing.T) {
	d := harness.StartDaemon(t, harness.VMOCI(t))
	p := d.RunPodWith(t, harness.PodConfig(t, "modules"), harness.OCIHandler)
	c := p.Run(harness.ContainerConfig("c", harness.Busybox, harness.Shell("echo redirected >/tmp/page; exec httpd -f -p 8080 -h /tmp"),
		withDevice("/dev/net/tun", "/dev/net/tun"),
		harness.Security(func(s *security) { s.Capabilities = &runtimeapi.Capability{AddCapabilities: []string{"NET_ADMIN"}} }),
		readonly("/usr", "/usr"), readonly("/usr/lib", "/lib"), readonly("/usr/lib64", "/lib64")))
	c.Must("sh", "-ec", `: <>/dev/net/tun
		for kind in bridge dummy wireguard; do ip link add $kind type $kind; ip link show $kind; done
		ip link add one type veth peer name two`)
	for _, iptables := range []string{"iptables-nft", "iptables-legacy"} {
		c.Must("sh", "-ec", iptables+` -t nat -A OUTPUT -p tcp --dport 81 -m comment --comment test -m owner --uid-owner 0 -j REDIRECT --to-ports 8080
			wget -qO- http://127.0.0.1:81/page; `+iptables+` -t nat -D OUTPUT 1`)
	}
	if _, stderr, code := c.ExecSync("ip", "link", "add", "x", "type", "nonsense"); code == 0 || !strings.Contains(stderr, "not supported") {
		t.Errorf("a link of an unknown kind: got code %d, stderr %q; want \"not supported\"", code, stderr)
	}
}

// TestVMOCIDevicesRefused: machines do not get devices of the node that are not block devices, and no two machines get the
// same one to write to.
func TestVMOCIDevicesRefused(t *testing.T) {
	d := harness.StartDaemon(t, harness.VMOCI(t))
	device := loopDevice(t, 1<<20)
	p := d.RunPodWith(t, harness.PodConfig(t, "one"), harness.OCIHandler)
	p.Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep(), withDevice(device, "/dev/volume")))
	other := d.RunPodWith(t, harness.PodConfig(t, "two"), harness.OCIHandler)
	for name, row := range map[string]struct {
		host string
		code codes.Code
		text string
	}{
		"hardware":   {"/dev/loop-control", codes.Unimplemented, "devices[0].host_path: /dev/loop-control: is not a block device"},
		"nothing":    {"/dev/nothing", codes.InvalidArgument, "devices[0].host_path: /dev/nothing: "},
		"used twice": {device, codes.FailedPrecondition, "devices[0].host_path: " + device + ": "},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := d.CRI().CreateContainer(t.Context(), &runtimeapi.CreateContainerRequest{
				PodSandboxId: other.ID, SandboxConfig: other.Config,
				Config: harness.ContainerConfig("c", harness.Busybox, harness.Sleep(), withDevice(row.host, "/dev/volume")),
			})
			wantWords(t, err, row.code, row.text)
		})
	}
}
