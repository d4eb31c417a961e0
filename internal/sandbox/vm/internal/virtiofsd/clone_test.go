package virtiofsd

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// TestLiveShare: what is mounted below a live share later appears in its clone, and disappears when it is unmounted. In
// another clone it does not appear.
func TestLiveShare(t *testing.T) {
	dir := t.TempDir()
	below := filepath.Join(dir, "volume")
	if err := errors.Join(os.Mkdir(below, 0o755), unix.Mount(dir, dir, "", unix.MS_BIND, "")); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	for _, propagation := range []uintptr{unix.MS_PRIVATE, unix.MS_SHARED} {
		if err := unix.Mount("", dir, "", propagation, ""); err != nil {
			t.Fatal(err)
		}
	}
	live, err := OpenLive(dir, false)
	if err != nil {
		t.Fatal(err)
	}
	defer live.Close()
	other, _, err := Open(dir, false, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	// A mount reaches those clones that are mounted, as virtiofsd's is.
	at := t.TempDir()
	if err := unix.MoveMount(int(live.Fd()), "", unix.AT_FDCWD, at, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(at, unix.MNT_DETACH)
	if err := unix.Mount("volume", below, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(below, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(at, "volume", "file")); err != nil {
		t.Errorf("file in the live clone: %v", err)
	}
	if _, err := os.Stat(fmt.Sprintf("/proc/self/fd/%d/volume/file", other.Fd())); !os.IsNotExist(err) {
		t.Errorf("file in the other clone: got error %v, want that it does not exist", err)
	}
	if err := unix.Unmount(below, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(at, "volume", "file")); !os.IsNotExist(err) {
		t.Errorf("file in the live clone after the unmount: got error %v, want that it does not exist", err)
	}
}

// TestShareOwners: a clone swaps root's files with those of QEMU's user and leaves other owners. It refuses writes if
// it is read-only. On a file system without owner mapping the owners are unchanged.
func TestShareOwners(t *testing.T) {
	memory, err := os.MkdirTemp("/run", "share") // a tmpfs, as for Secrets
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(memory)
	for _, dir := range []string{t.TempDir(), memory} {
		for name, uid := range map[string]int{"root's": 0, "another's": 1234, "qemu's": 200001} {
			file := filepath.Join(dir, name)
			if err := errors.Join(os.WriteFile(file, nil, 0o600), os.Chown(file, uid, uid)); err != nil {
				t.Fatal(err)
			}
		}
		for _, readOnly := range []bool{true, false} {
			f, mapped, err := Open(dir, readOnly, 200001, 200001)
			if err != nil || !mapped {
				t.Fatalf("Open(%s): mapped = %t, error %v; want mapped", dir, mapped, err)
			}
			at := func(name string) string { return fmt.Sprintf("/proc/self/fd/%d/%s", f.Fd(), name) }
			for name, want := range map[string]uint32{"root's": 200001, "another's": 1234, "qemu's": 0} {
				if info, err := os.Stat(at(name)); err != nil || owner(info) != want {
					t.Errorf("%s: %s file in the clone = %v, %v; want owner %d", dir, name, info, err, want)
				}
			}
			// Our root maps to QEMU's user, who does not exist on this mount. A read-only mount fails earlier.
			err = os.WriteFile(at("root's"), []byte("x"), 0)
			if readOnly != errors.Is(err, unix.EROFS) {
				t.Errorf("%s, read-only %t: write returned %v", dir, readOnly, err)
			}
			f.Close()
		}
	}
	unmapped, mapped, err := Open("/proc/sys", true, 200001, 200001)
	if err != nil || mapped {
		t.Fatalf("Open on a file system without owner mapping: mapped = %t, error %v", mapped, err)
	}
	defer unmapped.Close()
	if info, err := os.Stat(fmt.Sprintf("/proc/self/fd/%d/kernel", unmapped.Fd())); err != nil || owner(info) != 0 {
		t.Errorf("file in the unmapped clone = %v, %v; want owner root", info, err)
	}
	if _, _, err := Open("/proc/version", true, 200001, 200001); err == nil {
		t.Error("Open of a plain file succeeded")
	}
}

func owner(info os.FileInfo) uint32 { return info.Sys().(*syscall.Stat_t).Uid }
