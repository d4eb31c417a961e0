package qemu

import (
	"context"
	"fmt"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// Doctor tries what machines need on this host, by doing it: a guest of one sector is booted. It changes nothing that stays.
func Doctor(ctx context.Context, cfg Config) []machine.Finding {
	program := machine.Finding{Subject: "qemu", Required: true, Remedy: "install qemu-system-x86 and seabios, or set vm.emulator; run as root"}
	cfg, err := cfg.complete()
	if err == nil {
		err = cfg.try(ctx, AccelTCG)
	}
	if err != nil {
		program.Detail = err.Error()
		return []machine.Finding{program}
	}
	program.OK, program.Detail = true, fmt.Sprintf("%s: a guest boots, as user %d in a sandbox", cfg.Emulator, cfg.UID)
	return []machine.Finding{program, accelFinding(ctx, cfg), vhostFinding()}
}

func accelFinding(ctx context.Context, cfg Config) machine.Finding {
	f := machine.Finding{Subject: "vm acceleration", Remedy: "machines run, many times slower: use a host whose processors virtualize, with /dev/kvm open to a group"}
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

func vhostFinding() machine.Finding {
	f := machine.Finding{Subject: "vhost-net", OK: fileExists(vhostNet), Detail: vhostNet, Remedy: "modprobe vhost_net: packets go through QEMU without it"}
	if !f.OK {
		f.Detail = vhostNet + " is not there"
	}
	return f
}
