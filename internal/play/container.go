package play

import (
	"fmt"
	"strings"

	"github.com/distribution/reference"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func (t *translator) planContainers(p *Pod) {
	taken := map[string]bool{}
	t.eachContainer(func(at *field.Path, c *corev1.Container, role Role) {
		if taken[c.Name] {
			t.errs = append(t.errs, field.Duplicate(at.Child("name"), c.Name))
		}
		taken[c.Name] = true
		if role == Sidecar && *c.RestartPolicy != corev1.ContainerRestartPolicyAlways {
			t.errs = append(t.errs,
				field.NotSupported(at.Child("restartPolicy"), *c.RestartPolicy, []corev1.ContainerRestartPolicy{corev1.ContainerRestartPolicyAlways}))
		}
		p.Containers = append(p.Containers, t.container(at, p, c, role))
	})
	if len(t.pod.Spec.Containers) == 0 {
		t.errs = append(t.errs, field.Required(field.NewPath("spec", "containers"), ""))
	}
}

func (t *translator) container(at *field.Path, p *Pod, c *corev1.Container, role Role) *Container {
	t.check(at.Child("name"), c.Name, validation.IsDNS1123Label(c.Name))
	_, errs := t.environment(at, c, nil)
	t.errs = append(t.errs, errs...)
	config := &runtimeapi.ContainerConfig{
		Metadata:   &runtimeapi.ContainerMetadata{Name: c.Name},
		WorkingDir: c.WorkingDir,
		Mounts:     append(t.mounts(at, c), p.hosts.mounts()...),
		LogPath:    c.Name + "/0.log",
		Stdin:      c.Stdin, StdinOnce: c.StdinOnce, Tty: c.TTY,
		StopSignal: t.stopSignal(at, c),
		Linux: &runtimeapi.LinuxContainerConfig{
			Resources:       t.containerResources(at, c),
			SecurityContext: t.containerSecurity(at, c),
		},
	}
	return &Container{
		Name: c.Name, Role: role, Image: c.Image, Pull: t.pullPolicy(at, c), NonRoot: t.needsNonRoot(at, c),
		config: func(ips []string) *runtimeapi.ContainerConfig {
			config := proto.CloneOf(config)
			env, _ := t.environment(at, c, ips) // its errors do not depend on the addresses
			config.Envs, config.Command, config.Args = env.list(), env.expandAll(c.Command), env.expandAll(c.Args)
			return config
		},
	}
}

func (t *translator) stopSignal(at *field.Path, c *corev1.Container) runtimeapi.Signal {
	if c.Lifecycle == nil || c.Lifecycle.StopSignal == nil {
		return runtimeapi.Signal_SIGNAL_RUNTIME_DEFAULT
	}
	name := string(*c.Lifecycle.StopSignal)
	number, known := runtimeapi.Signal_value["SIGNAL_"+name]
	if !known {
		t.invalid(at.Child("lifecycle", "stopSignal"), name, "is not the name of a signal")
	}
	return runtimeapi.Signal(number)
}

// pullPolicy returns the policy of the container, or the default one.
func (t *translator) pullPolicy(at *field.Path, c *corev1.Container) corev1.PullPolicy {
	if c.Image == "" {
		t.errs = append(t.errs, field.Required(at.Child("image"), ""))
		return ""
	}
	ref, err := reference.ParseDockerRef(c.Image)
	if err != nil {
		t.invalid(at.Child("image"), c.Image, "%v", err)
		return ""
	}
	oneOf(t, at.Child("imagePullPolicy"), c.ImagePullPolicy, corev1.PullAlways, corev1.PullIfNotPresent, corev1.PullNever)
	if c.ImagePullPolicy != "" {
		return c.ImagePullPolicy
	}
	if _, digested := ref.(reference.Digested); !digested && strings.HasSuffix(ref.String(), ":latest") {
		return corev1.PullAlways
	}
	return corev1.PullIfNotPresent
}

// mounts returns the mounts of the container's volumes.
func (t *translator) mounts(at *field.Path, c *corev1.Container) (mounts []*runtimeapi.Mount) {
	taken := map[string]bool{}
	for i, m := range c.VolumeMounts {
		at := at.Child("volumeMounts").Index(i)
		from, known := t.volumesByName[m.Name]
		if !known {
			t.errs = append(t.errs, field.NotFound(at.Child("name"), m.Name))
			continue
		}
		if taken[m.MountPath] {
			t.errs = append(t.errs, field.Duplicate(at.Child("mountPath"), m.MountPath))
		}
		taken[m.MountPath] = true
		if !strings.HasPrefix(m.MountPath, "/") {
			t.invalid(at.Child("mountPath"), m.MountPath, "must be an absolute path")
		}
		if from.absent {
			if m.MountPath != tokenPath {
				t.invalid(at.Child("mountPath"), m.MountPath, "there are no tokens without a cluster")
			}
			continue
		}
		mounts = append(mounts, &runtimeapi.Mount{
			ContainerPath: m.MountPath, HostPath: t.below(at.Child("subPath"), from, m.SubPath),
			Readonly:          m.ReadOnly || from.readonly,
			RecursiveReadOnly: t.recursive(at, m),
			Propagation:       t.propagation(at, c, m),
			SelinuxRelabel:    from.own,
		})
	}
	return mounts
}

func (t *translator) recursive(at *field.Path, m corev1.VolumeMount) bool {
	if m.RecursiveReadOnly == nil {
		return false
	}
	oneOf(t, at.Child("recursiveReadOnly"), *m.RecursiveReadOnly, corev1.RecursiveReadOnlyEnabled, corev1.RecursiveReadOnlyDisabled)
	enabled := *m.RecursiveReadOnly == corev1.RecursiveReadOnlyEnabled
	if enabled && !m.ReadOnly {
		t.invalid(at.Child("recursiveReadOnly"), *m.RecursiveReadOnly, "needs readOnly")
	}
	return enabled
}

var propagations = map[corev1.MountPropagationMode]runtimeapi.MountPropagation{
	corev1.MountPropagationNone:            runtimeapi.MountPropagation_PROPAGATION_PRIVATE,
	corev1.MountPropagationHostToContainer: runtimeapi.MountPropagation_PROPAGATION_HOST_TO_CONTAINER,
	corev1.MountPropagationBidirectional:   runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL,
}

func (t *translator) propagation(at *field.Path, c *corev1.Container, m corev1.VolumeMount) runtimeapi.MountPropagation {
	if m.MountPropagation == nil {
		return runtimeapi.MountPropagation_PROPAGATION_PRIVATE
	}
	at = at.Child("mountPropagation")
	mode := *m.MountPropagation
	oneOf(t, at, mode, corev1.MountPropagationNone, corev1.MountPropagationHostToContainer, corev1.MountPropagationBidirectional)
	if mode == corev1.MountPropagationBidirectional && !isSet(securityOf(c).Privileged) {
		t.invalid(at, mode, "needs a privileged container")
	}
	return propagations[mode]
}

// below returns the path of a file or directory of the volume. Only what no container can change may be named: a link
// that a container has made would lead out of the volume.
func (t *translator) below(at *field.Path, from source, subPath string) string {
	switch {
	case subPath == "":
		return from.path
	case !from.readonly:
		t.errs = append(t.errs, field.Forbidden(at, "only for volumes of ConfigMaps and Secrets"))
	case !from.has(subPath):
		t.invalid(at, subPath, "is not a file or directory of the volume")
	}
	return fmt.Sprint(from.path, "/", subPath)
}
