package wasm

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Finding is one thing that Doctor looked at.
type Finding struct {
	// Subject names it.
	Subject string
	// OK says that it is as it should be; Required, that pods cannot run when it is not.
	OK, Required bool
	// Detail tells what was found, Remedy what to do when it is not OK.
	Detail, Remedy string
}

// Doctor tries what components need on this host, by doing it. It changes nothing that stays.
func Doctor(_ context.Context, cfg Config) []Finding {
	cfg = cfg.withDefaults()
	return []Finding{programFinding(cfg), compilerFinding(cfg), userFinding(cfg), addressFinding()}
}

func programFinding(cfg Config) Finding {
	f := Finding{Subject: ProgramName, Required: true, Remedy: "install the tripod-wasm that belongs to this tripod, readable and executable by everybody"}
	engine, err := askFingerprint(cfg)
	if err != nil {
		f.Detail = err.Error()
		return f
	}
	f.OK, f.Detail = true, cfg.Program+": engine "+engine
	return f
}

// compilerFinding starts a program as the compiler is started: as another user, in namespaces of its own.
func compilerFinding(cfg Config) Finding {
	f := Finding{Subject: "wasm isolation", Required: true, OK: true,
		Detail: fmt.Sprintf("processes without rights, as user %d, in namespaces of their own, can be started", cfg.UID),
		Remedy: "run as root, with user and network namespaces not forbidden, and let everybody into the directory of tripod-wasm"}
	cmd := exec.Command(cfg.Program, "fingerprint")
	cmd.Env = guestlessEnv()
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Setsid: true, Credential: cfg.credential(), Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS,
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		f.OK, f.Detail = false, fmt.Sprintf("%v %s", err, lastLine(out))
	}
	return f
}

// userFinding tells when the workers' user is somebody: what it owns would be theirs.
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

// addressFinding looks for room in the address space, of which each instance reserves more than it ever uses.
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
