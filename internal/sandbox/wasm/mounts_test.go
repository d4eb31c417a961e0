package wasm

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/keys"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/annotations"
)

// TestMountsAreContained checks that a mount gives access to its directory only, and read-only if requested.
func TestMountsAreContained(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "volume")
	if err := errors.Join(os.Mkdir(dir, 0o777), os.WriteFile(filepath.Join(dir, "file"), []byte("x"), 0o644),
		os.WriteFile(filepath.Join(dir, "..", "secret"), nil, 0o644)); err != nil {
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
			t.Errorf("open of ../secret = %v, want ENOENT", err)
			unix.Close(fd)
		}
		if fd, err = unix.Openat(at, "file", unix.O_RDONLY, 0); err != nil {
			t.Errorf("open of a file in the mount = %v", err)
		}
		unix.Close(fd)
		fd, err = unix.Openat(at, "new", unix.O_WRONLY|unix.O_CREAT, 0o644)
		if readonly != errors.Is(err, unix.EROFS) {
			t.Errorf("create of a file with readonly %v = %v", readonly, err)
		}
		unix.Close(fd)
		closeMounts(mounts)
	}
}

func withMounts(mounts ...*runtimeapi.Mount) *runtimeapi.ContainerConfig {
	return &runtimeapi.ContainerConfig{Mounts: mounts}
}

// TestModulesMountsFollowNoLink checks that a module's mount with a link is refused, because a link could lead out of
// the directories that modules can mount.
func TestModulesMountsFollowNoLink(t *testing.T) {
	dir := t.TempDir()
	if err := os.Symlink("/etc", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	config := withMounts(&runtimeapi.Mount{ContainerPath: "/data", HostPath: filepath.Join(dir, "link")})
	if _, err := checkMounts(config); err != nil {
		t.Errorf("checkMounts of a pod = %v", err)
	}
	config.Annotations = map[string]string{keys.EdgeModule: "uuid"}
	if _, err := checkMounts(config); !errdefs.IsInvalidArgument(err) || !errors.Is(err, unix.ELOOP) {
		t.Errorf("checkMounts of a module = %v, want ELOOP", err)
	}
	config.Mounts[0].HostPath = dir
	if _, err := checkMounts(config); err != nil {
		t.Errorf("checkMounts of a module without a link = %v", err)
	}
}

// TestMountsThatAreNone checks that the files that a kubelet mounts are ignored, and that other files and missing
// directories are refused.
func TestMountsThatAreNone(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	usual := []*runtimeapi.Mount{
		{ContainerPath: "/etc/hosts", HostPath: file}, {ContainerPath: "/dev/termination-log", HostPath: file},
		{ContainerPath: "/data", HostPath: t.TempDir()},
	}
	if kept, err := checkMounts(withMounts(usual...)); err != nil || len(kept) != 1 || kept[0].ContainerPath != "/data" {
		t.Errorf("checkMounts = %v, %v; want only /data", kept, err)
	}
	for say, m := range map[string]*runtimeapi.Mount{
		"mount its parent": {ContainerPath: "/etc/app.conf", HostPath: file},
		"no such file":     {ContainerPath: "/data", HostPath: file + "-not"},
	} {
		if _, err := checkMounts(withMounts(m)); !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), say) {
			t.Errorf("checkMounts = %v, want %q", err, say)
		}
	}
}

// TestBlobVolume checks which mount keeps objects: the one that the annotation names, which must be one of the guest's.
func TestBlobVolume(t *testing.T) {
	config := withMounts(&runtimeapi.Mount{ContainerPath: "/a", HostPath: t.TempDir()},
		&runtimeapi.Mount{ContainerPath: "/b/", HostPath: t.TempDir()})
	for annotation, want := range map[string]string{"": "", "/b": "/b", "/a/": "/a", "/c": "!", "/a/below": "!"} {
		o, err := annotations.Parse(&runtimeapi.PodSandboxConfig{Annotations: map[string]string{"p/blobstore": annotation}}, "c", "p/")
		if err != nil {
			t.Fatal(err)
		}
		err = validateBlobs(o, config, "p/")
		if want == "!" {
			if !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), "annotation p/blobstore: the container has no mount at") {
				t.Errorf("annotation %q: %v", annotation, err)
			}
			continue
		}
		mounts, openErr := openMounts(config)
		if err := errors.Join(err, openErr); err != nil {
			t.Fatal(err)
		}
		chooseMounts(o, config, mounts)
		got := ""
		for _, m := range mounts {
			if m.Blobs {
				got += m.Guest
			}
		}
		closeMounts(mounts)
		if got != want {
			t.Errorf("annotation %q: objects are in %q, want %q", annotation, got, want)
		}
	}
}

// TestConfigVolumes checks which mounts are configuration: those that a kubelet keeps up to date, except the token of
// the service account, or those that the annotation names.
func TestConfigVolumes(t *testing.T) {
	kept, plain := t.TempDir(), t.TempDir()
	if err := errors.Join(os.Mkdir(filepath.Join(kept, "..1"), 0o755), os.Symlink("..1", filepath.Join(kept, "..data"))); err != nil {
		t.Fatal(err)
	}
	config := withMounts(&runtimeapi.Mount{ContainerPath: "/etc/app/", HostPath: kept},
		&runtimeapi.Mount{ContainerPath: "/data", HostPath: plain},
		&runtimeapi.Mount{ContainerPath: serviceAccount, HostPath: kept})
	for annotation, want := range map[string]string{
		"": "[/etc/app]", "none": "[]", "/data": "[/data]", "/data/, /etc/app": "[/etc/app /data]", serviceAccount: "[" + serviceAccount + "]",
	} {
		pod := &runtimeapi.PodSandboxConfig{Annotations: map[string]string{"p/config": annotation}}
		o, err := annotations.Parse(pod, "c", "p/")
		if err != nil {
			t.Fatal(err)
		}
		mounts, err := openMounts(config)
		if err != nil {
			t.Fatal(err)
		}
		chooseMounts(o, config, mounts)
		chosen := []string{}
		for _, m := range mounts {
			if m.Config {
				chosen = append(chosen, m.Guest)
			}
		}
		closeMounts(mounts)
		if got := fmt.Sprint(chosen); got != want {
			t.Errorf("annotation %q: configuration is in %s, want %s", annotation, got, want)
		}
		if err := validateMounted(o.Config, annotations.KeyConfig, config.GetMounts(), "p/"); err != nil {
			t.Errorf("annotation %q: %v", annotation, err)
		}
	}
	if err := validateMounted([]string{"/missing"}, annotations.KeyConfig, config.GetMounts(), "p/"); !errdefs.IsInvalidArgument(err) ||
		!strings.Contains(err.Error(), "annotation p/config: the container has no mount at") {
		t.Errorf("a mount that is missing: %v", err)
	}
	relative := &runtimeapi.PodSandboxConfig{Annotations: map[string]string{"p/config": "data"}}
	if _, err := annotations.Parse(relative, "c", "p/"); !errdefs.IsInvalidArgument(err) {
		t.Errorf("a relative path: %v", err)
	}
}
