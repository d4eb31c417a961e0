package cri

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestSandboxLifecycle(t *testing.T) {
	d := open(t)
	ctx := t.Context()
	id := d.pod(t, "p")
	r, err := d.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id, Verbose: true})
	must(t, err)
	s, want := r.GetStatus(), podConfig("p")
	wantEqual(t, "id", s.GetId(), id)
	wantEqual(t, "state", s.GetState(), runtimeapi.PodSandboxState_SANDBOX_READY)
	wantEqual(t, "metadata", proto.Equal(s.GetMetadata(), want.GetMetadata()), true)
	wantEqual(t, "ip", s.GetNetwork().GetIp(), "192.0.2.1")
	wantEqual(t, "namespaces",
		proto.Equal(s.GetLinux().GetNamespaces().GetOptions(), want.GetLinux().GetSecurityContext().GetNamespaceOptions()), true)
	wantEqual(t, "handler", s.GetRuntimeHandler(), "linux")
	wantEqual(t, "labels", len(s.GetLabels()), len(want.GetLabels()))
	wantEqual(t, "annotations", len(s.GetAnnotations()), len(want.GetAnnotations()))
	if s.GetCreatedAt() <= 0 || r.GetTimestamp() < s.GetCreatedAt() {
		t.Errorf("got created at %d and recorded at %d, want the record after the creation", s.GetCreatedAt(), r.GetTimestamp())
	}
	var info map[string]any
	must(t, json.Unmarshal([]byte(r.GetInfo()["info"]), &info))
	if len(r.GetInfo()) != 1 || info["sandboxID"] != id || info["config"] == nil || info["cniResult"] == nil {
		t.Errorf("verbose info: got %q", r.GetInfo())
	}

	_, err = d.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: id})
	must(t, err)
	r, err = d.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id})
	must(t, err)
	wantEqual(t, "state", r.GetStatus().GetState(), runtimeapi.PodSandboxState_SANDBOX_NOTREADY)
	wantEqual(t, "ip of a stopped pod", r.GetStatus().GetNetwork().GetIp(), "")
	wantEqual(t, "information without verbose", len(r.GetInfo()), 0)
	_, err = d.PortForward(ctx, &runtimeapi.PortForwardRequest{PodSandboxId: id, Port: []int32{80}})
	wantCode(t, err, codes.FailedPrecondition, id, "Initiated")

	_, err = d.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id})
	must(t, err)
	_, err = d.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id})
	wantCode(t, err, codes.NotFound, id)
}

func TestContainerLifecycle(t *testing.T) {
	d := open(t)
	ctx := t.Context()
	pod := d.pod(t, "p")
	asked := &runtimeapi.ImageSpec{Image: d.images.add("nginx:1.25", "").ID, UserSpecifiedImage: "nginx:1.25",
		Annotations: map[string]string{"a": "b"}}
	id := d.container(t, pod, "c", func(c *runtimeapi.ContainerConfig) {
		c.Image = asked
		c.Mounts = []*runtimeapi.Mount{{ContainerPath: "/a", HostPath: "/b", Readonly: true, RecursiveReadOnly: true}}
	})
	s := d.status(t, id)
	wantEqual(t, "state", s.GetState(), runtimeapi.ContainerState_CONTAINER_CREATED)
	wantEqual(t, "started at", s.GetStartedAt(), 0)
	wantEqual(t, "finished at", s.GetFinishedAt(), 0)
	wantEqual(t, "image", s.GetImage().GetImage(), "nginx:1.25")
	wantEqual(t, "image as asked", s.GetImage().GetUserSpecifiedImage(), "nginx:1.25")
	wantEqual(t, "image annotations", s.GetImage().GetAnnotations()["a"], "b")
	wantEqual(t, "image id", s.GetImageId(), asked.Image)
	wantEqual(t, "image ref", s.GetImageRef(), asked.Image)
	wantEqual(t, "log path", s.GetLogPath(), "/var/log/pods/default_p/c/0.log")
	wantEqual(t, "mount", s.GetMounts()[0].GetContainerPath(), "/a")
	wantEqual(t, "shares", s.GetResources().GetLinux().GetCpuShares(), 102)
	wantEqual(t, "stop signal", s.GetStopSignal(), runtimeapi.Signal_SIGNAL_SIGTERM)
	_, err := d.Exec(ctx, &runtimeapi.ExecRequest{ContainerId: id, Cmd: []string{"x"}, Stdout: true})
	wantCode(t, err, codes.FailedPrecondition, id, "Created", "Running")

	_, err = d.StartContainer(ctx, &runtimeapi.StartContainerRequest{ContainerId: id})
	must(t, err)
	s = d.status(t, id)
	wantEqual(t, "state", s.GetState(), runtimeapi.ContainerState_CONTAINER_RUNNING)
	if s.GetStartedAt() < s.GetCreatedAt() || s.GetFinishedAt() != 0 || s.GetReason() != "" {
		t.Errorf("status of a running container: got %v, want a start and no exit", s)
	}

	_, err = d.UpdateContainerResources(ctx,
		&runtimeapi.UpdateContainerResourcesRequest{ContainerId: id, Linux: &runtimeapi.LinuxContainerResources{CpuShares: 512}})
	must(t, err)
	wantEqual(t, "shares", d.status(t, id).GetResources().GetLinux().GetCpuShares(), 512)

	_, err = d.StopContainer(ctx, &runtimeapi.StopContainerRequest{ContainerId: id, Timeout: 10})
	must(t, err)
	s = d.status(t, id)
	wantEqual(t, "state", s.GetState(), runtimeapi.ContainerState_CONTAINER_EXITED)
	wantEqual(t, "exit code", s.GetExitCode(), 143)
	wantEqual(t, "reason", s.GetReason(), "Error")
	if s.GetFinishedAt() < s.GetStartedAt() {
		t.Errorf("got finished at %d, want not before the start at %d", s.GetFinishedAt(), s.GetStartedAt())
	}

	_, err = d.RemoveContainer(ctx, &runtimeapi.RemoveContainerRequest{ContainerId: id})
	must(t, err)
	_, err = d.ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: id})
	wantCode(t, err, codes.NotFound, id)
}

// PLEG compares the list's and the status's data of the same object.
func TestListAndStatusAgree(t *testing.T) {
	d := open(t)
	pod := d.pod(t, "p")
	id := d.running(t, pod, "c")
	list, err := d.ListContainers(t.Context(), &runtimeapi.ListContainersRequest{})
	must(t, err)
	item, s := list.GetContainers()[0], d.status(t, id)
	wantEqual(t, "id", item.GetId(), s.GetId())
	wantEqual(t, "pod", item.GetPodSandboxId(), pod)
	wantEqual(t, "state", item.GetState(), s.GetState())
	wantEqual(t, "created at", item.GetCreatedAt(), s.GetCreatedAt())
	wantEqual(t, "image id", item.GetImageId(), s.GetImageId())
	wantEqual(t, "image ref", item.GetImageRef(), s.GetImageRef())
	wantEqual(t, "image", proto.Equal(item.GetImage(), s.GetImage()), true)
	wantEqual(t, "metadata", proto.Equal(item.GetMetadata(), s.GetMetadata()), true)

	pods, err := d.ListPodSandbox(t.Context(), &runtimeapi.ListPodSandboxRequest{})
	must(t, err)
	r, err := d.PodSandboxStatus(t.Context(), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: pod})
	must(t, err)
	p, ps := pods.GetItems()[0], r.GetStatus()
	wantEqual(t, "id", p.GetId(), ps.GetId())
	wantEqual(t, "state", p.GetState(), ps.GetState())
	wantEqual(t, "created at", p.GetCreatedAt(), ps.GetCreatedAt())
	wantEqual(t, "handler", p.GetRuntimeHandler(), ps.GetRuntimeHandler())
	wantEqual(t, "containers of the pod", len(r.GetContainersStatuses()), 1)
	wantEqual(t, "its container", proto.Equal(r.GetContainersStatuses()[0], s), true)
}

// A unit pod's container has its own ID, and the pod's ID also finds it.
func TestUnitPod(t *testing.T) {
	d := open(t)
	r, err := d.RunPodSandbox(t.Context(), &runtimeapi.RunPodSandboxRequest{Config: podConfig("u"), RuntimeHandler: "unit"})
	must(t, err)
	id := d.running(t, r.GetPodSandboxId(), "c")
	if id == r.GetPodSandboxId() {
		t.Errorf("the container's ID is the pod's: %s", id)
	}
	wantEqual(t, "container of the pod's ID", d.status(t, r.GetPodSandboxId()).GetId(), id)
	wantEqual(t, "state", d.status(t, id).GetState(), runtimeapi.ContainerState_CONTAINER_RUNNING)
}

func TestContainersThatThePodDoesNotAllow(t *testing.T) {
	d := open(t)
	create := func(pod string, change func(*runtimeapi.ContainerConfig)) error {
		c := containerConfig("c")
		change(c)
		_, err := d.CreateContainer(t.Context(), &runtimeapi.CreateContainerRequest{PodSandboxId: pod, Config: c})
		return err
	}
	privileged := func(c *runtimeapi.ContainerConfig) {
		c.Linux.SecurityContext = &runtimeapi.LinuxContainerSecurityContext{Privileged: true}
	}
	target := func(id string) func(c *runtimeapi.ContainerConfig) {
		return func(c *runtimeapi.ContainerConfig) {
			c.Linux.SecurityContext = &runtimeapi.LinuxContainerSecurityContext{NamespaceOptions: &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_TARGET, TargetId: id}}
		}
	}
	pod, other := d.pod(t, "p"), d.pod(t, "other")
	stranger, own := d.container(t, other, "stranger"), d.container(t, pod, "own")
	wantCode(t, create(pod, privileged), codes.InvalidArgument, "privileged", pod)
	wantCode(t, create(pod, target(stranger)), codes.InvalidArgument, "target_id", stranger)
	must(t, create(pod, target(own)))
	must(t, create(d.pod(t, "q", func(c *runtimeapi.PodSandboxConfig) { c.Linux.SecurityContext.Privileged = true }), privileged))

	unit, err := d.RunPodSandbox(t.Context(), &runtimeapi.RunPodSandboxRequest{Config: podConfig("u"), RuntimeHandler: "unit"})
	must(t, err)
	err = create(unit.GetPodSandboxId(), func(c *runtimeapi.ContainerConfig) {
		c.Mounts = []*runtimeapi.Mount{{ContainerPath: "/a", HostPath: "/b", Readonly: true, RecursiveReadOnly: true}}
	})
	wantCode(t, err, codes.Unimplemented, "RROUnsupported: config.mounts[0]", "unit")
}

func TestFilters(t *testing.T) {
	d := open(t)
	red := func(c *runtimeapi.PodSandboxConfig) { c.Labels["colour"] = "red" }
	a, b, c := d.pod(t, "a", red), d.pod(t, "b", red), d.pod(t, "c")
	ca, cb := d.running(t, a, "ca"), d.container(t, b, "cb")
	_, err := d.StopPodSandbox(t.Context(), &runtimeapi.StopPodSandboxRequest{PodSandboxId: c})
	must(t, err)
	ready := &runtimeapi.PodSandboxStateValue{}
	notReady := &runtimeapi.PodSandboxStateValue{State: runtimeapi.PodSandboxState_SANDBOX_NOTREADY}
	for name, f := range map[string]struct {
		filter *runtimeapi.PodSandboxFilter
		want   []string
	}{
		"none":             {nil, []string{a, b, c}},
		"empty":            {&runtimeapi.PodSandboxFilter{}, []string{a, b, c}},
		"id":               {&runtimeapi.PodSandboxFilter{Id: b}, []string{b}},
		"prefix":           {&runtimeapi.PodSandboxFilter{Id: b[:40]}, []string{b}},
		"unknown id":       {&runtimeapi.PodSandboxFilter{Id: "nope"}, nil},
		"ready":            {&runtimeapi.PodSandboxFilter{State: ready}, []string{a, b}},
		"not ready":        {&runtimeapi.PodSandboxFilter{State: notReady}, []string{c}},
		"label":            {&runtimeapi.PodSandboxFilter{LabelSelector: map[string]string{"colour": "red"}}, []string{a, b}},
		"labels are ANDed": {&runtimeapi.PodSandboxFilter{LabelSelector: map[string]string{"colour": "red", "app": "b"}}, []string{b}},
		"no such label":    {&runtimeapi.PodSandboxFilter{LabelSelector: map[string]string{"size": ""}}, nil},
		"all conditions":   {&runtimeapi.PodSandboxFilter{Id: a, State: notReady}, nil},
	} {
		t.Run("pods/"+name, func(t *testing.T) {
			r, err := d.ListPodSandbox(t.Context(), &runtimeapi.ListPodSandboxRequest{Filter: f.filter})
			must(t, err)
			wantIDs(t, ids(r.GetItems()), f.want)
		})
	}
	running := &runtimeapi.ContainerStateValue{State: runtimeapi.ContainerState_CONTAINER_RUNNING}
	for name, f := range map[string]struct {
		filter *runtimeapi.ContainerFilter
		want   []string
	}{
		"none":       {nil, []string{ca, cb}},
		"id":         {&runtimeapi.ContainerFilter{Id: cb}, []string{cb}},
		"prefix":     {&runtimeapi.ContainerFilter{Id: ca[:40]}, []string{ca}},
		"unknown id": {&runtimeapi.ContainerFilter{Id: "nope"}, nil},
		"pod":        {&runtimeapi.ContainerFilter{PodSandboxId: a}, []string{ca}},
		"pod prefix": {&runtimeapi.ContainerFilter{PodSandboxId: b[:40]}, []string{cb}},
		"empty pod":  {&runtimeapi.ContainerFilter{PodSandboxId: c}, nil},
		"no pod":     {&runtimeapi.ContainerFilter{PodSandboxId: "nope"}, nil},
		"other pod":  {&runtimeapi.ContainerFilter{Id: ca, PodSandboxId: b}, nil},
		"running":    {&runtimeapi.ContainerFilter{State: running}, []string{ca}},
		"label":      {&runtimeapi.ContainerFilter{LabelSelector: map[string]string{"app": "cb"}}, []string{cb}},
	} {
		t.Run("containers/"+name, func(t *testing.T) {
			r, err := d.ListContainers(t.Context(), &runtimeapi.ListContainersRequest{Filter: f.filter})
			must(t, err)
			wantIDs(t, ids(r.GetContainers()), f.want)
		})
	}
	t.Run("unknown state", func(t *testing.T) {
		_, err := d.ListPodSandbox(t.Context(),
			&runtimeapi.ListPodSandboxRequest{Filter: &runtimeapi.PodSandboxFilter{State: &runtimeapi.PodSandboxStateValue{State: 9}}})
		wantCode(t, err, codes.InvalidArgument, "filter.state")
		_, err = d.ListContainers(t.Context(),
			&runtimeapi.ListContainersRequest{Filter: &runtimeapi.ContainerFilter{State: &runtimeapi.ContainerStateValue{State: 9}}})
		wantCode(t, err, codes.InvalidArgument, "filter.state")
	})
}

func ids[T interface{ GetId() string }](items []T) []string {
	var ids []string
	for _, item := range items {
		ids = append(ids, item.GetId())
	}
	return ids
}

func wantIDs(t testing.TB, got, want []string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("IDs: got %q, want %q", got, want)
	}
}

func TestRuntimeStatus(t *testing.T) {
	d := open(t)
	condition := func(r *runtimeapi.StatusResponse, kind string) *runtimeapi.RuntimeCondition {
		i := slices.IndexFunc(r.GetStatus().GetConditions(), func(c *runtimeapi.RuntimeCondition) bool { return c.GetType() == kind })
		if i < 0 {
			t.Fatalf("the condition %s is missing", kind)
		}
		return r.GetStatus().GetConditions()[i]
	}
	r, err := d.Status(t.Context(), &runtimeapi.StatusRequest{Verbose: true})
	must(t, err)
	wantEqual(t, "runtime ready", condition(r, "RuntimeReady").GetStatus(), true)
	wantEqual(t, "network ready", condition(r, "NetworkReady").GetStatus(), true)
	wantEqual(t, "groups policy", r.GetFeatures().GetSupplementalGroupsPolicy(), true)
	features := map[string]*runtimeapi.RuntimeHandlerFeatures{}
	for _, h := range r.GetRuntimeHandlers() {
		features[h.GetName()] = h.GetFeatures()
	}
	wantEqual(t, "handlers, with the default and two aliases", len(features), 5)
	wantEqual(t, "the default has the features of linux", proto.Equal(features[""], features["linux"]), true)
	wantEqual(t, "recursive read-only of linux", features["linux"].GetRecursiveReadOnlyMounts(), true)
	wantEqual(t, "recursive read-only of unit", features["unit"].GetRecursiveReadOnlyMounts(), false)
	wantEqual(t, "user namespaces of unit", features["unit"].GetUserNamespaces(), true)
	for key, value := range r.GetInfo() {
		if !json.Valid([]byte(value)) {
			t.Errorf("info %s is not JSON: %s", key, value)
		}
	}

	d.network.notReady = errors.New("no configuration in /etc/cni/net.d")
	r, err = d.Status(t.Context(), &runtimeapi.StatusRequest{})
	must(t, err)
	c := condition(r, "NetworkReady")
	if c.GetStatus() || c.GetReason() != "NetworkNotReady" || !strings.Contains(c.GetMessage(), "/etc/cni/net.d") {
		t.Errorf("condition NetworkReady: got %v, want false with the directory", c)
	}
	wantEqual(t, "information without verbose", len(r.GetInfo()), 0)
}

func TestRuntimeConfig(t *testing.T) {
	d := open(t)
	r, err := d.RuntimeConfig(t.Context(), &runtimeapi.RuntimeConfigRequest{})
	must(t, err)
	wantEqual(t, "cgroup driver", r.GetLinux().GetCgroupDriver(), runtimeapi.CgroupDriver_SYSTEMD)
	wantEqual(t, "default cgroup driver", New(Config{}).cgroupDriver, runtimeapi.CgroupDriver_CGROUPFS)
	update := func(cidr string) error {
		_, err := d.UpdateRuntimeConfig(t.Context(),
			&runtimeapi.UpdateRuntimeConfigRequest{RuntimeConfig: &runtimeapi.RuntimeConfig{NetworkConfig: &runtimeapi.NetworkConfig{PodCidr: cidr}}})
		return err
	}
	must(t, update("10.88.0.0/16"))
	must(t, update(""))
	wantCode(t, update("10.88.0.0"), codes.InvalidArgument, "pod_cidr")
	wantCode(t, update("10.88.0.0/16,junk"), codes.InvalidArgument, "junk")
}

func TestVersion(t *testing.T) {
	d := open(t)
	v, err := d.Version(t.Context(), &runtimeapi.VersionRequest{Version: "0.1.0"})
	must(t, err)
	want := &runtimeapi.VersionResponse{Version: "0.1.0", RuntimeName: "tripod", RuntimeVersion: "0.1.0-test", RuntimeApiVersion: "v1"}
	if !proto.Equal(v, want) {
		t.Errorf("Version = %v, want %v", v, want)
	}
}

func TestWhatIsNotThereYetSaysSo(t *testing.T) {
	d := open(t)
	ctx := t.Context()
	for call, c := range map[string]struct {
		words string
		call  func() error
	}{
		"CheckpointContainer": {"checkpoint", func() error {
			_, err := d.CheckpointContainer(ctx, &runtimeapi.CheckpointContainerRequest{})
			return err
		}},
		"CheckpointPod": {"checkpoint", func() error { _, err := d.CheckpointPod(ctx, &runtimeapi.CheckpointPodRequest{}); return err }},
		"RestorePod":    {"restore", func() error { _, err := d.RestorePod(ctx, &runtimeapi.RestorePodRequest{}); return err }},
	} {
		t.Run(call, func(t *testing.T) { wantCode(t, c.call(), codes.Unimplemented, c.words) })
	}
}
