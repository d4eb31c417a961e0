package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/harness/gptdisk"
	"github.com/tripod-run/tripod/test/harness/libvirtdtest"
	"github.com/tripod-run/tripod/test/loopdev"
)

// loopDevice creates a block device of size bytes, with further options of losetup, and returns its path.
func loopDevice(t *testing.T, size int64, options ...string) string {
	t.Helper()
	volume, err := os.CreateTemp(harness.Dir(), strings.ReplaceAll(t.Name(), "/", "-")+"-*.volume")
	if err != nil {
		t.Fatal(err)
	}
	file := volume.Name()
	t.Cleanup(func() { os.Remove(file) })
	if err := errors.Join(volume.Truncate(size), volume.Close()); err != nil {
		t.Fatal(err)
	}
	return loopdev.Attach(t, file, options...)
}

// withDevice adds a block device to a container, like volumeDevices.
func withDevice(host, at string) harness.ContainerOption {
	return func(c *runtimeapi.ContainerConfig) {
		c.Devices = append(c.Devices, &runtimeapi.Device{HostPath: host, ContainerPath: at, Permissions: "mrw"})
	}
}

// TestVMSectors: the guest sees the sectors of the node's block devices, so that partitions and file systems made on one
// side are found on the other. A root disk has sectors of 512 bytes, for which its image was made.
func TestVMSectors(t *testing.T) {
	for _, driver := range []string{"qmp", "libvirt"} {
		t.Run(driver, func(t *testing.T) {
			options, stop := []harness.Option{harness.VM(t)}, func() {}
			if driver == "libvirt" {
				lv := libvirtdtest.Start(t)
				t.Setenv("TRIPOD_VMWRAP_BIN", libvirtdtest.Wrapper(t))
				options, stop = append(options, harness.Set("vm.driver", "libvirt"), harness.Set("vm.libvirt_uri", lv.URI)), lv.Kill
			}
			d := harness.StartDaemon(t, options...)
			t.Cleanup(stop) // before the harness checks for leftovers
			const size = 64 << 20
			root, small, large := loopDevice(t, size, "--sector-size", "4096"), loopDevice(t, size), loopDevice(t, size, "--sector-size", "4096")
			if err := os.WriteFile(large, bytes.Repeat([]byte("node"), 1024), 0); err != nil {
				t.Fatal(err)
			}
			c := d.RunVM(t, &harness.PodSpec{Image: harness.DiskGuest, Container: []harness.ContainerOption{
				withDevice(root, "/"), withDevice(small, "/dev/small"), withDevice(large, "/dev/large"),
			}})
			c.WaitGuest()
			waitAgent(t, d, c)
			got := c.Must("sh", "-c", `for disk in root disk0 disk1; do
				for block in /sys/block/*; do
					[ "$(cat $block/serial 2>/dev/null)" != $disk ] || echo $disk $(cat $block/queue/logical_block_size $block/size)
				done
			done; dd if=/dev/large bs=4096 count=1 2>/dev/null | head -c 8`)
			want := fmt.Sprintf("root 512 %d\ndisk0 512 %d\ndisk1 4096 %d\nnodenode", size/512-2048, size/512, size/512)
			if got != want {
				t.Errorf("sector size and 512-byte blocks of each disk: got\n%s\nwant\n%s", got, want)
			}
		})
	}
}

// TestVMRootDevice: a block device at / is the root disk. The guest's writes to it persist in the next pod. A second
// machine cannot use it at the same time.
func TestVMRootDevice(t *testing.T) {
	d := harness.StartDaemon(t, harness.VM(t))
	rootDevice(t, d)
}

// TestVMRootDeviceLibvirt is the same with libvirt.
func TestVMRootDeviceLibvirt(t *testing.T) {
	lv := libvirtdtest.Start(t)
	t.Setenv("TRIPOD_VMWRAP_BIN", libvirtdtest.Wrapper(t))
	d := harness.StartDaemon(t, harness.VM(t), harness.Set("vm.driver", "libvirt"), harness.Set("vm.libvirt_uri", lv.URI))
	t.Cleanup(lv.Kill)
	rootDevice(t, d)
}

func rootDevice(t *testing.T, d *harness.Daemon) {
	device := loopDevice(t, 64<<20)
	spec := func(name string) *harness.PodSpec {
		return &harness.PodSpec{Name: name, Image: harness.DiskGuest, Container: []harness.ContainerOption{withDevice(device, "/")}}
	}
	c := d.RunVM(t, spec("first"))
	c.WaitGuest()
	waitAgent(t, d, c)
	if out := c.Must("sh", "-c", "cat /sys/block/vda/size"); strings.TrimSpace(out) != "129024" { // 63 MiB
		t.Errorf("size of the guest's disk: got %s sectors, want 129024", out)
	}
	c.Must("sh", "-c", "echo kept >/disk/note; sync")

	other := d.RunPodWith(t, harness.PodConfig(t, "second"), "vm")
	t.Cleanup(other.Remove)
	twin := other.Create(harness.ContainerConfig("c", harness.DiskGuest, withDevice(device, "/")))
	if _, err := d.CRI().StartContainer(t.Context(), &runtimeapi.StartContainerRequest{ContainerId: twin.ID}); err == nil {
		t.Error("StartContainer of a second machine with the same root disk succeeded, want an error")
	} else {
		t.Log(err)
	}
	other.Remove()

	c.Stop(30 * time.Second)
	c.Pod.Remove()
	next := d.RunVM(t, spec("next"))
	next.WaitGuest()
	waitAgent(t, d, next)
	if out := next.Must("cat", "/disk/note"); out != "kept\n" {
		t.Errorf("file on the next pod's disk: got %q, want kept", out)
	}
}

// TestVMRootDeviceUEFI: a variable that a guest sets stays with the root disk on a block device: the next pod's guest finds
// it, on the same copy of the image. If the variables are damaged, the pod after that has new ones.
func TestVMRootDeviceUEFI(t *testing.T) {
	d := boots(t, map[string][]byte{"uefi.raw": gptdisk.Bootable()}, harness.Set("vm.default_memory", 64<<20)) // enough for UEFI
	device := loopDevice(t, 8<<20)
	mark := func() string {
		raw, err := os.ReadFile(device)
		if err != nil {
			t.Fatal(err)
		}
		return string(raw[:512])
	}
	var copied string
	for i, want := range []string{gptdisk.Text, gptdisk.Kept + gptdisk.Text, gptdisk.Text} {
		if i == 2 {
			f, err := os.OpenFile(device, os.O_WRONLY, 0)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := f.WriteAt(bytes.Repeat([]byte{0xff}, 4096), 256<<10); err != nil {
				t.Fatal(err)
			}
			f.Close()
		}
		c := d.RunVM(t, &harness.PodSpec{Name: fmt.Sprint("pod", i), Image: "virtlet.cloud/uefi.raw",
			Container: []harness.ContainerOption{withDevice(device, "/")}})
		c.WaitExit(0)
		if log := harness.Text(c.Logs(), "stdout"); !strings.Contains(log, strings.TrimSpace(want)) ||
			i != 1 && strings.Contains(log, gptdisk.Kept) {
			t.Errorf("log of pod %d: got %q, want %q", i, log, want)
		}
		c.Pod.Remove()
		if i == 0 {
			copied = mark()
		}
	}
	if got := mark(); got != copied || !strings.HasPrefix(got, "TRIPOD ROOT DISK") {
		t.Errorf("mark of the device: got %q, want %q from the first pod", got, copied)
	}
}

// TestV4VMRootDevice: if the daemon is killed while it copies the image to the device, the device is not a root disk. A
// repeated CreateContainer completes the copy.
func TestV4VMRootDevice(t *testing.T) {
	d := harness.StartDaemon(t, harness.VM(t))
	device := loopDevice(t, 64<<20)
	for _, point := range []string{"rootdisk.copying", "rootdisk.copied", "rootdisk.synced"} {
		d.Restart("TRIPOD_FAILPOINTS=" + point + "=kill")
		pod := d.RunPodWith(t, harness.PodConfig(t, "killed"), "vm")
		d.Pull(t, harness.DiskGuest)
		config := harness.ContainerConfig("c", harness.DiskGuest, withDevice(device, "/"))
		if _, err := d.CRI().CreateContainer(t.Context(),
			&runtimeapi.CreateContainerRequest{PodSandboxId: pod.ID, Config: config, SandboxConfig: pod.Config}); err == nil {
			t.Fatalf("%s: CreateContainer succeeded, want the daemon to be killed", point)
		}
		if s, ok := d.WaitExit(time.Minute).Sys().(syscall.WaitStatus); !ok || s.Signal() != syscall.SIGKILL {
			t.Fatalf("%s: end of the daemon: got %v, want SIGKILL", point, s)
		}
		raw, err := os.ReadFile(device)
		if err != nil || !strings.HasPrefix(string(raw), "TRIPOD ROOT DISK\x01\x00\x00\x00\x01") { // version 1, writing
			t.Errorf("%s: header of the device: got %q, error %v; want the mark of an incomplete copy", point, raw[:min(len(raw), 32)], err)
		}
		d.Start()
		pod.Remove()
	}
	c := d.RunVM(t, &harness.PodSpec{Image: harness.DiskGuest, Container: []harness.ContainerOption{withDevice(device, "/")}})
	c.WaitGuest()
	c.Stop(30 * time.Second)
	if raw, err := os.ReadFile(device); err != nil || string(raw[1<<20+510:1<<20+512]) != "\x55\xaa" {
		t.Errorf("the device has no boot sector, error %v", err)
	}
}

// TestVMRootDeviceRefused: a device with foreign data is refused unless an annotation allows to overwrite it. An image
// with a kernel is refused, because it contains no disk.
func TestVMRootDeviceRefused(t *testing.T) {
	d := tinyVM(t)
	device := loopDevice(t, 8<<20)
	if err := os.WriteFile(device, []byte("somebody's"), 0); err != nil {
		t.Fatal(err)
	}
	create := func(image string, annotations map[string]string, opts ...harness.ContainerOption) error {
		config := harness.PodConfig(t, "vm")
		config.Annotations = annotations
		pod := d.RunPodWith(t, config, "vm")
		defer pod.Remove()
		d.Pull(t, image)
		_, err := d.CRI().CreateContainer(t.Context(),
			&runtimeapi.CreateContainerRequest{PodSandboxId: pod.ID, Config: harness.ContainerConfig("c", image, opts...),
				SandboxConfig: pod.Config})
		return err
	}
	wantWords(t, create(harness.TinyGuest, nil, withDevice(device, "/")), codes.FailedPrecondition, "root-device-overwrite")
	wantWords(t, create(harness.Guest, nil, withDevice(device, "/")), codes.InvalidArgument, "has no disk")
	if raw, err := os.ReadFile(device); err != nil || !strings.HasPrefix(string(raw), "somebody's") {
		t.Errorf("content of the device: got %.20q, error %v; want it unchanged", raw, err)
	}
	if err := create(harness.TinyGuest, map[string]string{"tripod.dev/vm.root-device-overwrite": "foreign"},
		withDevice(device, "/")); err != nil {
		t.Error(err)
	}
	dir := shareDir(t, "root")
	wantWords(t, create(harness.TinyGuest, nil, func(c *runtimeapi.ContainerConfig) {
		c.Mounts = []*runtimeapi.Mount{{HostPath: dir, ContainerPath: "/"}}
	}), codes.InvalidArgument, "block device")
}

// TestVMHotplug: a running machine gets a block device as a disk and loses it, also after a SIGKILL of the daemon, whenever
// that comes.
func TestVMHotplug(t *testing.T) {
	d := harness.StartDaemon(t, harness.VM(t))
	// The test guest loads drivers only when it boots, so its first disks are SCSI disks, too.
	c := d.RunVM(t, &harness.PodSpec{Name: "hotplug", Image: harness.Guest,
		Pod: []harness.PodOption{annotated("tripod.dev/vm.disk-driver", "scsi")}})
	c.WaitGuest()
	waitAgent(t, d, c)
	device := loopDevice(t, 8<<20, "--sector-size", "4096")
	if err := os.WriteFile(device, bytes.Repeat([]byte("node"), 1024), 0); err != nil {
		t.Fatal(err)
	}
	disk := func(args ...string) string {
		out, _ := tripod(t, d, append([]string{"vm", "disk"}, args...)...).CombinedOutput()
		return string(out)
	}
	attach := []string{"attach", c.Pod.ID, "extra", device}
	const find = "cd /sys/bus/scsi/devices; for p in */vpd_pg80; do cat $p; ls ${p%/*}/block; done; true"
	wantGuest := func(has bool) {
		t.Helper()
		harness.Eventually(t, time.Minute, func() error {
			if out := c.Must("sh", "-c", find); strings.Contains(out, "extra") != has {
				return fmt.Errorf("SCSI disks of the guest: got %q, want the disk extra among them: %t", out, has)
			}
			return nil
		})
	}
	wantListed := func(words string) {
		t.Helper()
		if out := disk("ls", c.Pod.ID); !strings.Contains(out, words) || words == "" && strings.Contains(out, "extra") {
			t.Errorf("tripod vm disk ls: got %q, want %q in it", out, words)
		}
	}
	if out := disk(attach...); out != "" {
		t.Fatalf("tripod vm disk attach: got %q", out)
	}
	wantGuest(true)
	if out := c.Must("sh", "-c",
		`cd /sys/bus/scsi/devices; d=$(ls $(dirname $(grep -l extra */vpd_pg80))/block); cat /sys/block/$d/queue/logical_block_size; dd if=/dev/$d bs=8 count=1 2>/dev/null; echo guest >/dev/$d; sync`); out != "4096\nnodenode" {
		t.Errorf("sector size and content: got %q, want 4096 and nodenode", out)
	}
	if raw, err := os.ReadFile(device); err != nil || !strings.HasPrefix(string(raw), "guest\n") {
		t.Errorf("content of the device: got %.20q, error %v; want what the guest wrote", raw, err)
	}
	d.Kill()
	d.Start()
	wantListed("read-write   attached")
	if out := disk("detach", c.Pod.ID, "extra"); out != "" {
		t.Errorf("tripod vm disk detach: got %q", out)
	}
	wantListed("")
	wantGuest(false)
	volume := loopDevice(t, 8<<20)
	d.RunVM(t, &harness.PodSpec{Name: "other", Image: harness.TinyGuest,
		Container: []harness.ContainerOption{withDevice(volume, "/dev/volume")}})
	if out := disk("attach", c.Pod.ID, "extra", volume); !strings.Contains(out, "lock") {
		t.Errorf("attach a volume of another machine: got %q, want that it is locked", out)
	}
	wantListed("")
	if out := disk("attach", c.Pod.ID, "extra", volume, "--read-only"); out != "" {
		t.Errorf("attach a volume of another machine read-only: got %q", out)
	}
	wantListed("read-only   attached")
	wantGuest(true)
	if out := disk("detach", c.Pod.ID, "extra"); out != "" {
		t.Errorf("detach the volume of another machine: got %q", out)
	}
	wantGuest(false)
	for _, point := range []string{"attaching", "plugged", "detaching", "unplugged"} {
		d.Restart("TRIPOD_FAILPOINTS=vm.disk." + point + "=kill")
		if disk(attach...) == "" {
			disk("detach", c.Pod.ID, "extra")
		}
		d.WaitExit(time.Minute)
		d.Start()
		wantListed(map[bool]string{true: "attaching", false: "detaching"}[point == "attaching" || point == "plugged"])
		if out := disk(attach...); out != "" {
			t.Errorf("%s: attach again: got %q", point, out)
		}
		wantListed("read-write   attached")
		wantGuest(true)
		if out := disk("detach", c.Pod.ID, "extra"); out != "" {
			t.Errorf("%s: detach: got %q", point, out)
		}
		wantGuest(false)
	}
}

// TestVMScratchDisks: an annotation adds empty disks of given sizes, which are removed with the container.
func TestVMScratchDisks(t *testing.T) {
	d := harness.StartDaemon(t, harness.VM(t))
	c := d.RunVM(t, &harness.PodSpec{Image: harness.Guest, Pod: []harness.PodOption{func(p *runtimeapi.PodSandboxConfig) {
		p.Annotations = map[string]string{"tripod.dev/vm.scratch-disks": "/dev/scratch=1Gi,/dev/small=1Mi"}
	}}})
	c.WaitGuest()
	waitAgent(t, d, c)
	out := c.Must("sh", "-c", `for d in /sys/block/vd*; do echo "$(cat $d/serial) $(cat $d/size)"; done`)
	for _, want := range []string{"scratch0 2097152", "scratch1 2048"} {
		if !strings.Contains(out, want+"\n") {
			t.Errorf("disks: want %q among\n%s", want, out)
		}
	}
	c.Must("sh", "-c", `d=$(grep -l scratch0 /sys/block/*/serial | cut -d/ -f4); echo mine | dd of=/dev/$d bs=1M seek=1000 conv=sync && sync && dd if=/dev/$d bs=1M skip=1000 count=1 | grep -q mine`)
}

// wantWords checks an error's code, and that its text contains words.
func wantWords(t *testing.T, err error, want codes.Code, words string) {
	t.Helper()
	wantCode(t, err, want)
	if err != nil && !strings.Contains(err.Error(), words) {
		t.Errorf("error: got %q, want %q in it", err, words)
	}
}
