package main

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/cli/check"
	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/node"
	"github.com/tripod-run/tripod/internal/sandbox/vm"
	"github.com/tripod-run/tripod/internal/vm/agent"
	"github.com/tripod-run/tripod/internal/vm/libvirt"
	"github.com/tripod-run/tripod/internal/vm/machine"
	"github.com/tripod-run/tripod/internal/vm/qemu"
	"github.com/tripod-run/tripod/internal/vm/share"
)

func vmRoot(c *config.Config) string   { return filepath.Join(c.Root, "vm") }
func vmRunDir(c *config.Config) string { return filepath.Join(c.State, "vm") }

// libvirtDir is beside the state directory, which is closed: libvirtd runs its wrapper as the pod's user, who must get there.
func libvirtDir(c *config.Config) string { return c.State + "-libvirt" }

// vmRoutes send what Virtlet's users have to the handler of machines.
func vmRoutes(c *config.Config) []node.Route {
	return []node.Route{{Annotation: "kubernetes.io/target-runtime", Value: "virtlet.cloud", ImagePrefix: c.VM.ImagePrefix, Handler: "vm"}}
}

// vmCgroups is the host's tree of cgroups, with the parent of pods that name none.
func vmCgroups(c *config.Config) (cgroup.Tree, error) {
	driver, parent := cgroupDriver(c), c.Linux.CgroupParent
	if parent == "" {
		parent = map[string]string{cgroup.DriverCgroupfs: "/tripod", cgroup.DriverSystemd: "tripod.slice"}[driver]
	}
	return cgroup.Open(driver, parent)
}

func qemuConfig(c *config.Config, tree cgroup.Tree, log *slog.Logger) qemu.Config {
	return qemu.Config{
		Root: filepath.Join(vmRoot(c), "qemu"), Emulator: c.VM.Emulator, Virtiofsd: virtiofsd(c).Program, Accel: c.VM.Accel, UID: c.VM.UIDBase, GID: c.VM.UIDBase,
		Opener: vm.Taps{}, Cgroup: tree, Logger: log,
	}
}

// virtiofsd is what tries virtio-fs, with no program where there is none.
func virtiofsd(c *config.Config) *share.Prober {
	program, _ := share.Find(c.VM.Virtiofsd) // said by the probe
	return &share.Prober{Options: share.Options{Program: program, UID: c.VM.UIDBase, GID: c.VM.UIDBase}}
}

// openVM opens the backend of machines. Without QEMU a node that was not told where that is does without.
func (p *parts) openVM(ctx context.Context, c *config.Config, images *image.Store, log *slog.Logger) (*vm.Backend, error) {
	tree, err := vmCgroups(c)
	if err != nil {
		return nil, err
	}
	driver, accel, err := openDriver(ctx, c, tree, log)
	if errdefs.IsNotFound(err) && c.VM.Emulator == "" {
		log.Warn("the handler \"vm\" is not offered", "reason", err)
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("vm backend: %w (`tripod check` tells more)", err)
	}
	disk, err := agentDisk(c)
	if err != nil {
		log.Warn("machines have no agent: nothing can be run in them but by qemu-guest-agent", "reason", err)
	}
	b, err := vm.New(vm.Config{
		Root: vmRoot(c), RunDir: vmRunDir(c), Driver: driver, Accel: accel, UIDBase: c.VM.UIDBase, UIDCount: c.VM.UIDCount,
		DefaultMemory: c.VM.DefaultMemory, DefaultCPUs: c.VM.DefaultCPUs, Overhead: c.VM.MemoryOverhead, LogSizeMax: c.Log.ContainerSizeMax,
		BootTimeout: time.Duration(c.VM.BootTimeout), ConsoleBuffer: c.VM.ConsoleBuffer,
		Cgroup: tree, Virtiofs: virtiofsd(c).Probe, AgentDisk: disk, Images: images, Network: vm.Taps{}, Logger: log,
	})
	if err != nil {
		return nil, fmt.Errorf("%w (`tripod check` tells more)", err)
	}
	p.opened(b.Close)
	return b, nil
}

// agentDisk is the disk image by which guests get the agent.
func agentDisk(c *config.Config) (string, error) {
	program, err := agent.FindProgram()
	if err != nil {
		return "", err
	}
	return agent.Disk(vmRoot(c), program)
}

// checkVM looks at what machines need. Without QEMU everything else works.
func checkVM(ctx context.Context, c *config.Config) []check.Finding {
	if !c.Backends.VM {
		return nil
	}
	tree, err := vmCgroups(c)
	if err != nil {
		return []check.Finding{{Subject: "vm", Required: true, Detail: err.Error(), Remedy: "set linux.cgroup_driver and linux.cgroup_parent"}}
	}
	var findings []check.Finding
	for _, f := range qemu.Doctor(ctx, qemuConfig(c, tree, slog.New(slog.DiscardHandler))) {
		f.Required = f.Required && c.VM.Emulator != ""
		findings = append(findings, check.Finding(f))
	}
	if c.VM.Driver == "libvirt" {
		for _, f := range libvirt.Doctor(ctx, libvirt.Config{URI: c.VM.LibvirtURI}) {
			findings = append(findings, check.Finding(f))
		}
	}
	findings = append(findings, checkVirtiofs(ctx, c))
	if _, err := agent.FindProgram(); err != nil {
		findings = append(findings, check.Finding{Subject: agent.ProgramName, Detail: err.Error(), Remedy: "install tripod-agent beside tripod: exec and port-forward to a guest's localhost need it"})
	}
	for _, f := range vm.Doctor(ctx) {
		f.Required = f.Required && c.VM.Emulator != ""
		findings = append(findings, check.Finding(f))
	}
	return findings
}

// checkVirtiofs has a directory shared by virtio-fs. Without it machines use 9p.
func checkVirtiofs(ctx context.Context, c *config.Config) check.Finding {
	f := check.Finding{
		Subject: "virtiofsd",
		Remedy:  "install virtiofsd (Debian 12: qemu-system-common), or set vm.virtiofsd; allow user namespaces (user.max_user_namespaces). Until then machines have directories by 9p, without owners, and copies of Secrets and ConfigMaps",
	}
	probe := virtiofsd(c)
	if err := probe.Probe(ctx); err != nil {
		f.Detail = err.Error()
		return f
	}
	f.OK, f.Detail = true, probe.Program+": serves a directory, as root of a user namespace of its own"
	return f
}

type accelFunc func(context.Context) (accel, why string, err error)

// openDriver opens what runs the machines, and tells by whom they are accelerated.
func openDriver(ctx context.Context, c *config.Config, tree cgroup.Tree, log *slog.Logger) (machine.Driver, accelFunc, error) {
	direct, err := qemu.New(qemuConfig(c, tree, log))
	if err != nil {
		return nil, nil, err
	}
	probe := func(ctx context.Context) (string, string, error) {
		v, err := direct.Probe(ctx)
		return v.Accel, v.Why, err
	}
	if c.VM.Driver != "libvirt" {
		return direct, probe, nil
	}
	v, err := direct.Probe(ctx)
	if err != nil {
		return nil, nil, err
	}
	if err := direct.Close(); err != nil {
		return nil, nil, err
	}
	driver, err := libvirt.New(libvirt.Config{
		URI: c.VM.LibvirtURI, Dir: libvirtDir(c), Owner: c.Root, Emulator: c.VM.Emulator, Virtiofsd: virtiofsd(c).Program, Accel: v.Accel,
		Opener: vm.Taps{}, Cgroup: tree, Logger: log,
	})
	return driver, func(context.Context) (string, string, error) { return v.Accel, v.Why, nil }, err
}
