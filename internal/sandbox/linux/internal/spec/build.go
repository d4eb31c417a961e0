package spec

import (
	"fmt"
	"maps"
	"path"
	"slices"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/selinux"
)

// ociVersion is the version of the specification that we write; runc 1.1 accepts nothing newer.
const ociVersion = "1.0.2"

// The annotations of the specification. Labels and annotations of images and requests are never copied to the
// specification, because OCI runtimes act on annotations (CVE-2026-53488).
const (
	AnnotationPod       = "io.tripod.pod"
	AnnotationContainer = "io.tripod.container"
	// AnnotationType is "container", or "sandbox" for the process that holds a pod's PID namespace. Tools that read other
	// runtimes' bundles expect this name.
	AnnotationType = "io.kubernetes.cri.container-type"

	annotationPodName       = "io.kubernetes.cri.sandbox-name"
	annotationPodNamespace  = "io.kubernetes.cri.sandbox-namespace"
	annotationPodUID        = "io.kubernetes.cri.sandbox-uid"
	annotationContainerName = "io.kubernetes.cri.container-name"
	annotationImage         = "io.kubernetes.cri.image-name"
)

// Input is what Build needs to know about a container. Paths are paths on the host.
type Input struct {
	Pod       *sandbox.Pod
	Container *sandbox.Container
	// Image is the image's own configuration.
	Image ocispec.ImageConfig
	// Rootfs is the container's mounted root file system. Users and paths are looked up there.
	Rootfs string
	// Net, IPC, UTS and PID are the paths of the namespaces that the container joins in the modes POD and TARGET (see
	// ContainerModes). If UTS is "", a container that is not on the host network gets a new UTS namespace with the
	// pod's host name.
	Net, IPC, UTS, PID string
	// User is the path of the pod's user namespace, if the pod has one (sandbox.Pod.IDMap). OCI runtimes do not have to
	// support mapped mounts: the caller makes those that the result marks (specs.Mount.UIDMappings), and the root.
	User string
	// CgroupsPath is the specification's cgroupsPath, in the form /parent/id (cgroupfs) or slice:prefix:name (systemd).
	CgroupsPath string
	// ShmPath is the pod's /dev/shm. It is not used if the container has the host's IPC namespace or one of its own.
	ShmPath string
	// ResolvConf, Hosts and HostnameFile are the pod's files for /etc. If a path is "", the container does not get that
	// file. A mount in the request at the same path takes precedence.
	ResolvConf, Hosts, HostnameFile string
	// ImageVolumes maps the container_path of each image mount in the request to the host path of the mounted image.
	// That path already includes image_sub_path (see ResolveSubPath).
	ImageVolumes map[string]string
	// Labels are the container's SELinux labels. See Relabel about mounts.
	Labels selinux.Labels
}

// Build returns the runtime specification of a container. If it rejects a field, the error is
// errdefs.ErrInvalidArgument or errdefs.ErrNotImplemented and names the field; other errors come from the host.
func Build(in Input, h Host) (*specs.Spec, sandbox.Resolved, error) {
	if err := Validate(in.Pod, in.Container, h); err != nil {
		return nil, sandbox.Resolved{}, err
	}
	if err := checkRootfs(in.Rootfs); err != nil {
		return nil, sandbox.Resolved{}, err
	}
	b := builder{in: in, h: h, modes: ContainerModes(in.Pod, in.Container), spec: &specs.Spec{
		Version:     ociVersion,
		Root:        &specs.Root{Path: in.Rootfs, Readonly: in.Container.Config.GetLinux().GetSecurityContext().GetReadonlyRootfs()},
		Annotations: annotations(in.Pod, in.Container),
		Linux:       &specs.Linux{CgroupsPath: in.CgroupsPath},
	}}
	b.spec.Linux.UIDMappings, b.spec.Linux.GIDMappings = mappings(in.Pod.IDMap())
	if b.modes.UTS() && in.UTS == "" {
		b.spec.Hostname = in.Pod.Config.GetHostname()
	}
	b.resolved.SwapLimited = h.SwapAccounting
	// The order matters: the default system call filter depends on the process's capabilities.
	for _, step := range []func() error{b.process, b.namespaces, b.mounts, b.devices, b.security, b.imageVolumes} {
		if err := step(); err != nil {
			return nil, sandbox.Resolved{}, err
		}
	}
	return b.spec, b.resolved, nil
}

// builder holds the state of one Build.
type builder struct {
	in       Input
	h        Host
	modes    Modes
	spec     *specs.Spec
	resolved sandbox.Resolved
}

func (b *builder) process() (err error) {
	cfg, image := b.in.Container.Config, b.in.Image
	sc := cfg.GetLinux().GetSecurityContext()
	p := &specs.Process{
		Terminal:        cfg.GetTty(),
		NoNewPrivileges: sc.GetNoNewPrivs(),
		OOMScoreAdj:     oomScore(cfg.GetLinux().GetResources(), b.h),
	}
	b.spec.Process = p
	if p.Args, err = arguments(cfg, image); err != nil {
		return err
	}
	if p.Env, err = variables(b.in.Pod, cfg, image, b.h); err != nil {
		return err
	}
	if p.Cwd, err = workingDir(cfg, image, b.in.Rootfs); err != nil {
		return err
	}
	known := false
	if p.User, known, err = user(sc, image.User, b.in.Rootfs); err != nil {
		return err
	}
	p.Env = home(p.Env, known, cfg.GetMounts())
	if err := checkMapped(p.User, b.in.Pod.IDMap()); err != nil {
		return err
	}
	if p.Capabilities, err = capabilities(sc, b.h); err != nil {
		return err
	}
	b.resolved.User = containerUser(p.User)
	b.resolved.StopSignal, err = stopSignal(cfg.GetStopSignal(), image.StopSignal)
	return err
}

func (b *builder) namespaces() (err error) {
	b.spec.Linux.Namespaces, err = namespaces(b.in, b.modes, b.h)
	return err
}

func (b *builder) mounts() error {
	defaults, err := defaultMounts(b.in, b.modes)
	if err != nil {
		return err
	}
	requested, reported, propagation, err := requestedMounts(b.in)
	if err != nil {
		return err
	}
	b.spec.Mounts = joinMounts(defaults, requested)
	b.spec.Linux.RootfsPropagation = propagation
	b.resolved.Mounts = reported
	return nil
}

func (b *builder) devices() error {
	limits, err := Resources(b.in.Container.Config.GetLinux().GetResources(), b.h)
	if err != nil {
		return err
	}
	nodes, rules, err := devices(b.in.Container.Config, b.h)
	if err != nil {
		return err
	}
	limits.Devices = rules
	b.spec.Linux.Resources = limits
	// A bind-mounted /dev already has its nodes, and new nodes in it would be created on the host.
	if !slices.ContainsFunc(b.spec.Mounts, func(m specs.Mount) bool { return m.Destination == "/dev" && m.Type == "bind" }) {
		b.spec.Linux.Devices = nodes
	}
	return nil
}

func (b *builder) security() (err error) {
	sc := b.in.Container.Config.GetLinux().GetSecurityContext()
	linux := b.spec.Linux
	applyLabels(b.spec, b.in.Labels, sc.GetPrivileged())
	linux.MaskedPaths, linux.ReadonlyPaths = maskedPaths(b.in.Container.Config)
	if !sc.GetPrivileged() {
		deprecated := sc.GetApparmorProfile() //nolint:staticcheck // older kubelets send the string
		if b.spec.Process.ApparmorProfile, err = checkAppArmor(sc.GetApparmor(), deprecated, b.h); err != nil {
			return err
		}
	}
	linux.Seccomp, err = systemCallFilter(sc, b.spec, b.h)
	return err
}

// imageVolumes creates the directories that the image declares as volumes but does not contain.
func (b *builder) imageVolumes() error {
	for _, name := range slices.Sorted(maps.Keys(b.in.Image.Volumes)) {
		if err := checkDestination("image Volumes", name); err != nil {
			return err
		}
		if err := makeDirectory(b.in.Rootfs, path.Clean(name), b.in.Pod.IDMap()); err != nil {
			return classifyFileError("image Volumes", fmt.Errorf("%s cannot be made in the image: %w", name, err))
		}
	}
	return nil
}

func annotations(p *sandbox.Pod, c *sandbox.Container) map[string]string {
	a := podAnnotations(p)
	a[AnnotationContainer] = c.ID
	a[AnnotationType] = "container"
	a[annotationContainerName] = c.Config.GetMetadata().GetName()
	a[annotationImage] = c.Config.GetImage().GetImage()
	return a
}

func podAnnotations(p *sandbox.Pod) map[string]string {
	meta := p.Config.GetMetadata()
	return map[string]string{
		AnnotationPod:          p.ID,
		AnnotationType:         "sandbox",
		annotationPodName:      meta.GetName(),
		annotationPodNamespace: meta.GetNamespace(),
		annotationPodUID:       meta.GetUid(),
	}
}
