package spec

import (
	"os"
	"path/filepath"
	"testing"

	goselinux "github.com/opencontainers/selinux/go-selinux"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/selinux"
)

var testLabels = selinux.Labels{Process: "system_u:system_r:container_t:s0:c1,c2", Mount: "system_u:object_r:container_file_t:s0:c1,c2"}

func selinuxHost() Host {
	h := fullHost()
	h.SELinux = true
	return h
}

func TestSELinuxOptions(t *testing.T) {
	for _, o := range []*runtimeapi.SELinuxOption{
		nil, {},
		{Level: "s0"},
		{Level: "s0:c1,c7"},
		{Level: "s0-s3:c0.c1023"},
		{Level: "s0:c1.c3,c9-s1:c1.c3,c9"},
		{User: "system_u", Role: "system_r", Type: "svirt_lxc_net_t", Level: "s0:c4,c5"},
	} {
		require.NoError(t, checkSELinux(o, selinuxHost()), "%v", o)
	}
	for field, options := range map[string][]*runtimeapi.SELinuxOption{
		"level": {{Level: "s0,c4,c5"}, {Level: "c1"}, {Level: "s0:c1\""}, {Level: "s0:c1:c2"}, {Level: "s0:c99999"}, {Level: "s0\x00"}},
		"type":  {{Type: "a:b"}, {Type: "a b"}, {Type: "a,b"}, {Type: "a\x00"}},
		"role":  {{Role: "\"r"}},
		"user":  {{User: "ü"}},
	} {
		for _, o := range options {
			requireRefused(t, checkSELinux(o, selinuxHost()), errInvalid, "selinux_options."+field)
			in := testInput(t)
			in.Pod.Config.Linux.SecurityContext.Privileged = true
			in.Container.Config.Linux.SecurityContext = &runtimeapi.LinuxContainerSecurityContext{Privileged: true, SelinuxOptions: o}
			requireRefused(t, Validate(in.Pod, in.Container, selinuxHost()), errInvalid, "selinux_options."+field)
		}
	}
	requireRefused(t, checkSELinux(&runtimeapi.SELinuxOption{Type: "x"}, fullHost()), errUnsupported, "selinux_options")
	require.NoError(t, checkSELinux(&runtimeapi.SELinuxOption{Level: "s0"}, fullHost()))
}

func TestLabelsInSpec(t *testing.T) {
	in := testInput(t)
	in.Labels = testLabels
	s, _ := build(t, in, selinuxHost())
	assert.Equal(t, testLabels, selinux.Labels{Process: s.Process.SelinuxLabel, Mount: s.Linux.MountLabel})
	p, err := Process(ExecInput{Spec: s, Cmd: []string{"true"}})
	require.NoError(t, err)
	assert.Equal(t, testLabels.Process, p.SelinuxLabel)

	in.Pod.Config.Linux.SecurityContext.Privileged = true
	in.Container.Config.Linux.SecurityContext = &runtimeapi.LinuxContainerSecurityContext{Privileged: true}
	s, _ = build(t, in, selinuxHost())
	assert.Equal(t, selinux.Labels{Mount: testLabels.Mount}, selinux.Labels{Process: s.Process.SelinuxLabel, Mount: s.Linux.MountLabel})

	pause := Pause(PauseInput{Pod: testPod(), Host: selinuxHost(), Labels: testLabels})
	assert.Equal(t, testLabels, selinux.Labels{Process: pause.Process.SelinuxLabel, Mount: pause.Linux.MountLabel})
}

func TestRelabelledMounts(t *testing.T) {
	in := testInput(t)
	in.Labels = testLabels
	asked, other := t.TempDir(), t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(asked, "file"), nil, 0o600))
	in.Container.Config.Mounts = []*runtimeapi.Mount{
		{HostPath: asked, ContainerPath: "/asked", SelinuxRelabel: true},
		{HostPath: other, ContainerPath: "/other"},
	}
	build(t, in, selinuxHost())
	_, err := goselinux.LfileLabel(asked)
	require.Error(t, err, "a specification changes no label")
	require.NoError(t, Relabel(in.Container.Config, testLabels.Mount))
	for _, name := range []string{asked, filepath.Join(asked, "file")} {
		got, err := goselinux.LfileLabel(name)
		require.NoError(t, err)
		assert.Equal(t, testLabels.Mount, got)
	}
	_, err = goselinux.LfileLabel(other)
	require.Error(t, err, "a volume keeps its label unless the request asks for another")

	link := filepath.Join(t.TempDir(), "link")
	require.NoError(t, os.Symlink("/etc", link))
	for _, system := range []string{"/etc", link} {
		in.Container.Config.Mounts = []*runtimeapi.Mount{{HostPath: system, ContainerPath: "/a", SelinuxRelabel: true}}
		requireRefused(t, Relabel(in.Container.Config, testLabels.Mount), errInvalid, "mounts[0].selinux_relabel")
	}
}
