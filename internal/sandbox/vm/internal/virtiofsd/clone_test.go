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

// TestShareOwners: a shared tree shows root's files as QEMU's user's, leaves the others, cannot be written when it shall
// not be, and vanishes with its descriptor; where owners cannot be mapped it is shared as it is.
func TestShareOwners(t *testing.T) {
	memory, err := os.MkdirTemp("/run", "share") // a tmpfs, as of Secrets
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
				t.Fatalf("%s: %v", dir, err)
			}
			at := func(name string) string { return fmt.Sprintf("/proc/self/fd/%d/%s", f.Fd(), name) }
			for name, want := range map[string]uint32{"root's": 200001, "another's": 1234, "qemu's": 0} {
				if info, err := os.Stat(at(name)); err != nil || owner(info) != want {
					t.Errorf("%s: %s file is shared as %v, %v", dir, name, info, err)
				}
			}
			// Our own root is QEMU's user's equal here, who is nobody on this mount, but a read-only one refuses before that.
			err = os.WriteFile(at("root's"), []byte("x"), 0)
			if readOnly != errors.Is(err, unix.EROFS) {
				t.Errorf("%s, read-only %t: write: %v", dir, readOnly, err)
			}
			f.Close()
		}
	}
	odd, mapped, err := Open("/proc/sys", true, 200001, 200001)
	if err != nil || mapped {
		t.Fatalf("a file system that maps no owners: %v", err)
	}
	defer odd.Close()
	if info, err := os.Stat(fmt.Sprintf("/proc/self/fd/%d/kernel", odd.Fd())); err != nil || owner(info) != 0 {
		t.Errorf("%v, %v", info, err)
	}
	if _, _, err := Open("/proc/version", true, 200001, 200001); err == nil {
		t.Error("a file was shared")
	}
}

func owner(info os.FileInfo) uint32 { return info.Sys().(*syscall.Stat_t).Uid }
