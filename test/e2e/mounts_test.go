package e2e

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierrors "k8s.io/cri-api/pkg/errors"

	"github.com/tripod-run/tripod/test/harness"
)

// mountTmpfs mounts a tmpfs with one file, named "file", and unmounts it at the end of the test.
func mountTmpfs(t *testing.T, dir, content string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	if err := os.WriteFile(filepath.Join(dir, "file"), []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

// propagating returns a directory on its own mount with this propagation.
func propagating(t *testing.T, flag uintptr) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "volume")
	mountTmpfs(t, dir, "outer")
	if err := unix.Mount("", dir, "", flag, ""); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestMountPropagation(t *testing.T) {
	d := harness.StartDaemon(t)
	d.Pull(t, harness.Busybox)
	for _, c := range []struct {
		name           string
		mode           runtimeapi.MountPropagation
		toContainer    bool
		fromContainer  bool
		seenAtCreation bool
	}{
		{"mount with 'rprivate' should not support propagation", runtimeapi.MountPropagation_PROPAGATION_PRIVATE, false, false, true},
		{"mount with 'rshared' should support propagation from host to container and vice versa",
			runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL, true, true, true},
		{"mount with 'rslave' should support propagation from host to container", runtimeapi.MountPropagation_PROPAGATION_HOST_TO_CONTAINER, true,
			false, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := propagating(t, unix.MS_SHARED|unix.MS_REC)
			mountTmpfs(t, filepath.Join(dir, "before"), "before")
			p := d.RunPod(t, harness.PodConfig(t, "p", func(c *runtimeapi.PodSandboxConfig) { c.Linux.SecurityContext.Privileged = true }))
			defer p.Remove()
			ctr := p.Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep(),
				harness.Security(func(s *security) { s.Privileged = true }),
				mounts(&runtimeapi.Mount{HostPath: dir, ContainerPath: "/volume", Propagation: c.mode})))
			if got := ctr.Must("cat", "/volume/before/file"); got != "before" {
				t.Errorf("file on an earlier mount: got %q, want before", got)
			}
			mountTmpfs(t, filepath.Join(dir, "host"), "host")
			if _, _, code := ctr.ExecSync("test", "-e", "/volume/host/file"); (code == 0) != c.toContainer {
				t.Errorf("host's mount visible in the container: got %v, want %v", code == 0, c.toContainer)
			}
			ctr.Must("sh", "-c", "mkdir /volume/mine && mount -t tmpfs none /volume/mine && touch /volume/mine/file")
			_, err := os.Stat(filepath.Join(dir, "mine", "file"))
			if (err == nil) != c.fromContainer {
				t.Errorf("container's mount visible on the host: got %v, want %v", err == nil, c.fromContainer)
			}
			if err == nil {
				ctr.Must("umount", "/volume/mine")
			}
		})
	}
	t.Run("a private mount of the host cannot propagate", func(t *testing.T) {
		dir := propagating(t, unix.MS_PRIVATE|unix.MS_REC)
		p := startPod(t, d)
		for _, mode := range []runtimeapi.MountPropagation{runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL,
			runtimeapi.MountPropagation_PROPAGATION_HOST_TO_CONTAINER} {
			config := harness.ContainerConfig("c", harness.Busybox,
				mounts(&runtimeapi.Mount{HostPath: dir, ContainerPath: "/volume", Propagation: mode}))
			if msg := refused(t, d, p, config); !strings.Contains(msg, "propagation") {
				t.Errorf("refusal: got %q, want the name of the field", msg)
			}
		}
	})
}

func TestReadOnlyMounts(t *testing.T) {
	d := harness.StartDaemon(t)
	d.Pull(t, harness.Busybox)
	// nested runs a container with a read-only volume that contains another mount.
	nested := func(t *testing.T, recursive bool) *harness.Container {
		dir := t.TempDir()
		mountTmpfs(t, filepath.Join(dir, "within"), "x")
		return sleeper(t, d, mounts(&runtimeapi.Mount{HostPath: dir, ContainerPath: "/volume", Readonly: true, RecursiveReadOnly: recursive}))
	}
	writes := func(c *harness.Container, path string) bool {
		_, _, code := c.ExecSync("touch", path)
		return code == 0
	}
	t.Run("should support non-recursive readonly mounts", func(t *testing.T) {
		c := nested(t, false)
		if writes(c, "/volume/new") || !writes(c, "/volume/within/new") {
			t.Error("writable: want the mount inside the volume, and not the volume")
		}
		if m := c.Status().Mounts; len(m) != 1 || !m[0].Readonly || m[0].RecursiveReadOnly {
			t.Errorf("mounts in the status: got %v, want read-only", m)
		}
	})
	t.Run("should support recursive readonly mounts", func(t *testing.T) {
		status, err := d.Runtime().Status(context.Background(), false)
		if err != nil {
			t.Fatal(err)
		}
		offered := slices.ContainsFunc(status.RuntimeHandlers, func(h *runtimeapi.RuntimeHandler) bool {
			return h.Name == "" && h.Features.RecursiveReadOnlyMounts
		})
		if !offered { // the refusal must have the name that the kubelet knows
			p := startPod(t, d)
			_, err := create(d, p,
				harness.ContainerConfig("c", harness.Busybox,
					mounts(&runtimeapi.Mount{HostPath: t.TempDir(), ContainerPath: "/v", Readonly: true, RecursiveReadOnly: true})))
			if err == nil || !strings.Contains(err.Error(), crierrors.ErrRROUnsupported.Error()) {
				t.Errorf("CreateContainer: got error %v, want %v", err, crierrors.ErrRROUnsupported)
			}
			return
		}
		c := nested(t, true)
		if writes(c, "/volume/new") || writes(c, "/volume/within/new") {
			t.Error("the volume or the mount inside it is writable, want both read-only")
		}
		if m := c.Status().Mounts; len(m) != 1 || !m[0].Readonly || !m[0].RecursiveReadOnly {
			t.Errorf("mounts in the status: got %v, want recursively read-only", m)
		}
	})
	for name, m := range map[string]*runtimeapi.Mount{
		"should reject a recursive readonly mount with PROPAGATION_HOST_TO_CONTAINER": {Readonly: true,
			Propagation: runtimeapi.MountPropagation_PROPAGATION_HOST_TO_CONTAINER},
		"should reject a recursive readonly mount with PROPAGATION_BIDIRECTIONAL": {Readonly: true,
			Propagation: runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL},
		"should reject a recursive readonly mount with ReadOnly  false": {},
	} {
		t.Run(name, func(t *testing.T) {
			m.HostPath, m.ContainerPath, m.RecursiveReadOnly = t.TempDir(), "/volume", true
			_, err := create(d, startPod(t, d), harness.ContainerConfig("c", harness.Busybox, mounts(m)))
			wantCode(t, err, codes.InvalidArgument)
		})
	}
	t.Run("mount options", func(t *testing.T) {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "program"), []byte("#!/bin/sh\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		c := sleeper(t, d, mounts(&runtimeapi.Mount{HostPath: dir, ContainerPath: "/volume",
			MountOptions: []string{"noexec", "nodev", "nosuid"}}))
		if _, stderr, code := c.ExecSync("sh", "-c", "/volume/program"); code != 126 {
			t.Errorf("program on a noexec mount: got code %d, stderr %s; want 126", code, stderr)
		}
		options := c.Must("grep", " /volume ", "/proc/self/mountinfo")
		for _, o := range []string{"noexec", "nodev", "nosuid"} {
			if !strings.Contains(options, o) {
				t.Errorf("mount options: got %s, want %s among them", options, o)
			}
		}
		_, err := create(d, c.Pod,
			harness.ContainerConfig("other", harness.Busybox,
				mounts(&runtimeapi.Mount{HostPath: dir, ContainerPath: "/volume", MountOptions: []string{"suid"}})))
		wantCode(t, err, codes.InvalidArgument)
	})
}

// pushFiles pushes an artifact with a file of each title, as ORAS does, and returns its name.
func pushFiles(t *testing.T, repository string, files map[string]string) string {
	t.Helper()
	image := harness.Registry(t).Addr + "/" + repository + ":1"
	ref, err := name.ParseReference(image)
	if err != nil {
		t.Fatal(err)
	}
	artifact := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), "application/vnd.example.model.config.v1+json")
	for title, text := range files {
		artifact, err = mutate.Append(artifact, mutate.Addendum{
			Layer:       static.NewLayer([]byte(text), "application/vnd.example.model"),
			Annotations: map[string]string{"org.opencontainers.image.title": title},
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := remote.Write(ref, artifact); err != nil {
		t.Fatal(err)
	}
	return image
}

func TestImageVolume(t *testing.T) {
	d := harness.StartDaemon(t)
	id := d.Pull(t, harness.Layers)
	d.Pull(t, harness.Busybox)
	volume := func(sub string) *runtimeapi.Mount {
		return &runtimeapi.Mount{ContainerPath: "/volume", Image: &runtimeapi.ImageSpec{Image: harness.Layers}, ImageSubPath: sub, Readonly: true}
	}
	t.Run("should return image digest in ContainerStatus mounts", func(t *testing.T) {
		m := sleeper(t, d, mounts(volume(""))).Status().Mounts
		if len(m) != 1 || m[0].ContainerPath != "/volume" || m[0].Image == nil {
			t.Fatalf("mounts in the status: got %v, want the image at /volume", m)
		}
		if got := m[0].Image.ImageRef; got != id {
			t.Errorf("image_ref: got %q, want %q", got, id)
		}
	})
	t.Run("should correctly mount image and enforce read-only", func(t *testing.T) {
		c := sleeper(t, d, mounts(volume("")))
		if got := c.Must("cat", "/volume/layers/kept", "/volume/layers/replaced"); got != "low\nhigh\n" {
			t.Errorf("files in the volume: got %q, want low and high", got)
		}
		for _, script := range []string{"echo x >/volume/new", "echo x >/volume/layers/kept", "rm /volume/layers/kept"} {
			if _, stderr, code := c.ExecSync("sh", "-c", script); code == 0 || !strings.Contains(stderr, "Read-only") {
				t.Errorf("%s: got code %d, stderr %s; want \"Read-only\"", script, code, stderr)
			}
		}
	})
	t.Run("should reject Image Volume with Readonly set to false", func(t *testing.T) {
		m := volume("")
		m.Readonly = false
		_, err := create(d, startPod(t, d), harness.ContainerConfig("c", harness.Busybox, mounts(m)))
		wantCode(t, err, codes.InvalidArgument)
	})
	t.Run("subPath should succeed when using a valid subPath", func(t *testing.T) {
		if got := sleeper(t, d, mounts(volume("layers/opaque"))).Must("ls", "/volume"); got != "new\n" {
			t.Errorf("files in the volume: got %q, want new", got)
		}
	})
	t.Run("subPath should fail when subPath does not exist in the image", func(t *testing.T) {
		if msg := refused(t, d, startPod(t, d),
			harness.ContainerConfig("c", harness.Busybox, mounts(volume("no/such/path")))); !strings.Contains(msg,
			crierrors.ErrImageVolumeMountFailed.Error()) {
			t.Errorf("refusal: got %q, want %v", msg, crierrors.ErrImageVolumeMountFailed)
		}
	})
	t.Run("an artifact is a volume of its files", func(t *testing.T) {
		model := pushFiles(t, "models/one", map[string]string{"weights.bin": "weights", "config/params.json": "params"})
		id := d.Pull(t, model)
		artifact := func(path, sub string) *runtimeapi.Mount {
			return &runtimeapi.Mount{ContainerPath: path, Image: &runtimeapi.ImageSpec{Image: model}, ImageSubPath: sub, Readonly: true}
		}
		c := sleeper(t, d, mounts(artifact("/model", ""), artifact("/config", "config"), artifact("/weights", "weights.bin")))
		if got := c.Must("cat", "/model/weights.bin", "/model/config/params.json", "/config/params.json",
			"/weights"); got != "weightsparamsparamsweights" {
			t.Errorf("files of the artifact: got %q", got)
		}
		for _, script := range []string{"echo x >/model/weights.bin", "echo x >/weights", "rm /config/params.json"} {
			if _, stderr, code := c.ExecSync("sh", "-c", script); code == 0 || !strings.Contains(stderr, "Read-only") {
				t.Errorf("%s: got code %d, stderr %s; want \"Read-only\"", script, code, stderr)
			}
		}
		if got := c.Status().Mounts[0].Image.GetImageRef(); got != id {
			t.Errorf("image_ref: got %q, want %q", got, id)
		}
		_, err := create(d, startPod(t, d), harness.ContainerConfig("c", model))
		wantCode(t, err, codes.InvalidArgument)
	})
	t.Run("a sub path that leads out of the image is refused", func(t *testing.T) {
		d.Pull(t, harness.Symlinks)
		for _, sub := range []string{"../../etc", "/etc", "work", "data", "loop"} {
			m := volume(sub)
			m.Image.Image = harness.Symlinks
			p := startPod(t, d)
			id, err := create(d, p, harness.ContainerConfig("c", harness.Busybox, harness.Sleep(), mounts(m)))
			if err == nil { // resolved inside the image, which has such a directory
				_, err = d.CRI().StartContainer(context.Background(), &runtimeapi.StartContainerRequest{ContainerId: id})
			}
			if err == nil {
				resp, err := d.CRI().ExecSync(context.Background(),
					&runtimeapi.ExecSyncRequest{ContainerId: id, Cmd: []string{"test", "-e", "/volume/shadow"}})
				if err != nil || resp.ExitCode == 0 {
					t.Errorf("subPath %s: the volume contains the node's files, error %v", sub, err)
				}
			}
		}
	})
	t.Run("an image that is not there", func(t *testing.T) {
		m := volume("")
		m.Image.Image = "images.test/not/pulled:1"
		_, err := create(d, startPod(t, d), harness.ContainerConfig("c", harness.Busybox, mounts(m)))
		wantCode(t, err, codes.NotFound)
	})
	t.Run("an image in use as a volume is not lost", func(t *testing.T) {
		c := sleeper(t, d, mounts(volume("layers")))
		if err := d.Images().RemoveImage(context.Background(), &runtimeapi.ImageSpec{Image: harness.Layers}); err != nil {
			t.Logf("RemoveImage while in use: %v", err)
		}
		if got := c.Must("cat", "/volume/kept"); got != "low\n" {
			t.Errorf("file in the volume after RemoveImage: got %q, want low", got)
		}
		d.Pull(t, harness.Layers)
	})
}
