package vmwrap

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/fdpass"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// askTimeout bounds the time until the daemon answers; it has the files open already when it lets libvirt start a domain.
const askTimeout = 30 * time.Second

// Prepare is what to execute instead of the wrapper that was called with args in env: the path of QEMU, its arguments and
// its environment. The descriptors in the arguments are open and are inherited.
func Prepare(ctx context.Context, args, env []string) (emulator string, argv, environ []string, err error) {
	if len(args) == 0 || !filepath.IsAbs(args[0]) {
		return "", nil, nil, fmt.Errorf("called as %q; libvirt calls it by the path that the domain's <emulator> has: %w", args, errdefs.ErrInvalidArgument)
	}
	emulator = filepath.Join(filepath.Dir(args[0]), EmulatorName)
	argv = append([]string{emulator}, args[1:]...)
	name, socket, secret := lookup(env, MachineVar), lookup(env, SocketVar), lookup(env, SecretVar)
	if name == "" || socket == "" {
		return emulator, argv, env, nil
	}
	environ = slices.DeleteFunc(slices.Clone(env), func(v string) bool {
		return strings.HasPrefix(v, MachineVar+"=") || strings.HasPrefix(v, SocketVar+"=") || strings.HasPrefix(v, SecretVar+"=")
	})
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	conn, err := machine.Dial(ctx, socket)
	if err != nil {
		return "", nil, nil, fmt.Errorf("the daemon is not there: %w", err)
	}
	var grant Grant
	files, err := fdpass.Call(ctx, conn, Request{Machine: name, Secret: secret}, &grant)
	if err != nil {
		return "", nil, nil, fmt.Errorf("machine %s: %w", name, err)
	}
	fds, err := keep(files)
	if err != nil {
		return "", nil, nil, err
	}
	if argv, err = Edit(argv, grant, fds); err != nil {
		return "", nil, nil, fmt.Errorf("machine %s: %w", name, err)
	}
	if err := errors.Join(confine(), standard(grant.Serial, fds)); err != nil {
		return "", nil, nil, err
	}
	return emulator, argv, environ, nil
}

// confine takes from this process, and so from QEMU, every way to more rights, and core files, in which a guest's memory
// would be.
func confine() error {
	if _, _, errno := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0); errno != 0 {
		return fmt.Errorf("no_new_privs: %w", errno)
	}
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
		return fmt.Errorf("no core files: %w", err)
	}
	return nil
}

// standard makes the ends of the serial console QEMU's standard input and output.
func standard(s *Serial, fds []int) error {
	if s == nil {
		return nil
	}
	for number, index := range []int{s.Input, s.Output} {
		if index < 0 || index >= len(fds) {
			return fmt.Errorf("descriptor %d of %d for the serial console: %w", index, len(fds), errdefs.ErrFailedPrecondition)
		}
		if err := unix.Dup3(fds[index], number, 0); err != nil {
			return fmt.Errorf("the serial console: %w", err)
		}
	}
	return nil
}

// keep makes descriptors of the files that are inherited.
func keep(files []*os.File) ([]int, error) {
	fds := make([]int, len(files))
	for i, file := range files {
		raw, err := file.SyscallConn()
		if err != nil {
			return nil, err
		}
		var dupErr error
		if err := raw.Control(func(fd uintptr) { fds[i], dupErr = unix.Dup(int(fd)) }); err != nil {
			return nil, err
		}
		if dupErr != nil {
			return nil, dupErr
		}
		file.Close()
	}
	return fds, nil
}

func lookup(env []string, name string) string {
	for _, v := range env {
		if value, ok := strings.CutPrefix(v, name+"="); ok {
			return value
		}
	}
	return ""
}
