package cri

import (
	"fmt"
	"io"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// These tests are the rows of C1, "bad CRI requests", each against the real gRPC server: a clear error with the right
// code, and the node keeps working. FuzzRequests searches for unlisted ones.

func TestC1_NilConfigAndMetadata(t *testing.T) {
	d := open(t)
	pod := d.pod(t, "p")
	run := func(c *runtimeapi.PodSandboxConfig) error {
		_, err := d.RunPodSandbox(t.Context(), &runtimeapi.RunPodSandboxRequest{Config: c})
		return err
	}
	create := func(c *runtimeapi.ContainerConfig) error {
		_, err := d.CreateContainer(t.Context(), &runtimeapi.CreateContainerRequest{PodSandboxId: pod, Config: c})
		return err
	}
	wantCode(t, run(nil), codes.InvalidArgument, "config")
	wantCode(t, run(&runtimeapi.PodSandboxConfig{}), codes.InvalidArgument, "config.metadata")
	wantCode(t, create(nil), codes.InvalidArgument, "config")
	wantCode(t, create(&runtimeapi.ContainerConfig{}), codes.InvalidArgument, "config.metadata")
	wantCode(t, create(&runtimeapi.ContainerConfig{Metadata: &runtimeapi.ContainerMetadata{Name: "x"}}), codes.InvalidArgument,
		"config.image.image")
	_, err := d.PullImage(t.Context(), &runtimeapi.PullImageRequest{})
	wantCode(t, err, codes.InvalidArgument, "image.image")
	_, err = d.UpdateContainerResources(t.Context(), &runtimeapi.UpdateContainerResourcesRequest{ContainerId: "x"})
	wantCode(t, err, codes.InvalidArgument, "linux")

	// These may be nil: filters, the sandbox's configuration in CreateContainer, the runtime's.
	d.container(t, pod, "c")
	_, err = d.ListPodSandbox(t.Context(), &runtimeapi.ListPodSandboxRequest{})
	must(t, err)
	_, err = d.UpdateRuntimeConfig(t.Context(), &runtimeapi.UpdateRuntimeConfigRequest{})
	must(t, err)
}

func TestC1_EmptyNames(t *testing.T) {
	d := open(t)
	for _, name := range []string{"name", "namespace", "uid"} {
		c := podConfig("p")
		m := map[string]*string{"name": &c.Metadata.Name, "namespace": &c.Metadata.Namespace, "uid": &c.Metadata.Uid}
		*m[name] = ""
		_, err := d.RunPodSandbox(t.Context(), &runtimeapi.RunPodSandboxRequest{Config: c})
		wantCode(t, err, codes.InvalidArgument, "config.metadata."+name)
	}
	c := containerConfig("")
	_, err := d.CreateContainer(t.Context(), &runtimeapi.CreateContainerRequest{PodSandboxId: d.pod(t, "p"), Config: c})
	wantCode(t, err, codes.InvalidArgument, "config.metadata.name")
}

// An empty ID never means "any" or "the first".
func TestC1_EmptyIDs(t *testing.T) {
	d := open(t)
	d.running(t, d.pod(t, "p"), "c")
	ctx, pod, container := t.Context(), "pod_sandbox_id", "container_id"
	cmd := []string{"true"}
	for call, c := range map[string]struct {
		field string
		call  func() error
	}{
		"StopPodSandbox": {pod, func() error { _, err := d.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{}); return err }},
		"RemovePodSandbox": {pod, func() error {
			_, err := d.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{})
			return err
		}},
		"PodSandboxStatus": {pod, func() error {
			_, err := d.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{})
			return err
		}},
		"PodSandboxStats": {pod, func() error { _, err := d.PodSandboxStats(ctx, &runtimeapi.PodSandboxStatsRequest{}); return err }},
		"PortForward":     {pod, func() error { _, err := d.PortForward(ctx, &runtimeapi.PortForwardRequest{}); return err }},
		"CreateContainer": {pod, func() error {
			_, err := d.CreateContainer(ctx, &runtimeapi.CreateContainerRequest{Config: containerConfig("x")})
			return err
		}},
		"StartContainer":  {container, func() error { _, err := d.StartContainer(ctx, &runtimeapi.StartContainerRequest{}); return err }},
		"StopContainer":   {container, func() error { _, err := d.StopContainer(ctx, &runtimeapi.StopContainerRequest{}); return err }},
		"RemoveContainer": {container, func() error { _, err := d.RemoveContainer(ctx, &runtimeapi.RemoveContainerRequest{}); return err }},
		"ContainerStatus": {container, func() error { _, err := d.ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{}); return err }},
		"ContainerStats":  {container, func() error { _, err := d.ContainerStats(ctx, &runtimeapi.ContainerStatsRequest{}); return err }},
		"UpdateContainerResources": {container, func() error {
			_, err := d.UpdateContainerResources(ctx, &runtimeapi.UpdateContainerResourcesRequest{})
			return err
		}},
		"ReopenContainerLog": {container, func() error {
			_, err := d.ReopenContainerLog(ctx, &runtimeapi.ReopenContainerLogRequest{})
			return err
		}},
		"ExecSync": {container, func() error { _, err := d.ExecSync(ctx, &runtimeapi.ExecSyncRequest{Cmd: cmd}); return err }},
		"Exec":     {container, func() error { _, err := d.Exec(ctx, &runtimeapi.ExecRequest{Cmd: cmd, Stdout: true}); return err }},
		"Attach":   {container, func() error { _, err := d.Attach(ctx, &runtimeapi.AttachRequest{Stdout: true}); return err }},
	} {
		t.Run(call, func(t *testing.T) { wantCode(t, c.call(), codes.InvalidArgument, c.field+": must be set") })
	}
}

// A repeat returns the same pod or container; other parameters under the same name are refused.
func TestC1_DuplicateNames(t *testing.T) {
	d := open(t)
	pod := d.pod(t, "p")
	wantEqual(t, "the repeated pod", d.pod(t, "p"), pod)
	c := d.container(t, pod, "c")
	wantEqual(t, "the repeated container", d.container(t, pod, "c"), c)
	other := containerConfig("c")
	other.Args = []string{"-c", "true"}
	_, err := d.CreateContainer(t.Context(), &runtimeapi.CreateContainerRequest{PodSandboxId: pod, Config: other})
	wantCode(t, err, codes.AlreadyExists, c)
}

func TestC1_IDPrefixOfTwoPods(t *testing.T) {
	d := open(t)
	// Of seventeen hexadecimal IDs, two begin with the same digit.
	first := map[byte]string{}
	var prefix string
	for i := 0; prefix == ""; i++ {
		id := d.pod(t, fmt.Sprintf("p%d", i))
		if first[id[0]] != "" {
			prefix = id[:1]
		}
		first[id[0]] = id
	}
	_, err := d.PodSandboxStatus(t.Context(), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: prefix})
	wantCode(t, err, codes.InvalidArgument, prefix, "more than one")
	_, err = d.ListPodSandbox(t.Context(), &runtimeapi.ListPodSandboxRequest{Filter: &runtimeapi.PodSandboxFilter{Id: prefix}})
	wantCode(t, err, codes.InvalidArgument, prefix)
	_, err = d.StopPodSandbox(t.Context(), &runtimeapi.StopPodSandboxRequest{PodSandboxId: prefix})
	wantCode(t, err, codes.InvalidArgument, prefix)
	r, err := d.ListPodSandbox(t.Context(), &runtimeapi.ListPodSandboxRequest{Filter: &runtimeapi.PodSandboxFilter{
		State: &runtimeapi.PodSandboxStateValue{State: runtimeapi.PodSandboxState_SANDBOX_NOTREADY}}})
	must(t, err)
	wantEqual(t, "pods that were stopped", len(r.GetItems()), 0)
}

func TestC1_NegativeTimeout(t *testing.T) {
	d := open(t)
	id := d.running(t, d.pod(t, "p"), "c")
	_, err := d.StopContainer(t.Context(), &runtimeapi.StopContainerRequest{ContainerId: id, Timeout: -1})
	wantCode(t, err, codes.InvalidArgument, "timeout", "-1")
	_, err = d.ExecSync(t.Context(), &runtimeapi.ExecSyncRequest{ContainerId: id, Cmd: []string{"echo"}, Timeout: -1})
	wantCode(t, err, codes.InvalidArgument, "timeout", "-1")
	wantEqual(t, "state", d.status(t, id).GetState(), runtimeapi.ContainerState_CONTAINER_RUNNING)
}

func TestC1_NonUTF8Env(t *testing.T) {
	d := open(t)
	value := []byte("caf\xe9\xff")
	id := d.container(t, d.pod(t, "p"), "c", func(c *runtimeapi.ContainerConfig) {
		c.Envs = []*runtimeapi.KeyValue{{Key: "LATIN", Value: value}}
	})
	c, _, err := d.node.Container(id)
	must(t, err)
	wantEqual(t, "the variable", string(c.Config.GetEnvs()[0].GetValue()), string(value))
}

func TestC1_TenThousandLabels(t *testing.T) {
	d := open(t)
	many := func(labels map[string]string) {
		for i := range 10_000 {
			labels[fmt.Sprintf("example.com/label-%05d", i)] = "v"
		}
	}
	pod := d.pod(t, "p", func(c *runtimeapi.PodSandboxConfig) { many(c.Labels) })
	d.container(t, pod, "c", func(c *runtimeapi.ContainerConfig) { many(c.Labels) })
	d.pod(t, "other")
	r, err := d.ListPodSandbox(t.Context(), &runtimeapi.ListPodSandboxRequest{Filter: &runtimeapi.PodSandboxFilter{
		LabelSelector: map[string]string{"example.com/label-00000": "v", "example.com/label-09999": "v"}}})
	must(t, err)
	if len(r.GetItems()) != 1 || r.Items[0].Id != pod || len(r.Items[0].Labels) < 10_000 {
		t.Errorf("list by two of ten thousand labels: got %d pods, want %s", len(r.GetItems()), pod)
	}
}

// A list that exceeds a message is a clear error; the Stream* call works.
func TestC1_SixteenMiBList(t *testing.T) {
	d := open(t)
	const pods = 17
	big := strings.Repeat("x", 1<<20)
	for i := range pods {
		d.pod(t, fmt.Sprintf("p%d", i), func(c *runtimeapi.PodSandboxConfig) { c.Annotations["big"] = big })
	}
	_, err := d.ListPodSandbox(t.Context(), &runtimeapi.ListPodSandboxRequest{})
	wantCode(t, err, codes.ResourceExhausted, "17 items", "StreamPodSandboxes")

	stream, err := d.StreamPodSandboxes(t.Context(), &runtimeapi.StreamPodSandboxesRequest{})
	must(t, err)
	seen := map[string]bool{}
	for {
		r, err := stream.Recv()
		if err == io.EOF {
			break
		}
		must(t, err)
		for _, p := range r.GetPodSandboxes() {
			seen[p.GetId()] = true
		}
	}
	wantEqual(t, "pods in the stream", len(seen), pods)

	// gRPC rejects a request that exceeds a message.
	_, err = d.RunPodSandbox(t.Context(),
		&runtimeapi.RunPodSandboxRequest{Config: &runtimeapi.PodSandboxConfig{Hostname: strings.Repeat("x", MaxMessageSize)}})
	wantCode(t, err, codes.ResourceExhausted)
}

// A cluster that used another runtime has RuntimeClasses with its handlers.
func TestHandlerAliases(t *testing.T) {
	d := open(t)
	s, err := d.RuntimeServiceClient.Status(t.Context(), &runtimeapi.StatusRequest{})
	must(t, err)
	features := map[string]*runtimeapi.RuntimeHandlerFeatures{}
	for _, h := range s.GetRuntimeHandlers() {
		features[h.GetName()] = h.GetFeatures()
	}
	for alias, handler := range map[string]string{"runc": "linux", "kata": "unit"} {
		if features[alias] == nil || !proto.Equal(features[alias], features[handler]) {
			t.Errorf("features of the alias %s: got %v, want those of %s: %v", alias, features[alias], handler, features[handler])
		}
		config := podConfig(alias)
		made, err := d.RunPodSandbox(t.Context(), &runtimeapi.RunPodSandboxRequest{Config: config, RuntimeHandler: alias})
		must(t, err)
		got, err := d.PodSandboxStatus(t.Context(), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: made.GetPodSandboxId()})
		must(t, err)
		wantEqual(t, "runtime handler", got.GetStatus().GetRuntimeHandler(), alias)
		list, err := d.ListPodSandbox(t.Context(),
			&runtimeapi.ListPodSandboxRequest{Filter: &runtimeapi.PodSandboxFilter{Id: made.GetPodSandboxId()}})
		must(t, err)
		wantEqual(t, "runtime handler in the list", list.GetItems()[0].GetRuntimeHandler(), alias)
		image := &runtimeapi.ImageSpec{Image: "busybox", RuntimeHandler: alias}
		_, err = d.PullImage(t.Context(), &runtimeapi.PullImageRequest{Image: image})
		must(t, err)
		c := containerConfig("c")
		c.Image = image
		_, err = d.CreateContainer(t.Context(),
			&runtimeapi.CreateContainerRequest{PodSandboxId: made.GetPodSandboxId(), Config: c, SandboxConfig: config})
		must(t, err)
	}
}

func TestC1_UnknownHandler(t *testing.T) {
	d := open(t)
	_, err := d.RunPodSandbox(t.Context(), &runtimeapi.RunPodSandboxRequest{Config: podConfig("p"), RuntimeHandler: "nope"})
	wantCode(t, err, codes.InvalidArgument, "runtime_handler", "no runtime for handler", "nope", "linux")
	_, err = d.PullImage(t.Context(), &runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: "busybox", RuntimeHandler: "nope"}})
	wantCode(t, err, codes.InvalidArgument, "image.runtime_handler", "nope")
	c := containerConfig("c")
	c.Image.RuntimeHandler = "nope"
	_, err = d.CreateContainer(t.Context(), &runtimeapi.CreateContainerRequest{PodSandboxId: d.pod(t, "p"), Config: c})
	wantCode(t, err, codes.InvalidArgument, "config.image.runtime_handler", "no runtime for handler", "nope", "linux")
}

// A request asks only the backend that it names whether it is ready: another one can be slow to answer.
func TestOtherHandlersAreNotAsked(t *testing.T) {
	d := open(t)
	image := &runtimeapi.ImageSpec{Image: "busybox", RuntimeHandler: "linux"}
	_, err := d.PullImage(t.Context(), &runtimeapi.PullImageRequest{Image: image})
	must(t, err)
	pod, err := d.RunPodSandbox(t.Context(), &runtimeapi.RunPodSandboxRequest{Config: podConfig("p"), RuntimeHandler: "linux"})
	must(t, err)
	d.container(t, pod.GetPodSandboxId(), "c", func(c *runtimeapi.ContainerConfig) {
		c.Image = image
		c.Mounts = []*runtimeapi.Mount{{ContainerPath: "/a", HostPath: "/b", Readonly: true, RecursiveReadOnly: true}}
	})
	wantEqual(t, "questions to another backend", d.asked.Load(), 0)
	_, err = d.RuntimeServiceClient.Status(t.Context(), &runtimeapi.StatusRequest{})
	must(t, err)
	if d.asked.Load() == 0 {
		t.Error("Status did not ask the backend whether it is ready")
	}
}

// A handler whose backend is missing on this node is no mistake of the caller.
func TestC1_MissingHandler(t *testing.T) {
	d := open(t)
	_, err := d.RunPodSandbox(t.Context(), &runtimeapi.RunPodSandboxRequest{Config: podConfig("p"), RuntimeHandler: "gone"})
	wantCode(t, err, codes.FailedPrecondition, "runtime_handler", `no runtime handler "gone" on this node`, "it is not installed")
}

// An unknown field or enum value of a later API version is not mistaken for something else.
func TestC1_UnknownContainerOption(t *testing.T) {
	d := open(t)
	pod := d.pod(t, "p")
	create := func(change func(*runtimeapi.ContainerConfig)) error {
		c := containerConfig("c")
		change(c)
		_, err := d.CreateContainer(t.Context(), &runtimeapi.CreateContainerRequest{PodSandboxId: pod, Config: c})
		return err
	}
	wantCode(t, create(func(c *runtimeapi.ContainerConfig) { c.StopSignal = 1000 }), codes.InvalidArgument, "config.stop_signal", "1000")
	wantCode(t, create(func(c *runtimeapi.ContainerConfig) {
		c.Linux.SecurityContext = &runtimeapi.LinuxContainerSecurityContext{NamespaceOptions: &runtimeapi.NamespaceOption{Pid: 7}}
	}), codes.InvalidArgument, "namespace_options.pid")
	wantCode(t, create(func(c *runtimeapi.ContainerConfig) {
		c.Mounts = []*runtimeapi.Mount{{ContainerPath: "/a", HostPath: "/b", MountOptions: []string{"quantum"}}}
	}), codes.InvalidArgument, "config.mounts[0].mount_options[0]", "quantum")

	// A field with an unknown number is kept, as protobuf requires, and is harmless.
	config := containerConfig("future")
	future := protowire.AppendBytes(protowire.AppendTag(nil, 4000, protowire.BytesType), []byte("x"))
	config.ProtoReflect().SetUnknown(future)
	_, err := d.CreateContainer(t.Context(), &runtimeapi.CreateContainerRequest{PodSandboxId: pod, Config: config})
	must(t, err)
}

func TestC1_MalformedImageReference(t *testing.T) {
	d := open(t)
	for _, ref := range []string{"UPPER", "a b", "x@sha256:short", "http://r.example/x", "r.example:port/x", ":tag"} {
		_, err := d.PullImage(t.Context(), &runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: ref}})
		wantCode(t, err, codes.InvalidArgument, "image.image")
		_, err = d.ImageStatus(t.Context(), &runtimeapi.ImageStatusRequest{Image: &runtimeapi.ImageSpec{Image: ref}})
		wantCode(t, err, codes.InvalidArgument, "image.image")
	}
}

// C2: unknown IDs count as stopped and removed, but have no status.
func TestC2_UnknownIDs(t *testing.T) {
	d := open(t)
	ctx, unknown := t.Context(), strings.Repeat("0", 64)
	_, err := d.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: unknown})
	must(t, err)
	_, err = d.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: unknown})
	must(t, err)
	_, err = d.StopContainer(ctx, &runtimeapi.StopContainerRequest{ContainerId: unknown})
	must(t, err)
	_, err = d.RemoveContainer(ctx, &runtimeapi.RemoveContainerRequest{ContainerId: unknown})
	must(t, err)
	_, err = d.RemoveImage(ctx, &runtimeapi.RemoveImageRequest{Image: &runtimeapi.ImageSpec{Image: "not-there"}})
	must(t, err)
	image, err := d.ImageStatus(ctx, &runtimeapi.ImageStatusRequest{Image: &runtimeapi.ImageSpec{Image: "not-there"}})
	must(t, err)
	if image.GetImage() != nil {
		t.Errorf("ImageStatus of a missing image = %v, want none", image)
	}

	_, err = d.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: unknown})
	wantCode(t, err, codes.NotFound, unknown)
	_, err = d.ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: unknown})
	wantCode(t, err, codes.NotFound, unknown)
	_, err = d.StartContainer(ctx, &runtimeapi.StartContainerRequest{ContainerId: unknown})
	wantCode(t, err, codes.NotFound, unknown)
	_, err = d.CreateContainer(ctx, &runtimeapi.CreateContainerRequest{PodSandboxId: unknown, Config: containerConfig("c")})
	wantCode(t, err, codes.NotFound, unknown)
	_, err = d.ExecSync(ctx, &runtimeapi.ExecSyncRequest{ContainerId: unknown, Cmd: []string{"echo"}})
	wantCode(t, err, codes.NotFound, unknown)
	_, err = d.Exec(ctx, &runtimeapi.ExecRequest{ContainerId: unknown, Cmd: []string{"echo"}, Stdout: true})
	wantCode(t, err, codes.NotFound, unknown)
	_, err = d.PortForward(ctx, &runtimeapi.PortForwardRequest{PodSandboxId: unknown})
	wantCode(t, err, codes.NotFound, unknown)
	_, err = d.ContainerStats(ctx, &runtimeapi.ContainerStatsRequest{ContainerId: unknown})
	wantCode(t, err, codes.NotFound, unknown)
	_, err = d.PodSandboxStats(ctx, &runtimeapi.PodSandboxStatsRequest{PodSandboxId: unknown})
	wantCode(t, err, codes.NotFound, unknown)
}

// C3: a log path stays below the pod's log directory.
func TestC3_LogPathStaysInItsDirectory(t *testing.T) {
	d := open(t)
	pod := d.pod(t, "p")
	for _, path := range []string{"/etc/cron.d/x", "../x", "a/../../x", ".."} {
		c := containerConfig("c")
		c.LogPath = path
		_, err := d.CreateContainer(t.Context(), &runtimeapi.CreateContainerRequest{PodSandboxId: pod, Config: c})
		wantCode(t, err, codes.InvalidArgument, "config.log_path")
	}
	c := podConfig("q")
	c.LogDirectory = "/var/log/pods/../../../etc"
	_, err := d.RunPodSandbox(t.Context(), &runtimeapi.RunPodSandboxRequest{Config: c})
	wantCode(t, err, codes.InvalidArgument, "config.log_directory")
}
