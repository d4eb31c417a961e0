package vm

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/hotplug"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/test/loopdev"
)

// loopDevice returns a block device.
func loopDevice(t *testing.T, options ...string) string {
	file := filepath.Join(t.TempDir(), "device")
	if err := os.WriteFile(file, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	return loopdev.Attach(t, file, options...)
}

// wantDisks checks what disks the driver and Inspect know, as NAME or NAME(PHASE).
func (r *rig) wantDisks(p *sandbox.Pod, c *sandbox.Container, plugged []string, listed ...string) {
	r.Helper()
	var got []string
	for _, lun := range slices.Sorted(maps.Keys(r.driver.guest(c.ID).plugged)) {
		got = append(got, r.driver.guest(c.ID).plugged[lun].Serial)
	}
	if !slices.Equal(got, plugged) {
		r.Errorf("disks of the machine: got %q, want %q", got, plugged)
	}
	info, err := r.Inspect(r.ctx(), p, c)
	r.must(err)
	got = nil
	disks, _ := info["disks"].(hotplug.Disks)
	for _, d := range disks {
		name := d.Name
		if d.Phase != hotplug.Attached {
			name += fmt.Sprintf("(%s)", d.Phase)
		}
		got = append(got, name)
	}
	if !slices.Equal(got, listed) {
		r.Errorf("disks that are reported: got %q, want %q", got, listed)
	}
}

// TestAttachDisk: a running machine gets and loses disks, also by the next backend. They are gone when the machine ends.
func TestAttachDisk(t *testing.T) {
	one, two := loopDevice(t, "--sector-size", "4096"), loopDevice(t)
	r := newRig(t)
	p, c := r.run("disks", "disk")
	for range 2 {
		r.must(r.AttachDisk(r.ctx(), p, c, sandbox.Disk{Name: "one", Path: one}))
	}
	r.must(r.AttachDisk(r.ctx(), p, c, sandbox.Disk{Name: "two", Path: two, ReadOnly: true}))
	r.wantDisks(p, c, []string{"one", "two"}, "one", "two")
	got := r.driver.guest(c.ID).plugged
	if got[0].ReadOnly || got[0].LogicalBlock != 4096 || !got[1].ReadOnly || got[1].LogicalBlock != 512 {
		t.Errorf("disks: got %+v, want one with sectors of 4096 bytes and a read-only one with 512", got)
	}
	r.restart()
	r.wantDisks(p, c, []string{"one", "two"}, "one", "two")
	r.must(r.DetachDisk(r.ctx(), p, c, "one"))
	if err := r.DetachDisk(r.ctx(), p, c, "one"); !errdefs.IsNotFound(err) {
		t.Errorf("detach a disk again: got error %v, want ErrNotFound", err)
	}
	r.must(r.AttachDisk(r.ctx(), p, c, sandbox.Disk{Name: "three", Path: one}))
	r.wantDisks(p, c, []string{"three", "two"}, "two", "three")
	r.driver.end(c.ID, machine.CausePowerOff, 0)
	r.waitEnd(c)
	r.wantDisks(p, c, []string{"three", "two"}) // the fake keeps them
	if err := r.AttachDisk(r.ctx(), p, c, sandbox.Disk{Name: "one", Path: one}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("attach a disk to a machine that has ended: got error %v, want ErrFailedPrecondition", err)
	}
}

// TestAttachDiskRefused: what cannot be attached leaves no trace.
func TestAttachDiskRefused(t *testing.T) {
	device, used, readOnly := loopDevice(t), loopDevice(t), loopDevice(t, "--read-only")
	claimed, err := os.OpenFile(used, os.O_RDONLY|os.O_EXCL, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer claimed.Close()
	own := loopDevice(t)
	r := newRig(t)
	p := r.pod("refuses")
	c := r.create(p, "disk", func(c *runtimeapi.ContainerConfig) {
		c.Devices = []*runtimeapi.Device{{HostPath: own, ContainerPath: "/dev/own", Permissions: "mrw"}}
	})
	r.must(r.StartContainer(r.ctx(), p, c))
	r.must(r.AttachDisk(r.ctx(), p, c, sandbox.Disk{Name: "first", Path: device}))
	link := filepath.Join(t.TempDir(), "link")
	r.must(os.Symlink(device, link))
	for what, test := range map[string]struct {
		name, path string
		want       func(error) bool
	}{
		"no name":               {"", used, errdefs.IsInvalidArgument},
		"long name":             {strings.Repeat("x", 21), used, errdefs.IsInvalidArgument},
		"name with a comma":     {"a,b", used, errdefs.IsInvalidArgument},
		"no device":             {"a", "/nowhere", errdefs.IsInvalidArgument},
		"character device":      {"a", os.DevNull, errdefs.IsNotImplemented},
		"read-only device":      {"a", readOnly, errdefs.IsInvalidArgument},
		"device in use":         {"a", used, errdefs.IsFailedPrecondition},
		"another disk's name":   {"first", used, errdefs.IsAlreadyExists},
		"the root disk's name":  {rootID, used, errdefs.IsAlreadyExists},
		"a device twice":        {"a", link, errdefs.IsFailedPrecondition},
		"a device of a machine": {"a", own, errdefs.IsFailedPrecondition},
	} {
		if err := r.AttachDisk(r.ctx(), p, c, sandbox.Disk{Name: test.name, Path: test.path}); !test.want(err) {
			t.Errorf("%s: got error %v", what, err)
		}
	}
	r.driver.plugErr = errdefs.ErrFailedPrecondition
	if err := r.AttachDisk(r.ctx(), p, c, sandbox.Disk{Name: "a", Path: loopDevice(t)}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("error of the driver: got %v, want ErrFailedPrecondition", err)
	}
	r.wantDisks(p, c, []string{"first"}, "first")
}

// TestAttachDiskToEarlierMachine: a machine without the port, as earlier releases made them, is refused.
func TestAttachDiskToEarlierMachine(t *testing.T) {
	r := newRig(t)
	p, c := r.run("earlier", "disk")
	h, err := r.ledger.Get(c.ID, c.ID)
	r.must(err)
	r.must(h.Set(func(s *state) { s.Definition.Hotplug = false }))
	err = r.AttachDisk(r.ctx(), p, c, sandbox.Disk{Name: "a", Path: "/dev/loop0"})
	if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "earlier release") {
		t.Errorf("got error %v, want ErrFailedPrecondition", err)
	}
}

// TestDiskInterrupted: a call that ends at any line can be repeated, by the next backend, too. So can the opposite call.
func TestDiskInterrupted(t *testing.T) {
	failpoint.Needed(t)
	device := loopDevice(t)
	for point, listed := range map[string]string{
		"vm.disk.attaching": "a(attaching)", "vm.disk.plugged": "a(attaching)",
		"vm.disk.detaching": "a(detaching)", "vm.disk.unplugged": "a(detaching)",
	} {
		for _, then := range []string{"attach", "detach"} {
			t.Run(point+"/"+then, func(t *testing.T) {
				r := newRig(t)
				p, c := r.run("interrupted", "disk")
				attach := func() error { return r.AttachDisk(r.ctx(), p, c, sandbox.Disk{Name: "a", Path: device}) }
				r.must(failpoint.Arm(point, "1*error"))
				err := attach()
				if err == nil {
					err = r.DetachDisk(r.ctx(), p, c, "a")
				}
				r.must(failpoint.Arm(point, ""))
				if err == nil || !strings.Contains(err.Error(), point) {
					t.Fatalf("error = %v, want the fail point's", err)
				}
				r.restart()
				var plugged []string
				if point == "vm.disk.plugged" || point == "vm.disk.detaching" {
					plugged = []string{"a"}
				}
				r.wantDisks(p, c, plugged, listed)
				if then == "attach" {
					r.must(attach())
					r.wantDisks(p, c, []string{"a"}, "a")
				} else {
					r.must(r.DetachDisk(r.ctx(), p, c, "a"))
					r.wantDisks(p, c, nil)
				}
			})
		}
	}
}
