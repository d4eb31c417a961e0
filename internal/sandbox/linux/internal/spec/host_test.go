package spec

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func fakeMachine(t *testing.T, files map[string]string) string {
	root := t.TempDir()
	for name, text := range map[string]string{
		"proc/self/status":         "Name:\tx\nCapBnd:\t0000000000000003\nSeccomp:\t0\n",
		"proc/self/oom_score_adj":  "-5\n",
		"proc/sys/kernel/hostname": "box\n",
	} {
		writeFile(t, filepath.Join(root, name), text)
	}
	for name, text := range files {
		writeFile(t, filepath.Join(root, name), text)
	}
	return root
}

func TestProbeV1(t *testing.T) {
	h, err := ProbeAt(fakeMachine(t, map[string]string{
		"sys/fs/cgroup/memory/cgroup.procs": "", "sys/fs/cgroup/memory/memory.memsw.limit_in_bytes": "",
		"sys/fs/cgroup/cpu,cpuacct/cgroup.procs": "", "sys/fs/cgroup/systemd/cgroup.procs": "",
		"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "", "sys/fs/cgroup/unified/cgroup.procs": "", "sys/fs/cgroup/unified/cgroup.controllers": "hugetlb",
		"sys/kernel/mm/hugepages/hugepages-1048576kB/x": "", "sys/kernel/mm/hugepages/hugepages-2048kB/x": "",
		"sys/kernel/mm/hugepages/hugepages-64kB/x": "",
		"sys/module/apparmor/parameters/enabled":   "Y\n", "sys/fs/selinux/enforce": "1",
	}))
	require.NoError(t, err)
	assert.False(t, h.CgroupV2)
	assert.Equal(t, map[string]bool{"memory": true, "cpu": true, "cpuacct": true, "systemd": true}, h.Controllers)
	assert.Equal(t, []string{"64KB", "2MB", "1GB"}, h.HugepageSizes)
	assert.True(t, h.SwapAccounting && h.CPUQuota && h.AppArmor && h.SELinux && h.Seccomp)
	assert.Equal(t, []string{"CAP_CHOWN", "CAP_DAC_OVERRIDE"}, h.Caps)
	assert.Equal(t, -5, h.OwnOOMScore)
	assert.Equal(t, "box", h.Name)
}

func TestProbeV2(t *testing.T) {
	files := map[string]string{
		"sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory hugetlb pids\n",
		"proc/self/status":                 "CapBnd:\t000001ffffffffff\n",
	}
	h, err := ProbeAt(fakeMachine(t, files))
	require.NoError(t, err)
	assert.True(t, h.CgroupV2 && h.Controllers["memory"] && h.Controllers["io"])
	assert.False(t, h.SwapAccounting || h.CPUQuota || h.AppArmor || h.SELinux || h.Seccomp)
	assert.Equal(t, -1000, h.OwnOOMScore, "with CAP_SYS_RESOURCE")
	assert.Empty(t, h.HugepageSizes)

	files["sys/fs/cgroup/system.slice/memory.swap.max"] = "max"
	files["sys/fs/cgroup/system.slice/cpu.max"] = "max 100000"
	h, err = ProbeAt(fakeMachine(t, files))
	require.NoError(t, err)
	assert.True(t, h.SwapAccounting && h.CPUQuota)
}

func TestProbeBrokenMachine(t *testing.T) {
	_, err := ProbeAt(t.TempDir())
	require.ErrorContains(t, err, "cgroup")
	_, err = ProbeAt(fakeMachine(t, map[string]string{"sys/fs/cgroup/cgroup.controllers": "", "proc/self/status": "CapBnd:\txyz\n"}))
	require.ErrorContains(t, err, "bounding")
	_, err = ProbeAt(fakeMachine(t, map[string]string{"sys/fs/cgroup/cgroup.controllers": "", "proc/self/oom_score_adj": ""}))
	require.ErrorContains(t, err, "oom_score_adj")
}

// TestProbeHere compares the results with other sources on this machine.
func TestProbeHere(t *testing.T) {
	h, err := Probe()
	require.NoError(t, err)
	name, err := os.Hostname()
	require.NoError(t, err)
	assert.Equal(t, name, h.Name)
	assert.Contains(t, h.Caps, "CAP_CHOWN")
	assert.Equal(t, slices.Contains(h.Caps, "CAP_SYS_RESOURCE"), h.OwnOOMScore == -1000)
	for _, controller := range []string{"cpu", "memory", "pids"} {
		assert.True(t, h.Controllers[controller], controller)
	}
}
