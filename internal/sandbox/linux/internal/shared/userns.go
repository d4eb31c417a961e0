package shared

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/containerd/containerd/v2/pkg/sys"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/mnt"
)

// A pod with a user namespace (sandbox.Pod.IDMap) owns all its namespaces: they are made together, by a process that
// enters the new user namespace and never runs a program. The pod's root must reach its files, so these lie below a
// directory of the pod that its group can enter; all directories above can be entered, but not read, by everyone.
// See docs/adr/0040.

var fpUsers = failpoint.New("linux.create-sandbox.users")

// MakeRunDir creates a pod's run-time directory. The root of the pod's user namespace can enter it.
func MakeRunDir(p *sandbox.Pod, run string) error {
	if err := os.MkdirAll(run, 0o700); err != nil {
		return fmt.Errorf("make the pod's directory: %w", err)
	}
	ids := p.IDMap()
	if ids == nil {
		return nil
	}
	if err := errors.Join(os.Chown(run, 0, int(ids.Groups.First)), os.Chmod(run, 0o710)); err != nil {
		return fmt.Errorf("open the pod's directory to the pod's root: %w", err)
	}
	return nil
}

// MakeUserNamespace makes and pins a user namespace, and the network, ipc and uts namespaces that have a pin. The pin of
// the network namespace must exist.
func MakeUserNamespace(ids *sandbox.IDMap, at Pins) error {
	var flags uintptr
	wanted := map[string]string{"user": at.User}
	for _, ns := range []struct {
		kind, pin string
		flag      uintptr
	}{{"net", at.Net, unix.CLONE_NEWNET}, {"ipc", at.IPC, unix.CLONE_NEWIPC}, {"uts", at.UTS, unix.CLONE_NEWUTS}} {
		if ns.pin != "" {
			flags |= ns.flag
			wanted[ns.kind] = ns.pin
		}
	}
	for kind, pin := range wanted {
		if kind == "net" {
			continue
		}
		if err := makePin(pin); err != nil {
			return err
		}
	}
	err := sys.UnshareAfterEnterUserns(mapping(ids.Users), mapping(ids.Groups), flags, func(pid int) error {
		for kind, pin := range wanted {
			if err := pinNamespace(fmt.Sprintf("/proc/%d/ns/%s", pid, kind), pin); err != nil {
				return err
			}
		}
		return fpUsers.Hit(context.Background())
	})
	if err != nil {
		err = fmt.Errorf("make the pod's user namespace: %w", err)
		for _, pin := range wanted {
			err = errors.Join(err, mnt.Unmount(pin))
		}
	}
	return err
}

// mapping returns a range in the notation of containerd: first ID in the namespace, first ID of the node, length.
func mapping(r sandbox.IDRange) string { return fmt.Sprintf("0:%d:%d", r.First, r.Length) }

// completeUserNamespace makes the namespaces of a pod with a user namespace, unless MakeNetns has made them.
func completeUserNamespace(p *sandbox.Pod, at Pins) error {
	if IsPinned(at.User) {
		return nil
	}
	if at.Net != "" {
		return fmt.Errorf("the user namespace that owns %s is missing: %w", at.Net, errdefs.ErrFailedPrecondition)
	}
	return MakeUserNamespace(p.IDMap(), at)
}

// OpenUsers opens a pod's user namespace.
func OpenUsers(p *sandbox.Pod, runDir string) (*os.File, error) {
	f, err := os.Open(PinsOf(p, runDir).User)
	if err != nil {
		return nil, fmt.Errorf("the pod's user namespace: %w: %w", err, errdefs.ErrFailedPrecondition)
	}
	return f, nil
}
