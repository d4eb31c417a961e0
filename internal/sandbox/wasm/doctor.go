package wasm

import (
	"context"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/component/wasi"
	"github.com/tripod-run/tripod/internal/health"
)

// Doctor checks whether this host can run components. It leaves nothing behind.
func Doctor(_ context.Context, cfg Config) []health.Finding {
	cfg = cfg.withDefaults()
	if err := cfg.findProgram(); err != nil {
		return []health.Finding{{Subject: ProgramName, Detail: err.Error(),
			Remedy: "install tripod-wasm beside tripod, or set wasm.program; without it the handler \"wasm\" is missing"}}
	}
	return []health.Finding{programFinding(cfg), interfacesFinding(), userFinding(cfg), addressFinding()}
}

// programFinding checks that the program can run under the same conditions as the compiler: as the unprivileged user,
// in new namespaces.
func programFinding(cfg Config) health.Finding {
	f := health.Finding{Subject: ProgramName, Required: true,
		Remedy: "run as root, allow network namespaces, and install the tripod-wasm of this version, executable by all users"}
	engine, err := askFingerprint(cfg)
	if err != nil {
		f.Detail = err.Error()
		return f
	}
	f.OK, f.Detail = true, fmt.Sprintf("%s: engine %s; starts as user %d in new namespaces", cfg.Program, engine, cfg.UID)
	return f
}

// interfacesFinding lists what components can import.
func interfacesFinding() health.Finding {
	return health.Finding{Subject: "wasm interfaces", OK: true, Detail: "WASI 0.2, " + strings.Join(wasi.Drafts(), ", ")}
}

// userFinding warns if the workers' user has an account, because a guest that escapes could access the account's files.
func userFinding(cfg Config) health.Finding {
	f := health.Finding{Subject: "wasm user", OK: true, Detail: fmt.Sprintf("user %d has no account", cfg.UID), Remedy: "set wasm.user to an unused user ID"}
	passwd, err := os.ReadFile("/etc/passwd")
	if err != nil {
		return f
	}
	for line := range strings.Lines(string(passwd)) {
		if fields := strings.Split(line, ":"); len(fields) > 2 && fields[2] == fmt.Sprint(cfg.UID) {
			f.OK, f.Detail = false, fmt.Sprintf("user %d is %s, whose files an escaped guest could access", cfg.UID, fields[0])
		}
	}
	return f
}

// addressFinding checks that the address space is unlimited, because each instance reserves far more addresses than it
// uses.
func addressFinding() health.Finding {
	f := health.Finding{Subject: "wasm address space", OK: true, Detail: "unlimited", Remedy: "remove the limit (ulimit -v unlimited): each instance reserves 4 GiB of addresses"}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_AS, &limit); err == nil && limit.Cur != unix.RLIM_INFINITY {
		f.OK, f.Required, f.Detail = false, true, fmt.Sprintf("limited to %d MiB", limit.Cur>>20)
	}
	if mode, err := os.ReadFile("/proc/sys/vm/overcommit_memory"); err == nil && strings.TrimSpace(string(mode)) == "2" {
		f.OK, f.Required, f.Detail = false, true, "vm.overcommit_memory is 2: addresses cannot be reserved without memory"
		f.Remedy = "set vm.overcommit_memory to 0 or 1"
	}
	return f
}
