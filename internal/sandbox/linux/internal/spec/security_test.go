package spec

import (
	"path/filepath"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func withCapabilities(c *runtimeapi.Capability) *runtimeapi.LinuxContainerSecurityContext {
	return &runtimeapi.LinuxContainerSecurityContext{Capabilities: c}
}

func TestCapabilities(t *testing.T) {
	h := fullHost()
	h.Caps = append([]string{"CAP_NET_ADMIN", "CAP_SYS_ADMIN"}, defaultCapabilities...)
	all := capabilitySets(h.Caps, nil).Bounding
	for name, c := range map[string]struct {
		asked   *runtimeapi.Capability
		has     []string
		hasNot  []string
		exactly []string
		ambient []string
	}{
		"default": {exactly: defaultCapabilities},
		"add":     {asked: &runtimeapi.Capability{AddCapabilities: []string{"SYS_ADMIN", "cap_net_admin"}}, exactly: all},
		"add ALL": {asked: &runtimeapi.Capability{AddCapabilities: []string{"all"}}, exactly: all},
		"add ALL, drop 1": {asked: &runtimeapi.Capability{AddCapabilities: []string{"ALL"}, DropCapabilities: []string{"SYS_ADMIN"}},
			has: []string{"CAP_NET_ADMIN"}, hasNot: []string{"CAP_SYS_ADMIN"}},
		"drop ALL": {asked: &runtimeapi.Capability{DropCapabilities: []string{"ALL"}}, exactly: []string{}},
		"drop ALL, add 1": {asked: &runtimeapi.Capability{AddCapabilities: []string{"CHOWN"}, DropCapabilities: []string{"ALL"}},
			exactly: []string{"CAP_CHOWN"}},
		"drop wins": {asked: &runtimeapi.Capability{AddCapabilities: []string{"CHOWN"}, DropCapabilities: []string{"CHOWN"}},
			hasNot: []string{"CAP_CHOWN"}},
		"ambient": {asked: &runtimeapi.Capability{AddAmbientCapabilities: []string{"NET_ADMIN"}},
			has: []string{"CAP_NET_ADMIN", "CAP_CHOWN"}, ambient: []string{"CAP_NET_ADMIN"}},
		"ambient, dropped": {
			asked:  &runtimeapi.Capability{AddAmbientCapabilities: []string{"NET_ADMIN"}, DropCapabilities: []string{"NET_ADMIN"}},
			hasNot: []string{"CAP_NET_ADMIN"},
		},
	} {
		got, err := capabilities(withCapabilities(c.asked), h)
		require.NoError(t, err, name)
		assert.Equal(t, got.Bounding, got.Permitted, name)
		assert.Equal(t, got.Bounding, got.Effective, name)
		if c.exactly != nil {
			assert.ElementsMatch(t, c.exactly, got.Bounding, name)
		}
		assert.Subset(t, got.Bounding, c.has, name)
		for _, gone := range c.hasNot {
			assert.NotContains(t, got.Bounding, gone, name)
		}
		assert.ElementsMatch(t, c.ambient, got.Ambient, name)
		assert.ElementsMatch(t, c.ambient, got.Inheritable, name)
	}

	_, err := capabilities(withCapabilities(&runtimeapi.Capability{AddCapabilities: []string{"FLY"}}), h)
	requireRefused(t, err, errInvalid, "add_capabilities")
	_, err = capabilities(withCapabilities(&runtimeapi.Capability{DropCapabilities: []string{"CAP_FLY"}}), h)
	requireRefused(t, err, errInvalid, "drop_capabilities")
	_, err = capabilities(withCapabilities(&runtimeapi.Capability{AddCapabilities: []string{"SYS_RESOURCE"}}), h)
	requireRefused(t, err, errUnsupported, "CAP_SYS_RESOURCE")
	_, err = capabilities(withCapabilities(&runtimeapi.Capability{AddAmbientCapabilities: []string{"SYS_RESOURCE"}}), h)
	requireRefused(t, err, errUnsupported, "CAP_SYS_RESOURCE")
	h.Caps = []string{"CAP_CHOWN"}
	got, err := capabilities(nil, h)
	require.NoError(t, err)
	assert.Equal(t, []string{"CAP_CHOWN"}, got.Bounding, "defaults that cannot be granted are left out")
}

func TestSeccomp(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		writeFile(t, filepath.Join(dir, name), text)
		return filepath.Join(dir, name)
	}
	good := file("good", `{"comment": "a", "defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["sethostname"], "action": "SCMP_ACT_ERRNO"}]}`)
	fifo := filepath.Join(dir, "fifo")
	require.NoError(t, unix.Mkfifo(fifo, 0o600))
	runtimeDefault := &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault}
	unconfined := &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Unconfined}

	for name, c := range map[string]struct {
		sc   *runtimeapi.LinuxContainerSecurityContext
		want specs.LinuxSeccompAction // the default action; "" means no filter
	}{
		"no profile":            {sc: nil},
		"unconfined":            {sc: &runtimeapi.LinuxContainerSecurityContext{Seccomp: unconfined, SeccompProfilePath: profileDefault}},
		"runtime default":       {sc: &runtimeapi.LinuxContainerSecurityContext{Seccomp: runtimeDefault}, want: specs.ActErrno},
		"localhost":             {sc: &runtimeapi.LinuxContainerSecurityContext{Seccomp: localhostProfile(good)}, want: specs.ActAllow},
		"deprecated default":    {sc: &runtimeapi.LinuxContainerSecurityContext{SeccompProfilePath: profileDefault}, want: specs.ActErrno},
		"deprecated unconfined": {sc: &runtimeapi.LinuxContainerSecurityContext{SeccompProfilePath: profileUnconfined}},
		"deprecated localhost": {sc: &runtimeapi.LinuxContainerSecurityContext{SeccompProfilePath: profileLocalhost + good},
			want: specs.ActAllow},
		"privileged ignores even": {sc: &runtimeapi.LinuxContainerSecurityContext{Privileged: true, Seccomp: localhostProfile("junk")}},
	} {
		s := &specs.Spec{Process: &specs.Process{Capabilities: capabilitySets(defaultCapabilities, nil)}, Linux: &specs.Linux{}}
		got, err := systemCallFilter(c.sc, s, fullHost())
		require.NoError(t, err, name)
		if c.want == "" {
			assert.Nil(t, got, name)
			continue
		}
		require.NotNil(t, got, name)
		assert.Equal(t, c.want, got.DefaultAction, name)
		assert.NotEmpty(t, got.Syscalls, name)
	}

	for name, p := range map[string]*runtimeapi.SecurityProfile{
		"relative path": localhostProfile("profiles/good"),
		"no path":       localhostProfile(""),
		"absent":        localhostProfile(filepath.Join(dir, "absent")),
		"no JSON":       localhostProfile(file("junk", "{")),
		"no profile":    localhostProfile(file("other", `{"kind": "other"}`)),
		"directory":     localhostProfile(dir),
		"FIFO":          localhostProfile(fifo),
		"unused ref":    {ProfileType: runtimeapi.SecurityProfile_RuntimeDefault, LocalhostRef: good},
		"unknown type":  {ProfileType: 7},
	} {
		_, err := systemCallFilter(&runtimeapi.LinuxContainerSecurityContext{Seccomp: p}, &specs.Spec{}, fullHost())
		require.ErrorIs(t, err, errInvalid, name)
		require.ErrorContains(t, err, "seccomp", name)
	}
	_, err := systemCallFilter(&runtimeapi.LinuxContainerSecurityContext{SeccompProfilePath: "junk"}, &specs.Spec{}, fullHost())
	requireRefused(t, err, errInvalid, "seccomp")

	h := fullHost()
	h.Seccomp = false
	_, err = systemCallFilter(&runtimeapi.LinuxContainerSecurityContext{Seccomp: runtimeDefault}, &specs.Spec{}, h)
	requireRefused(t, err, errUnsupported, "seccomp")
}

func TestAppArmor(t *testing.T) {
	h := fullHost()
	got, err := checkAppArmor(&runtimeapi.SecurityProfile{}, "", h)
	require.NoError(t, err)
	assert.Empty(t, got)
	_, err = checkAppArmor(localhostProfile("mine"), "", h)
	requireRefused(t, err, errUnsupported, "apparmor")
	_, err = checkAppArmor(nil, "localhost/mine", h)
	requireRefused(t, err, errUnsupported, "apparmor")
	_, err = checkAppArmor(nil, "junk", h)
	requireRefused(t, err, errInvalid, "apparmor")

	h.AppArmor, h.root = true, t.TempDir()
	_, err = checkAppArmor(localhostProfile("mine"), "", h)
	requireRefused(t, err, errInvalid, "cannot be listed")
	writeFile(t, filepath.Join(h.root, "sys/kernel/security/apparmor/profiles"), "mine-too (enforce)\nmine (complain)\nprefixed (enforce)\n")
	got, err = checkAppArmor(localhostProfile("mine"), "", h)
	require.NoError(t, err)
	assert.Equal(t, "mine", got)
	_, err = checkAppArmor(localhostProfile("min"), "", h)
	requireRefused(t, err, errInvalid, "not loaded")
	_, err = checkAppArmor(localhostProfile(""), "", h)
	requireRefused(t, err, errInvalid, "must name a profile")

	_, err = checkAppArmor(&runtimeapi.SecurityProfile{}, "", h)
	requireRefused(t, err, errUnsupported, "default profile could not be loaded")
	got, err = checkAppArmor(nil, "", h)
	require.NoError(t, err)
	assert.Empty(t, got, "a container that asks for nothing, without a default profile")

	h.AppArmorProfile = "tripod-default"
	unconfined := &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Unconfined}
	for want, request := range map[string]struct {
		profile    *runtimeapi.SecurityProfile
		deprecated string
	}{
		"tripod-default": {}, "unconfined": {unconfined, "localhost/mine"}, "mine": {localhostProfile("mine"), "unconfined"},
		"prefixed": {localhostProfile("localhost/prefixed"), ""},
	} {
		in := testInput(t)
		sc := in.Container.Config.Linux.SecurityContext
		sc.Apparmor, sc.ApparmorProfile = request.profile, request.deprecated
		s, _ := build(t, in, h)
		assert.Equal(t, want, s.Process.ApparmorProfile)
		exec, err := Process(ExecInput{Spec: s, Cmd: []string{"true"}})
		require.NoError(t, err)
		assert.Equal(t, want, exec.ApparmorProfile, "exec")
		sc.Privileged, in.Pod.Config.Linux.SecurityContext = true, &runtimeapi.LinuxSandboxSecurityContext{Privileged: true}
		s, _ = build(t, in, h)
		assert.Empty(t, s.Process.ApparmorProfile, "privileged")
	}
}

func TestMaskedPaths(t *testing.T) {
	sc := &runtimeapi.LinuxContainerSecurityContext{}
	c := &runtimeapi.ContainerConfig{Linux: &runtimeapi.LinuxContainerConfig{SecurityContext: sc}}
	masked, readonly := maskedPaths(c)
	assert.Equal(t, defaultMaskedPaths, masked)
	assert.Equal(t, defaultReadonlyPaths, readonly)
	c.Labels = map[string]string{"io.kubernetes.container.name": "c"}
	masked, readonly = maskedPaths(c)
	assert.Empty(t, masked, "procMount: Unmasked")
	assert.Empty(t, readonly, "procMount: Unmasked")
	sc.MaskedPaths, sc.ReadonlyPaths = []string{"/bin"}, []string{"/tmp"}
	require.NoError(t, checkMaskedPaths(sc))
	masked, readonly = maskedPaths(c)
	assert.Equal(t, []string{"/bin"}, masked)
	assert.Equal(t, []string{"/tmp"}, readonly)
	sc.Privileged = true
	masked, readonly = maskedPaths(c)
	assert.Empty(t, masked)
	assert.Empty(t, readonly)
	requireRefused(t, checkMaskedPaths(&runtimeapi.LinuxContainerSecurityContext{MaskedPaths: []string{"bin"}}), errInvalid, "masked_paths")
	requireRefused(t, checkMaskedPaths(&runtimeapi.LinuxContainerSecurityContext{ReadonlyPaths: []string{"/a\x00"}}), errInvalid,
		"readonly_paths")
}

// TestSysctls tests fault C3.
func TestSysctls(t *testing.T) {
	pod := testPod()
	pod.Config.Linux.Sysctls = map[string]string{
		"kernel.shm_rmid_forced": "1", "net.ipv4.ip_local_port_range": "1024 65000", "fs.mqueue.msg_max": "100",
		"kernel/sem": "1 2 3 4", "kernel.msgmax": "8192", "net.ipv4.conf.eth0/1.forwarding": "1", "net/ipv4/conf/eth1.2/forwarding": "0",
	}
	got, err := Sysctls(pod)
	require.NoError(t, err)
	assert.Equal(t, map[string]string{
		"kernel/shm_rmid_forced": "1", "net/ipv4/ip_local_port_range": "1024 65000", "fs/mqueue/msg_max": "100",
		"kernel/sem": "1 2 3 4", "kernel/msgmax": "8192", "net/ipv4/conf/eth0.1/forwarding": "1", "net/ipv4/conf/eth1.2/forwarding": "0",
	}, got)

	for name, value := range map[string]string{
		"kernel.core_pattern": "|/bin/sh", "vm.swappiness": "1", "": "", "net": "1", "net.": "1", "kernel.sem.x": "1", "kernel": "1",
		"net/ipv4/../../kernel/core_pattern": "x", "net.ipv4.//kernel": "x", "net/./x": "1", "fs.file-max": "1", "fs.mqueue": "1",
		"kernel.shm_rmid_forced": "1\n2", "kernel.msgmax": "1\x00", "net.ipv4.a b": "1", "kernel.shm\x00": "1", "/net/ipv4/x": "1",
		"kernel.hostname": "x",
	} {
		pod.Config.Linux.Sysctls = map[string]string{name: value}
		_, err := Sysctls(pod)
		requireRefused(t, err, errInvalid, "linux.sysctls")
		requireRefused(t, Validate(pod, nil, fullHost()), errInvalid, "linux.sysctls")
	}
	pod.Config.Linux.Sysctls = map[string]string{"net.core.somaxconn": "1", "net/core/somaxconn": "2"}
	_, err = Sysctls(pod)
	requireRefused(t, err, errInvalid, "twice")

	pod.Config.Linux.SecurityContext.NamespaceOptions = &runtimeapi.NamespaceOption{Network: runtimeapi.NamespaceMode_NODE,
		Ipc: runtimeapi.NamespaceMode_NODE}
	for _, name := range []string{"net.ipv4.ip_forward", "kernel.sem", "fs.mqueue.msg_max"} {
		pod.Config.Linux.Sysctls = map[string]string{name: "1"}
		_, err := Sysctls(pod)
		requireRefused(t, err, errInvalid, "would change the node")
	}
}
