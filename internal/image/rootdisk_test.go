package image

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/image/disk"
	"github.com/tripod-run/tripod/internal/image/internal/failure"
	"github.com/tripod-run/tripod/internal/image/internal/layer"
	"github.com/tripod-run/tripod/test/loopdev"
)

// mkfsProgram makes root disks; mkfsName is the longest file name in bytes that they have.
const (
	mkfsProgram = "mkfs.erofs"
	mkfsName    = 254
)

// openRoot opens a root disk and returns its path and digest.
func openRoot(t testing.TB, s *Store, key, imageID string) (string, digest.Digest) {
	t.Helper()
	disk, err := s.OpenRootDisk(t.Context(), key, imageID)
	check(t, err)
	defer disk.Close()
	dgst, err := digest.FromReader(disk)
	check(t, err)
	if disk.Name() != s.blobPath(dgst) {
		t.Errorf("the disk with the digest %s has the name %s, want that of its blob", dgst, disk.Name())
	}
	if _, err := disk.Write([]byte("x")); err == nil {
		t.Error("a write to the disk succeeded, want a read-only file")
	}
	return disk.Name(), dgst
}

// mountRoot mounts a root disk for the duration of a test.
func mountRoot(t testing.TB, path string) string {
	t.Helper()
	device, dir := loopdev.Attach(t, path, "--read-only"), t.TempDir()
	if err := unix.Mount(device, dir, "erofs", unix.MS_RDONLY, ""); err == unix.ENODEV {
		t.Skip("the kernel has no EROFS, so the content of a root disk cannot be compared")
	} else if err != nil {
		t.Fatalf("mount the disk: %v", err)
	}
	t.Cleanup(func() { check(t, unix.Unmount(dir, 0)) })
	return dir
}

// fastDir returns a directory on an ext4 in memory, where thousands of files and hundreds of syncs take no time.
func fastDir(t testing.TB) string {
	t.Helper()
	memory, dir := t.TempDir(), t.TempDir()
	check(t, unix.Mount("tmpfs", memory, "tmpfs", 0, "size=512m"))
	t.Cleanup(func() { check(t, unix.Unmount(memory, unix.MNT_DETACH)) })
	disk := filepath.Join(memory, "disk")
	if out, err := exec.CommandContext(t.Context(), "mkfs.ext4", "-q", "-O", "^has_journal", disk, "512m").CombinedOutput(); err != nil {
		t.Fatalf("mkfs.ext4: %v: %s", err, out)
	}
	check(t, unix.Mount(loopdev.Attach(t, disk), dir, "ext4", 0, ""))
	t.Cleanup(func() { check(t, unix.Unmount(dir, 0)) })
	return dir
}

// treeOf describes all files below a directory.
func treeOf(t testing.TB, root string) map[string]string {
	t.Helper()
	tree, links := map[string]string{}, map[uint64][]string{}
	check(t, filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		check(t, err)
		var st unix.Stat_t
		check(t, unix.Lstat(path, &st))
		name := strings.TrimPrefix(path, root)
		d := fmt.Sprintf("mode %o owner %d:%d mtime %d.%09d", st.Mode, st.Uid, st.Gid, st.Mtim.Sec, st.Mtim.Nsec)
		xattrs := map[string]string{}
		check(t, layer.Attributes(path, xattrs))
		for _, key := range slices.Sorted(maps.Keys(xattrs)) {
			d += fmt.Sprintf(" %s=%q", key, xattrs[key])
		}
		if n, err := unix.Lgetxattr(path, "trusted.overlay.opaque", nil); err == nil {
			d += fmt.Sprintf(" opaque, %d bytes", n)
		}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFLNK:
			target, err := os.Readlink(path)
			check(t, err)
			d += fmt.Sprintf(" to %q", target)
		case unix.S_IFREG:
			sum := sha256.Sum256([]byte(read(t, path)))
			d += fmt.Sprintf(" size %d sum %x", st.Size, sum[:8])
		case unix.S_IFCHR, unix.S_IFBLK:
			d += fmt.Sprintf(" device %x", st.Rdev)
		}
		if st.Mode&unix.S_IFMT != unix.S_IFDIR {
			links[st.Ino] = append(links[st.Ino], name)
		}
		tree[name] = d
		return nil
	}))
	for _, names := range links {
		for _, name := range names {
			tree[name] += fmt.Sprintf(" is %.100q", names)
		}
	}
	return tree
}

// nastyLayers are the layers of an image with everything that an image can have. Their files have paths of at most
// maxLen bytes.
func nastyLayers(t testing.TB, maxLen int) [][]byte {
	special := func(name string, kind byte, mode int64, target string) entryOf {
		return entryOf{Header: tar.Header{Name: name, Typeflag: kind, Mode: mode, Linkname: target, ModTime: testTime}}
	}
	with := func(e entryOf, change func(*tar.Header)) entryOf {
		e.Format, e.PAXRecords = tar.FormatPAX, map[string]string{}
		change(&e.Header)
		return e
	}
	long := strings.Repeat(strings.Repeat("d", mkfsName)+"/", maxLen/(mkfsName+1))
	long += strings.Repeat("f", min(maxLen-len(long), mkfsName))
	base := []entryOf{
		special("etc/", tar.TypeDir, 0o755, ""),
		special("tmp/", tar.TypeDir, 0o1777, ""),
		special("empty/", tar.TypeDir, 0o700, ""),
		special("etc/fifo", tar.TypeFifo, 0o620, ""),
		special("etc/link", tar.TypeSymlink, 0o777, "../\xfe/absent"),
		with(file("etc/text", "text"), func(h *tar.Header) {
			h.Uid, h.Gid, h.ModTime = 1234567, 4000000, time.Unix(981173106, 123456789)
		}),
		with(file("etc/attributes", "x"), func(h *tar.Header) {
			h.PAXRecords["SCHILY.xattr.user.x"] = "a\x00b"
			h.PAXRecords["SCHILY.xattr.user.long"] = strings.Repeat("v", 3000)
		}),
		with(file("etc/capability", "x"), func(h *tar.Header) {
			h.PAXRecords["SCHILY.xattr.security.capability"] = "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"
		}),
		with(file("etc/setuid", "x"), func(h *tar.Header) { h.Mode, h.ModTime = 0o6755, time.Unix(1, 0) }),
		file("etc/sparse", strings.Repeat("\x00", 1<<20)+"data"+strings.Repeat("\x00", 3<<20)),
		file("etc/nothing", ""),
		file("etc/new\nline \xff\xfe ' \" \\", "x"),
		file("links/a", "linked"),
		special("links/b", tar.TypeLink, 0, "links/a"),
		special("other/c", tar.TypeLink, 0, "links/a"),
		special("other/d", tar.TypeLink, 0, "links/a"),
		file("opaque/old", "old"),
		file("opaque/sub/old", "old"),
		file("gone/old", "old"),
		file("replaced/old", "old"),
		file(long, "far down"),
	}
	layers := [][]byte{tarOf(t, base...)}
	for i := len(layers); i < 97; i++ {
		layers = append(layers,
			tarOf(t, file(fmt.Sprintf("layers/%d", i), fmt.Sprint(i)), file("layers/.wh."+fmt.Sprint(i-2), ""), file("layers/last", fmt.Sprint(i))))
	}
	return append(layers,
		tarOf(t, file("opaque/.wh..wh..opq", ""), file("opaque/new", "new"), file(".wh.gone", ""), file("other/.wh.d", "")),
		tarOf(t, file(".wh.replaced", ""), file("replaced", "now a file"), file("links/a", "no longer linked")),
		tarOf(t, manyFiles("many/file-%05d", 10_000)...))
}

// TestRootDiskIsTheRootFilesystem: the disk has the same files as the root filesystem that containers get.
func TestRootDiskIsTheRootFilesystem(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{Root: filepath.Join(fastDir(t), "image")})
	// A layer is unpacked by path.
	longest := unix.PathMax - 1 - len(filepath.Join(s.cfg.Root, "snapshots", "snapshots", "1000", "fs")) - len("/")
	for name, layers := range map[string][][]byte{
		"nasty": nastyLayers(t, longest), "one": {tarOf(t, file("etc/text", "1"))}, "two": {tarOf(t, file("a", "1")), tarOf(t, file("b/c", "2"))},
	} {
		t.Run(name, func(t *testing.T) {
			img := pull(t, s, reg.push(t, name+":1", imageOf(t, v1.Config{}, layers...)))
			view, err := s.View(t.Context(), name, img.ID)
			check(t, err)
			dirs, err := layer.ViewDirs(view)
			check(t, err)
			// A pull omits devices.
			check(t, unix.Mknod(filepath.Join(dirs[0], "device"), unix.S_IFCHR|0o640, int(unix.Mkdev(300, 70000))))
			want := treeOf(t, mounted(t, view))
			path, _ := openRoot(t, s, name, img.ID)
			got := treeOf(t, mountRoot(t, path))
			for _, file := range slices.Sorted(maps.Keys(want)) {
				if got[file] != want[file] {
					t.Errorf("%.200q on the disk: got\n%s, want\n%s", file, got[file], want[file])
				}
			}
			for _, file := range slices.Sorted(maps.Keys(got)) {
				if want[file] == "" {
					t.Errorf("%.200q is on the disk (%s) but not in the root filesystem", file, got[file])
				}
			}
			if name == "nasty" && len(want) < 10_030 {
				t.Errorf("the root filesystem has %d files, want all of the image", len(want))
			}
		})
	}
}

// fakeMkfs puts a shell script in the place of mkfs.erofs. $dir is a new directory, which fakeMkfs returns, and $mkfs is
// the real program.
func fakeMkfs(t *testing.T, script string) string {
	t.Helper()
	dir := t.TempDir()
	text := fmt.Sprintf("#!/bin/sh\ndir=%s PATH=%s\nmkfs=$(command -v %s)\necho $$ >>$dir/pids\n%s", dir, os.Getenv("PATH"), mkfsProgram,
		script)
	check(t, os.WriteFile(filepath.Join(dir, mkfsProgram), []byte(text), 0o700))
	t.Setenv("PATH", dir)
	return dir
}

// runs returns the process IDs of all runs of a fakeMkfs.
func runs(t testing.TB, dir string) (pids []int) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, "pids"))
	if !failure.IsGone(err) {
		check(t, err)
	}
	for _, line := range strings.Fields(string(text)) {
		pid, err := strconv.Atoi(line)
		check(t, err)
		pids = append(pids, pid)
	}
	return pids
}

// eventuallyRuns waits until a fakeMkfs has been run n times, and returns the process ID of the last run.
func eventuallyRuns(t testing.TB, dir string, n int) int {
	t.Helper()
	eventually(t, func() error {
		if got := len(runs(t, dir)); got != n {
			return fmt.Errorf("%s has been run %d times, want %d", mkfsProgram, got, n)
		}
		return nil
	})
	return runs(t, dir)[n-1]
}

// eventuallyWaiting waits until n callers wait for the only root disk under way.
func eventuallyWaiting(t testing.TB, s *Store, n int) {
	t.Helper()
	eventually(t, func() error {
		s.rootDisks.mu.Lock()
		defer s.rootDisks.mu.Unlock()
		for _, f := range s.rootDisks.all {
			if f.waiters == n {
				return nil
			}
		}
		return fmt.Errorf("not %d callers wait", n)
	})
}

func eventuallyDead(t testing.TB, pid int) {
	t.Helper()
	eventually(t, func() error {
		if err := syscall.Kill(pid, 0); err != syscall.ESRCH {
			return fmt.Errorf("process %d is alive (%v)", pid, err)
		}
		return nil
	})
}

// TestRootDiskIsMadeOnce: callers share the work, and one that is cancelled does not disturb the others.
func TestRootDiskIsMadeOnce(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	img := pull(t, s, reg.push(t, "app:1", oneFileImage(t, "x")))
	dir := fakeMkfs(t, "while ! [ -e $dir/go ]; do sleep 0.01; done\nexec $mkfs \"$@\"\n")
	var wg sync.WaitGroup
	first, leave := context.WithCancel(t.Context())
	wg.Go(func() {
		_, err := s.OpenRootDisk(first, "first", img.ID)
		if err == nil || !strings.Contains(err.Error(), "stopped waiting") {
			t.Errorf("OpenRootDisk of the cancelled caller: got error %v, want that it stopped waiting", err)
		}
	})
	eventuallyWaiting(t, s, 1)
	disks := make([]digest.Digest, 8)
	for i := range disks {
		wg.Go(func() { _, disks[i] = openRoot(t, s, fmt.Sprint(i), img.RepoTags[0]) })
	}
	eventuallyWaiting(t, s, 9)
	leave()
	eventuallyWaiting(t, s, 8)
	check(t, os.WriteFile(filepath.Join(dir, "go"), nil, 0o600))
	wg.Wait()
	if n := len(runs(t, dir)); n != 1 || slices.ContainsFunc(disks, func(d digest.Digest) bool { return d != disks[0] }) {
		t.Errorf("%s was run %d times for the disks %q, want once for one disk", mkfsProgram, n, disks)
	}
	keys, err := s.Disks(t.Context())
	check(t, err)
	if slices.Sort(keys); !slices.Equal(keys, strings.Fields("0 1 2 3 4 5 6 7")) {
		t.Errorf("Disks() = %q, want 0 to 7", keys)
	}
}

// TestRootDiskIsHeld: a root disk is there until its image has been removed and its keys closed, also after a restart.
func TestRootDiskIsHeld(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	img := pull(t, s, reg.push(t, "app:1", oneFileImage(t, "x")))
	other := pull(t, s, reg.push(t, "other:1", oneFileImage(t, "y")))
	path, disk := openRoot(t, s, "a", img.ID)
	check(t, s.CloseDisk(t.Context(), "a"))
	t.Setenv("PATH", t.TempDir()) // from here on, no disk can be made
	reopen := func() {
		t.Helper()
		check(t, s.Close())
		s = open(t, Config{Root: s.cfg.Root})
		check(t, s.Collect(t.Context()))
	}
	reopen()
	if _, again := openRoot(t, s, "b", img.ID); again != disk {
		t.Errorf("the disk after a restart is %s, want %s", again, disk)
	}
	_, err := s.OpenRootDisk(t.Context(), "b", other.ID)
	wantError(t, err, errdefs.IsAlreadyExists, "root disk", img.ID)
	_, err = s.OpenDisk(t.Context(), "b", img.ID)
	wantError(t, err, errdefs.IsAlreadyExists, "root disk", img.ID)
	check(t, s.Remove(t.Context(), img.ID))
	check(t, s.Remove(t.Context(), other.ID))
	for range 2 {
		reopen()
		if _, again := openRoot(t, s, "b", img.ID); again != disk {
			t.Errorf("the disk of the removed image is %s, want %s", again, disk)
		}
	}
	keys, err := s.Disks(t.Context())
	check(t, err)
	if !slices.Equal(keys, []string{"b"}) {
		t.Errorf("Disks() = %q, want b", keys)
	}
	check(t, s.CloseDisk(t.Context(), "b"))
	wantEmpty(t, s)
	if _, err := os.Lstat(path); !failure.IsGone(err) {
		t.Errorf("Lstat of the collected disk: got error %v, want not exist", err)
	}
}

func TestRootDiskIsRefused(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	img := pull(t, s, reg.push(t, "app:1", imageOf(t, v1.Config{}, tarOf(t, file("disk/a.raw", strings.Repeat("x", 512))))))
	artifact := pull(t, s, diskArtifact(disk.MediaTypeRaw, []byte("disk")).push(t, reg, "disk"))
	name := strings.Repeat("n", mkfsName)
	long := pull(t, s, reg.push(t, "long:1", imageOf(t, v1.Config{}, tarOf(t, file(name, "1")), tarOf(t, file(name+"n", "2")))))

	_, err := s.OpenRootDisk(t.Context(), "a", artifact.ID)
	wantError(t, err, errdefs.IsInvalidArgument, "a disk has no root filesystem", artifact.ID)
	_, err = s.OpenRootDisk(t.Context(), "a", long.ID)
	wantError(t, err, errdefs.IsInvalidArgument, "nnn", "255 bytes")
	_, err = s.OpenRootDisk(t.Context(), "a", "sha256:"+strings.Repeat("0", 64))
	wantError(t, err, errdefs.IsNotFound)
	_, err = s.OpenRootDisk(t.Context(), "", img.ID)
	wantError(t, err, errdefs.IsInvalidArgument, "key")
	f, err := s.OpenDisk(t.Context(), "machine", img.ID)
	check(t, err)
	check(t, f.Close())
	_, err = s.OpenRootDisk(t.Context(), "machine", img.ID)
	wantError(t, err, errdefs.IsAlreadyExists, "boot files")

	fakeMkfs(t, "echo 'wrong device' >&2; exit 1\n")
	_, err = s.OpenRootDisk(t.Context(), "a", img.ID)
	wantError(t, err, func(error) bool { return true }, mkfsProgram, "wrong device", "exit status 1")
	t.Setenv("PATH", t.TempDir())
	_, err = s.OpenRootDisk(t.Context(), "a", img.ID)
	wantError(t, err, errdefs.IsFailedPrecondition, "mkfs.erofs", "erofs-utils")

	if keys, err := s.Disks(t.Context()); err != nil || !slices.Equal(keys, []string{"machine"}) {
		t.Errorf("Disks() = %q, %v; want only machine", keys, err)
	}
	check(t, s.snaps.Remove(s.withNamespace(t.Context()), diskPrefix+"machine"))
	check(t, s.snaps.Remove(s.withNamespace(t.Context()), img.ChainID))
	t.Setenv("PATH", "/usr/bin:/bin")
	_, err = s.OpenRootDisk(t.Context(), "a", img.ID)
	wantError(t, err, errdefs.IsNotFound, "pull it again")
}

// TestRootDiskIsCancelled: without callers the work ends, and leaves nothing.
func TestRootDiskIsCancelled(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	img := pull(t, s, reg.push(t, "app:1", oneFileImage(t, "x")))
	dir := fakeMkfs(t, "echo begun >/proc/self/fd/3; exec sleep 1000\n")
	ctx, cancel := context.WithCancel(t.Context())
	result := make(chan error, 1)
	go func() { _, err := s.OpenRootDisk(ctx, "a", img.ID); result <- err }()
	pid := eventuallyRuns(t, dir, 1)
	cancel()
	wantError(t, <-result, errdefs.IsCanceled, "stopped waiting")
	eventuallyDead(t, pid)

	// So does the store's end.
	go func() { _, err := s.OpenRootDisk(t.Context(), "a", img.ID); result <- err }()
	pid = eventuallyRuns(t, dir, 2)
	check(t, s.Close())
	if err := <-result; err == nil {
		t.Error("OpenRootDisk in a store that is closed succeeded, want an error")
	}
	eventuallyDead(t, pid)
	s = open(t, Config{Root: s.cfg.Root})
	check(t, s.CloseDisk(t.Context(), "a"))
	check(t, s.Remove(t.Context(), img.ID))
	wantEmpty(t, s)
}
