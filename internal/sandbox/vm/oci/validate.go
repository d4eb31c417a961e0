package oci

import (
	"errors"
	"fmt"
	"strings"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/utils/cpuset"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/fields"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/annotations"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/validate"
	"github.com/tripod-run/tripod/internal/stream"
)

// machineAnnotations are the settings of a machine that pods of OCI containers can have too, by our own and Virtlet's names.
var machineAnnotations = []struct{ own, virtlet string }{{"vcpu-count", "VirtletVCPUCount"}, {"cpu-model", "VirtletCPUModel"}}

// Validate implements sandbox.Backend. It refuses what a guest cannot have. All other fields are checked in the guest, by
// the backend that runs the containers there.
func (o *Backend) Validate(p *sandbox.Pod, c *sandbox.Container) error {
	if !cgroup.ID().MatchString(p.ID) {
		return fmt.Errorf("pod ID %q is not 64 lower-case hex digits: %w", p.ID, errdefs.ErrInvalidArgument)
	}
	if err := o.annotations.Check(p, c); err != nil {
		return err
	}
	if c == nil {
		return o.validatePod(p)
	}
	if !cgroup.ID().MatchString(c.ID) {
		return fmt.Errorf("container ID %q is not 64 lower-case hex digits: %w", c.ID, errdefs.ErrInvalidArgument)
	}
	sc := c.Config.GetLinux().GetSecurityContext()
	_, logErr := stream.LogPath(p.Config.GetLogDirectory(), c.Config.GetLogPath())
	return errors.Join(logErr, validateSecurity(sc.GetNamespaceOptions(), sc.GetSeccomp(), sc.GetApparmor()), validateContainer(c.Config),
		validateHardware(c.Config.GetLinux().GetResources()))
}

// validateHardware checks the resources that mean the node's hardware.
func validateHardware(res *runtimeapi.LinuxContainerResources) error {
	for field, list := range map[string]string{"cpuset_cpus": res.GetCpusetCpus(), "cpuset_mems": res.GetCpusetMems()} {
		if _, err := cpuset.Parse(list); err != nil {
			return fields.Invalid("linux.resources."+field, "%q is not a list like 0-4,9", list)
		}
	}
	for _, limit := range res.GetHugepageLimits() {
		if limit.GetLimit() > 0 {
			return fields.Unsupported("linux.resources.hugepage_limits", "%d bytes of pages of %s: a guest has none of the node's huge pages",
				limit.GetLimit(), limit.GetPageSize())
		}
	}
	return nil
}

func (o *Backend) validatePod(p *sandbox.Pod) error {
	for key := range p.Config.GetAnnotations() {
		if name, ours := strings.CutPrefix(key, annotations.Prefix); ours && !supported(name) {
			return fields.Unsupported("annotation "+key, "it sets up a disk machine; a machine of OCI containers has no such setting")
		}
	}
	mp, mc := o.machine(p)
	if _, _, err := o.machines.Requested(mp, mc); err != nil {
		return err
	}
	if err := validate.Resources(mc.Config.GetLinux().GetResources()); err != nil {
		return err
	}
	if err := validateHardware(p.Config.GetLinux().GetResources()); err != nil {
		return err
	}
	sc := p.Config.GetLinux().GetSecurityContext()
	return validateSecurity(sc.GetNamespaceOptions(), sc.GetSeccomp(), sc.GetApparmor())
}

func supported(name string) bool {
	for _, a := range machineAnnotations {
		if a.own == name {
			return true
		}
	}
	return false
}

func validateSecurity(o *runtimeapi.NamespaceOption, seccomp, apparmor *runtimeapi.SecurityProfile) error {
	const namespaces = "linux.security_context.namespace_options."
	switch {
	case o.GetNetwork() == runtimeapi.NamespaceMode_NODE:
		return fields.Unsupported(namespaces+"network", "a machine is connected to the pod's network and cannot share the node's")
	case o.GetPid() == runtimeapi.NamespaceMode_NODE:
		return fields.Unsupported(namespaces+"pid", "a guest sees only its own processes")
	case o.GetIpc() == runtimeapi.NamespaceMode_NODE:
		return fields.Unsupported(namespaces+"ipc", "a guest has only its own System V IPC")
	case sandbox.WantsUserNamespace(o.GetUsernsOptions()):
		return fields.Unsupported(namespaces+"userns_options", "users in the guest are never users of the node")
	}
	for field, profile := range map[string]*runtimeapi.SecurityProfile{"seccomp": seccomp, "apparmor": apparmor} {
		if profile.GetProfileType() == runtimeapi.SecurityProfile_Localhost {
			return fields.Unsupported("linux.security_context."+field, "the profile %q is a file of the node, which the guest does not have",
				profile.GetLocalhostRef())
		}
	}
	return nil
}

func validateContainer(config *runtimeapi.ContainerConfig) error {
	for i, m := range config.GetMounts() {
		field := fmt.Sprintf("mounts[%d]", i)
		switch {
		case m.GetPropagation() == runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL:
			return fields.Unsupported(field+".propagation", "what a guest mounts does not appear on the node")
		case len(m.GetUidMappings())+len(m.GetGidMappings()) > 0:
			return fields.Unsupported(field+".uid_mappings", "users in the guest are never users of the node")
		}
	}
	return nil
}
