package wasm

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// TestMountsAreContained: what a worker is handed is the directory and nothing around it, read-only where that was asked.
func TestMountsAreContained(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "volume")
	if err := errors.Join(os.Mkdir(dir, 0o777), os.WriteFile(filepath.Join(dir, "file"), []byte("x"), 0o644), os.WriteFile(filepath.Join(dir, "..", "secret"), nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	for _, readonly := range []bool{false, true} {
		mounts, err := openMounts(withMounts(&runtimeapi.Mount{ContainerPath: "/data", HostPath: dir, Readonly: readonly}))
		if err != nil {
			t.Fatal(err)
		}
		at := int(mounts[0].Dir.Fd())
		fd, err := unix.Openat(at, "../secret", unix.O_RDONLY, 0)
		if !errors.Is(err, unix.ENOENT) {
			t.Errorf("the directory above is reached: %v", err)
			unix.Close(fd)
		}
		if fd, err = unix.Openat(at, "file", unix.O_RDONLY, 0); err != nil {
			t.Errorf("a file in it: %v", err)
		}
		unix.Close(fd)
		fd, err = unix.Openat(at, "new", unix.O_WRONLY|unix.O_CREAT, 0o644)
		if readonly != errors.Is(err, unix.EROFS) {
			t.Errorf("a write with readonly %v: %v", readonly, err)
		}
		unix.Close(fd)
		closeMounts(mounts)
	}
}

func withMounts(mounts ...*runtimeapi.Mount) *runtimeapi.ContainerConfig {
	return &runtimeapi.ContainerConfig{Mounts: mounts}
}

// TestModulesMountsFollowNoLink: a directory that was held against what modules may have must not be another one now.
func TestModulesMountsFollowNoLink(t *testing.T) {
	dir := t.TempDir()
	if err := os.Symlink("/etc", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	config := withMounts(&runtimeapi.Mount{ContainerPath: "/data", HostPath: filepath.Join(dir, "link")})
	if _, err := checkMounts(config); err != nil {
		t.Errorf("a kubelet's: %v", err)
	}
	config.Annotations = map[string]string{sandbox.AnnotationEdge + "module": "uuid"}
	if _, err := checkMounts(config); !errdefs.IsInvalidArgument(err) || !errors.Is(err, unix.ELOOP) {
		t.Errorf("a module's: %v", err)
	}
	config.Mounts[0].HostPath = dir
	if _, err := checkMounts(config); err != nil {
		t.Errorf("a module's, without a link: %v", err)
	}
}

// TestMountsThatAreNone: files that a kubelet sends are passed over, others are refused, as is what is not there.
func TestMountsThatAreNone(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	usual := []*runtimeapi.Mount{
		{ContainerPath: "/etc/hosts", HostPath: file}, {ContainerPath: "/dev/termination-log", HostPath: file}, {ContainerPath: "/data", HostPath: t.TempDir()},
	}
	if kept, err := checkMounts(withMounts(usual...)); err != nil || len(kept) != 1 || kept[0].ContainerPath != "/data" {
		t.Errorf("%v, %v", kept, err)
	}
	for say, m := range map[string]*runtimeapi.Mount{
		"mount its parent": {ContainerPath: "/etc/app.conf", HostPath: file},
		"no such file":           {ContainerPath: "/data", HostPath: file + "-not"},
	} {
		if _, err := checkMounts(withMounts(m)); !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), say) {
			t.Errorf("%s: %v", say, err)
		}
	}
}
