package play

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func (t *translator) podSecurity() *corev1.PodSecurityContext {
	if sc := t.pod.Spec.SecurityContext; sc != nil {
		return sc
	}
	return &corev1.PodSecurityContext{}
}

func (t *translator) sandboxSecurity() *runtimeapi.LinuxSandboxSecurityContext {
	sc := t.podSecurity()
	group := sc.RunAsGroup
	if sc.RunAsUser == nil {
		group = nil // the CRI knows no group without a user
	}
	return &runtimeapi.LinuxSandboxSecurityContext{
		NamespaceOptions:         t.namespaces(),
		SelinuxOptions:           seLinux(sc.SELinuxOptions),
		RunAsUser:                userID(sc.RunAsUser),
		RunAsGroup:               userID(group),
		SupplementalGroups:       t.groups(),
		SupplementalGroupsPolicy: t.groupsPolicy(),
		Privileged:               t.hasPrivileged(),
		Seccomp:                  &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault},
	}
}

func (t *translator) namespaces() *runtimeapi.NamespaceOption {
	spec := &t.pod.Spec
	mode := func(host bool) runtimeapi.NamespaceMode {
		if host {
			return runtimeapi.NamespaceMode_NODE
		}
		return runtimeapi.NamespaceMode_POD
	}
	o := &runtimeapi.NamespaceOption{Network: mode(spec.HostNetwork), Ipc: mode(spec.HostIPC), Pid: runtimeapi.NamespaceMode_CONTAINER}
	switch {
	case spec.HostPID:
		o.Pid = runtimeapi.NamespaceMode_NODE
	case spec.ShareProcessNamespace != nil && *spec.ShareProcessNamespace:
		o.Pid = runtimeapi.NamespaceMode_POD
	}
	if spec.HostUsers != nil && !*spec.HostUsers {
		o.UsernsOptions = &runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_POD}
	}
	return o
}

// containerSecurity merges the security contexts of the pod and the container, which takes precedence.
func (t *translator) containerSecurity(at *field.Path, c *corev1.Container) *runtimeapi.LinuxContainerSecurityContext {
	pod, sc := t.podSecurity(), securityOf(c)
	at = at.Child("securityContext")
	if sc.ProcMount != nil {
		oneOf(t, at.Child("procMount"), *sc.ProcMount, corev1.DefaultProcMount)
	}
	config := &runtimeapi.LinuxContainerSecurityContext{
		NamespaceOptions:         t.namespaces(),
		Privileged:               isSet(sc.Privileged),
		SelinuxOptions:           seLinux(or(sc.SELinuxOptions, pod.SELinuxOptions)),
		RunAsUser:                userID(or(sc.RunAsUser, pod.RunAsUser)),
		RunAsGroup:               userID(or(sc.RunAsGroup, pod.RunAsGroup)),
		ReadonlyRootfs:           isSet(sc.ReadOnlyRootFilesystem),
		SupplementalGroups:       t.groups(),
		SupplementalGroupsPolicy: t.groupsPolicy(),
		NoNewPrivs:               sc.AllowPrivilegeEscalation != nil && !*sc.AllowPrivilegeEscalation,
		Seccomp:                  t.seccomp(at, or(sc.SeccompProfile, pod.SeccompProfile)),
		Apparmor:                 t.appArmor(at, or(sc.AppArmorProfile, pod.AppArmorProfile)),
	}
	if config.Privileged && config.NoNewPrivs {
		t.invalid(at.Child("allowPrivilegeEscalation"), false, "must not be false for a privileged container")
	}
	if caps := sc.Capabilities; caps != nil {
		config.Capabilities = &runtimeapi.Capability{AddCapabilities: names(caps.Add), DropCapabilities: names(caps.Drop)}
	}
	return config
}

func securityOf(c *corev1.Container) *corev1.SecurityContext {
	if c.SecurityContext != nil {
		return c.SecurityContext
	}
	return &corev1.SecurityContext{}
}

// needsNonRoot reports whether the image must name a user that is not root.
func (t *translator) needsNonRoot(at *field.Path, c *corev1.Container) bool {
	pod, sc := t.podSecurity(), securityOf(c)
	if !isSet(or(sc.RunAsNonRoot, pod.RunAsNonRoot)) {
		return false
	}
	user := or(sc.RunAsUser, pod.RunAsUser)
	if user != nil && *user == 0 {
		t.invalid(at.Child("securityContext", "runAsUser"), 0, "is root, with runAsNonRoot")
	}
	return user == nil
}

// hasPrivileged reports whether a container is privileged: then the pod must be, too.
func (t *translator) hasPrivileged() (found bool) {
	t.eachContainer(func(_ *field.Path, c *corev1.Container, _ Role) { found = found || isSet(securityOf(c).Privileged) })
	return found
}

// userOf returns the user of an image as a kubelet sends it: an ID or a name; root if the image has none. The CRI knows no
// group without a user, and with it the group of the image's USER has no effect.
func userOf(image *runtimeapi.Image) (*runtimeapi.Int64Value, string) {
	if image.GetUid() == nil && image.GetUsername() == "" {
		return &runtimeapi.Int64Value{}, ""
	}
	return image.GetUid(), image.GetUsername()
}

func (t *translator) groups() []int64 {
	sc := t.podSecurity()
	if sc.FSGroup == nil {
		return sc.SupplementalGroups
	}
	return append([]int64{*sc.FSGroup}, sc.SupplementalGroups...)
}

func (t *translator) groupsPolicy() runtimeapi.SupplementalGroupsPolicy {
	policy := t.podSecurity().SupplementalGroupsPolicy
	if policy == nil {
		return runtimeapi.SupplementalGroupsPolicy_Merge
	}
	return runtimeapi.SupplementalGroupsPolicy(runtimeapi.SupplementalGroupsPolicy_value[string(*policy)])
}

// profileOf returns a profile of a type, which Kubernetes and the CRI name alike.
func profileOf(name string) *runtimeapi.SecurityProfile {
	number := runtimeapi.SecurityProfile_ProfileType_value[name]
	return &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_ProfileType(number)}
}

// seccomp returns nil for the node's default.
func (t *translator) seccomp(at *field.Path, p *corev1.SeccompProfile) *runtimeapi.SecurityProfile {
	if p == nil {
		return nil
	}
	oneOf(t, at.Child("seccompProfile", "type"), p.Type, corev1.SeccompProfileTypeRuntimeDefault, corev1.SeccompProfileTypeUnconfined)
	return profileOf(string(p.Type))
}

// appArmor returns nil for the node's default.
func (t *translator) appArmor(at *field.Path, p *corev1.AppArmorProfile) *runtimeapi.SecurityProfile {
	if p == nil {
		return nil
	}
	at = at.Child("appArmorProfile")
	oneOf(t, at.Child("type"), p.Type, corev1.AppArmorProfileTypeRuntimeDefault, corev1.AppArmorProfileTypeUnconfined,
		corev1.AppArmorProfileTypeLocalhost)
	profile := profileOf(string(p.Type))
	if p.LocalhostProfile != nil {
		profile.LocalhostRef = *p.LocalhostProfile
	}
	if (p.Type == corev1.AppArmorProfileTypeLocalhost) != (profile.LocalhostRef != "") {
		t.invalid(at.Child("localhostProfile"), profile.LocalhostRef, "belongs to the type Localhost, which needs it")
	}
	return profile
}

func (t *translator) sysctls() map[string]string {
	all := map[string]string{}
	for _, s := range t.podSecurity().Sysctls {
		all[s.Name] = s.Value
	}
	return all
}

func seLinux(o *corev1.SELinuxOptions) *runtimeapi.SELinuxOption {
	if o == nil {
		return nil
	}
	return &runtimeapi.SELinuxOption{User: o.User, Role: o.Role, Type: o.Type, Level: o.Level}
}

func userID(id *int64) *runtimeapi.Int64Value {
	if id == nil {
		return nil
	}
	return &runtimeapi.Int64Value{Value: *id}
}

func names(capabilities []corev1.Capability) (all []string) {
	for _, c := range capabilities {
		all = append(all, fmt.Sprint(c))
	}
	return all
}

func isSet(b *bool) bool { return b != nil && *b }

// or returns the first pointer that is not nil.
func or[T any](first, second *T) *T {
	if first != nil {
		return first
	}
	return second
}
