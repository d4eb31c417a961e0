package cri

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/sandboxtest/corpus"
)

// wantInvalid checks that err is InvalidArgument and begins with the field; an empty field expects no error.
func wantInvalid(t *testing.T, err error, field string) {
	t.Helper()
	switch {
	case field == "" && err != nil:
		t.Errorf("got error %v, want none", err)
	case field == "":
	case err == nil:
		t.Errorf("got no error, want one about %s", field)
	case !errdefs.IsInvalidArgument(err) || !strings.HasPrefix(err.Error(), field+": "):
		t.Errorf("got error %q, want one about %s", err, field)
	}
}

func TestValidateSandboxConfig(t *testing.T) {
	type config = runtimeapi.PodSandboxConfig
	security := func(sc *runtimeapi.LinuxSandboxSecurityContext) func(*config) {
		return func(c *config) { c.Linux.SecurityContext = sc }
	}
	namespaces := func(o *runtimeapi.NamespaceOption) func(*config) {
		return security(&runtimeapi.LinuxSandboxSecurityContext{NamespaceOptions: o})
	}
	ports := func(m ...*runtimeapi.PortMapping) func(*config) { return func(c *config) { c.PortMappings = m } }
	const sc = "config.linux.security_context"
	for name, c := range map[string]struct {
		change func(*config)
		field  string
	}{
		"as the kubelet sends it": {func(*config) {}, ""},
		"the least": {func(c *config) {
			c.Hostname, c.LogDirectory, c.DnsConfig, c.Labels, c.Annotations, c.Linux = "", "", nil, nil, nil, nil
		}, ""},
		"no metadata":              {func(c *config) { c.Metadata = nil }, "config.metadata"},
		"no name":                  {func(c *config) { c.Metadata.Name = "" }, "config.metadata.name"},
		"no namespace":             {func(c *config) { c.Metadata.Namespace = "" }, "config.metadata.namespace"},
		"no uid":                   {func(c *config) { c.Metadata.Uid = "" }, "config.metadata.uid"},
		"long name":                {func(c *config) { c.Metadata.Name = strings.Repeat("a", 254) }, "config.metadata.name"},
		"longest name":             {func(c *config) { c.Metadata.Name = strings.Repeat("a", 253) }, ""},
		"two lines of name":        {func(c *config) { c.Metadata.Name = "a\nb" }, "config.metadata.name"},
		"windows":                  {func(c *config) { c.Windows = &runtimeapi.WindowsPodSandboxConfig{} }, "config.windows"},
		"longest hostname":         {func(c *config) { c.Hostname = strings.Repeat("a", 64) }, ""},
		"long hostname":            {func(c *config) { c.Hostname = strings.Repeat("a", 65) }, "config.hostname"},
		"hostname of two words":    {func(c *config) { c.Hostname = "a b" }, "config.hostname"},
		"relative log directory":   {func(c *config) { c.LogDirectory = "var/log" }, "config.log_directory"},
		"log directory with dots":  {func(c *config) { c.LogDirectory = "/var/log/../../etc" }, "config.log_directory"},
		"log directory with a NUL": {func(c *config) { c.LogDirectory = "/var\x00" }, "config.log_directory"},
		"DNS server of two lines": {func(c *config) { c.DnsConfig.Servers = []string{"10.0.0.1\noptions rotate"} },
			"config.dns_config.servers[0]"},
		"DNS search of two words": {func(c *config) { c.DnsConfig.Searches = []string{"a", "b c"} }, "config.dns_config.searches[1]"},
		"empty DNS option":        {func(c *config) { c.DnsConfig.Options = []string{""} }, "config.dns_config.options[0]"},
		"host port": {ports(&runtimeapi.PortMapping{ContainerPort: 80, HostPort: 8080, HostIp: "::1",
			Protocol: runtimeapi.Protocol_SCTP}), ""},
		"container port only": {ports(&runtimeapi.PortMapping{ContainerPort: 80}), ""},
		"one host port, two protocols": {ports(&runtimeapi.PortMapping{ContainerPort: 53, HostPort: 53},
			&runtimeapi.PortMapping{ContainerPort: 53, HostPort: 53, Protocol: runtimeapi.Protocol_UDP}), ""},
		"host port twice": {ports(&runtimeapi.PortMapping{ContainerPort: 80, HostPort: 80},
			&runtimeapi.PortMapping{ContainerPort: 81, HostPort: 80}), "config.port_mappings[1].host_port"},
		"host port too high":    {ports(&runtimeapi.PortMapping{ContainerPort: 80, HostPort: 65536}), "config.port_mappings[0].host_port"},
		"host port below none":  {ports(&runtimeapi.PortMapping{ContainerPort: 80, HostPort: -1}), "config.port_mappings[0].host_port"},
		"host port for no port": {ports(&runtimeapi.PortMapping{HostPort: 80}), "config.port_mappings[0].container_port"},
		"protocol":              {ports(&runtimeapi.PortMapping{ContainerPort: 80, Protocol: 9}), "config.port_mappings[0].protocol"},
		"host IP": {ports(&runtimeapi.PortMapping{ContainerPort: 80, HostIp: "localhost"}),
			"config.port_mappings[0].host_ip"},
		"empty label key":          {func(c *config) { c.Labels[""] = "x" }, "config.labels"},
		"labels without end":       {func(c *config) { c.Labels["x"] = strings.Repeat("y", maxKeyValueBytes) }, "config.labels"},
		"annotations of the edge":  {func(c *config) { c.Annotations["tripod.dev/edge.channels"] = "[]" }, "config.annotations"},
		"annotations without end":  {func(c *config) { c.Annotations["x"] = strings.Repeat("y", maxKeyValueBytes) }, "config.annotations"},
		"cgroup parent with dots":  {func(c *config) { c.Linux.CgroupParent = "/kubepods/../../x" }, "config.linux.cgroup_parent"},
		"cgroup parent of systemd": {func(c *config) { c.Linux.CgroupParent = "kubepods-burstable-pod_x.slice" }, ""},
		"sysctl":                   {func(c *config) { c.Linux.Sysctls = map[string]string{"net.ipv4.ip_unprivileged_port_start": "0"} }, ""},
		"sysctl with dots":         {func(c *config) { c.Linux.Sysctls = map[string]string{"net..x": "0"} }, "config.linux.sysctls"},
		"sysctl of two words":      {func(c *config) { c.Linux.Sysctls = map[string]string{"net.x y": "0"} }, "config.linux.sysctls"},
		"overhead": {func(c *config) { c.Linux.Overhead = &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: -2} },
			"config.linux.overhead.memory_limit_in_bytes"},
		"resources": {func(c *config) { c.Linux.Resources = &runtimeapi.LinuxContainerResources{CpuShares: -1} },
			"config.linux.resources.cpu_shares"},
		"group without user": {security(&runtimeapi.LinuxSandboxSecurityContext{RunAsGroup: id(1)}), sc + ".run_as_group"},
		"negative user":      {security(&runtimeapi.LinuxSandboxSecurityContext{RunAsUser: id(-1)}), sc + ".run_as_user"},
		"user of 32 bits": {security(&runtimeapi.LinuxSandboxSecurityContext{RunAsUser: id(math.MaxInt32 + 1)}),
			sc + ".run_as_user"},
		"supplemental group": {security(&runtimeapi.LinuxSandboxSecurityContext{SupplementalGroups: []int64{1, -1}}),
			sc + ".supplemental_groups[1]"},
		"groups policy": {security(&runtimeapi.LinuxSandboxSecurityContext{SupplementalGroupsPolicy: 7}),
			sc + ".supplemental_groups_policy"},
		"host network": {namespaces(&runtimeapi.NamespaceOption{Network: runtimeapi.NamespaceMode_NODE}), ""},
		"network of a container": {namespaces(&runtimeapi.NamespaceOption{Network: runtimeapi.NamespaceMode_CONTAINER}),
			sc + ".namespace_options.network"},
		"target of a sandbox": {namespaces(&runtimeapi.NamespaceOption{TargetId: "x"}), sc + ".namespace_options.target_id"},
		"PID namespace of a target": {namespaces(&runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_TARGET}),
			sc + ".namespace_options.pid"},
		"user namespace per container": {namespaces(&runtimeapi.NamespaceOption{UsernsOptions: &runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_CONTAINER}}), sc + ".namespace_options.userns_options.mode"},
		"seccomp without a file":       {security(&runtimeapi.LinuxSandboxSecurityContext{Seccomp: &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Localhost}}), sc + ".seccomp.localhost_ref"},
		"file without seccomp":         {security(&runtimeapi.LinuxSandboxSecurityContext{Seccomp: &runtimeapi.SecurityProfile{LocalhostRef: "/x"}}), sc + ".seccomp.localhost_ref"},
		"profile type": {security(&runtimeapi.LinuxSandboxSecurityContext{Apparmor: &runtimeapi.SecurityProfile{ProfileType: 5}}),
			sc + ".apparmor.profile_type"},
	} {
		t.Run(name, func(t *testing.T) {
			config := podConfig("x")
			c.change(config)
			wantInvalid(t, validateSandboxConfig(config), c.field)
		})
	}
	wantInvalid(t, validateSandboxConfig(nil), "config")
}

func id(n int64) *runtimeapi.Int64Value { return &runtimeapi.Int64Value{Value: n} }

func TestValidateContainerConfig(t *testing.T) {
	type config = runtimeapi.ContainerConfig
	mount := func(m *runtimeapi.Mount) func(*config) { return func(c *config) { c.Mounts = []*runtimeapi.Mount{m} } }
	device := func(d *runtimeapi.Device) func(*config) {
		return func(c *config) { c.Devices = []*runtimeapi.Device{d} }
	}
	env := func(key, value string) func(*config) {
		return func(c *config) { c.Envs = []*runtimeapi.KeyValue{{Key: key, Value: []byte(value)}} }
	}
	img := &runtimeapi.ImageSpec{Image: "busybox"}
	const bidirectional = runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL
	for name, c := range map[string]struct {
		change func(*config)
		field  string
	}{
		"as the kubelet sends it":      {func(*config) {}, ""},
		"no metadata":                  {func(c *config) { c.Metadata = nil }, "config.metadata"},
		"no name":                      {func(c *config) { c.Metadata.Name = "" }, "config.metadata.name"},
		"windows":                      {func(c *config) { c.Windows = &runtimeapi.WindowsContainerConfig{} }, "config.windows"},
		"no image":                     {func(c *config) { c.Image = nil }, "config.image.image"},
		"no image name":                {func(c *config) { c.Image.Image = "" }, "config.image.image"},
		"malformed image":              {func(c *config) { c.Image.Image = "UPPER/case:!" }, "config.image.image"},
		"image by ID":                  {func(c *config) { c.Image.Image = "sha256:" + strings.Repeat("a", 64) }, ""},
		"image by bare ID":             {func(c *config) { c.Image.Image = strings.Repeat("a", 64) }, ""},
		"image by digest":              {func(c *config) { c.Image.Image = "r.example:5000/x/y@sha256:" + strings.Repeat("a", 64) }, ""},
		"NUL in command":               {func(c *config) { c.Command = []string{"a", "b\x00"} }, "config.command[1]"},
		"NUL in args":                  {func(c *config) { c.Args = []string{"\x00"} }, "config.args[0]"},
		"relative working directory":   {func(c *config) { c.WorkingDir = "work" }, "config.working_dir"},
		"variable":                     {env("A-B", "x\xff\xfe"), ""},
		"variable without a name":      {env("", "x"), "config.envs[0].key"},
		"variable with an equals sign": {env("A=B", "x"), "config.envs[0].key"},
		"variable with a NUL":          {env("A", "x\x00y"), "config.envs[0].value"},
		"mount":                        {mount(&runtimeapi.Mount{ContainerPath: "/a", HostPath: "/b", Propagation: bidirectional}), ""},
		"mount on nothing":             {mount(&runtimeapi.Mount{HostPath: "/b"}), "config.mounts[0].container_path"},
		"mount on a relative path":     {mount(&runtimeapi.Mount{ContainerPath: "a", HostPath: "/b"}), "config.mounts[0].container_path"},
		"mount of nothing":             {mount(&runtimeapi.Mount{ContainerPath: "/a"}), "config.mounts[0].host_path"},
		"mount of a relative path":     {mount(&runtimeapi.Mount{ContainerPath: "/a", HostPath: "b"}), "config.mounts[0].host_path"},
		"long mount path": {mount(&runtimeapi.Mount{ContainerPath: "/a", HostPath: "/" + strings.Repeat("b", 4095)}),
			"config.mounts[0].host_path"},
		"propagation": {mount(&runtimeapi.Mount{ContainerPath: "/a", HostPath: "/b", Propagation: 9}),
			"config.mounts[0].propagation"},
		"recursive but not read-only": {mount(&runtimeapi.Mount{ContainerPath: "/a", HostPath: "/b", RecursiveReadOnly: true}),
			"config.mounts[0].recursive_read_only"},
		"recursive read-only, propagated": {mount(&runtimeapi.Mount{ContainerPath: "/a", HostPath: "/b", RecursiveReadOnly: true, Readonly: true,
			Propagation: bidirectional}), "config.mounts[0].recursive_read_only"},
		"image volume":           {mount(&runtimeapi.Mount{ContainerPath: "/a", Image: img, Readonly: true, ImageSubPath: "x/y"}), ""},
		"image volume, writable": {mount(&runtimeapi.Mount{ContainerPath: "/a", Image: img}), "config.mounts[0].readonly"},
		"image volume and host path": {mount(&runtimeapi.Mount{ContainerPath: "/a", Image: img, Readonly: true, HostPath: "/b"}),
			"config.mounts[0].host_path"},
		"image volume without a name": {mount(&runtimeapi.Mount{ContainerPath: "/a", Image: &runtimeapi.ImageSpec{}, Readonly: true}),
			"config.mounts[0].image.image"},
		"sub path that leaves the image": {mount(&runtimeapi.Mount{ContainerPath: "/a", Image: img, Readonly: true, ImageSubPath: "x/../../y"}),
			"config.mounts[0].image_sub_path"},
		"mount options": {mount(&runtimeapi.Mount{ContainerPath: "/a", HostPath: "/b",
			MountOptions: []string{"noexec", "nodev", "nosuid"}}), ""},
		"unknown mount option": {mount(&runtimeapi.Mount{ContainerPath: "/a", HostPath: "/b", MountOptions: []string{"suid"}}),
			"config.mounts[0].mount_options[0]"},
		"device":                {device(&runtimeapi.Device{HostPath: "/dev/null", ContainerPath: "/dev/x", Permissions: "rwm"}), ""},
		"device without a path": {device(&runtimeapi.Device{ContainerPath: "/dev/x"}), "config.devices[0].host_path"},
		"device permissions": {device(&runtimeapi.Device{HostPath: "/dev/null", Permissions: "rx"}),
			"config.devices[0].permissions"},
		"CDI device without a name":      {func(c *config) { c.CDIDevices = []*runtimeapi.CDIDevice{{}} }, "config.CDI_devices[0].name"},
		"absolute log path":              {func(c *config) { c.LogPath = "/etc/passwd" }, "config.log_path"},
		"log path that leaves its place": {func(c *config) { c.LogPath = "a/../../b" }, "config.log_path"},
		"log path of dots":               {func(c *config) { c.LogPath = ".." }, "config.log_path"},
		"log path with dots in a name":   {func(c *config) { c.LogPath = "a..b/0.log" }, ""},
		"no log":                         {func(c *config) { c.LogPath = "" }, ""},
		"stop signal":                    {func(c *config) { c.StopSignal = 99 }, "config.stop_signal"},
		"OOM score":                      {func(c *config) { c.Linux.Resources.OomScoreAdj = 1001 }, "config.linux.resources.oom_score_adj"},
		"CPU quota without limit":        {func(c *config) { c.Linux.Resources.CpuQuota = -1 }, ""},
		"CPU quota":                      {func(c *config) { c.Linux.Resources.CpuQuota = -2 }, "config.linux.resources.cpu_quota"},
		"CPU period":                     {func(c *config) { c.Linux.Resources.CpuPeriod = -1 }, "config.linux.resources.cpu_period"},
		"swap": {func(c *config) { c.Linux.Resources.MemorySwapLimitInBytes = -2 },
			"config.linux.resources.memory_swap_limit_in_bytes"},
		"huge pages of no size": {func(c *config) { c.Linux.Resources.HugepageLimits = []*runtimeapi.HugepageLimit{{Limit: 1}} },
			"config.linux.resources.hugepage_limits[0].page_size"},
	} {
		t.Run(name, func(t *testing.T) {
			config := containerConfig("x")
			config.Image = &runtimeapi.ImageSpec{Image: "busybox"}
			c.change(config)
			wantInvalid(t, validateContainerConfig(config), c.field)
		})
	}
	wantInvalid(t, validateContainerConfig(nil), "config")
}

func TestValidateSecurityContext(t *testing.T) {
	type context = runtimeapi.LinuxContainerSecurityContext
	const target = runtimeapi.NamespaceMode_TARGET
	for name, c := range map[string]struct {
		sc    *context
		field string
	}{
		"none":                     {nil, ""},
		"user and group":           {&context{RunAsUser: id(math.MaxInt32), RunAsGroup: id(0)}, ""},
		"user name and group":      {&context{RunAsUsername: "www", RunAsGroup: id(1)}, ""},
		"user and user name":       {&context{RunAsUser: id(1), RunAsUsername: "www"}, "sc.run_as_username"},
		"group without user":       {&context{RunAsGroup: id(1)}, "sc.run_as_group"},
		"negative group":           {&context{RunAsUser: id(1), RunAsGroup: id(-1)}, "sc.run_as_group"},
		"supplemental group":       {&context{SupplementalGroups: []int64{math.MaxInt32 + 1}}, "sc.supplemental_groups[0]"},
		"policy":                   {&context{SupplementalGroupsPolicy: -1}, "sc.supplemental_groups_policy"},
		"target":                   {&context{NamespaceOptions: &runtimeapi.NamespaceOption{Pid: target, TargetId: "x"}}, ""},
		"target without an ID":     {&context{NamespaceOptions: &runtimeapi.NamespaceOption{Pid: target}}, "sc.namespace_options.target_id"},
		"ID without a target":      {&context{NamespaceOptions: &runtimeapi.NamespaceOption{TargetId: "x"}}, "sc.namespace_options.target_id"},
		"IPC namespace of another": {&context{NamespaceOptions: &runtimeapi.NamespaceOption{Ipc: target}}, "sc.namespace_options.ipc"},
		"network of another":       {&context{NamespaceOptions: &runtimeapi.NamespaceOption{Network: target}}, "sc.namespace_options.network"},
		"unknown mode":             {&context{NamespaceOptions: &runtimeapi.NamespaceOption{Pid: 9}}, "sc.namespace_options.pid"},
		"relative masked path":     {&context{MaskedPaths: []string{"/proc/kcore", "x"}}, "sc.masked_paths[1]"},
		"relative read-only path":  {&context{ReadonlyPaths: []string{"x"}}, "sc.readonly_paths[0]"},
		"seccomp": {&context{Seccomp: &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Localhost,
			LocalhostRef: "/x.json"}}, ""},
		"relative seccomp profile": {&context{Seccomp: &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Localhost,
			LocalhostRef: "x.json"}}, "sc.seccomp.localhost_ref"},
		"apparmor": {&context{Apparmor: &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Localhost,
			LocalhostRef: "profile"}}, ""},
	} {
		t.Run(name, func(t *testing.T) { wantInvalid(t, validateSecurityContext("sc", c.sc), c.field) })
	}
}

// TestWhatAKubeletSends: every request in the corpus passes.
func TestWhatAKubeletSends(t *testing.T) {
	for _, p := range corpus.Pods(t) {
		if err := cmp.Or(validateSandboxConfig(p.Sandbox), validateContainerConfig(p.Container)); err != nil {
			t.Errorf("pod %s of a kubelet: %v", p.Name, err)
		}
	}
}

func TestSeconds(t *testing.T) {
	for _, c := range []struct {
		n    int64
		want string
	}{{0, "0s"}, {30, "30s"}, {math.MaxInt64, "2562047h47m16.854775807s"}} {
		d, err := seconds("timeout", c.n)
		must(t, err)
		wantEqual(t, fmt.Sprint(c.n), d.String(), c.want)
	}
	_, err := seconds("timeout", -1)
	wantInvalid(t, err, "timeout")
}

// The largest object that Kubernetes can send must pass.
func TestKeyValuesOfTheLargestObjectPass(t *testing.T) {
	pairs := map[string]string{}
	for i := range 10_000 {
		pairs[fmt.Sprintf("example.com/label-%05d", i)] = strings.Repeat("v", 63)
	}
	must(t, validateKeyValues("labels", pairs))
	more := maps.Clone(pairs)
	more["example.com/big"] = strings.Repeat("v", 1<<20)
	wantInvalid(t, validateKeyValues("labels", more), "labels")
}
