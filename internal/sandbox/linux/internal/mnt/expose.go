package mnt

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
)

// exposeDir returns the directory of what Expose mounts for a container.
func exposeDir(runDir, id string) string { return filepath.Join(runDir, "mounts", id) }

// Expose lets a container in a user namespace reach its root file system and volumes, which lie in directories that
// only the node's root can enter: it mounts clones below the pod's run-time directory, mapped to the user namespace where
// the specification says so, and changes the specification to these clones.
func Expose(config *specs.Spec, runDir, id string, users *os.File) error {
	if err := Unexpose(runDir, id); err != nil {
		return err
	}
	dir := exposeDir(runDir, id)
	if err := errors.Join(os.MkdirAll(dir, 0o755), os.Chmod(filepath.Dir(dir), 0o755), os.Chmod(dir, 0o755)); err != nil {
		return err
	}
	root := specs.Mount{Source: config.Root.Path}
	if err := exposeMount(&root, filepath.Join(dir, "rootfs"), users); err != nil {
		return err
	}
	config.Root.Path = root.Source
	for i := range config.Mounts {
		m := &config.Mounts[i]
		if m.Type != "bind" || strings.HasPrefix(m.Source, runDir+"/") {
			continue
		}
		if err := exposeMount(m, filepath.Join(dir, strconv.Itoa(i)), users); err != nil {
			return fmt.Errorf("mount for %s: %w", m.Destination, err)
		}
	}
	return nil
}

// Exposed reports whether a container has all its clones.
func Exposed(runDir, id string) bool {
	return IsMounted(filepath.Join(exposeDir(runDir, id), "rootfs"))
}

// exposeMount mounts a clone of a mount's source on target, and makes the clone the source.
func exposeMount(m *specs.Mount, target string, users *os.File) error {
	if m.UIDMappings == nil {
		users = nil
	}
	tree, err := cloneTree(m.Source, slices.Contains(m.Options, "rbind"), slices.Contains(m.Options, "rslave"), users)
	if cannotMap(err) {
		return fmt.Errorf("%w: %w", err, errdefs.ErrFailedPrecondition)
	}
	if err != nil {
		return err
	}
	if err := makeMountPoint(tree, target); err != nil {
		tree.Close()
		return err
	}
	m.Source, m.UIDMappings, m.GIDMappings = target, nil, nil
	return attach(tree, target)
}

// makeMountPoint creates an empty directory or file, depending on what will be mounted on it.
func makeMountPoint(tree *os.File, target string) error {
	info, err := tree.Stat()
	if err != nil {
		return err
	}
	if info.IsDir() {
		return os.MkdirAll(target, 0o700)
	}
	f, err := os.OpenFile(target, os.O_CREATE|os.O_RDONLY, 0o400)
	if err != nil {
		return err
	}
	return f.Close()
}

// UnexposeAll removes the clones of all of a pod's containers.
func UnexposeAll(runDir string) error {
	var errs []error
	entries, _ := os.ReadDir(exposeDir(runDir, ""))
	for _, e := range entries {
		if cgroup.ID().MatchString(e.Name()) {
			errs = append(errs, Unexpose(runDir, e.Name()))
		}
	}
	return errors.Join(append(errs, ledger.RemoveFile(exposeDir(runDir, "")))...)
}

// Unexpose removes a container's clones, and fails rather than delete a file in a volume.
func Unexpose(runDir, id string) error {
	dir := exposeDir(runDir, id)
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		err = errors.Join(err, RemovePoint(filepath.Join(dir, e.Name())))
	}
	return errors.Join(err, ledger.RemoveFile(dir))
}
