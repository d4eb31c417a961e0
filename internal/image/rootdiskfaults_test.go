package image

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/image/internal/failure"
)

// TestV4KilledWhileMakingARootDisk: a daemon that dies while it makes a disk leaves no process, no mount and no usable
// incomplete disk.
func TestV4KilledWhileMakingARootDisk(t *testing.T) {
	failpoint.Needed(t)
	reg, root := newRegistry(t), filepath.Join(t.TempDir(), "image")
	s := open(t, Config{Root: root})
	img := pull(t, s, reg.push(t, "app:1", imageOf(t, v1.Config{}, tarOf(t, file("a", "1")), tarOf(t, file("b", "2")))))
	check(t, s.Close())
	if err := helper(t, root, "root-disk "+img.ID, "image.rootdisk.write=kill").Run(); err == nil {
		t.Fatal("the process was not killed")
	}
	t.Run("mkfs", func(t *testing.T) {
		dir := fakeMkfs(t, "exec sleep 1000\n")
		daemon := helper(t, root, "root-disk "+img.ID, "")
		check(t, daemon.Start())
		pid := eventuallyRuns(t, dir, 1)
		check(t, daemon.Process.Kill())
		_ = daemon.Wait()
		eventuallyDead(t, pid)
	})
	if strings.Contains(read(t, "/proc/self/mountinfo"), root) {
		t.Error("the image is still mounted")
	}
	s = open(t, Config{Root: root})
	manifest, err := s.content.Info(s.withNamespace(t.Context()), img.Manifest)
	check(t, err)
	if disk := manifest.Labels[labelRootDisk]; disk != "" {
		t.Errorf("the incomplete disk %s counts", disk)
	}
	path, _ := openRoot(t, s, "a", img.ID)
	if dir := mountRoot(t, path); read(t, dir+"/a")+read(t, dir+"/b") != "12" {
		t.Error("the disk lacks the image's files")
	}
}

// TestV4DamagedRootDisk: OpenRootDisk makes a damaged disk again, with the same content. Verify finds the damage.
func TestV4DamagedRootDisk(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	img := pull(t, s, reg.push(t, "app:1", imageOf(t, v1.Config{}, tarOf(t, file("a", "1")), tarOf(t, file("b", "2")))))
	path, disk := openRoot(t, s, "a", img.ID)
	check(t, os.Chmod(path, 0o600))
	check(t, os.WriteFile(path, bytes.Repeat([]byte("x"), 4096), 0o600))
	report, err := s.Verify(t.Context(), true)
	check(t, err)
	if text := fmt.Sprintf("%+v", report); !strings.Contains(text, disk.String()) {
		t.Errorf("Verify: got %s, want the damaged disk %s", text, disk)
	}
	if _, again := openRoot(t, s, "a", img.ID); again != disk {
		t.Errorf("the disk made again is %s, want %s", again, disk)
	}
	if _, err := s.Get(t.Context(), img.ID); err != nil {
		t.Errorf("Get of the image: %v", err)
	}
}

func TestFaultN5DiskFullOfRootDisks(t *testing.T) {
	reg := newRegistry(t)
	layer := tarOf(t, file("big", strings.Repeat("0123456789abcdef", 3<<20/16)))
	for step, size := range map[string]string{"mkfs": "size=11m", "copy": "size=14m"} {
		t.Run(step, func(t *testing.T) {
			dir := t.TempDir()
			check(t, unix.Mount("tmpfs", dir, "tmpfs", 0, size))
			t.Cleanup(func() { check(t, unix.Unmount(dir, unix.MNT_DETACH)) })
			s := open(t, Config{Root: filepath.Join(dir, "image")})
			img := pull(t, s, reg.push(t, "app:1", imageOf(t, v1.Config{}, layer)))
			counted := fakeMkfs(t, "$mkfs \"$@\" || exit\n: >$dir/made\n")
			_, err := s.OpenRootDisk(t.Context(), "a", img.ID)
			wantError(t, err, errdefs.IsResourceExhausted)
			if _, err := os.Lstat(filepath.Join(counted, "made")); failure.IsGone(err) != (step == "mkfs") {
				t.Errorf("Lstat of the mark of a complete run: got error %v", err)
			}
			if keys, err := s.Disks(t.Context()); err != nil || len(keys) > 0 {
				t.Errorf("Disks() = %q, %v; want none", keys, err)
			}
			var free unix.Statfs_t
			check(t, unix.Statfs(dir, &free))
			if left := free.Bavail * uint64(free.Bsize); left < 1<<20 {
				t.Errorf("%d bytes are free after the failure, want all that the disk took", left)
			}
		})
	}
}
