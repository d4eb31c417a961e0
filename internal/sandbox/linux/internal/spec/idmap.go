package spec

import (
	"fmt"
	"os"

	"github.com/cyphar/filepath-securejoin/pathrs-lite"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// mappings returns a map in the specification's form.
func mappings(m *sandbox.IDMap) (uids, gids []specs.LinuxIDMapping) {
	if m == nil {
		return nil, nil
	}
	return []specs.LinuxIDMapping{{HostID: m.Users.First, Size: m.Users.Length}},
		[]specs.LinuxIDMapping{{HostID: m.Groups.First, Size: m.Groups.Length}}
}

// checkMapped rejects a user or group that the pod's user namespace lacks.
func checkMapped(u specs.User, m *sandbox.IDMap) error {
	if m == nil {
		return nil
	}
	if u.UID >= m.Users.Length {
		return invalid("linux.security_context.run_as_user", "user %d is not in the pod's user namespace, which has %d users", u.UID,
			m.Users.Length)
	}
	for _, gid := range append([]uint32{u.GID}, u.AdditionalGids...) {
		if gid >= m.Groups.Length {
			return invalid("linux.security_context.supplemental_groups", "group %d is not in the pod's user namespace, which has %d groups", gid,
				m.Groups.Length)
		}
	}
	return nil
}

// makeDirectory creates a directory in a root file system, and its missing parents. They belong to the root user of
// the pod's user namespace.
func makeDirectory(root, name string, m *sandbox.IDMap) error {
	dir, err := os.OpenFile(root, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer dir.Close()
	if m == nil {
		return mkdirAll(dir, name)
	}
	return asRoot(*m, func() error { return mkdirAll(dir, name) })
}

func mkdirAll(dir *os.File, name string) error {
	made, err := pathrs.MkdirAllHandle(dir, name, 0o755)
	if err != nil {
		return err
	}
	return made.Close()
}

// asRoot runs fn with the file-system identity of a map's root. fn keeps the node's right to override permissions: a
// directory of the image may belong to another user.
func asRoot(m sandbox.IDMap, fn func() error) error {
	run, wait := guard.Part(func() error {
		if _, err := unix.SetfsgidRetGid(int(m.Groups.First)); err != nil {
			return err
		}
		if _, err := unix.SetfsuidRetUid(int(m.Users.First)); err != nil {
			return err
		}
		if err := raise(unix.CAP_DAC_OVERRIDE); err != nil {
			return err
		}
		return fn()
	})
	go process.OnOwnThread(run) // the identity is the thread's, which ends with it
	return wait()
}

// raise makes a permitted capability of the thread effective. setfsuid(2) drops some for other users than 0.
func raise(capability int) error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData
	if err := unix.Capget(&header, &sets[0]); err != nil {
		return fmt.Errorf("read the capabilities: %w", err)
	}
	sets[capability/32].Effective |= 1 << (capability % 32)
	if err := unix.Capset(&header, &sets[0]); err != nil {
		return fmt.Errorf("raise capability %d: %w", capability, err)
	}
	return nil
}
