package nri

import (
	"fmt"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/node"
)

// adjust applies the plugins' adjustment to a container. What the CRI can express goes into the container's
// configuration; the backend's validation then accepts or refuses it as in a request. The rest goes into c.Adjustment
// if the container has an OCI specification, and is refused by name otherwise.
func adjust(c *node.Container, a *api.ContainerAdjustment, specified bool) error {
	if a = a.Strip(); a == nil {
		return nil
	}
	config := proto.CloneOf(c.Config)
	limits, unlimited := split(a.GetLinux().GetResources())
	if limits != nil {
		if config.Linux == nil {
			config.Linux = &runtimeapi.LinuxContainerConfig{}
		}
		config.Linux.Resources = node.MergeResources(config.Linux.Resources, limits)
	}
	for _, d := range a.GetCDIDevices() {
		config.CDIDevices = append(config.CDIDevices, &runtimeapi.CDIDevice{Name: d.GetName()})
	}
	a.CDIDevices = nil
	if a.Linux != nil {
		a.Linux.Resources = unlimited
	}
	if !specified {
		if err := express(config, a); err != nil {
			return err
		}
	}
	c.Config, c.Adjustment = config, a.Strip()
	return nil
}

// express moves adjustments from a to a configuration. It refuses those that no configuration can express, except
// annotations, which only inform.
func express(config *runtimeapi.ContainerConfig, a *api.ContainerAdjustment) error {
	for _, e := range a.GetEnv() {
		key, removed := e.IsMarkedForRemoval()
		config.Envs = slices.DeleteFunc(config.Envs, func(v *runtimeapi.KeyValue) bool { return v.GetKey() == key })
		if !removed {
			config.Envs = append(config.Envs, &runtimeapi.KeyValue{Key: e.GetKey(), Value: []byte(e.GetValue())})
		}
	}
	for _, m := range a.GetMounts() {
		dest, removed := m.IsMarkedForRemoval()
		config.Mounts = slices.DeleteFunc(config.Mounts, func(v *runtimeapi.Mount) bool { return v.GetContainerPath() == dest })
		if removed {
			continue
		}
		if m.GetType() != "bind" {
			return impossible("mounts", fmt.Sprintf("%s: type %q; only bind mounts are possible", m.GetDestination(), m.GetType()))
		}
		config.Mounts = append(config.Mounts, &runtimeapi.Mount{
			HostPath: m.GetSource(), ContainerPath: m.GetDestination(), Readonly: slices.Contains(m.GetOptions(), "ro"),
		})
	}
	if args := a.GetArgs(); len(args) > 0 {
		if args[0] == "" { // the mark that replaces another plugin's arguments
			args = args[1:]
		}
		config.Command, config.Args = args, nil
	}
	a.Env, a.Mounts, a.Args = nil, nil, nil
	rest := proto.CloneOf(a)
	rest.Annotations = nil
	return none("", rest)
}

// none returns an error with the names of the fields that are set in a message, or nil if none is.
func none(prefix string, m proto.Message) error {
	var names []string
	for name := range setFields(prefix, m.ProtoReflect()) {
		names = append(names, name)
	}
	if names == nil {
		return nil
	}
	slices.Sort(names)
	return impossible(strings.Join(names, ", "), "this kind of pod cannot be adjusted so, or not after it was created")
}

func impossible(field, why string) error {
	return fmt.Errorf("adjustment by a node plugin (NRI): %s: %s: %w", field, why, errdefs.ErrNotImplemented)
}
