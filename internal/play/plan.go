package play

import (
	"cmp"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// defaultGrace is terminationGracePeriodSeconds of pods that set none, as in Kubernetes.
const defaultGrace = 30 * time.Second

// Options are what a plan needs from its caller.
type Options struct {
	NewUID    func() string // makes the UID of a pod
	NodeName  string
	LogDir    string // parent of the pods' log directories
	VolumeDir string // parent of the directories with the pods' volumes
}

// Pod is the plan of a pod: what to send to the node, in which order.
type Pod struct {
	Sandbox *runtimeapi.PodSandboxConfig
	Handler string // empty: the node's default
	// Containers are in the order in which they start.
	Containers []*Container
	// Grace is the time that the containers have to end.
	Grace time.Duration
	// Ignored names the fields of the manifest that are set and have no effect on a node alone, sorted.
	Ignored []string

	dir       string // of the volumes
	volumes   []*volume
	hostPaths []hostPath
	hosts     *hosts // nil: the node's own file suffices
}

// Name returns the pod's namespace and name.
func (p *Pod) Name() string {
	return p.Sandbox.GetMetadata().GetNamespace() + "/" + p.Sandbox.GetMetadata().GetName()
}

// Role says when a container starts and what follows its end.
type Role string

const (
	Init    Role = "init"    // must end successfully before the next one starts
	Sidecar Role = "sidecar" // starts in the order of the init containers and goes on
	Regular Role = "regular" // starts after all init containers
)

// Container is the plan of a container.
type Container struct {
	Name  string
	Role  Role
	Image string
	Pull  corev1.PullPolicy
	// NonRoot is set if the image must name a user that is not root.
	NonRoot bool

	config func(ips []string) *runtimeapi.ContainerConfig
}

// Config returns the container's message for CreateContainer. The image is the pulled one; the addresses are those that
// RunPodSandbox gave the pod.
func (c *Container) Config(image *runtimeapi.Image, ips []string) *runtimeapi.ContainerConfig {
	config := c.config(ips)
	config.Image = &runtimeapi.ImageSpec{Image: image.GetId(), UserSpecifiedImage: c.Image}
	if sc := config.GetLinux().GetSecurityContext(); sc.GetRunAsUser() == nil {
		sc.RunAsUser, sc.RunAsUsername = userOf(image)
	}
	return config
}

// Plan translates all pods. Its error names every field that is wrong or not supported.
func (m *Manifests) Plan(o Options) ([]*Pod, error) {
	var pods []*Pod
	var problems []string
	for _, pod := range m.pods {
		t := &translator{Manifests: m, options: o, pod: pod, uid: o.NewUID()}
		t.errs, t.ignored = compare(pod)
		pods = append(pods, t.plan())
		for _, e := range t.errs {
			problems = append(problems, fmt.Sprintf("pod %s/%s: %s", pod.Namespace, pod.Name, e.Error()))
		}
	}
	if problems != nil {
		return nil, fmt.Errorf("%s: %w", strings.Join(problems, "\n"), errdefs.ErrInvalidArgument)
	}
	return pods, nil
}

// translator translates one pod and collects what is wrong with it.
type translator struct {
	*Manifests
	options Options
	pod     *corev1.Pod
	uid     string
	errs    field.ErrorList
	ignored map[string]bool // names of fields

	volumesByName map[string]source
}

func (t *translator) invalid(at *field.Path, value any, format string, args ...any) {
	t.errs = append(t.errs, field.Invalid(at, value, fmt.Sprintf(format, args...)))
}

// oneOf refuses a value that is neither empty nor one of those given.
func oneOf[T ~string](t *translator, at *field.Path, value T, values ...T) {
	if value == "" {
		return
	}
	for _, v := range values {
		if v == value {
			return
		}
	}
	t.errs = append(t.errs, field.NotSupported(at, value, values))
}

// check adds the messages of a function of k8s.io/apimachinery's validation.
func (t *translator) check(at *field.Path, value string, messages []string) {
	for _, m := range messages {
		t.invalid(at, value, "%s", m)
	}
}

func (t *translator) plan() *Pod {
	spec := &t.pod.Spec
	p := &Pod{Grace: defaultGrace, dir: path.Join(t.options.VolumeDir, t.uid)}
	if spec.RuntimeClassName != nil {
		p.Handler = *spec.RuntimeClassName
	}
	if g := spec.TerminationGracePeriodSeconds; g != nil {
		p.Grace = time.Duration(*g) * time.Second
		if *g < 0 {
			t.invalid(field.NewPath("spec", "terminationGracePeriodSeconds"), *g, "must not be negative")
		}
	}
	t.checkPod()
	p.Sandbox = t.sandbox()
	t.planVolumes(p)
	t.planHosts(p)
	t.planContainers(p)
	p.Ignored = slices.Sorted(maps.Keys(t.ignored))
	return p
}

// checkPod checks the values of fields that have only one meaning on a node alone.
func (t *translator) checkPod() {
	spec, at := &t.pod.Spec, field.NewPath("spec")
	meta := field.NewPath("metadata")
	if t.pod.Name == "" {
		t.errs = append(t.errs, field.Required(meta.Child("name"), ""))
	} else {
		t.check(meta.Child("name"), t.pod.Name, validation.IsDNS1123Subdomain(t.pod.Name))
	}
	t.check(meta.Child("namespace"), t.pod.Namespace, validation.IsDNS1123Label(t.pod.Namespace))
	oneOf(t, at.Child("restartPolicy"), spec.RestartPolicy, corev1.RestartPolicyAlways, corev1.RestartPolicyNever)
	if spec.OS != nil {
		oneOf(t, at.Child("os", "name"), spec.OS.Name, corev1.Linux)
	}
	if spec.Hostname != "" {
		t.check(at.Child("hostname"), spec.Hostname, validation.IsDNS1123Label(spec.Hostname))
	}
	if p := t.podSecurity().SupplementalGroupsPolicy; p != nil {
		oneOf(t, at.Child("securityContext", "supplementalGroupsPolicy"), *p, corev1.SupplementalGroupsPolicyMerge,
			corev1.SupplementalGroupsPolicyStrict)
	}
	if s := spec.ShareProcessNamespace; s != nil && *s && spec.HostPID {
		t.invalid(at.Child("shareProcessNamespace"), true, "must not be set with hostPID")
	}
}

func (t *translator) sandbox() *runtimeapi.PodSandboxConfig {
	c := &runtimeapi.PodSandboxConfig{
		Metadata:     &runtimeapi.PodSandboxMetadata{Name: t.pod.Name, Namespace: t.pod.Namespace, Uid: t.uid},
		LogDirectory: path.Join(t.options.LogDir, t.pod.Namespace+"_"+t.pod.Name+"_"+t.uid),
		Labels:       t.pod.Labels,
		Annotations:  t.pod.Annotations,
		DnsConfig:    t.dns(),
		PortMappings: t.ports(),
		Linux: &runtimeapi.LinuxPodSandboxConfig{
			SecurityContext: t.sandboxSecurity(),
			Sysctls:         t.sysctls(),
			Resources:       t.podResources(),
			Overhead:        t.overhead(),
		},
	}
	if !t.pod.Spec.HostNetwork {
		c.Hostname = cmp.Or(t.pod.Spec.Hostname, hostname(t.pod.Name))
	}
	return c
}

// hostname converts a pod's name, which can be longer than a host name.
func hostname(name string) string { return strings.TrimRight(name[:min(len(name), 63)], "-.") }

// dns returns nil for the node's resolvers.
func (t *translator) dns() *runtimeapi.DNSConfig {
	spec, at := &t.pod.Spec, field.NewPath("spec")
	oneOf(t, at.Child("dnsPolicy"), spec.DNSPolicy, corev1.DNSClusterFirst, corev1.DNSDefault, corev1.DNSNone)
	c := spec.DNSConfig
	switch {
	case spec.DNSPolicy != corev1.DNSNone && c != nil:
		t.invalid(at.Child("dnsPolicy"), spec.DNSPolicy, "must be None with dnsConfig")
		return nil
	case spec.DNSPolicy != corev1.DNSNone:
		return nil
	case c == nil || len(c.Nameservers) == 0:
		t.errs = append(t.errs, field.Required(at.Child("dnsConfig", "nameservers"), "with dnsPolicy None"))
		return nil
	}
	config := &runtimeapi.DNSConfig{Servers: c.Nameservers, Searches: c.Searches}
	for _, o := range c.Options {
		option := o.Name
		if o.Value != nil && *o.Value != "" {
			option += ":" + *o.Value
		}
		config.Options = append(config.Options, option)
	}
	return config
}

// ports returns the ports of all containers.
func (t *translator) ports() (mappings []*runtimeapi.PortMapping) {
	t.eachContainer(func(at *field.Path, c *corev1.Container, _ Role) {
		for i, p := range c.Ports {
			at := at.Child("ports").Index(i)
			oneOf(t, at.Child("protocol"), p.Protocol, corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP)
			t.check(at.Child("containerPort"), fmt.Sprint(p.ContainerPort), validation.IsValidPortNum(int(p.ContainerPort)))
			if p.HostPort != 0 {
				t.check(at.Child("hostPort"), fmt.Sprint(p.HostPort), validation.IsValidPortNum(int(p.HostPort)))
			}
			if t.pod.Spec.HostNetwork && p.HostPort != 0 && p.HostPort != p.ContainerPort {
				t.invalid(at.Child("hostPort"), p.HostPort, "must be the containerPort with hostNetwork")
			}
			if p.HostIP != "" {
				t.errs = append(t.errs, validation.IsValidIP(at.Child("hostIP"), p.HostIP)...)
			}
			mappings = append(mappings, &runtimeapi.PortMapping{
				Protocol: runtimeapi.Protocol(runtimeapi.Protocol_value[string(p.Protocol)]), HostIp: p.HostIP,
				HostPort: p.HostPort, ContainerPort: p.ContainerPort,
			})
		}
	})
	return mappings
}

// eachContainer calls the function for each container in the order in which they start.
func (t *translator) eachContainer(do func(at *field.Path, c *corev1.Container, role Role)) {
	at := field.NewPath("spec", "initContainers")
	for i := range t.pod.Spec.InitContainers {
		c, role := &t.pod.Spec.InitContainers[i], Init
		if c.RestartPolicy != nil {
			role = Sidecar
		}
		do(at.Index(i), c, role)
	}
	at = field.NewPath("spec", "containers")
	for i := range t.pod.Spec.Containers {
		do(at.Index(i), &t.pod.Spec.Containers[i], Regular)
	}
}
