package linux

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/mnt"
)

// rootMount returns the mount of a container's root file system.
func rootMount(t *testing.T, r *rig, c *testContainer) *mountinfo.Info {
	t.Helper()
	found, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(rootfsDir(r.cfg.bundle(c.pod.ID, c.ID))))
	if err != nil || len(found) != 1 {
		t.Fatalf("mounts of the root file system: got %d, error %v; want 1", len(found), err)
	}
	return found[0]
}

// isVolatile reports whether a mount has the option "volatile", which newer kernels show as "fsync=volatile".
func isVolatile(m *mountinfo.Info) bool {
	return slices.ContainsFunc(strings.Split(m.VFSOptions, ","), func(o string) bool { return o == "volatile" || o == "fsync=volatile" })
}

// markOfContainer returns the path of the kernel's mark in a container's layer.
func markOfContainer(t *testing.T, r *rig, c *testContainer) string {
	t.Helper()
	mounts, err := r.images.Mounts(t.Context(), snapshotPrefix+c.ID)
	if err != nil {
		t.Fatal(err)
	}
	return mnt.VolatileMark(mounts)
}

// TestVolatileLayer: a container's layer is mounted with "volatile". Its content survives until the next start in the
// same boot, even if the daemon was killed or the layer was unmounted, with the kernel's mark or without.
func TestVolatileLayer(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p := r.pod()
		c := p.container("cat /kept 2>/dev/null; echo up; " + forever).start()
		c.waitLog("up")
		if !isVolatile(rootMount(t, r, c)) {
			t.Errorf("mount options: got %s, want volatile", rootMount(t, r, c).VFSOptions)
		}
		c.exec("echo written >/kept")
		r.restart(p.known(c))
		c.stop(0)
		if !ledger.Exists(markOfContainer(t, r, c)) {
			t.Error("the kernel left no mark, so the test proves nothing")
		}
		if err := mnt.Unmount(rootfsDir(r.cfg.bundle(p.ID, c.ID))); err != nil {
			t.Fatal(err)
		}
		r.restart(p.known(c))
		c.start().waitLog("written")
		if !isVolatile(rootMount(t, r, c)) {
			t.Error("the second mount lacks the option volatile")
		}
	})
}

// TestVolatileLayerAfterReboot: after a crash of the machine, a container's unsynced layer is dropped and the container
// starts from its image, even if the daemon was killed while it dropped the layer.
func TestVolatileLayerAfterReboot(t *testing.T) {
	for name, interrupted := range map[string]func(t *testing.T, r *rig, c *testContainer){
		"mark": func(*testing.T, *rig, *testContainer) {},
		"layer dropped already": func(t *testing.T, r *rig, c *testContainer) {
			if err := r.images.Release(t.Context(), snapshotPrefix+c.ID); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, "crun")
			p := r.pod()
			c := p.container("ls /; echo up; " + forever).start()
			c.waitLog("up")
			c.exec("echo torn >/half-written")
			c.stop(0)
			h, _ := r.ledger.Find(p.ID, c.ID)
			if err := r.unmountAll(h.PodID, h.ID); err != nil {
				t.Fatal(err)
			}
			if err := h.Set(func(s *state) { s.BootID = "another" }); err != nil {
				t.Fatal(err)
			}
			interrupted(t, r, c)
			if err := os.Truncate(c.logFile(), 0); err != nil {
				t.Fatal(err)
			}
			r.restart(p.known(c))
			c.start().waitLog("up")
			if log := c.log(); strings.Contains(log, "half-written") {
				t.Errorf("the container started on its unsynced layer: %s", log)
			}
			if s, _ := h.Snapshot(); s.Phase == ledger.Created {
				t.Errorf("phase after the start: got %v, want another", s.Phase)
			}
			c.stop(0)
		})
	}
}

// TestLayerWithoutVolatile: on a kernel without the option, containers work, even if a newer kernel has left its mark.
func TestLayerWithoutVolatile(t *testing.T) {
	r := newRig(t, "crun")
	p := r.pod()
	c := p.container(forever).start()
	c.waitLog("up")
	c.exec("echo written >/kept")
	c.stop(0)
	if err := mnt.Unmount(rootfsDir(r.cfg.bundle(p.ID, c.ID))); err != nil {
		t.Fatal(err)
	}
	r.volatile = false
	c.start()
	if isVolatile(rootMount(t, r, c)) || c.exec("cat /kept") != "written" {
		t.Errorf("mount options: got %s, want no volatile and the earlier content", rootMount(t, r, c).VFSOptions)
	}
}

// TestRemoveFlushesNothing: removing a container does not write out other programs' dirty data on the same file system.
// The kernel can write for its own reasons, so one success in several attempts is enough; without "volatile" no attempt
// succeeds.
func TestRemoveFlushesNothing(t *testing.T) {
	r := newRig(t, "crun")
	p := r.pod()
	const size = 8 << 20
	for range 10 {
		c := p.container(forever)
		other, err := os.OpenFile(filepath.Join(r.images.dir, "..", "neighbour"), os.O_CREATE|os.O_RDWR|os.O_TRUNC, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := other.Write(make([]byte, size)); err != nil {
			t.Fatal(err)
		}
		before := dirtyPages(t, other)
		if err := r.RemoveContainer(t.Context(), p.Pod, c.Container); err != nil {
			t.Fatal(err)
		}
		after := dirtyPages(t, other)
		other.Close()
		t.Logf("dirty pages: %d before the removal, %d after", before, after)
		if before > 0 && after > before/2 {
			return
		}
	}
	t.Error("every removal wrote out another program's dirty data")
}

func dirtyPages(t *testing.T, f *os.File) uint64 {
	t.Helper()
	var stat unix.Cachestat_t
	err := unix.Cachestat(uint(f.Fd()), &unix.CachestatRange{}, &stat, 0)
	if errors.Is(err, unix.ENOSYS) {
		t.Skip("the kernel does not report dirty pages (cachestat(2), Linux 6.5)")
	}
	if err != nil {
		t.Fatal(err)
	}
	return stat.Dirty
}
