package notifier

import (
	"fmt"
	"maps"
	"slices"

	"github.com/containerd/errdefs"
	"github.com/elastic/go-seccomp-bpf/arch"
	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// neededToNotify are calls that the OCI runtime makes after it has installed the filter. A notification about one of
// them would wait for itself.
var neededToNotify = []string{"write", "sendmsg", "close", "poll", "ppoll", "exit", "exit_group", "rt_sigreturn"}

// Apply changes a profile so that the socket's listener is notified about every call that the profile fails with an
// error. A call that the profile allows for some arguments only is not notified. The metadata comes back with each
// Event.
func Apply(filter *specs.LinuxSeccomp, socket, metadata string) error {
	if filter == nil {
		return fmt.Errorf("a seccomp notifier needs a seccomp profile, and the container has none: %w", errdefs.ErrInvalidArgument)
	}
	if filter.ListenerPath != "" {
		return fmt.Errorf("the profile already has a listener, %s: %w", filter.ListenerPath, errdefs.ErrInvalidArgument)
	}
	info, err := arch.GetInfo("")
	if err != nil {
		return fmt.Errorf("%w: %w", err, errdefs.ErrNotImplemented)
	}
	mentioned := map[string]bool{}
	for i, rule := range filter.Syscalls {
		for _, name := range rule.Names {
			mentioned[name] = true
		}
		if rule.Action == specs.ActErrno && len(rule.Args) == 0 && !slices.ContainsFunc(rule.Names, isNeeded) {
			filter.Syscalls[i].Action, filter.Syscalls[i].ErrnoRet = specs.ActNotify, nil
		}
	}
	var rest []string
	for _, name := range slices.Sorted(maps.Keys(info.SyscallNames)) {
		if !mentioned[name] && !isNeeded(name) {
			rest = append(rest, name)
		}
	}
	// libseccomp does not accept a notification as the default action, so name the calls.
	if filter.DefaultAction == specs.ActErrno && len(rest) > 0 {
		filter.Syscalls = append(filter.Syscalls, specs.LinuxSyscall{Names: rest, Action: specs.ActNotify})
	}
	filter.ListenerPath, filter.ListenerMetadata = socket, metadata
	return nil
}

func isNeeded(name string) bool { return slices.Contains(neededToNotify, name) }

// nameOf returns the name of a system call of this machine's own architecture, otherwise its number.
func nameOf(number int32, audit uint32) string {
	info, err := arch.GetInfo("")
	if err == nil && uint32(info.ID) == audit {
		if name, ok := info.SyscallNumbers[int(number)]; ok {
			return name
		}
	}
	return fmt.Sprintf("system call %d of architecture %#x", number, audit)
}
