package cloudinit

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// Kind is what becomes of a mount.
type Kind int

// The kinds of mounts.
const (
	// KindFiles: its files are copied into the guest.
	KindFiles Kind = iota
	// KindSource: it holds a ConfigMap or Secret that annotations refer to; the guest does not see it.
	KindSource
	// KindShare: the guest mounts the directory.
	KindShare
	// KindDevice: it is a block device.
	KindDevice
)

// SourceDir is where a pod mounts ConfigMaps and Secrets that only its annotations use: SourceDir/configmap/NAME and
// SourceDir/secret/NAME.
const SourceDir = "/etc/tripod/sources"

// Bounds of what is read of mounts: a Secret or ConfigMap has at most 1 MiB.
const (
	maxFile  = 1 << 20
	maxTotal = 16 << 20
	maxFiles = 4096
	maxDepth = 16
)

// apiVolume matches the directory of a volume whose files the kubelet writes from objects of the API.
var apiVolume = regexp.MustCompile(`/volumes/kubernetes\.io~(secret|configmap|downward-api|projected)/([^/]+)$`)

// Classify tells what becomes of a mount, where directories reach the guest by driver: those of Secrets, ConfigMaps and the
// like are shared by virtio-fs, so that the guest sees what becomes of them, and copied where there is none. A host path that is not there is errdefs.ErrFailedPrecondition, one that is neither
// file, directory nor block device errdefs.ErrInvalidArgument.
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
	case info.IsDir() && driver != machine.ShareVirtiofs && apiVolume.MatchString(path.Clean(hostPath)):
		return KindFiles, nil
	case info.IsDir():
		return KindShare, nil
	case info.Mode().Type() == fs.ModeDevice:
		return KindDevice, nil
	}
	return 0, fmt.Errorf("mount at %s: %s is neither a file, a directory nor a block device: %w", containerPath, hostPath, errdefs.ErrInvalidArgument)
}

// file is a file of a mount.
type file struct {
	// name is relative to the mount, empty for a mount that is a file.
	name string
	data []byte
	mode os.FileMode
}

// read returns the files of a mount, in the order of their names, following links inside of it only.
func (b *builder) read(m Mount) ([]file, error) {
	fail := func(err error) error { return fmt.Errorf("mount at %s: %w", m.ContainerPath, err) }
	info, err := os.Stat(m.HostPath)
	if err != nil {
		return nil, fail(fmt.Errorf("%v: %w", err, errdefs.ErrFailedPrecondition))
	}
	dir, name := m.HostPath, "."
	if !info.IsDir() {
		// The last link of such a path, which the kubelet has resolved or an administrator has set, may lead elsewhere.
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

// readDir appends the files below a directory. Names that begin with ".." are the kubelet's own: versions of the volume,
// to which the links outside of them lead.
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
			return nil, fmt.Errorf("a link that leads nowhere, or out of the volume: %v: %w", err, errdefs.ErrInvalidArgument)
		}
		if b.count--; b.count < 0 {
			return nil, fmt.Errorf("%s: the mounts of the pod have more than %d files to copy: %w", at, maxFiles, errdefs.ErrInvalidArgument)
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
	// Not to wait for the writer of a pipe that has taken the file's place.
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
		return nil, fmt.Errorf("%s is larger than the %d bytes that are copied into a guest; mount its directory, which is shared: %w", name, maxFile, errdefs.ErrInvalidArgument)
	case b.budget < 0:
		return nil, fmt.Errorf("%s: the mounts of the pod have more than %d bytes to copy: %w", name, maxTotal, errdefs.ErrInvalidArgument)
	}
	return append(files, file{name: name, data: data, mode: info.Mode().Perm()}), nil
}

// errNoSource is why a reference cannot be served.
var errNoSource = errors.New("no mount of the pod has it")
