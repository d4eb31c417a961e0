package cloudinit

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/lazyregexp"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// Kind says how a mount reaches the guest.
type Kind int

// The kinds of mounts.
const (
	// KindFiles: the files are copied into the guest.
	KindFiles Kind = iota
	// KindSource: the mount holds a ConfigMap or Secret that annotations refer to. The guest does not see the mount.
	KindSource
	// KindShare: the guest mounts the directory.
	KindShare
	// KindDevice: the mount is a block device.
	KindDevice
)

// SourceDir is a directory for ConfigMaps and Secrets that only a pod's annotations use. The pod mounts them at
// SourceDir/configmap/NAME and SourceDir/secret/NAME.
const SourceDir = "/etc/tripod/sources"

// Limits for reading mounts. A Secret or ConfigMap has at most 1 MiB.
const (
	maxFile  = 1 << 20
	maxTotal = 16 << 20
	maxFiles = 4096
	maxDepth = 16
)

// apiVolume matches the directory of a volume whose files the kubelet writes from API objects.
var apiVolume = lazyregexp.New(`/volumes/kubernetes\.io~(secret|configmap|downward-api|projected)/([^/]+)$`)

// Classify returns how a mount reaches the guest. The given driver shares directories. Directories of Secrets,
// ConfigMaps and similar volumes are shared by virtio-fs, so that the guest sees updates; with other drivers they are
// copied. Classify returns errdefs.ErrFailedPrecondition if the host path is missing, and errdefs.ErrInvalidArgument if
// that path is not a file, directory or block device.
func Classify(hostPath, containerPath string, driver machine.ShareDriver) (Kind, error) {
	if strings.HasPrefix(path.Clean(containerPath), SourceDir+"/") {
		return KindSource, nil
	}
	info, err := os.Stat(hostPath)
	switch {
	case err != nil:
		return 0, fmt.Errorf("mount at %s: %v: %w", containerPath, err, errdefs.ErrFailedPrecondition)
	case info.Mode().IsRegular():
		return KindFiles, nil
	case info.IsDir() && driver != machine.ShareVirtiofs && apiVolume().MatchString(path.Clean(hostPath)):
		return KindFiles, nil
	case info.IsDir():
		return KindShare, nil
	case info.Mode().Type() == fs.ModeDevice:
		return KindDevice, nil
	}
	return 0, fmt.Errorf("mount at %s: %s is neither a file, a directory nor a block device: %w", containerPath, hostPath,
		errdefs.ErrInvalidArgument)
}

// file is a file in a mount.
type file struct {
	// name is relative to the mount. It is empty if the mount itself is a file.
	name string
	data []byte
	mode os.FileMode
}

// read returns the files in a mount, ordered by name. It follows only links that stay within the mount.
func (b *builder) read(m Mount) ([]file, error) {
	fail := func(err error) error { return fmt.Errorf("mount at %s: %w", m.ContainerPath, err) }
	info, err := os.Stat(m.HostPath)
	if err != nil {
		return nil, fail(fmt.Errorf("%v: %w", err, errdefs.ErrFailedPrecondition))
	}
	dir, name := m.HostPath, "."
	if !info.IsDir() {
		// The path of a single file may end in a link that leads elsewhere. Following the link is safe, because the
		// kubelet or an administrator made it.
		if dir, err = filepath.EvalSymlinks(m.HostPath); err != nil {
			return nil, fail(fmt.Errorf("%v: %w", err, errdefs.ErrFailedPrecondition))
		}
		dir, name = filepath.Split(dir)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fail(fmt.Errorf("%v: %w", err, errdefs.ErrFailedPrecondition))
	}
	defer root.Close()
	var files []file
	if !info.IsDir() {
		files, err = b.readFile(root, name, nil)
		for i := range files {
			files[i].name = ""
		}
	} else {
		files, err = b.readDir(root, name, 0, nil)
	}
	if err != nil {
		return nil, fail(err)
	}
	return files, nil
}

// readDir appends the files below a directory to the given files. It skips entries whose names begin with "..". These
// entries hold the kubelet's versions of the volume; all other entries are links into the current version.
func (b *builder) readDir(root *os.Root, name string, depth int, files []file) ([]file, error) {
	if depth > maxDepth {
		return nil, fmt.Errorf("%s: more than %d directories deep: %w", name, maxDepth, errdefs.ErrInvalidArgument)
	}
	entries, err := fs.ReadDir(root.FS(), name)
	if err != nil {
		return nil, fmt.Errorf("%v: %w", err, errdefs.ErrFailedPrecondition)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "..") {
			continue
		}
		at := path.Join(name, e.Name())
		info, err := root.Stat(at)
		if err != nil {
			return nil, fmt.Errorf("a link has no target in the volume: %v: %w", err, errdefs.ErrInvalidArgument)
		}
		if b.count--; b.count < 0 {
			return nil, fmt.Errorf("%s: the pod's mounts have more than %d files to copy: %w", at, maxFiles, errdefs.ErrInvalidArgument)
		}
		if info.IsDir() {
			files, err = b.readDir(root, at, depth+1, files)
		} else {
			files, err = b.readFile(root, at, files)
		}
		if err != nil {
			return nil, err
		}
	}
	return files, nil
}

func (b *builder) readFile(root *os.Root, name string, files []file) ([]file, error) {
	// O_NONBLOCK: if a pipe has replaced the file, do not wait for a writer of the pipe.
	f, err := root.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("%v: %w", err, errdefs.ErrFailedPrecondition)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a file: %w", name, errdefs.ErrInvalidArgument)
	}
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, fmt.Errorf("%v: %w", err, errdefs.ErrFailedPrecondition)
	}
	b.budget -= len(data)
	switch {
	case len(data) > maxFile:
		return nil, fmt.Errorf("%s is larger than the %d bytes that can be copied into a guest; mount its directory instead, which is shared: %w",
			name, maxFile, errdefs.ErrInvalidArgument)
	case b.budget < 0:
		return nil, fmt.Errorf("%s: the pod's mounts have more than %d bytes to copy: %w", name, maxTotal, errdefs.ErrInvalidArgument)
	}
	return append(files, file{name: name, data: data, mode: info.Mode().Perm()}), nil
}
