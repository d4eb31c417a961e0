package spec

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// TestAdjust: every adjustment changes the specification.
func TestAdjust(t *testing.T) {
	a := &nri.ContainerAdjustment{}
	a.AddAnnotation("note", "1")
	a.AddEnv("A", "b")
	a.AddEnv("OLD", "new")
	a.SetArgs([]string{"prog"})
	a.AddMount(&nri.Mount{Source: "/src", Destination: "/dst", Type: "bind", Options: []string{"rbind", "rprivate"}})
	a.RemoveMount("/removed")
	a.AddDevice(&nri.LinuxDevice{Path: "/dev/x", Type: "c", Major: 10, Minor: 20})
	a.RemoveDevice("/dev/removed")
	a.AddHooks(&nri.Hooks{
		Prestart: []*nri.Hook{{Path: "/1"}}, CreateRuntime: []*nri.Hook{{Path: "/2"}}, CreateContainer: []*nri.Hook{{Path: "/3"}},
		StartContainer: []*nri.Hook{{Path: "/4"}}, Poststart: []*nri.Hook{{Path: "/5"}}, Poststop: []*nri.Hook{{Path: "/6"}},
	})
	a.AddRlimit("RLIMIT_CORE", 9, 8)
	a.SetLinuxSysctl("net.x", "1")
	a.SetLinuxOomScoreAdj(new(77))
	a.SetLinuxIOPriority(&nri.LinuxIOPriority{Class: nri.IOPrioClass_IOPRIO_CLASS_BE, Priority: 3})
	a.SetLinuxScheduler(&nri.LinuxScheduler{Policy: nri.LinuxSchedulerPolicy_SCHED_BATCH})
	a.SetLinuxSeccompPolicy(&nri.LinuxSeccomp{DefaultAction: "SCMP_ACT_ERRNO"})
	a.AddOrReplaceNamespace(&nri.LinuxNamespace{Type: "network", Path: "/ns"})
	a.SetLinuxRDTClass("gold")
	a.SetLinuxPidLimits(5)
	a.Linux.Resources.Memory = &nri.LinuxMemory{Reservation: nri.Int64(6), Swappiness: nri.UInt64(uint64(7))}
	a.Linux.Resources.Cpu = &nri.LinuxCPU{RealtimeRuntime: nri.Int64(8)}
	s := &specs.Spec{
		Process: &specs.Process{Env: []string{"OLD=x", "KEPT=y"}, Args: []string{"sh"}},
		Mounts:  []specs.Mount{{Destination: "/removed"}, {Destination: "/kept"}},
		Linux: &specs.Linux{
			Devices:    []specs.LinuxDevice{{Path: "/dev/removed"}},
			Namespaces: []specs.LinuxNamespace{{Type: specs.NetworkNamespace}, {Type: specs.PIDNamespace}},
		},
	}
	if err := Adjust(s, a, Host{Runtime: Runtime{Processes: true}}); err != nil {
		t.Fatal(err)
	}
	raw, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	text := string(raw)
	for _, want := range []string{
		`"note":"1"`, `"OLD=new"`, `"KEPT=y"`, `"A=b"`, `"args":["prog"]`, `"destination":"/dst"`, `"path":"/dev/x"`,
		`"allow":true,"type":"c","major":10,"minor":20`, `"prestart":[{"path":"/1"`, `"createRuntime":[{"path":"/2"`,
		`"createContainer":[{"path":"/3"`,
		`"startContainer":[{"path":"/4"`, `"poststart":[{"path":"/5"`, `"poststop":[{"path":"/6"`, `"RLIMIT_CORE","hard":9,"soft":8`,
		`"sysctl":{"net.x":"1"}`, `"oomScoreAdj":77`, `"ioPriority":{"class":"IOPRIO_CLASS_BE","priority":3}`, `"policy":"SCHED_BATCH"`,
		`"defaultAction":"SCMP_ACT_ERRNO"`, `"type":"network","path":"/ns"`, `"closID":"gold"`, `"pids":{"limit":5}`, `"reservation":6`,
		`"swappiness":7`, `"realtimeRuntime":8`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the specification lacks %s: %s", want, text)
		}
	}
	if strings.Contains(text, "removed") || len(s.Linux.Namespaces) != 2 || slices.Contains(s.Process.Env, "OLD=x") {
		t.Errorf("the specification still has what was removed or replaced: %s", text)
	}
}

func TestAdjustRefuses(t *testing.T) {
	linux := func(l *nri.LinuxContainerAdjustment) *nri.ContainerAdjustment {
		return &nri.ContainerAdjustment{Linux: l}
	}
	for want, a := range map[string]*nri.ContainerAdjustment{
		"adjustment.mounts":                        {Mounts: []*nri.Mount{{Destination: "relative"}}},
		"adjustment.linux.devices: \"x\"":          linux(&nri.LinuxContainerAdjustment{Devices: []*nri.LinuxDevice{{Path: "x"}}}),
		"adjustment.linux.devices: /x":             linux(&nri.LinuxContainerAdjustment{Devices: []*nri.LinuxDevice{{Path: "/x", Type: "z"}}}),
		"adjustment.rlimits: \"CORE\"":             {Rlimits: []*nri.POSIXRlimit{{Type: "CORE"}}},
		"adjustment.rlimits: RLIMIT_CORE":          {Rlimits: []*nri.POSIXRlimit{{Type: "RLIMIT_CORE", Soft: 2, Hard: 1}}},
		"adjustment.hooks.poststop":                {Hooks: &nri.Hooks{Poststop: []*nri.Hook{{Path: "x"}}}},
		"adjustment.linux.cgroups_path":            linux(&nri.LinuxContainerAdjustment{CgroupsPath: "/x"}),
		"adjustment.linux.namespaces: the user":    linux(&nri.LinuxContainerAdjustment{Namespaces: []*nri.LinuxNamespace{{Type: "user"}}}),
		"linux.namespaces: \"moon\"":               linux(&nri.LinuxContainerAdjustment{Namespaces: []*nri.LinuxNamespace{{Type: "moon"}}}),
		"adjustment.linux.scheduler":               linux(&nri.LinuxContainerAdjustment{Scheduler: &nri.LinuxScheduler{}}),
		"adjustment.linux.io_priority":             linux(&nri.LinuxContainerAdjustment{IoPriority: &nri.LinuxIOPriority{}}),
		"adjustment.linux.memory_policy":           linux(&nri.LinuxContainerAdjustment{MemoryPolicy: &nri.LinuxMemoryPolicy{}}),
		"adjustment.linux.net_devices":             linux(&nri.LinuxContainerAdjustment{NetDevices: map[string]*nri.LinuxNetDevice{"eth1": {}}}),
		"adjustment.linux.resources.blockio_class": linux(&nri.LinuxContainerAdjustment{Resources: &nri.LinuxResources{BlockioClass: nri.String("x")}}),
	} {
		err := Adjust(&specs.Spec{Process: &specs.Process{}, Linux: &specs.Linux{}}, a, Host{})
		if (!errdefs.IsInvalidArgument(err) && !errdefs.IsNotImplemented(err)) || !strings.Contains(err.Error(), want) {
			t.Errorf("adjustment %v: got error %v, want one for %s", a, err, want)
		}
	}
}
