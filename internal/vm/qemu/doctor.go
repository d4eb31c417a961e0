package qemu

import (
	"context"
	"fmt"

	"github.com/tripod-run/tripod/internal/vm/machine"
)

// Finding is one thing that Doctor looked at.
type Finding struct {
	// Subject names it.
	Subject string
	// OK says that it is as it should be; Required, that machines cannot run when it is not.
	OK, Required bool
	// Detail tells what was found, Remedy what to do when it is not OK.
	Detail, Remedy string
}

// Doctor tries what machines need on this host, by doing it: a guest of one sector is booted. It changes nothing that stays.
func Doctor(ctx context.Context, cfg Config) []Finding {
	program := Finding{Subject: "qemu", Required: true, Remedy: "install qemu-system-x86 and seabios, or set vm.emulator; run as root"}
	cfg, err := cfg.complete()
	if err == nil {
		err = cfg.try(ctx, AccelTCG)
	}
	if err != nil {
		program.Detail = err.Error()
		return []Finding{program}
	}
	program.OK, program.Detail = true, fmt.Sprintf("%s: a guest boots, as user %d in a sandbox", cfg.Emulator, cfg.UID)
	return []Finding{program, accelFinding(ctx, cfg), vhostFinding()}
}

func accelFinding(ctx context.Context, cfg Config) Finding {
	f := Finding{Subject: "vm acceleration", Remedy: "machines run, many times slower: use a host whose processors virtualize, with /dev/kvm open to a group"}
	if cfg.Accel == AccelTCG {
		f.OK, f.Detail = true, "none (vm.accel is tcg)"
		return f
	}
	f.Required = cfg.Accel == AccelKVM
	if err := cfg.tryKVM(ctx); err != nil {
		f.Detail = "KVM: " + err.Error()
		return f
	}
	f.OK, f.Detail = true, "a guest boots under KVM"
	return f
}

func vhostFinding() Finding {
	f := Finding{Subject: "vhost-net", OK: fileExists(vhostNet), Detail: vhostNet, Remedy: "modprobe vhost_net: packets go through QEMU without it"}
	if !f.OK {
		f.Detail = vhostNet + " is not there"
	}
	return f
}

// Overhead is what QEMU needs beyond the guest's RAM, in bytes: its own code and heap, translated code, and tables of the
// devices. It was measured with QEMU 7.2; see docs/vm.md.
func Overhead(d machine.Definition) uint64 {
	const base, perCPU, perDevice = 112 << 20, 8 << 20, 2 << 20
	devices := uint64(len(d.Disks) + len(d.NICs) + len(d.Shares))
	return base + perCPU*uint64(d.CPUs) + perDevice*devices + d.Memory/128
}
