package cri

import (
	"context"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// handlers collects the handlers that the generated code registers, which the real gRPC server calls.
type handlers struct{ list []handler }

type handler struct {
	name string
	call func(ctx context.Context, raw []byte, prepare func(proto.Message)) error
}

func (h *handlers) RegisterService(desc *grpc.ServiceDesc, srv any) {
	for _, m := range desc.Methods {
		h.list = append(h.list, handler{m.MethodName, func(ctx context.Context, raw []byte, prepare func(proto.Message)) error {
			request := &fuzzRequest{raw: raw, prepare: prepare}
			_, err := m.Handler(srv, ctx, request.decode, interceptUnary)
			return request.outcome(err)
		}})
	}
	for _, s := range desc.Streams {
		h.list = append(h.list, handler{s.StreamName, func(ctx context.Context, raw []byte, prepare func(proto.Message)) error {
			request := &fuzzRequest{raw: raw, prepare: prepare}
			err := interceptStream(srv, &fuzzStream{ctx: ctx, request: request},
				&grpc.StreamServerInfo{FullMethod: s.StreamName, IsServerStream: true}, s.Handler)
			return request.outcome(err)
		}})
	}
}

// fuzzRequest holds the bytes of a request.
type fuzzRequest struct {
	raw     []byte
	prepare func(proto.Message)
	broken  bool
}

func (r *fuzzRequest) decode(into any) error {
	err := proto.Unmarshal(r.raw, into.(proto.Message))
	r.broken = err != nil
	r.prepare(into.(proto.Message))
	return err
}

// outcome returns the call's error. If the bytes are not a message of the request's type, gRPC itself returns Internal,
// which takes precedence.
func (r *fuzzRequest) outcome(err error) error {
	if r.broken {
		return nil
	}
	return err
}

// fuzzStream delivers one request and receives the answers.
type fuzzStream struct {
	ctx     context.Context
	request *fuzzRequest
}

func (s *fuzzStream) Context() context.Context     { return s.ctx }
func (s *fuzzStream) SetHeader(metadata.MD) error  { return nil }
func (s *fuzzStream) SendHeader(metadata.MD) error { return nil }
func (s *fuzzStream) SetTrailer(metadata.MD)       {}

func (s *fuzzStream) SendMsg(m any) error {
	if proto.Size(m.(proto.Message)) > MaxMessageSize {
		return status.Error(codes.ResourceExhausted, "too large a message")
	}
	return s.ctx.Err()
}

func (s *fuzzStream) RecvMsg(m any) error { return s.request.decode(m) }

// IDs are random, so a corpus cannot contain them: these words in a request stand for existing ones.
const (
	thePod       = "$pod"
	theContainer = "$container"
)

// FuzzRequests calls every RPC with any bytes. No call panics, and no error is Unknown or Internal, which mean defects.
func FuzzRequests(f *testing.F) {
	d := open(f)
	all := &handlers{}
	d.server.Register(all)
	for i, h := range all.list {
		for _, m := range seeds[h.name] {
			raw, err := proto.Marshal(m)
			must(f, err)
			f.Add(uint8(i), raw)
		}
		f.Add(uint8(i), []byte{})
	}
	f.Fuzz(func(t *testing.T, method uint8, raw []byte) {
		h := all.list[int(method)%len(all.list)]
		pod, container := d.ensurePod(t)
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		if h.name == "GetContainerEvents" {
			cancel() // it ends only with the client
		}
		err := h.call(ctx, raw, func(m proto.Message) { substitute(m.ProtoReflect(), pod, container) })
		switch code := status.Code(err); code {
		case codes.Internal, codes.Unknown:
			t.Errorf("%s: got code %s: %v", h.name, code, err)
		}
	})
}

// ensurePod makes sure that a pod with a running container exists, and removes pods of earlier requests.
func (d *door) ensurePod(t *testing.T) (pod, container string) {
	if pods := d.node.Pods(); len(pods) > 100 {
		for _, p := range pods {
			must(t, d.node.RemoveSandbox(t.Context(), p.ID))
		}
	}
	config := podConfig("the-pod")
	for attempt := range uint32(1000) {
		config.Metadata.Attempt = attempt
		id, err := d.node.RunSandbox(t.Context(), config, "")
		if err != nil {
			continue // an earlier request stopped it
		}
		if p, err := d.node.Pod(id); err == nil && len(p.Visible()) > 0 {
			return id, p.Visible()[0].ID
		}
		return id, d.running(t, id, "the-container")
	}
	t.Fatal("no attempt to make the pod succeeded")
	return "", ""
}

// substitute replaces the words in all of the message's strings with existing IDs.
func substitute(m protoreflect.Message, pod, container string) {
	m.Range(func(field protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case field.IsMap():
		case field.IsList():
			for i := range v.List().Len() {
				if field.Message() != nil {
					substitute(v.List().Get(i).Message(), pod, container)
				}
			}
		case field.Message() != nil:
			substitute(v.Message(), pod, container)
		case field.Kind() == protoreflect.StringKind && v.String() == thePod:
			m.Set(field, protoreflect.ValueOfString(pod))
		case field.Kind() == protoreflect.StringKind && v.String() == theContainer:
			m.Set(field, protoreflect.ValueOfString(container))
		}
		return true
	})
}

// seeds are requests that exercise each RPC, by its name.
var seeds = map[string][]proto.Message{
	"Version": {&runtimeapi.VersionRequest{Version: "0.1.0"}},
	"RunPodSandbox": {
		&runtimeapi.RunPodSandboxRequest{Config: podConfig("seed")},
		&runtimeapi.RunPodSandboxRequest{Config: podConfig("unit"), RuntimeHandler: "unit"},
		&runtimeapi.RunPodSandboxRequest{Config: podConfig("x"), RuntimeHandler: "nope"},
		&runtimeapi.RunPodSandboxRequest{Config: &runtimeapi.PodSandboxConfig{
			Metadata:     &runtimeapi.PodSandboxMetadata{Name: "n", Namespace: "ns", Uid: "u", Attempt: 3},
			PortMappings: []*runtimeapi.PortMapping{{Protocol: runtimeapi.Protocol_UDP, ContainerPort: 53, HostPort: 53, HostIp: "::1"}},
			Windows:      &runtimeapi.WindowsPodSandboxConfig{},
			Linux: &runtimeapi.LinuxPodSandboxConfig{Sysctls: map[string]string{"net.core.somaxconn": "1"},
				SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
					NamespaceOptions: &runtimeapi.NamespaceOption{Network: runtimeapi.NamespaceMode_NODE,
						UsernsOptions: &runtimeapi.UserNamespace{Uids: []*runtimeapi.IDMapping{{Length: 1}}}},
					RunAsUser: id(1), RunAsGroup: id(-1), SupplementalGroups: []int64{1},
					Seccomp: &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Localhost}}},
		}},
	},
	"StopPodSandbox":   {&runtimeapi.StopPodSandboxRequest{PodSandboxId: thePod}, &runtimeapi.StopPodSandboxRequest{PodSandboxId: "a"}},
	"RemovePodSandbox": {&runtimeapi.RemovePodSandboxRequest{PodSandboxId: thePod}, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: "a"}},
	"PodSandboxStatus": {&runtimeapi.PodSandboxStatusRequest{PodSandboxId: thePod, Verbose: true}},
	"ListPodSandbox": {&runtimeapi.ListPodSandboxRequest{Filter: &runtimeapi.PodSandboxFilter{Id: thePod,
		State: &runtimeapi.PodSandboxStateValue{State: 1}, LabelSelector: map[string]string{"app": "the-pod"}}}},
	"CreateContainer": {
		&runtimeapi.CreateContainerRequest{PodSandboxId: thePod, Config: containerConfig("c"), SandboxConfig: podConfig("the-pod")},
		&runtimeapi.CreateContainerRequest{PodSandboxId: thePod, Config: &runtimeapi.ContainerConfig{
			Metadata: &runtimeapi.ContainerMetadata{Name: "d", Attempt: 1}, Image: &runtimeapi.ImageSpec{Image: "busybox", UserSpecifiedImage: "x"},
			Envs: []*runtimeapi.KeyValue{{Key: "A", Value: []byte{0xff}}},
			Mounts: []*runtimeapi.Mount{{ContainerPath: "/a", HostPath: "/b"},
				{ContainerPath: "/c", Readonly: true, Image: &runtimeapi.ImageSpec{Image: "busybox"}, ImageSubPath: "x",
					MountOptions: []string{"noexec"}}},
			Devices: []*runtimeapi.Device{{HostPath: "/dev/null", ContainerPath: "/dev/x", Permissions: "rwm"}}, LogPath: "../x", StopSignal: 99,
			CDIDevices: []*runtimeapi.CDIDevice{{Name: "vendor.com/gpu=0"}},
			Linux: &runtimeapi.LinuxContainerConfig{Resources: &runtimeapi.LinuxContainerResources{CpuQuota: -1,
				HugepageLimits: []*runtimeapi.HugepageLimit{{PageSize: "2MB"}}, Unified: map[string]string{"memory.max": "1"}},
				SecurityContext: &runtimeapi.LinuxContainerSecurityContext{Privileged: true, RunAsUsername: "root",
					Capabilities:     &runtimeapi.Capability{AddCapabilities: []string{"ALL"}},
					NamespaceOptions: &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_TARGET, TargetId: theContainer}}},
		}},
	},
	"StartContainer": {&runtimeapi.StartContainerRequest{ContainerId: theContainer}},
	"StopContainer": {&runtimeapi.StopContainerRequest{ContainerId: theContainer, Timeout: 1},
		&runtimeapi.StopContainerRequest{ContainerId: theContainer, Timeout: -1}},
	"RemoveContainer": {&runtimeapi.RemoveContainerRequest{ContainerId: theContainer}},
	"ListContainers": {&runtimeapi.ListContainersRequest{Filter: &runtimeapi.ContainerFilter{Id: theContainer, PodSandboxId: thePod,
		State: &runtimeapi.ContainerStateValue{State: 1}, LabelSelector: map[string]string{"app": "x"}}}},
	"ContainerStatus": {&runtimeapi.ContainerStatusRequest{ContainerId: theContainer, Verbose: true}},
	"UpdateContainerResources": {
		&runtimeapi.UpdateContainerResourcesRequest{ContainerId: theContainer, Linux: &runtimeapi.LinuxContainerResources{CpuShares: 1},
			Annotations: map[string]string{"a": "b"}},
		&runtimeapi.UpdateContainerResourcesRequest{ContainerId: theContainer, Windows: &runtimeapi.WindowsContainerResources{}},
	},
	"ReopenContainerLog": {&runtimeapi.ReopenContainerLogRequest{ContainerId: theContainer}},
	"ExecSync": {&runtimeapi.ExecSyncRequest{ContainerId: theContainer, Cmd: []string{"echo", "x"}, Timeout: 1},
		&runtimeapi.ExecSyncRequest{ContainerId: theContainer, Cmd: []string{"nope"}, Timeout: -1}},
	"Exec": {&runtimeapi.ExecRequest{ContainerId: theContainer, Cmd: []string{"echo"}, Stdout: true, Stdin: true},
		&runtimeapi.ExecRequest{ContainerId: theContainer, Cmd: []string{"echo"}, Tty: true, Stderr: true}},
	"Attach": {&runtimeapi.AttachRequest{ContainerId: theContainer, Stdout: true},
		&runtimeapi.AttachRequest{ContainerId: theContainer, Tty: true, Stdin: true}},
	"PortForward": {&runtimeapi.PortForwardRequest{PodSandboxId: thePod, Port: []int32{80}},
		&runtimeapi.PortForwardRequest{PodSandboxId: thePod, Port: []int32{-1, 70000}}},
	"ContainerStats": {&runtimeapi.ContainerStatsRequest{ContainerId: theContainer}},
	"ListContainerStats": {&runtimeapi.ListContainerStatsRequest{Filter: &runtimeapi.ContainerStatsFilter{Id: theContainer,
		PodSandboxId: thePod}}},
	"PodSandboxStats": {&runtimeapi.PodSandboxStatsRequest{PodSandboxId: thePod}},
	"ListPodSandboxStats": {&runtimeapi.ListPodSandboxStatsRequest{Filter: &runtimeapi.PodSandboxStatsFilter{Id: thePod,
		LabelSelector: map[string]string{"a": ""}}}},
	"UpdateRuntimeConfig": {&runtimeapi.UpdateRuntimeConfigRequest{RuntimeConfig: &runtimeapi.RuntimeConfig{NetworkConfig: &runtimeapi.NetworkConfig{PodCidr: "10.0.0.0/8"}}}},
	"Status":              {&runtimeapi.StatusRequest{Verbose: true}},
	"CheckpointContainer": {&runtimeapi.CheckpointContainerRequest{ContainerId: theContainer, Location: "/tmp/x", Timeout: -1}},
	"CheckpointPod": {&runtimeapi.CheckpointPodRequest{PodSandboxId: thePod, OutputPath: "/tmp", ContainerIds: []string{theContainer},
		Options: map[string]string{"a": "b"}}},
	"RestorePod": {&runtimeapi.RestorePodRequest{CheckpointPath: "/tmp", Config: podConfig("x"),
		ContainerConfigs: []*runtimeapi.ContainerConfig{containerConfig("c")}}},
	"UpdatePodSandboxResources": {
		&runtimeapi.UpdatePodSandboxResourcesRequest{PodSandboxId: thePod, Overhead: &runtimeapi.LinuxContainerResources{CpuShares: 1}},
		&runtimeapi.UpdatePodSandboxResourcesRequest{PodSandboxId: thePod,
			Resources: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: -2}},
	},
	"StreamPodSandboxes":    {&runtimeapi.StreamPodSandboxesRequest{Filter: &runtimeapi.PodSandboxFilter{Id: thePod}}},
	"StreamContainers":      {&runtimeapi.StreamContainersRequest{Filter: &runtimeapi.ContainerFilter{PodSandboxId: thePod}}},
	"StreamContainerStats":  {&runtimeapi.StreamContainerStatsRequest{Filter: &runtimeapi.ContainerStatsFilter{PodSandboxId: thePod}}},
	"StreamPodSandboxStats": {&runtimeapi.StreamPodSandboxStatsRequest{Filter: &runtimeapi.PodSandboxStatsFilter{Id: thePod}}},
	"ListImages":            {&runtimeapi.ListImagesRequest{Filter: &runtimeapi.ImageFilter{Image: &runtimeapi.ImageSpec{Image: "busybox"}}}},
	"StreamImages":          {&runtimeapi.StreamImagesRequest{Filter: &runtimeapi.ImageFilter{Image: &runtimeapi.ImageSpec{Image: "!"}}}},
	"ImageStatus":           {&runtimeapi.ImageStatusRequest{Image: &runtimeapi.ImageSpec{Image: "busybox"}, Verbose: true}},
	"PullImage": {
		&runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: "r.example:5000/x@sha256:aa"},
			Auth: &runtimeapi.AuthConfig{Username: "u", Password: "p"}, SandboxConfig: podConfig("x")},
		&runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: "r.example:5000/x:tag", RuntimeHandler: "linux"},
			Auth: &runtimeapi.AuthConfig{Auth: "!", ServerAddress: "http://r.example"}},
	},
	"RemoveImage": {&runtimeapi.RemoveImageRequest{Image: &runtimeapi.ImageSpec{Image: "not-there"}}},
}

// The corpus must keep up with the API: each RPC whose request has fields has a seed.
func TestSeedsCoverEveryRPC(t *testing.T) {
	all := &handlers{}
	(&Server{}).Register(all)
	wantEqual(t, "RPCs", len(all.list), 43+2) // PullWithProgress and ImportModule are not part of the CRI
	services := runtimeapi.File_staging_src_k8s_io_cri_api_pkg_apis_runtime_v1_api_proto.Services()
	for i := range services.Len() {
		methods := services.Get(i).Methods()
		for j := range methods.Len() {
			m := methods.Get(j)
			if m.Input().Fields().Len() > 0 && len(seeds[string(m.Name())]) == 0 {
				t.Errorf("RPC %s has no seed", m.Name())
			}
		}
	}
}
