package vm

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"path/filepath"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/boot"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/libvirt"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/qemu"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/tap"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/virtiofsd"
	"github.com/tripod-run/tripod/internal/sandbox/vm/templates"
	"github.com/vishvananda/netlink"
)

// DriverLibvirt is the value of vm.driver that makes libvirtd start QEMU. With any other value, the daemon starts QEMU
// itself.
const DriverLibvirt = "libvirt"

// Config configures the backend and its machines.
type Config struct {
	// VM is the section [vm] of the node's configuration, valid and with defaults filled in.
	VM config.VM
	// Root holds the machines' disks and must survive a reboot. RunDir holds the pods' files and sockets and must be empty
	// after a reboot.
	Root, RunDir string
	// LibvirtDir is the directory of the driver "libvirt". Unprivileged users must be able to enter the directory,
	// because libvirtd runs the driver's wrapper program as the pod's user.
	LibvirtDir string
	// Owner is the daemon's root directory. This path marks this node's domains among all of libvirtd's domains.
	Owner string
	// CgroupParent is the parent cgroup of pods that do not name one; "" means the default for CgroupDriver.
	CgroupDriver, CgroupParent string
	// CDIDirs are the directories of the files that describe CDI devices.
	CDIDirs []string
	// Annotations are those that pods may use.
	Annotations sandbox.AllowList
	// LogSizeMax is the maximum size of a container's log file in bytes; 0 means no limit.
	LogSizeMax int64
}

// Services are the services of the node that the backend uses.
type Services struct {
	Images Images
	// Logger logs what cannot be returned to a caller. If Logger is nil, nothing is logged.
	Logger *slog.Logger
}

// Open opens the backend with the driver that the configuration names. It returns errdefs.ErrNotFound if QEMU is
// missing. The backend leaves all machines alone until Recover is called.
func Open(ctx context.Context, c Config, s Services) (*Backend, error) {
	b, err := open(ctx, c, s, nil)
	if err != nil {
		return nil, err
	}
	b.templates = templates.New(b, b.templateKind(), c.Root, c.VM, b.log)
	b.templates.Start(b.ctx)
	return b, nil
}

// open is Open for a backend with further settings.
func open(ctx context.Context, c Config, s Services, adjust func(*settings)) (*Backend, error) {
	if s.Logger == nil {
		s.Logger = slog.New(slog.DiscardHandler)
	}
	tree, err := c.cgroups()
	if err != nil {
		return nil, fmt.Errorf("vm backend: %w", err)
	}
	set := settings{Config: c, Prefix: slicePrefix, Cgroup: tree, Virtiofs: c.virtiofsd().Probe, UEFI: boot.FindUEFI, Images: s.Images,
		Network: tap.Node{}, Logger: s.Logger}
	if set.Driver, set.Accel, err = c.openDriver(ctx, tree, s.Logger); err != nil {
		return nil, fmt.Errorf("vm backend: %w", err)
	}
	if set.AgentDisk, err = c.agentDisk(); err != nil {
		s.Logger.Warn("machines get no agent; exec needs qemu-guest-agent in the guest", "err", err)
	}
	if adjust != nil {
		adjust(&set)
	}
	return newBackend(set)
}

// Guests are machines that run a guest of the caller's, and no images of pods.
type Guests struct {
	// Prefix precedes the pod's ID in the names of cgroups and slices.
	Prefix string
	// ScratchBase is the path of the raw image below the scratch disks, and Disk that of the image with the guest's root.
	ScratchBase, Disk string
	// Continue can make a machine that is about to be defined continue from a saved state.
	Continue func(context.Context, *sandbox.Pod, *machine.Definition) error
}

// OpenGuests is Open for machines that run a guest of the caller's. Disks can be plugged into them, and they have neither a
// cloud-init image nor a disk with an agent, nor templates.
func OpenGuests(ctx context.Context, c Config, s Services, g Guests) (*Backend, error) {
	return open(ctx, c, s, func(s *settings) {
		s.Prefix, s.Plug, s.ScratchBase, s.GuestDisk, s.AgentDisk, s.Continue = g.Prefix, true, g.ScratchBase, g.Disk, "", g.Continue
	})
}

// cgroups opens the host's cgroup tree, with the parent cgroup for pods that do not name one.
func (c Config) cgroups() (cgroup.Tree, error) {
	standard := map[string]string{cgroup.DriverCgroupfs: "/tripod", cgroup.DriverSystemd: "tripod.slice"}
	return cgroup.Open(c.CgroupDriver, cmp.Or(c.CgroupParent, standard[c.CgroupDriver]))
}

func (c Config) qemu(tree cgroup.Tree, log *slog.Logger) qemu.Config {
	return qemu.Config{
		Root: filepath.Join(c.Root, "qemu"), Emulator: c.VM.Emulator, Virtiofsd: c.virtiofsd().Program, Accel: c.VM.Accel,
		UID: c.VM.UIDBase, GID: c.VM.UIDBase, Opener: tap.Node{}, Cgroup: tree, Logger: log,
	}
}

// virtiofsd returns a prober that tests virtio-fs. If the host does not have virtiofsd, the prober's Probe method
// reports that.
func (c Config) virtiofsd() *virtiofsd.Prober {
	program, _ := virtiofsd.Find(c.VM.Virtiofsd)
	return &virtiofsd.Prober{Options: virtiofsd.Options{Program: program, UID: c.VM.UIDBase, GID: c.VM.UIDBase}}
}

// agentDisk makes the disk image with the guest's agent, and returns its path.
func (c Config) agentDisk() (string, error) {
	program, err := agent.FindProgram()
	if err != nil {
		return "", err
	}
	return agent.Disk(c.Root, program)
}

// accelFunc returns the guests' accelerator (kvm, tcg), and the reason for choosing it. A call may take as long as a
// boot.
type accelFunc func(context.Context) (accel, why string, err error)

// openDriver opens the driver that the configuration names.
func (c Config) openDriver(ctx context.Context, tree cgroup.Tree, log *slog.Logger) (machine.Driver, accelFunc, error) {
	direct, err := qemu.New(c.qemu(tree, log))
	if err != nil {
		return nil, nil, err
	}
	if c.VM.Driver != DriverLibvirt {
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
		Opener: tap.Node{}, Cgroup: tree, Logger: log,
	})
	return driver, func(context.Context) (string, string, error) { return v.Accel, v.Why, nil }, err
}

// IsTap reports whether a link in a pod's namespace is a tap that the backend made.
func IsTap(link netlink.Link) bool { return tap.IsTap(link) }
