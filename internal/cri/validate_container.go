package cri

import (
	"bytes"
	"cmp"
	"slices"
	"strings"

	"github.com/distribution/reference"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// validateContainerConfig checks what can be checked in a CreateContainer request without knowing the state of the
// node.
func validateContainerConfig(c *runtimeapi.ContainerConfig) error {
	switch {
	case c == nil:
		return required("config")
	case c.GetMetadata() == nil:
		return required("config.metadata")
	case c.GetWindows() != nil:
		return invalid("config.windows", "this node runs Linux")
	}
	return cmp.Or(
		validateName("config.metadata.name", c.GetMetadata().GetName()),
		validateImageSpec("config.image", c.GetImage()),
		validateWords("config.command", c.GetCommand()),
		validateWords("config.args", c.GetArgs()),
		validateAbsolute("config.working_dir", c.GetWorkingDir()),
		validateEach("config.envs", c.GetEnvs(), validateEnv),
		validateEach("config.mounts", c.GetMounts(), validateMount),
		validateEach("config.devices", c.GetDevices(), validateDevice),
		validateEach("config.CDI_devices", c.GetCDIDevices(), validateCDIDevice),
		validateKeyValues("config.labels", c.GetLabels()),
		validateAnnotations("config.annotations", c.GetAnnotations()),
		validateRelative("config.log_path", c.GetLogPath()),
		validateEnum("config.stop_signal", c.GetStopSignal(), runtimeapi.Signal_name),
		validateResources("config.linux.resources", c.GetLinux().GetResources()),
		validateSecurityContext("config.linux.security_context", c.GetLinux().GetSecurityContext()),
	)
}

// validateImageSpec checks that the image is a reference, a digest or an ID.
func validateImageSpec(field string, s *runtimeapi.ImageSpec) error {
	if s.GetImage() == "" {
		return required(field + ".image")
	}
	if _, err := reference.ParseAnyReference(s.GetImage()); err != nil {
		return invalid(field+".image", "%q is not an image reference: %v", s.GetImage(), err)
	}
	return nil
}

// validateEnv checks a variable. The value can be any bytes that execve(2) accepts.
func validateEnv(field string, kv *runtimeapi.KeyValue) error {
	switch {
	case kv.GetKey() == "":
		return required(field + ".key")
	case strings.ContainsAny(kv.GetKey(), "=\x00"):
		return invalid(field+".key", "%q has a zero byte or an equals sign", kv.GetKey())
	case bytes.IndexByte(kv.GetValue(), 0) >= 0:
		return invalid(field+".value", "of %s has a zero byte", kv.GetKey())
	}
	return nil
}

func validateMount(field string, m *runtimeapi.Mount) error {
	if m.GetContainerPath() == "" {
		return required(field + ".container_path")
	}
	return cmp.Or(
		validateAbsolute(field+".container_path", m.GetContainerPath()),
		validateMountSource(field, m),
		validateEnum(field+".propagation", m.GetPropagation(), runtimeapi.MountPropagation_name),
		validateRecursiveReadOnly(field+".recursive_read_only", m),
		validateEach(field+".mount_options", m.GetMountOptions(), validateMountOption),
	)
}

// validateMountSource checks that a mount has exactly one source (a host path or an image) and that an image is mounted
// read-only. It ignores image_sub_path for mounts with a host_path: a kubelet sets it in a pod with an image volume,
// but the host_path already includes it.
func validateMountSource(field string, m *runtimeapi.Mount) error {
	if m.GetImage() == nil {
		if m.GetHostPath() == "" {
			return required(field + ".host_path")
		}
		return validateAbsolute(field+".host_path", m.GetHostPath())
	}
	switch {
	case m.GetHostPath() != "":
		return invalid(field+".host_path", "must not be set with image")
	case !m.GetReadonly():
		return invalid(field+".readonly", "must be set: an image is mounted read-only")
	}
	return cmp.Or(
		validateImageSpec(field+".image", m.GetImage()),
		validateRelative(field+".image_sub_path", m.GetImageSubPath()),
	)
}

func validateRecursiveReadOnly(field string, m *runtimeapi.Mount) error {
	if !m.GetRecursiveReadOnly() {
		return nil
	}
	if !m.GetReadonly() {
		return invalid(field, "needs readonly")
	}
	if m.GetPropagation() != runtimeapi.MountPropagation_PROPAGATION_PRIVATE {
		return invalid(field, "needs PROPAGATION_PRIVATE, not %s", m.GetPropagation())
	}
	return nil
}

// mountOptions are the options that the API defines for Mount.mount_options.
var mountOptions = []string{"noexec", "nodev", "nosuid"}

func validateMountOption(field, option string) error {
	if !slices.Contains(mountOptions, option) {
		return invalid(field, "%q is not one of %q", option, mountOptions)
	}
	return nil
}

func validateDevice(field string, d *runtimeapi.Device) error {
	if d.GetHostPath() == "" {
		return required(field + ".host_path")
	}
	if strings.Trim(d.GetPermissions(), "rwm") != "" {
		return invalid(field+".permissions", `%q has more than "r", "w" and "m"`, d.GetPermissions())
	}
	return cmp.Or(
		validateAbsolute(field+".host_path", d.GetHostPath()),
		validateAbsolute(field+".container_path", d.GetContainerPath()),
	)
}

func validateCDIDevice(field string, d *runtimeapi.CDIDevice) error {
	return validateName(field+".name", d.GetName())
}
