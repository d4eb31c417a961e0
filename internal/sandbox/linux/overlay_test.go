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
)

// rootMount is the mount of a container's root file system.
func rootMount(t *testing.T, r *rig, c *testContainer) *mountinfo.Info {
	t.Helper()
	found, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(rootfsDir(r.cfg.bundle(c.pod.ID, c.ID))))
	if err != nil || len(found) != 1 {
		t.Fatalf("%d mounts, %v", len(found), err)
	}
	return found[0]
}

// isVolatile checks for the option, which newer kernels show as "fsync=volatile".
func isVolatile(m *mountinfo.Info) bool {
	return slices.ContainsFunc(strings.Split(m.VFSOptions, ","), func(o string) bool { return o == volatile || o == "fsync="+volatile })
}

// markOfContainer is the kernel's mark in the layer of a container.
func markOfContainer(t *testing.T, r *rig, c *testContainer) string {
	t.Helper()
	mounts, err := r.images.Mounts(t.Context(), snapshotPrefix+c.ID)
	if err != nil {
		t.Fatal(err)
	}
	return markOf(mounts)
}

// TestVolatileLayer: a container's layer is mounted without syncs. Its content is there at the next start in the same boot,
// even if the daemon was killed or somebody unmounted it, with or without a mark.
func TestVolatileLayer(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p := r.pod()
		c := p.container("cat /kept 2>/dev/null; echo up; " + forever).start()
		c.waitLog("up")
		if !isVolatile(rootMount(t, r, c)) {
			t.Errorf("mounted with %s", rootMount(t, r, c).VFSOptions)
		}
		c.exec("echo written >/kept")
		r.restart(p.known(c))
		c.stop(0)
		if !exists(markOfContainer(t, r, c)) {
			t.Error("the kernel has left no mark: this test shows nothing")
		}
		if err := unmount(rootfsDir(r.cfg.bundle(p.ID, c.ID))); err != nil {
			t.Fatal(err)
		}
		r.restart(p.known(c))
		c.start().waitLog("written")
		if !isVolatile(rootMount(t, r, c)) {
			t.Error("mounted again with syncs")
		}
	})
}

// TestVolatileLayerAfterReboot: after the machine went down, a container's layer that was not synced is dropped, and the
// container starts from its image; also if the daemon was killed while dropping it.
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
			if err := unmountAll(r.bundleOf(h)); err != nil {
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
				t.Errorf("it started on what was not synced: %s", log)
			}
			if s, _ := h.Snapshot(); s.Phase == ledger.Created {
				t.Error("not started")
			}
			c.stop(0)
		})
	}
}

// TestLayerWithoutVolatile: on a kernel without the option, containers work as usual, and a newer kernel's mark does not stop
// them.
func TestLayerWithoutVolatile(t *testing.T) {
	r := newRig(t, "crun")
	p := r.pod()
	c := p.container(forever).start()
	c.waitLog("up")
	c.exec("echo written >/kept")
	c.stop(0)
	if err := unmount(rootfsDir(r.cfg.bundle(p.ID, c.ID))); err != nil {
		t.Fatal(err)
	}
	r.volatile = false
	c.start()
	if isVolatile(rootMount(t, r, c)) || c.exec("cat /kept") != "written" {
		t.Errorf("mounted with %s", rootMount(t, r, c).VFSOptions)
	}
}

// TestRemoveFlushesNothing: removing a container does not flush others' dirty data on the same file system. The kernel may
// flush for its own reasons, so one success in several attempts suffices; with syncs there is none.
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
		t.Logf("%d pages were dirty, %d are", before, after)
		if before > 0 && after > before/2 {
			return
		}
	}
	t.Error("a removal writes out what others have written")
}

func dirtyPages(t *testing.T, f *os.File) uint64 {
	t.Helper()
	var stat unix.Cachestat_t
	err := unix.Cachestat(uint(f.Fd()), &unix.CachestatRange{}, &stat, 0)
	if errors.Is(err, unix.ENOSYS) {
		t.Skip("the kernel does not tell which pages are dirty (cachestat(2), Linux 6.5)")
	}
	if err != nil {
		t.Fatal(err)
	}
	return stat.Dirty
}
