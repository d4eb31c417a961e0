package wasm

import (
	"context"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/component/wasi"
	"github.com/tripod-run/tripod/internal/health"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/codelayer"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/code"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/launch"
)

// Doctor checks whether this host can run components. It leaves nothing behind.
func Doctor(_ context.Context, cfg Config) []health.Finding {
	cfg = cfg.withDefaults()
	var err error
	if cfg.Program, err = launch.Find(cfg.Program); err != nil {
		return []health.Finding{{Subject: ProgramName, Detail: err.Error(),
			Remedy: "install tripod-wasm beside tripod, or set wasm.program; without it the handler \"wasm\" is missing"}}
	}
	return []health.Finding{programFinding(cfg), interfacesFinding(), userFinding(cfg), addressFinding(), layersFinding(cfg)}
}

// programFinding checks that the program can run under the same conditions as the compiler: as the unprivileged user,
// in new namespaces.
func programFinding(cfg Config) health.Finding {
	f := health.Finding{Subject: ProgramName, Required: true,
		Remedy: "run as root, allow network namespaces, and install the tripod-wasm of this version, executable by all users"}
	engine, err := cfg.program().Engine()
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

// layersFinding says whose compiled code is used, and warns of keys that cannot be read.
func layersFinding(cfg Config) health.Finding {
	f := health.Finding{Subject: "wasm code in images", OK: true, Detail: "not used", Remedy: "correct the keys of wasm.compiled_layer"}
	if len(cfg.CompiledLayers) == 0 {
		return f
	}
	var used []string
	for _, rule := range cfg.CompiledLayers {
		keys, err := code.Keys([]code.Rule{rule})
		if err != nil {
			f.OK, f.Detail = false, err.Error()
			return f
		}
		for _, key := range keys {
			used = append(used, fmt.Sprintf("from %s if signed by %s", strings.Join(rule.Repositories, ", "), key.Fingerprint))
		}
	}
	f.Detail = fmt.Sprintf("used %s; this processor has %s", strings.Join(used, ", "), strings.Join(codelayer.HostFeatures(), " "))
	return f
}

// userFinding warns if the workers' user has an account, because a guest that escapes could access the account's files.
func userFinding(cfg Config) health.Finding {
	f := health.Finding{Subject: "wasm user", OK: true, Detail: fmt.Sprintf("user %d has no account", cfg.UID),
		Remedy: "set wasm.user to an unused user ID"}
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
	f := health.Finding{Subject: "wasm address space", OK: true, Detail: "unlimited",
		Remedy: "remove the limit (ulimit -v unlimited): each instance reserves 4 GiB of addresses"}
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
