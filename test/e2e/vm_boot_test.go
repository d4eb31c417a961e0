package e2e

import (
	"context"
	"encoding/binary"
	"net/http"
	"net/http/httptest"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/harness/cdimage"
	"github.com/tripod-run/tripod/test/harness/gptdisk"
	"github.com/tripod-run/tripod/test/harness/libvirtdtest"
)

// bootable returns a disk of 1 MiB with a boot sector that only halts.
func bootable() []byte {
	disk := make([]byte, 1<<20)
	copy(disk, []byte{0xfa, 0xf4, 0xeb, 0xfd}) // cli; hlt; jmp to hlt
	disk[510], disk[511] = 0x55, 0xaa
	return disk
}

// partition sets the first entry of a boot sector's partition table.
func partition(disk []byte, kind byte, first, sectors uint32) []byte {
	disk[450] = kind
	binary.LittleEndian.PutUint32(disk[454:], first)
	binary.LittleEndian.PutUint32(disk[458:], sectors)
	return disk
}

// boots starts a daemon with images virtlet.cloud/NAME of these disks.
func boots(t *testing.T, disks map[string][]byte, opts ...harness.Option) *harness.Daemon {
	t.Helper()
	files := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.ServeContent(w, r, "", time.Time{}, strings.NewReader(string(disks[path.Base(r.URL.Path)])))
	}))
	t.Cleanup(files.Close)
	rules := t.TempDir()
	text := "translations: [{regexp: '^(.*)$', url: '" + files.URL + "/$1'}]\n"
	if err := os.WriteFile(filepath.Join(rules, "rules.yaml"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return tinyVM(t, append(opts, harness.Set("vm.translations_dir", rules))...)
}

// unbootable is an intact disk that the machine's firmware cannot boot, a part of the reported reason, and the beginning
// of the firmware's output in the log.
type unbootable struct {
	disk           []byte
	says, firmware string
}

// wantNoBoot runs a machine from an image that cannot boot, and checks that the event, the status and the log say so.
func wantNoBoot(t *testing.T, d *harness.Daemon, image string, u unbootable) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), harness.GuestTimeout)
	defer cancel()
	events, err := d.CRI().GetContainerEvents(ctx, &runtimeapi.GetEventsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	c := d.RunVM(t, &harness.PodSpec{Name: "unbootable", Image: image})
	for {
		e, err := events.Recv()
		if err != nil {
			t.Fatalf("wait for the event of the end: %v", err)
		}
		if e.ContainerId != c.ID || e.ContainerEventType != runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT {
			continue
		}
		if len(e.ContainersStatuses) != 1 || e.ContainersStatuses[0].Reason != "NoBootableDevice" ||
			!strings.Contains(e.ContainersStatuses[0].Message, u.says) {
			t.Errorf("event: got statuses %v, want NoBootableDevice and %q", e.ContainersStatuses, u.says)
		}
		break
	}
	if s := c.WaitExit(128); s.Reason != "NoBootableDevice" || !strings.Contains(s.Message, u.says) {
		t.Errorf("status: got %v, want NoBootableDevice and %q", s, u.says)
	}
	if log := harness.Text(c.Logs(), "stderr"); !strings.Contains(log, "firmware: "+u.firmware) || !strings.Contains(log, "tripod: ") ||
		!strings.Contains(log, u.says) {
		t.Errorf("log: got %q, want lines of the firmware and of tripod with %q", log, u.says)
	}
}

// emptyDisk is a disk that no BIOS boots.
var emptyDisk = unbootable{make([]byte, 1<<20), "not a bootable disk", "Booting from Hard Disk..."}

// TestV5NoBootableDevice: a machine whose disk is empty, or boots by UEFI but has no boot loader, ends with a reason. So
// does one with a CD-ROM that does not boot.
func TestV5NoBootableDevice(t *testing.T) {
	images := map[string]unbootable{
		"zeros.raw": emptyDisk, "uefi.raw": {gptdisk.Build(nil), "failed to load Boot0001", "BdsDxe: failed to load"},
		"files.iso": {cdimage.Build(false, nil), "Could not read from CDROM", "Booting from DVD/CD..."},
	}
	disks := map[string][]byte{}
	for name, u := range images {
		disks[name] = u.disk
	}
	d := boots(t, disks, harness.Set("vm.default_memory", 64<<20)) // enough for UEFI
	for name, u := range images {
		t.Run(name, func(t *testing.T) { wantNoBoot(t, d, "virtlet.cloud/"+name, u) })
	}
}

// TestVMBootsFromCD: a machine boots from a CD-ROM image, although it has a disk, too.
func TestVMBootsFromCD(t *testing.T) {
	d := boots(t, map[string][]byte{"installer.iso": cdimage.Build(true, nil)})
	c := d.RunVM(t, &harness.PodSpec{
		Name: "installer", Image: "virtlet.cloud/installer.iso",
		Pod: []harness.PodOption{annotated("tripod.dev/vm.scratch-disks", "/dev/target=1Mi")},
	})
	if s := c.WaitExit(0); s.Reason != "Completed" {
		t.Errorf("status: got %v, want Completed", s)
	}
	if log := harness.Text(c.Logs(), "stdout"); !strings.Contains(log, strings.TrimSpace(cdimage.Text)) {
		t.Errorf("log: got %q, want the text of the CD-ROM's program", log)
	}
}

// TestV5NoBootableDeviceLibvirt is the same with libvirt.
func TestV5NoBootableDeviceLibvirt(t *testing.T) {
	lv := libvirtdtest.Start(t)
	t.Setenv("TRIPOD_VMWRAP_BIN", libvirtdtest.Wrapper(t))
	d := boots(t, map[string][]byte{"zeros.raw": emptyDisk.disk}, harness.Set("vm.driver", "libvirt"), harness.Set("vm.libvirt_uri", lv.URI))
	t.Cleanup(lv.Kill)
	wantNoBoot(t, d, "virtlet.cloud/zeros.raw", emptyDisk)
}

// TestV5Refused: damaged disks are refused before a machine exists: by the pull if the file is truncated or has another
// format, by CreateContainer if a partition is incomplete.
func TestV5Refused(t *testing.T) {
	whole, err := os.ReadFile(harness.VMFile(t, "disk.qcow2"))
	if err != nil {
		t.Fatal(err)
	}
	d := boots(t, map[string][]byte{
		"half.qcow2": whole[:len(whole)/2], "other.img": append([]byte("KDMV"), make([]byte, 1<<20)...), "named.vmdk": bootable(),
		"partition.raw": partition(bootable(), 0x83, 1, 4096),
	})
	for image, says := range map[string]string{"half.qcow2": "cut off", "other.img": "VMDK", "named.vmdk": "VMDK"} {
		_, err := d.ImageCRI().PullImage(t.Context(), &runtimeapi.PullImageRequest{Image: spec("virtlet.cloud/" + image)})
		wantWords(t, err, codes.InvalidArgument, says)
	}
	pod := d.RunPodWith(t, harness.PodConfig(t, "cut"), "vm")
	t.Cleanup(pod.Remove)
	d.Pull(t, "virtlet.cloud/partition.raw")
	_, err = d.CRI().CreateContainer(t.Context(), &runtimeapi.CreateContainerRequest{
		PodSandboxId: pod.ID, Config: harness.ContainerConfig("c", "virtlet.cloud/partition.raw"), SandboxConfig: pod.Config,
	})
	wantWords(t, err, codes.InvalidArgument, "cut off")
}

// TestV5Silent: if a guest shows no sign of life within the boot timeout, its log says so and it keeps running. The log
// of a guest that ticks has no such line.
func TestV5Silent(t *testing.T) {
	d := boots(t, map[string][]byte{"halts.raw": bootable()}, harness.Set("vm.boot_timeout", "5s"))
	ticks := d.RunVM(t, &harness.PodSpec{Name: "ticks", Image: harness.TinyGuest})
	c := d.RunVM(t, &harness.PodSpec{Name: "halts", Image: "virtlet.cloud/halts.raw"})
	c.WaitConsole("no sign of life in 5s")
	if s := c.Status(); s.State != runtimeapi.ContainerState_CONTAINER_RUNNING {
		t.Errorf("status: got %v, want running", s)
	}
	if log := harness.Text(c.Logs(), "stderr"); !strings.Contains(log, "firmware: Booting from 0000:7c00") {
		t.Errorf("log: got %q, want the firmware's last line", log)
	}
	wantTicks(t, ticks)
	for _, line := range ticks.Logs() {
		if strings.Contains(line.Text, "sign of life") {
			t.Errorf("log of a guest that ticks: got %q, want no such line", line.Text)
		}
	}
}
