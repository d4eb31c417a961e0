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
	"github.com/tripod-run/tripod/internal/unixsocket"
)

// askTimeout bounds the wait for the daemon's answer. The daemon answers soon, because it opened the files before it
// asked libvirt to start the domain.
const askTimeout = 30 * time.Second

// Exec replaces this process with QEMU. It takes the arguments and the environment with which libvirt started this
// process. Exec returns only on error.
func Exec(ctx context.Context, args, env []string) error {
	emulator, argv, env, err := prepare(ctx, args, env)
	if err != nil {
		return err
	}
	// QEMU inherits libvirt's descriptors and those of the grant. All others are closed on exec.
	err = syscall.Exec(emulator, argv, env) //nolint:forbidigo // libvirt knows the emulator by the PID that it started
	return fmt.Errorf("execute %s: %w", emulator, err)
}

// prepare returns QEMU's path, arguments and environment. The descriptors in the arguments are open and inheritable.
func prepare(ctx context.Context, args, env []string) (emulator string, argv, environ []string, err error) {
	if len(args) == 0 || !filepath.IsAbs(args[0]) {
		return "", nil, nil, fmt.Errorf("called as %q, but libvirt calls it by the absolute path in the domain's <emulator>: %w", args,
			errdefs.ErrInvalidArgument)
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
	conn, err := unixsocket.Dial(ctx, socket)
	if err != nil {
		return "", nil, nil, fmt.Errorf("connect to the daemon: %w", err)
	}
	var grant Grant
	files, err := fdpass.Call(ctx, conn, Request{Machine: name, Secret: secret}, &grant)
	if err != nil {
		return "", nil, nil, fmt.Errorf("machine %s: %w", name, err)
	}
	fds, err := inheritable(files)
	if err != nil {
		return "", nil, nil, err
	}
	if argv, err = edit(argv, grant, fds); err != nil {
		return "", nil, nil, fmt.Errorf("machine %s: %w", name, err)
	}
	if err := errors.Join(confine(), redirectSerial(grant.Serial, fds)); err != nil {
		return "", nil, nil, err
	}
	return emulator, argv, environ, nil
}

// confine sets no_new_privs, which QEMU inherits, and disables core files, which would contain the guest's memory.
func confine() error {
	if _, _, errno := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0); errno != 0 {
		return fmt.Errorf("set no_new_privs: %w", errno)
	}
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
		return fmt.Errorf("disable core files: %w", err)
	}
	return nil
}

// redirectSerial makes the serial console the standard input and output.
func redirectSerial(s *Serial, fds []int) error {
	if s == nil {
		return nil
	}
	for number, index := range []int{s.Input, s.Output} {
		if index < 0 || index >= len(fds) {
			return fmt.Errorf("the grant's serial console refers to descriptor %d, but the grant has only %d: %w", index, len(fds),
				errdefs.ErrFailedPrecondition)
		}
		if err := unix.Dup3(fds[index], number, 0); err != nil {
			return fmt.Errorf("redirect the serial console: %w", err)
		}
	}
	return nil
}

// inheritable duplicates the files' descriptors and closes the files. An executed program inherits the duplicates.
func inheritable(files []*os.File) ([]int, error) {
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
