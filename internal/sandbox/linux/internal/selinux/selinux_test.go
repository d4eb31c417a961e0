package selinux_test

import (
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"

	"github.com/containerd/errdefs"
	goselinux "github.com/opencontainers/selinux/go-selinux"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/selinux"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/selinux/selinuxtest"
)

func newPool(t *testing.T) *selinux.Pool {
	t.Helper()
	goselinux.ClearLabels()
	pool, err := selinux.NewPool(&selinuxtest.Policy{})
	require.NoError(t, err)
	return pool
}

func reserved(label string) bool { return goselinux.CheckLabel(label) != nil }

func TestEachPodHasItsOwnLevel(t *testing.T) {
	pool := newPool(t)
	var wg sync.WaitGroup
	labels := make([]selinux.Labels, 100)
	for i := range labels {
		wg.Go(func() {
			l, err := pool.Pod(strconv.Itoa(i), nil)
			assert.NoError(t, err)
			labels[i] = l
		})
	}
	wg.Wait()
	seen := map[string]bool{}
	for _, l := range labels {
		assert.Regexp(t, `^system_u:system_r:container_t:s0:c\d+,c\d+$`, l.Process)
		assert.Regexp(t, `^system_u:object_r:container_file_t:s0:c\d+,c\d+$`, l.Mount)
		assert.True(t, reserved(l.Process), l.Process)
		assert.False(t, seen[l.Process], "%s was assigned twice", l.Process)
		seen[l.Process] = true
	}
	for i := range labels {
		pool.Release(strconv.Itoa(i))
		assert.False(t, reserved(labels[i].Process), "the level of a removed pod can be assigned again")
	}
}

func TestSharedLevelStaysReserved(t *testing.T) {
	pool := newPool(t)
	first, err := pool.Pod("first", nil)
	require.NoError(t, err)
	second, err := pool.Pod("second", &runtimeapi.SELinuxOption{Level: "s0:c1,c0", Type: "svirt_lxc_net_t"})
	require.NoError(t, err)
	require.Contains(t, first.Process, "s0:c0,c1", "the test needs two pods with the same level")
	assert.Equal(t, "system_u:system_r:svirt_lxc_net_t:s0:c0,c1", second.Process)
	pool.Release("first")
	assert.True(t, reserved(second.Process))
	pool.Release("second")
	assert.False(t, reserved(second.Process))
}

func TestLevelsSurviveARestart(t *testing.T) {
	before, err := newPool(t).Pod("old", nil)
	require.NoError(t, err)
	pool := newPool(t)
	require.False(t, reserved(before.Process))
	pool.Hold("old", before)
	pool.Hold("unlabelled", selinux.Labels{})
	after, err := pool.Pod("new", nil)
	require.NoError(t, err)
	assert.NotEqual(t, before.Process, after.Process)
	pool.Release("old")
	assert.False(t, reserved(before.Process))
}

func TestContainerLabels(t *testing.T) {
	pool := newPool(t)
	pod, err := pool.Pod("pod", nil)
	require.NoError(t, err)
	for name, c := range map[string]struct {
		o    *runtimeapi.SELinuxOption
		want selinux.Labels
	}{
		"none":  {nil, pod},
		"empty": {&runtimeapi.SELinuxOption{}, pod},
		"level": {&runtimeapi.SELinuxOption{Level: "s0"},
			selinux.Labels{Process: "system_u:system_r:container_t:s0", Mount: "system_u:object_r:container_file_t:s0"}},
		"range": {&runtimeapi.SELinuxOption{Level: "s0-s0:c0.c1023"},
			selinux.Labels{Process: "system_u:system_r:container_t:s0-s0:c0.c1023", Mount: "system_u:object_r:container_file_t:s0-s0:c0.c1023"}},
		"type": {&runtimeapi.SELinuxOption{Type: "svirt_lxc_net_t"},
			selinux.Labels{Process: "system_u:system_r:svirt_lxc_net_t:s0:c0,c1", Mount: pod.Mount}},
		"all": {
			&runtimeapi.SELinuxOption{User: "u", Role: "r", Type: "svirt_lxc_net_t", Level: "s0:c4,c5"},
			selinux.Labels{Process: "u:r:svirt_lxc_net_t:s0:c4,c5", Mount: "u:object_r:container_file_t:s0:c4,c5"},
		},
	} {
		got, err := pool.Container("pod", pod, c.o)
		require.NoError(t, err, name)
		assert.Equal(t, c.want, got, name)
	}
	assert.True(t, reserved("::t:s0:c4,c5"), "no other pod gets the container's level")
	pool.Release("pod")
	assert.False(t, reserved("::t:s0:c4,c5"))

	_, err = pool.Container("pod", pod, &runtimeapi.SELinuxOption{Type: "shadow_t", Level: "s0:c8"})
	require.ErrorIs(t, err, errdefs.ErrInvalidArgument)
	require.ErrorContains(t, err, "shadow_t")
	assert.False(t, reserved("::t:s0:c8"))
}

type noContainers struct{ selinuxtest.Policy }

func (*noContainers) Labels([]string) (selinux.Labels, error) { return selinux.Labels{}, nil }

func TestPolicyWithoutContainers(t *testing.T) {
	_, err := selinux.NewPool(&noContainers{})
	require.ErrorContains(t, err, "no labels for containers")
}

func TestNoSELinux(t *testing.T) {
	var pool *selinux.Pool
	l, err := pool.Pod("pod", nil)
	require.NoError(t, err)
	assert.Zero(t, l)
	l, err = pool.Container("pod", l, nil)
	require.NoError(t, err)
	assert.Zero(t, l)
	assert.Empty(t, pool.MountOption("x"))
	pool.Hold("pod", l)
	pool.Release("pod")
}

func TestMountOptionQuotesCommas(t *testing.T) {
	assert.Equal(t, `context="system_u:object_r:container_file_t:s0:c1,c2"`,
		selinux.Kernel{}.MountOption("system_u:object_r:container_file_t:s0:c1,c2"))
}

// Without SELinux, the kernel stores this extended attribute without checking it.
func TestRelabel(t *testing.T) {
	const label = "system_u:object_r:container_file_t:s0:c1,c2"
	root := t.TempDir()
	dir, outside := filepath.Join(root, "volume"), filepath.Join(root, "outside")
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "sub"), 0o755))
	for _, name := range []string{outside, filepath.Join(dir, "sub/file")} {
		require.NoError(t, os.WriteFile(name, nil, 0o600))
	}
	require.NoError(t, os.Symlink(outside, filepath.Join(dir, "link")))
	require.NoError(t, goselinux.LsetFileLabel(outside, "system_u:object_r:etc_t:s0"))
	for range 2 {
		require.NoError(t, selinux.Relabel(dir, label))
	}
	for _, name := range []string{"", "sub", "sub/file", "link"} {
		got, err := goselinux.LfileLabel(filepath.Join(dir, name))
		require.NoError(t, err, name)
		assert.Equal(t, label, got, name)
	}
	got, err := goselinux.LfileLabel(outside)
	require.NoError(t, err)
	assert.Equal(t, "system_u:object_r:etc_t:s0", got, "symbolic links are not followed")
	for _, system := range []string{"/", "/etc", "/usr", "/var/lib", "/root/"} {
		require.ErrorContains(t, selinux.Relabel(system, label), "not allowed", system)
	}
}
