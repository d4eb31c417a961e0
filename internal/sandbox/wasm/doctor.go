package wasm

import (
	"context"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// Finding is the result of one check.
type Finding struct {
	// Subject names it.
	Subject string
	// OK: the check passed. Required: pods cannot run unless it does.
	OK, Required bool
	// Detail says what was found, Remedy what to do if it is not OK.
	Detail, Remedy string
}

// Doctor checks what components need on this host by doing it. It leaves no changes behind.
func Doctor(_ context.Context, cfg Config) []Finding {
	cfg = cfg.withDefaults()
	if err := cfg.findProgram(); err != nil {
		return []Finding{{Subject: ProgramName, Detail: err.Error(),
			Remedy: "install tripod-wasm beside tripod, or name it by wasm.program; without it there is no handler \"wasm\""}}
	}
	return []Finding{programFinding(cfg), userFinding(cfg), addressFinding()}
}

// programFinding starts the program like the compiler: as another user, in namespaces of its own.
func programFinding(cfg Config) Finding {
	f := Finding{Subject: ProgramName, Required: true,
		Remedy: "run as root, with network namespaces not forbidden, and install the tripod-wasm that belongs to this tripod, executable by everybody"}
	engine, err := askFingerprint(cfg)
	if err != nil {
		f.Detail = err.Error()
		return f
	}
	f.OK, f.Detail = true, fmt.Sprintf("%s: engine %s; starts as user %d in namespaces of its own", cfg.Program, engine, cfg.UID)
	return f
}

// userFinding warns if the workers' user has a login: guests that break out could reach its files.
func userFinding(cfg Config) Finding {
	f := Finding{Subject: "wasm user", OK: true, Detail: fmt.Sprintf("%d has no login", cfg.UID), Remedy: "set wasm.user to a number that nobody has"}
	passwd, err := os.ReadFile("/etc/passwd")
	if err != nil {
		return f
	}
	for line := range strings.Lines(string(passwd)) {
		if fields := strings.Split(line, ":"); len(fields) > 2 && fields[2] == fmt.Sprint(cfg.UID) {
			f.OK, f.Detail = false, fmt.Sprintf("%d is %s, whose files guests could reach if they broke out", cfg.UID, fields[0])
		}
	}
	return f
}

// addressFinding checks for limits of the address space: each instance reserves more than it ever uses.
func addressFinding() Finding {
	f := Finding{Subject: "wasm address space", OK: true, Detail: "unlimited", Remedy: "lift the limit (ulimit -v unlimited): each instance reserves 4 GiB of addresses"}
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
