package linux

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	goselinux "github.com/opencontainers/selinux/go-selinux"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/mnt"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/selinux"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/selinux/selinuxtest"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/shared"
)

// No OCI runtime starts a container with a label on a kernel without SELinux, so these tests look at specifications and
// mounts.

func newSELinuxRig(t *testing.T) (*rig, *selinuxtest.Policy) {
	goselinux.ClearLabels()
	r, policy := newRig(t, "crun"), &selinuxtest.Policy{}
	r.policy = policy
	r.restart()
	return r, policy
}

func (c *testContainer) labels() selinux.Labels {
	c.pod.r.tb.Helper()
	config, err := readConfig(c.pod.r.cfg.bundle(c.pod.ID, c.ID))
	require.NoError(c.pod.r.tb, err)
	return selinux.Labels{Process: config.Process.SelinuxLabel, Mount: config.Linux.MountLabel}
}

// mountOptions returns the line of mountinfo for the mount on a path.
func mountOptions(t *testing.T, path string) string {
	t.Helper()
	raw, err := os.ReadFile("/proc/self/mountinfo")
	require.NoError(t, err)
	for line := range strings.Lines(string(raw)) {
		if f := strings.Fields(line); len(f) > 4 && f[4] == path {
			return line
		}
	}
	t.Fatalf("nothing is mounted on %s", path)
	return ""
}

func TestSELinuxContainersShareThePodsLabel(t *testing.T) {
	for users, change := range map[string]func(*runtimeapi.PodSandboxConfig){"node": func(*runtimeapi.PodSandboxConfig) {}, "pod": mapped} {
		t.Run("users of the "+users, func(t *testing.T) {
			r, policy := newSELinuxRig(t)
			p, other := r.pod(change), r.pod()
			policy.Mounted()
			first, second, foreign := p.container("true"), p.container("true"), other.container("true")
			assert.Regexp(t, `^system_u:system_r:container_t:s0:c\d+,c\d+$`, first.labels().Process)
			assert.Regexp(t, `^system_u:object_r:container_file_t:s0:c\d+,c\d+$`, first.labels().Mount)
			assert.Equal(t, first.labels(), second.labels())
			assert.NotEqual(t, first.labels(), foreign.labels())
			assert.ElementsMatch(t, []string{first.labels().Mount, foreign.labels().Mount}, policy.Mounted())

			files := shared.FilesOf(p.Pod, r.cfg.podRunDir(p.ID))
			for _, path := range []string{files.Etc, files.Shm, rootfsDir(r.cfg.bundle(p.ID, first.ID))} {
				assert.Contains(t, mountOptions(t, path), selinuxtest.MountOption, path)
			}
		})
	}
}

func TestSELinuxOptionsOfAContainer(t *testing.T) {
	r, _ := newSELinuxRig(t)
	for _, privileged := range []bool{false, true} {
		p := r.pod(func(c *runtimeapi.PodSandboxConfig) { c.Linux.SecurityContext.Privileged = privileged })
		with := func(o *runtimeapi.SELinuxOption) func(*runtimeapi.ContainerConfig) {
			return func(c *runtimeapi.ContainerConfig) {
				c.Linux.SecurityContext.Privileged, c.Linux.SecurityContext.SelinuxOptions = privileged, o
			}
		}
		process := func(label string) string {
			if privileged {
				return ""
			}
			return label
		}
		level := p.container("true", with(&runtimeapi.SELinuxOption{Level: "s0"}))
		assert.Equal(t, selinux.Labels{Process: process("system_u:system_r:container_t:s0"), Mount: "system_u:object_r:container_file_t:s0"},
			level.labels())
		all := p.container("true",
			with(&runtimeapi.SELinuxOption{User: "system_u", Role: "system_r", Type: "svirt_lxc_net_t", Level: "s0:c4,c5"}))
		assert.Equal(t, selinux.Labels{
			Process: process("system_u:system_r:svirt_lxc_net_t:s0:c4,c5"), Mount: "system_u:object_r:container_file_t:s0:c4,c5",
		}, all.labels())

		wrong := &sandbox.Container{ID: newID(), Config: all.Config, ImageID: busybox}
		wrong.Config.Linux.SecurityContext.SelinuxOptions = &runtimeapi.SELinuxOption{Level: "s0,c4,c5"}
		require.ErrorIs(t, r.Validate(p.Pod, wrong), errdefs.ErrInvalidArgument)
		wrong.Config.Linux.SecurityContext.SelinuxOptions = &runtimeapi.SELinuxOption{Type: "shadow_t"}
		_, err := r.CreateContainer(context.Background(), p.Pod, wrong)
		require.ErrorIs(t, err, errdefs.ErrInvalidArgument)
		require.NoError(t, r.RemoveContainer(context.Background(), p.Pod, wrong))
	}
}

func TestSELinuxLabelsSurviveARestart(t *testing.T) {
	r, _ := newSELinuxRig(t)
	p := r.pod()
	old := p.container("true", func(c *runtimeapi.ContainerConfig) {
		c.Linux.SecurityContext.SelinuxOptions = &runtimeapi.SELinuxOption{Level: "s0:c0,c2"}
	})
	goselinux.ClearLabels() // as in a new process
	r.restart(sandbox.Known{Pod: p.Pod, Containers: []*sandbox.Container{old.Container}})
	recorded, err := r.cfg.readLabels(p.ID)
	require.NoError(t, err)
	assert.Equal(t, recorded, p.container("true").labels())
	created, err := r.labelPod(p.Pod)
	require.NoError(t, err)
	assert.Equal(t, recorded, created, "a repeated creation keeps the labels")
	other := r.pod()
	label, err := r.cfg.readLabels(other.ID)
	require.NoError(t, err)
	assert.NotContains(t, []string{recorded.Mount, old.labels().Mount}, label.Mount)
	require.NoError(t, r.RemoveSandbox(context.Background(), other.Pod))
	require.NoError(t, goselinux.CheckLabel(label.Process), "a removed pod's level is free")
	require.Error(t, goselinux.CheckLabel(recorded.Process))
}

func TestSELinuxLabelsOfAnUnknownPodAreReleased(t *testing.T) {
	r, _ := newSELinuxRig(t)
	p := r.pod()
	label, err := r.cfg.readLabels(p.ID)
	require.NoError(t, err)
	require.NotZero(t, label)
	goselinux.ClearLabels()
	r.restart()
	assert.NoDirExists(t, r.cfg.podDir(p.ID))
	require.NoError(t, goselinux.CheckLabel(label.Process))
}

func TestPodOfEarlierVersionHasNoLabel(t *testing.T) {
	goselinux.ClearLabels()
	r := newRig(t, "crun")
	p := r.pod()
	r.policy = &selinuxtest.Policy{}
	r.restart(sandbox.Known{Pod: p.Pod})
	assert.Zero(t, p.container("true").labels())
}

func TestLabelledView(t *testing.T) {
	r, _ := newSELinuxRig(t)
	dir := t.TempDir()
	layer, bundle, target := filepath.Join(dir, "layer"), filepath.Join(dir, "bundle"), filepath.Join(dir, "target")
	for _, name := range []string{layer, bundle} {
		require.NoError(t, os.Mkdir(name, 0o755))
	}
	require.NoError(t, os.WriteFile(filepath.Join(layer, "file"), []byte("content"), 0o644))
	for range 2 { // the second attempt finds the empty directory
		mounts, err := r.labels.View([]mount.Mount{{Type: "bind", Source: layer, Options: []string{"ro", "rbind"}}}, "x:x:x:s0", bundle)
		require.NoError(t, err)
		require.NoError(t, mnt.Mount(mounts, target))
	}
	t.Cleanup(func() { _ = mnt.Unmount(target) })
	assert.Contains(t, mountOptions(t, target), selinuxtest.MountOption)
	got, err := os.ReadFile(filepath.Join(target, "file"))
	require.NoError(t, err)
	assert.Equal(t, "content", string(got))
	require.Error(t, os.WriteFile(filepath.Join(target, "new"), nil, 0o600), "a view is read-only")
	_, err = goselinux.LfileLabel(layer)
	require.Error(t, err, "the layer belongs to other containers too")
}
