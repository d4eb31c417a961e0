package vm

import (
	"context"
	"log/slog"

	"github.com/tripod-run/tripod/internal/health"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/boot"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/libvirt"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/qemu"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/tap"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/virtiofsd"
)

// Check tests whether this host can run machines, and leaves nothing behind. Other kinds of pods run without QEMU, so
// the findings are marked as required only if the configuration names an emulator. The finding about the guest of machines that
// run containers, which is not about a host for disk machines, is one of those that are returned.
func Check(ctx context.Context, c Config, guest health.Finding) []health.Finding {
	tree, err := c.cgroups()
	if err != nil {
		return []health.Finding{{Subject: "vm", Required: true, Detail: err.Error(), Remedy: "set linux.cgroup_driver and linux.cgroup_parent"}}
	}
	findings := qemu.Doctor(ctx, c.qemu(tree, slog.New(slog.DiscardHandler)))
	required := c.VM.Emulator != ""
	for i := range findings {
		findings[i].Required = findings[i].Required && required
	}
	if c.VM.Driver == DriverLibvirt {
		findings = append(findings, libvirt.Doctor(ctx, libvirt.Config{URI: c.VM.LibvirtURI})...)
	}
	findings = append(findings, checkVirtiofs(ctx, c.virtiofsd()), checkUEFI(), guest)
	if _, err := agent.FindProgram(); err != nil {
		findings = append(findings,
			health.Finding{Subject: agent.ProgramName, Detail: err.Error(),
				Remedy: "install tripod-agent beside tripod: exec and port-forward to a guest's localhost need it"})
	}
	return append(findings, checkNetwork(ctx, required))
}

// checkVirtiofs tests whether a directory can be shared by virtio-fs. The finding is not required, because machines can
// use 9p instead.
func checkVirtiofs(ctx context.Context, probe *virtiofsd.Prober) health.Finding {
	f := health.Finding{
		Subject: "virtiofsd", OK: true, Detail: probe.Program + ": serves a directory, as root in its own user namespace",
		Remedy: "install virtiofsd (Debian 12: qemu-system-common), or set vm.virtiofsd; allow user namespaces (user.max_user_namespaces). Until then machines get directories by 9p, without owners, and copies of Secrets and ConfigMaps",
	}
	if err := probe.Probe(ctx); err != nil {
		f.OK, f.Detail = false, err.Error()
	}
	return f
}

// checkUEFI looks for a UEFI firmware. The finding is not required, because most disks also boot with a BIOS.
func checkUEFI() health.Finding {
	f := health.Finding{Subject: "vm uefi",
		Remedy: "install ovmf (Fedora, Arch: edk2-ovmf); until then disks that boot by UEFI only are refused"}
	found, err := boot.FindUEFI()
	if err != nil {
		f.Detail = err.Error()
		return f
	}
	f.OK, f.Detail = true, found.Code
	return f
}

// checkNetwork tests, in a temporary network namespace, whether a tap can be connected to a link.
func checkNetwork(ctx context.Context, required bool) health.Finding {
	f := health.Finding{Subject: "vm network", Required: required, OK: true, Detail: "tc u32 and mirred connect a tap to a pod's link",
		Remedy: "run as root, with /dev/net/tun and the kernel modules tun, sch_ingress, cls_u32 and act_mirred"}
	if err := tap.Check(ctx); err != nil {
		f.OK, f.Detail = false, err.Error()
	}
	return f
}
