package play

import (
	"os"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"sigs.k8s.io/yaml"

	"github.com/tripod-run/tripod/test/sandboxtest/corpus"
)

// TestLikeAKubelet compares plans with what a real kubelet sent for the same pods (test/sandboxtest/corpus), except what
// only a kubelet knows.
func TestLikeAKubelet(t *testing.T) {
	text, err := os.ReadFile("../../test/sandboxtest/corpus/pods.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var pods []struct {
		Name           string
		Pod            corev1.Pod
		ImageUID       *int64
		SeccompDefault bool
	}
	if err := yaml.Unmarshal(text, &pods); err != nil {
		t.Fatal(err)
	}
	compared := 0
	for _, p := range pods {
		p.Pod.Namespace = "default"
		m := &Manifests{pods: []*corev1.Pod{&p.Pod}}
		o := options()
		o.NewUID = func() string { return "b5a69788-7766-4544-a332-211000f1e2d3" }
		plans, err := m.Plan(o)
		if err != nil || p.SeccompDefault {
			continue // TestRefused has what is refused
		}
		at := slices.IndexFunc(corpus.Pods(t), func(c corpus.Pod) bool { return c.Name == strings.ReplaceAll(p.Name, " ", "-") })
		want := corpus.Pods(t)[at]
		compared++
		image := &runtimeapi.Image{Id: want.Container.GetImage().GetImage(), Uid: userID(p.ImageUID)}
		got := plans[0].Containers[0].Config(image, nil)
		withoutKubelet(want.Sandbox, want.Container, plans[0].Sandbox)
		got.Mounts = slices.DeleteFunc(got.GetMounts(), isKubeletFile)
		if !proto.Equal(plans[0].Sandbox, want.Sandbox) {
			t.Errorf("%s: sandbox:\n%s\nthe kubelet's:\n%s", p.Name, prototext.Format(plans[0].Sandbox), prototext.Format(want.Sandbox))
		}
		if !proto.Equal(got, want.Container) {
			t.Errorf("%s: container:\n%s\nthe kubelet's:\n%s", p.Name, prototext.Format(got), prototext.Format(want.Container))
		}
	}
	if compared < 16 {
		t.Errorf("compared %d pods of the corpus, want at least 16", compared)
	}
}

// withoutKubelet removes from a kubelet's messages what it adds for itself: labels, annotations, its cgroups, the DNS and
// the resources that it computes, and its files.
func withoutKubelet(sandbox *runtimeapi.PodSandboxConfig, c *runtimeapi.ContainerConfig, ours *runtimeapi.PodSandboxConfig) {
	labels := map[string]string{}
	for k, v := range sandbox.GetLabels() {
		if !strings.HasPrefix(k, "io.kubernetes.") {
			labels[k] = v
		}
	}
	sandbox.Labels, sandbox.Annotations, c.Labels, c.Annotations = labels, nil, nil, nil
	if ours.GetDnsConfig() == nil {
		sandbox.DnsConfig = nil
	}
	sandbox.Linux.CgroupParent = ""
	sandbox.Linux.Overhead.Unified, sandbox.Linux.Resources.Unified = nil, nil
	if ours.GetLinux().GetOverhead() == nil {
		sandbox.Linux.Overhead = nil
	}
	if ours.GetLinux().GetResources() == nil {
		sandbox.Linux.Resources = nil
	}
	r := c.GetLinux().GetResources()
	r.OomScoreAdj, r.HugepageLimits, r.MemorySwapLimitInBytes, r.Unified, r.CpusetCpus = 0, nil, 0, nil, ""
	sc := c.GetLinux().GetSecurityContext()
	sc.MaskedPaths, sc.ReadonlyPaths = nil, nil // the node's lists are the same
	sc.ApparmorProfile = ""                     // the deprecated form
	// Without a profile, the kubelet asks for none, and here the node decides.
	if sc.GetSeccomp().GetProfileType() == runtimeapi.SecurityProfile_Unconfined &&
		sc.GetApparmor().GetProfileType() != runtimeapi.SecurityProfile_Unconfined {
		sc.Seccomp = nil
	}
	for _, o := range []*runtimeapi.NamespaceOption{sandbox.GetLinux().GetSecurityContext().GetNamespaceOptions(), sc.GetNamespaceOptions()} {
		if o.GetUsernsOptions().GetMode() == runtimeapi.NamespaceMode_NODE {
			o.UsernsOptions = nil
		}
	}
	c.Mounts = slices.DeleteFunc(c.GetMounts(), isKubeletFile)
	for _, m := range c.GetMounts() {
		_, name, _ := strings.Cut(m.GetHostPath(), "kubernetes.io~empty-dir/")
		m.HostPath, m.SelinuxRelabel = "/volumes/"+sandbox.GetMetadata().GetUid()+"/volumes/"+name, true
	}
}

// isKubeletFile reports whether the mount is a file that a kubelet makes for each container.
func isKubeletFile(m *runtimeapi.Mount) bool {
	return m.GetContainerPath() == "/etc/hosts" || m.GetContainerPath() == "/dev/termination-log"
}
