package wasm

import (
	"errors"
	"fmt"
	"path"
	"slices"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/cdi"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/fields"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/annotations"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workers"
	"github.com/tripod-run/tripod/internal/stream"
)

// Harmless lists the fields that are accepted without effect, because a kubelet sends them with every pod or because
// guests are restricted further anyway. All other fields are enforced or refused.
var Harmless = map[string]string{
	"linux.resources.cpu_shares":                              "in a shared worker, guests compete for the CPU by request, not by shares. With a worker per pod, shares are enforced",
	"linux.resources.oom_score_adj":                           "in a shared worker, a guest has no process of its own that the kernel could kill. Beside other containers, it is enforced",
	"linux.resources.hugepage_limits":                         "guests cannot use huge pages",
	"linux.resources.cpu_period without cpu_quota":            "a period has no meaning without a quota",
	"linux.resources.cpuset_cpus, cpuset_mems":                "the CPU and memory managers allow these CPUs and memory nodes to all pods, and the CPU limit still applies. With a worker per pod, they are enforced. Otherwise, exclusive CPUs (`cpu_quota: -1`) are refused",
	"linux.resources.unified memory.oom.group":                "a guest that runs out of memory always ends as a whole",
	"linux.resources.unified memory.high, low, min, swap.max": "a kubelet on cgroup v2 sets them for every container. They throttle, reserve and swap a cgroup's memory, but the memory limit bounds the memory that guests can address",
	"linux.resources.memory_swap_limit_in_bytes":              "the memory limit bounds the memory that guests can address, whether it is swapped out or not",
	"linux.security_context.run_as_user, groups, fsGroup":     "a guest has no user. Its files are opened as the worker's user, which has no account, even if root (0) is requested: the kubelet requests root if neither the pod nor the image names a user",
	"linux.security_context.capabilities.drop":                "a guest has no capabilities",
	"linux.security_context.readonly_rootfs":                  "a guest has no root file system, only mounts",
	"linux.security_context.namespace_options.userns_options": "a component has no users that could be the node's, so there is nothing to map: neither here nor in the mappings of mounts",
	"linux.security_context.no_new_privs":                     "always in effect",
	"linux.security_context.selinux_options of level s0":      "every process without a label has this level",
	"linux.security_context.seccomp, apparmor, not a file":    "the worker's own filter is stricter than RuntimeDefault",
	"linux.security_context.masked_paths, readonly_paths":     "a guest has no /proc",
	"namespace_options of pid, ipc: POD, CONTAINER":           "a guest sees no processes",
	"mounts of /etc/hosts and the termination message":        "the kubelet adds them, but WASI does not read /etc/hosts, and a guest's exit status explains its end",
	"mounts.mount_options":                                    "nothing in a mount is executed, and device files and set-user-ID bits never have an effect",
	"mounts.selinux_relabel, propagation PRIVATE":             "there is nothing to relabel and no mount to propagate",
	"linux.sysctls net.ipv4.ip_unprivileged_port_start":       "the daemon opens the ports, and can open any port",
	"stop_signal": "WASI has no signals: a server completes its requests, and a command gets end of file on standard input",
	"hostname":    "WASI has none",
	"pod linux.resources except memory_limit, cpu_quota": "the kubelet limits the pod's cgroup; they are recorded and reported",
	"pod linux.overhead": "recorded and reported; a component has no overhead of its own",
}

// reasons say why some fields are unsupported for components.
var reasons = fields.Reasons{
	Profile:     "a component makes no system calls",
	Label:       "a component has no process to label",
	PID:         "a component sees no processes",
	IPC:         "a component has no System V IPC",
	ImageVolume: "components cannot have image volumes",
	Propagation: "a component gets a directory, not a mount",
}

// Validate implements sandbox.Backend.
func (b *Backend) Validate(p *sandbox.Pod, c *sandbox.Container) error {
	if !hexID().MatchString(p.ID) && !componentID().MatchString(p.ID) {
		return fmt.Errorf("pod ID %q is neither 64 lower-case hex digits nor component#n: %w", p.ID, errdefs.ErrInvalidArgument)
	}
	if err := b.cfg.Annotations.Check(p, c, b.cfg.LabelPrefix); err != nil {
		return err
	}
	o, err := b.optionsOf(p, c)
	if err != nil {
		return err
	}
	if limit := b.cfg.Concurrency; limit > 0 && o.Limits.Concurrency > limit {
		return fmt.Errorf("annotation %s: %d exceeds wasm.max_concurrency (%d): %w",
			b.cfg.LabelPrefix+annotations.KeyConcurrency, o.Limits.Concurrency, limit, errdefs.ErrInvalidArgument)
	}
	if err := b.validateStore(o, p); err != nil {
		return err
	}
	if c == nil {
		return validatePod(p.Config)
	}
	for _, check := range []func() error{
		func() error { return b.validateContainer(c.Config) },
		func() error { return validateSecurity(c.Config.GetLinux().GetSecurityContext()) },
		func() error { return b.validateResources(sandbox.Resources(p, c), sandbox.IsForeign(p, c)) },
		func() error { return reasons.Mounts(c.Config.GetMounts(), nil) },
		func() error { return validateTLSMount(o, c.Config.GetMounts(), b.cfg.LabelPrefix) },
		func() error { return validateEgressCA(o, c.Config.GetMounts(), b.cfg.LabelPrefix) },
		func() error {
			return validateMounted(o.Config, annotations.KeyConfig, c.Config.GetMounts(), b.cfg.LabelPrefix)
		},
		func() error { return validateBlobs(o, c.Config, b.cfg.LabelPrefix) },
		func() error { _, err := stream.LogPath(p.Config.GetLogDirectory(), c.Config.GetLogPath()); return err },
	} {
		if err := check(); err != nil {
			return err
		}
	}
	return nil
}

func validatePod(config *runtimeapi.PodSandboxConfig) error {
	linux := config.GetLinux()
	sc, demanded := linux.GetSecurityContext(), fields.DemandedSysctls(linux.GetSysctls())
	switch {
	case config.GetWindows() != nil:
		return fields.Invalid("windows", "this is a Linux node")
	case sc.GetPrivileged():
		return fields.Unsupported("linux.security_context.privileged",
			"a component cannot be privileged: it has no processes, devices or namespaces")
	case len(demanded) > 0:
		return fields.Unsupported("linux.sysctls", "%v: sysctls have no effect on components", demanded)
	}
	if err := reasons.Profiles(sc.GetSeccomp(), sc.GetApparmor(), sc.GetSelinuxOptions()); err != nil {
		return err
	}
	return reasons.Namespaces(sc.GetNamespaceOptions())
}

func (b *Backend) validateContainer(config *runtimeapi.ContainerConfig) error {
	switch {
	case config.GetWindows() != nil:
		return fields.Invalid("windows", "this is a Linux node")
	case len(config.GetDevices()) > 0:
		return fields.Unsupported("devices", "a component cannot reach devices")
	case len(config.GetCDIDevices()) > 0:
		return fields.Unsupported("CDI_devices", "a component cannot reach devices")
	case config.GetTty():
		return fields.Unsupported("tty", "WASI has no terminals; use stdin without tty")
	case config.GetWorkingDir() != "" && path.Clean(config.GetWorkingDir()) != "/":
		return fields.Unsupported("working_dir", "%q: WASI has no working directory; a component starts in /", config.GetWorkingDir())
	}
	if names, err := cdi.Names(config); err != nil || len(names) > 0 {
		return errors.Join(err, fields.Unsupported("annotations", "CDI devices %v: a component cannot reach devices", names))
	}
	return fields.Env(config.GetEnvs())
}

func validateSecurity(sc *runtimeapi.LinuxContainerSecurityContext) error {
	caps := sc.GetCapabilities()
	switch {
	case sc.GetPrivileged():
		return fields.Unsupported("linux.security_context.privileged",
			"a component cannot be privileged: it has no processes, devices or namespaces")
	case len(caps.GetAddCapabilities()) > 0 || len(caps.GetAddAmbientCapabilities()) > 0:
		return fields.Unsupported("linux.security_context.capabilities", "a component cannot have %v: only its imports grant rights",
			slices.Concat(caps.GetAddCapabilities(), caps.GetAddAmbientCapabilities()))
	}
	if err := reasons.Profiles(sc.GetSeccomp(), sc.GetApparmor(), sc.GetSelinuxOptions()); err != nil {
		return err
	}
	return reasons.Namespaces(sc.GetNamespaceOptions())
}

// exclusiveCPUs reports whether a container has exclusive CPUs. With the static CPU manager, a kubelet sets CPUs for
// every container, but removes the CPU quota only for containers with exclusive CPUs.
func exclusiveCPUs(res *runtimeapi.LinuxContainerResources) bool {
	return res.GetCpusetCpus() != "" && res.GetCpuQuota() < 0
}

// validateResources refuses limits that the kernel can enforce only on a separate process.
func (b *Backend) validateResources(res *runtimeapi.LinuxContainerResources, foreign bool) error {
	const field = "linux.resources."
	switch {
	case res.GetMemoryLimitInBytes() < -1:
		return fields.Invalid(field+"memory_limit_in_bytes", "%d is negative", res.GetMemoryLimitInBytes())
	case foreign && res.GetMemoryLimitInBytes() > 0 && res.GetMemoryLimitInBytes() < workers.ForeignMinimum:
		return fields.Invalid(field+"memory_limit_in_bytes",
			"%d is less than %d, of which a component's process needs %d beside other containers",
			res.GetMemoryLimitInBytes(), workers.ForeignMinimum, workers.WorkerReserve)
	case foreign && (res.GetOomScoreAdj() < -1000 || res.GetOomScoreAdj() > 1000): // proc_pid_oom_score_adj(5)
		return fields.Invalid(field+"oom_score_adj", "%d is not between -1000 and 1000", res.GetOomScoreAdj())
	case exclusiveCPUs(res) && b.cfg.Workers != WorkerPerPod && !foreign:
		return fields.Unsupported(field+"cpuset_cpus", "components share their worker's CPUs; for exclusive CPUs set wasm.worker = \"pod\"")
	}
	if demanded := sandbox.DemandedUnified(res); demanded != nil {
		return fields.Unsupported(field+"unified", "%v: a component has no cgroup", demanded)
	}
	return fields.CPU(res)
}

// validateTLSMount checks that the container has the mount that the TLS annotation names.
func validateTLSMount(o annotations.Options, mounts []*runtimeapi.Mount, prefix string) error {
	if o.TLS == annotations.TLSGenerated || o.TLS == annotations.TLSOff {
		return nil
	}
	return validateMounted([]string{o.TLS}, annotations.KeyTLS, mounts, prefix)
}

// validateMounted checks that the container has the mounts that an annotation names.
func validateMounted(paths []string, key string, mounts []*runtimeapi.Mount, prefix string) error {
	for _, at := range paths {
		if !slices.ContainsFunc(mounts, func(m *runtimeapi.Mount) bool { return path.Clean(m.GetContainerPath()) == at }) {
			return fmt.Errorf("annotation %s: the container has no mount at %q: %w", prefix+key, at, errdefs.ErrInvalidArgument)
		}
	}
	return nil
}

// validateBlobs checks that a guest gets the mount with the objects of wasi:blobstore.
func validateBlobs(o annotations.Options, config *runtimeapi.ContainerConfig, prefix string) error {
	if o.Blobs == "" {
		return nil
	}
	return validateMounted([]string{o.Blobs}, annotations.KeyBlobs, wantedMounts(config), prefix)
}

// validateEgressCA checks that the file that the annotation names is in a mount of the container.
func validateEgressCA(o annotations.Options, mounts []*runtimeapi.Mount, prefix string) error {
	if o.EgressCA == "" || mountOf(mounts, o.EgressCA) != nil {
		return nil
	}
	return fmt.Errorf("annotation %s: the container has no mount with the file %q: %w", prefix+annotations.KeyEgressCA, o.EgressCA,
		errdefs.ErrInvalidArgument)
}

// optionsOf reads the options of a container; c is nil for a unit pod's.
func (b *Backend) optionsOf(p *sandbox.Pod, c *sandbox.Container) (annotations.Options, error) {
	name := ""
	if c != nil {
		name = c.Config.GetMetadata().GetName()
	}
	return annotations.Parse(p.Config, name, b.cfg.LabelPrefix)
}
