package vm

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/health"
	"github.com/tripod-run/tripod/internal/network/netthread"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/firmware"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/libvirt"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/qemu"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/tap"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/virtiofsd"
)

// Check tests whether this host can run machines, and leaves nothing behind. Other kinds of pods run without QEMU, so
// the findings are marked as required only if the configuration names an emulator.
func Check(ctx context.Context, c Config) []health.Finding {
	tree, err := c.cgroups()
	if err != nil {
		return []health.Finding{{Subject: "vm", Required: true, Detail: err.Error(), Remedy: "set linux.cgroup_driver and linux.cgroup_parent"}}
	}
	findings := qemu.Doctor(ctx, c.qemu(tree, slog.New(slog.DiscardHandler)))
	required := c.VM.Emulator != ""
	for i := range findings {
		findings[i].Required = findings[i].Required && required
	}
	if c.VM.Driver == driverLibvirt {
		findings = append(findings, libvirt.Doctor(ctx, libvirt.Config{URI: c.VM.LibvirtURI})...)
	}
	findings = append(findings, checkVirtiofs(ctx, c.virtiofsd()), checkUEFI(), checkGuest(ctx, c))
	if _, err := agent.FindProgram(); err != nil {
		findings = append(findings, health.Finding{Subject: agent.ProgramName, Detail: err.Error(), Remedy: "install tripod-agent beside tripod: exec and port-forward to a guest's localhost need it"})
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
	f := health.Finding{Subject: "vm uefi", Remedy: "install ovmf (Fedora, Arch: edk2-ovmf); until then disks that boot by UEFI only are refused"}
	found, err := firmware.Find()
	if err != nil {
		f.Detail = err.Error()
		return f
	}
	f.OK, f.Detail = true, found.Code
	return f
}

// checkGuest looks for what pods of OCI containers need beside QEMU. The finding is not required, because disk machines need
// none of it.
func checkGuest(ctx context.Context, c Config) health.Finding {
	f := health.Finding{Subject: "vm-oci", Detail: c.guestFiles().dir, Remedy: "install the guest (make install-guest) or set vm.guest_dir, and install virtiofsd, erofs-utils and e2fsprogs; without the guest there is no handler \"vm-oci\", and without the programs it has no new pods; without coreutils there are no templates"}
	err := errors.Join(c.guestFiles().check(), c.checkTools())
	if c.VM.Templates > 0 {
		err = errors.Join(err, qemu.CheckCopy(ctx))
	}
	if err != nil {
		f.Detail = err.Error()
		return f
	}
	f.OK = true
	return f
}

// CheckTemplates says which templates there are below Config.Root of the handler vm-oci. Without templates there is no finding.
func CheckTemplates(handler, root string) []health.Finding {
	list, err := Templates(root)
	if err != nil {
		return []health.Finding{{Subject: handler + " templates", Detail: err.Error(), Remedy: fmt.Sprintf("machines of the handler %q boot until the directory can be read", handler)}}
	}
	if len(list) == 0 {
		return nil
	}
	var size int64
	oldest := list[0].CreatedAt
	for _, t := range list {
		size += t.Size
		if t.CreatedAt.Before(oldest) {
			oldest = t.CreatedAt
		}
	}
	return []health.Finding{{Subject: handler + " templates", OK: true, Detail: fmt.Sprintf("%d ready, %d MiB on disk, the oldest from %s; last used %s",
		len(list), size>>20, oldest.UTC().Format(time.RFC3339), list[0].UsedAt.UTC().Format(time.RFC3339))}}
}

// checkTools returns errdefs.ErrNotFound if a program is missing that pods of OCI containers need beside QEMU.
func (c Config) checkTools() error {
	if _, err := virtiofsd.Find(c.VM.Virtiofsd); err != nil {
		return err
	}
	for program, pkg := range map[string]string{"mkfs.erofs": "erofs-utils", "mke2fs": "e2fsprogs"} {
		if _, err := exec.LookPath(program); err != nil {
			return fmt.Errorf("%s is missing (Debian: %s): %w: %w", program, pkg, err, errdefs.ErrNotFound)
		}
	}
	return nil
}

// checkNetwork tests, in a temporary network namespace, whether a tap can be connected to a link.
func checkNetwork(ctx context.Context, required bool) health.Finding {
	f := health.Finding{Subject: "vm network", Required: required, OK: true, Detail: "tc u32 and mirred connect a tap to a pod's link",
		Remedy: "run as root, with /dev/net/tun and the kernel modules tun, sch_ingress, cls_u32 and act_mirred"}
	if err := testTap(ctx); err != nil {
		f.OK, f.Detail = false, err.Error()
	}
	return f
}

func testTap(ctx context.Context) (err error) {
	dir, err := os.MkdirTemp("", "tripod-check-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	netthread.Run(func() (restored bool) {
		if err = unix.Unshare(unix.CLONE_NEWNET); err != nil {
			err = fmt.Errorf("make a network namespace: %w", err)
			return false // the thread ends, and its namespace with it
		}
		err = wireLink(ctx, fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid()), filepath.Join(dir, "taps.json"))
		return false
	})
	return err
}

// wireLink makes a link in the calling thread's network namespace, whose path is netns, and connects a tap to the link.
func wireLink(ctx context.Context, netns, record string) error {
	link := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "peer0"}
	if err := errors.Join(netlink.LinkAdd(link), netlink.LinkSetUp(link)); err != nil {
		return fmt.Errorf("make a link: %w", err)
	}
	const nobody = 65534
	wired, err := tap.Wire(ctx, netns, tap.Options{Record: record, UID: nobody, GID: nobody})
	if err != nil {
		return err
	}
	if len(wired) != 1 {
		return fmt.Errorf("one link got %d taps", len(wired))
	}
	opened, err := tap.Open(ctx, netns, wired[0].Tap)
	if err != nil {
		return err
	}
	opened.Close()
	return tap.Unwire(ctx, netns, record)
}
