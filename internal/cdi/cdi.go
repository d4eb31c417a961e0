// Package cdi finds devices by their names of the Container Device Interface, which describes devices in files that an
// administrator or a device driver puts on the node (https://github.com/cncf-tags/container-device-interface).
//
// The package knows no kind of pod. The files are read when a container requests such a device, so that a driver's
// changes take effect at once, and a node without such containers has no cost.
package cdi

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"tags.cncf.io/container-device-interface/pkg/cdi"
)

// Devices are the devices that the files in some directories describe.
type Devices struct{ dirs []string }

// New returns the devices in these directories. In a later directory, a device replaces one with the same name.
func New(dirs []string) *Devices { return &Devices{dirs} }

// Names lists the devices that a container requests: by the CRI's field, and by annotations of the container with the
// prefix cdi.k8s.io/, which only a kubelet's device plugins can set.
func Names(config *runtimeapi.ContainerConfig) ([]string, error) {
	var names []string
	for _, d := range config.GetCDIDevices() {
		names = append(names, d.GetName())
	}
	_, annotated, err := cdi.ParseAnnotations(config.GetAnnotations())
	if err != nil {
		return nil, fmt.Errorf("annotations: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	for _, name := range annotated {
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names, nil
}

// find reads the files and returns the named devices.
func (d *Devices) find(names []string) (*cdi.Cache, error) {
	cache, err := cdi.NewCache(cdi.WithSpecDirs(d.dirs...), cdi.WithAutoRefresh(false))
	if err != nil {
		return nil, fmt.Errorf("read the node's CDI devices: %w", err)
	}
	for _, name := range names {
		if cache.GetDevice(name) != nil {
			continue
		}
		damaged := ""
		for file, errs := range cache.GetErrors() {
			damaged += fmt.Sprintf("; %s: %v", file, errs)
		}
		return nil, fmt.Errorf("CDI_devices: no file in %s describes the device %q%s: %w", strings.Join(d.dirs, ", "), name, damaged,
			errdefs.ErrInvalidArgument)
	}
	return cache, nil
}

// Inject adds the named devices to a specification.
func (d *Devices) Inject(s *specs.Spec, names []string) error {
	if len(names) == 0 {
		return nil
	}
	cache, err := d.find(names)
	if err != nil {
		return err
	}
	if _, err := cache.InjectDevices(s, names...); err != nil {
		return fmt.Errorf("CDI_devices: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	return nil
}

// AsBlocks returns a copy of a container's configuration with block devices of the node in the place of the names of its devices, for
// backends that can add nothing else to a container.
func (d *Devices) AsBlocks(config *runtimeapi.ContainerConfig) (*runtimeapi.ContainerConfig, error) {
	config = proto.CloneOf(config)
	names, err := Names(config)
	if err != nil || len(names) == 0 {
		return config, err
	}
	blocks, err := d.blocks(names)
	if err != nil {
		return nil, err
	}
	config.Devices, config.CDIDevices = append(config.Devices, blocks...), nil
	maps.DeleteFunc(config.Annotations, func(key, _ string) bool { return strings.HasPrefix(key, cdi.AnnotationPrefix) })
	return config, nil
}

func (d *Devices) blocks(names []string) ([]*runtimeapi.Device, error) {
	cache, err := d.find(names)
	if err != nil {
		return nil, err
	}
	var devices []*runtimeapi.Device
	for _, name := range names {
		s := &specs.Spec{Process: &specs.Process{}, Linux: &specs.Linux{}}
		if _, err := cache.InjectDevices(s, name); err != nil {
			return nil, fmt.Errorf("CDI_devices: %w: %w", err, errdefs.ErrInvalidArgument)
		}
		if rest := beyondDevices(s); rest != "" {
			return nil, fmt.Errorf("CDI_devices: %q changes the container's %s: only block devices are possible: %w", name, rest,
				errdefs.ErrNotImplemented)
		}
		nodes := cache.GetDevice(name).ContainerEdits.DeviceNodes
		nodes = append(slices.Clone(cache.GetDevice(name).GetSpec().ContainerEdits.DeviceNodes), nodes...)
		for _, n := range nodes {
			at := slices.IndexFunc(s.Linux.Devices, func(made specs.LinuxDevice) bool { return made.Path == n.Path })
			if at < 0 || s.Linux.Devices[at].Type != "b" {
				return nil, fmt.Errorf("CDI_devices: %q has %s, which is not a block device: only block devices are possible: %w", name, n.Path,
					errdefs.ErrNotImplemented)
			}
			host, permissions := n.HostPath, n.Permissions
			if host == "" {
				host = n.Path
			}
			if permissions == "" {
				permissions = "rwm"
			}
			devices = append(devices, &runtimeapi.Device{HostPath: host, ContainerPath: n.Path, Permissions: permissions})
		}
	}
	return devices, nil
}

// beyondDevices names what a specification has besides device nodes; empty if there is nothing.
func beyondDevices(s *specs.Spec) string {
	switch {
	case len(s.Mounts) > 0:
		return "mounts"
	case s.Hooks != nil:
		return "hooks"
	case len(s.Process.Env) > 0:
		return "environment"
	case len(s.Process.User.AdditionalGids) > 0:
		return "groups"
	case s.Linux.IntelRdt != nil:
		return "RDT class"
	case len(s.Linux.NetDevices) > 0:
		return "network devices"
	}
	return ""
}
