package vm

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"path/filepath"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/libvirt"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/qemu"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/virtiofsd"
)

// driverLibvirt is the value of vm.driver that has libvirtd start QEMU; with any other the daemon starts it.
const driverLibvirt = "libvirt"

// Config says where the backend keeps its files and what its machines are made with.
type Config struct {
	// VM is the section [vm] of the node's configuration. It is valid and complete.
	VM config.VM
	// Root holds the machines' disks and must survive a reboot. RunDir holds what must not: the pods' files and sockets.
	Root, RunDir string
	// LibvirtDir is the directory of the driver "libvirt". Users without rights must be able to reach it: libvirtd runs its
	// wrapper as the pod's user.
	LibvirtDir string
	// Owner marks the domains of this node among those of libvirtd: the daemon's root directory.
	Owner string
	// CgroupDriver and CgroupParent say where pods that name no cgroup are placed; a parent of "" is the driver's default.
	CgroupDriver, CgroupParent string
	// LogSizeMax is how large the log file of a container may get, in bytes; 0 is no bound.
	LogSizeMax int64
}

// Services are what the backend uses of the node.
type Services struct {
	// Images gives disks.
	Images Images
	// Logger takes what no caller is there to receive; nil discards it.
	Logger *slog.Logger
}

// Open opens the backend with the driver that the configuration names: errdefs.ErrNotFound when there is no QEMU. Nothing
// runs before Recover.
func Open(ctx context.Context, c Config, s Services) (*Backend, error) {
	if s.Logger == nil {
		s.Logger = slog.New(slog.DiscardHandler)
	}
	tree, err := c.cgroups()
	if err != nil {
		return nil, fmt.Errorf("vm backend: %w", err)
	}
	set := settings{Config: c, Cgroup: tree, Virtiofs: c.virtiofsd().Probe, Images: s.Images, Network: taps{}, Logger: s.Logger}
	if set.Driver, set.Accel, err = c.openDriver(ctx, tree, s.Logger); err != nil {
		return nil, fmt.Errorf("vm backend: %w", err)
	}
	if set.AgentDisk, err = c.agentDisk(); err != nil {
		s.Logger.Warn("machines have no agent: nothing can be run in them but by qemu-guest-agent", "reason", err)
	}
	return newBackend(set)
}

// cgroups is the host's tree, with the parent of pods that name none.
func (c Config) cgroups() (cgroup.Tree, error) {
	standard := map[string]string{cgroup.DriverCgroupfs: "/tripod", cgroup.DriverSystemd: "tripod.slice"}
	return cgroup.Open(c.CgroupDriver, cmp.Or(c.CgroupParent, standard[c.CgroupDriver]))
}

func (c Config) qemu(tree cgroup.Tree, log *slog.Logger) qemu.Config {
	return qemu.Config{
		Root: filepath.Join(c.Root, "qemu"), Emulator: c.VM.Emulator, Virtiofsd: c.virtiofsd().Program, Accel: c.VM.Accel,
		UID: c.VM.UIDBase, GID: c.VM.UIDBase, Opener: taps{}, Cgroup: tree, Logger: log,
	}
}

// virtiofsd tries virtio-fs. On a host without the program its probe says so.
func (c Config) virtiofsd() *virtiofsd.Prober {
	program, _ := virtiofsd.Find(c.VM.Virtiofsd)
	return &virtiofsd.Prober{Options: virtiofsd.Options{Program: program, UID: c.VM.UIDBase, GID: c.VM.UIDBase}}
}

// agentDisk makes the disk image by which guests get the agent.
func (c Config) agentDisk() (string, error) {
	program, err := agent.FindProgram()
	if err != nil {
		return "", err
	}
	return agent.Disk(c.Root, program)
}

// accelFunc reports how guests execute (kvm, tcg) and why. It may take as long as a boot.
type accelFunc func(context.Context) (accel, why string, err error)

// openDriver opens what runs the machines.
func (c Config) openDriver(ctx context.Context, tree cgroup.Tree, log *slog.Logger) (machine.Driver, accelFunc, error) {
	direct, err := qemu.New(c.qemu(tree, log))
	if err != nil {
		return nil, nil, err
	}
	if c.VM.Driver != driverLibvirt {
		return direct, func(ctx context.Context) (string, string, error) {
			v, err := direct.Probe(ctx)
			return v.Accel, v.Why, err
		}, nil
	}
	v, err := direct.Probe(ctx)
	if err != nil {
		return nil, nil, err
	}
	if err := direct.Close(); err != nil {
		return nil, nil, err
	}
	driver, err := libvirt.New(libvirt.Config{
		URI: c.VM.LibvirtURI, Dir: c.LibvirtDir, Owner: c.Owner, Emulator: c.VM.Emulator, Virtiofsd: c.virtiofsd().Program, Accel: v.Accel,
		Opener: taps{}, Cgroup: tree, Logger: log,
	})
	return driver, func(context.Context) (string, string, error) { return v.Accel, v.Why, nil }, err
}
