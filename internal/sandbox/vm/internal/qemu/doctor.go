package qemu

import (
	"context"
	"fmt"

	"github.com/tripod-run/tripod/internal/health"
)

// Doctor boots a guest of one sector to check that this host can run machines. It leaves nothing behind.
func Doctor(ctx context.Context, cfg Config) []health.Finding {
	program := health.Finding{Subject: "qemu", Required: true, Remedy: "install qemu-system-x86 and seabios, or set vm.emulator; run as root"}
	cfg, err := cfg.complete()
	if err == nil {
		err = cfg.bootProbe(ctx, AccelTCG)
	}
	if err != nil {
		program.Detail = err.Error()
		return []health.Finding{program}
	}
	program.OK, program.Detail = true, fmt.Sprintf("%s: a guest boots, as user %d in a sandbox", cfg.Emulator, cfg.UID)
	return []health.Finding{program, accelFinding(ctx, cfg), vhostFinding()}
}

func accelFinding(ctx context.Context, cfg Config) health.Finding {
	f := health.Finding{Subject: "vm acceleration",
		Remedy: "machines run without it, many times slower; use a host with hardware virtualization and a group that may open /dev/kvm"}
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

func vhostFinding() health.Finding {
	f := health.Finding{Subject: "vhost-net", OK: fileExists(vhostNet), Detail: vhostNet,
		Remedy: "modprobe vhost_net; without it, packets go through QEMU"}
	if !f.OK {
		f.Detail = vhostNet + " does not exist"
	}
	return f
}
