package qemu

import (
	"context"
	"fmt"
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
