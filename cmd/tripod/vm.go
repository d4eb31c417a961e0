package main

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/node"
	"github.com/tripod-run/tripod/internal/sandbox/vm"
	"github.com/tripod-run/tripod/internal/sandbox/vm/oci"
)

func vmRunDir(c *config.Config) string { return filepath.Join(c.State, "vm") }

// vmRoutes returns the rule that sends pods with Virtlet's annotation to the handler "vm".
func vmRoutes(c *config.Config) []node.Route {
	return []node.Route{{Annotation: "kubernetes.io/target-runtime", Value: "virtlet.cloud", ImagePrefix: c.VM.ImagePrefix, Handler: "vm"}}
}

func vmConfig(c *config.Config) vm.Config {
	return vm.Config{
		VM: c.VM, Root: filepath.Join(c.Root, "vm"), RunDir: vmRunDir(c), LibvirtDir: c.State + "-libvirt", Owner: c.Root,
		CgroupDriver: cgroupDriver(c), CgroupParent: c.Linux.CgroupParent, LogSizeMax: c.Log.ContainerSizeMax,
		Annotations: c.Handlers.VM.AllowedAnnotations, CDIDirs: c.CDI.SpecDirs,
	}
}

// openVM opens the backend for virtual machines. It returns nil if there is no QEMU and the configuration names none.
func (p *parts) openVM(ctx context.Context, c *config.Config, images *image.Store, log *slog.Logger) (*vm.Backend, error) {
	b, err := vm.Open(ctx, vmConfig(c), vm.Services{Images: images, Logger: log})
	if errdefs.IsNotFound(err) && c.VM.Emulator == "" {
		log.Warn("no handler \"vm\"", "reason", err)
		p.missing["vm"] = err
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%w (see `tripod check`)", err)
	}
	p.opened(b.Close)
	return b, nil
}

// ociConfig returns the configuration of the handler "vm-oci".
func ociConfig(c *config.Config) vm.Config {
	cfg := vmConfig(c)
	cfg.Root, cfg.RunDir = filepath.Join(c.Root, "vm-oci"), filepath.Join(c.State, "vm-oci")
	return cfg
}

// openOCI opens the backend for OCI containers in machines. It returns nil if the node has no QEMU or no guest for it, or if
// its driver cannot run such machines.
func (p *parts) openOCI(ctx context.Context, c *config.Config, images *image.Store, log *slog.Logger) (*oci.Backend, error) {
	if err := p.missing["vm"]; err != nil { // there is no QEMU
		p.missing["vm-oci"] = err
		return nil, nil
	}
	b, err := oci.Open(ctx, ociConfig(c), images, log)
	if (errdefs.IsNotFound(err) && c.VM.GuestDir == "") || errdefs.IsNotImplemented(err) {
		log.Info("no handler \"vm-oci\"", "reason", err)
		p.missing["vm-oci"] = err
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%w (see `tripod check`)", err)
	}
	p.opened(b.Close)
	return b, nil
}
