package image

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/containerd/containerd/v2/core/mount"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/image/internal/failure"
)

// Paths of a machine's boot files in a container image.
const (
	diskDir     = "disk"
	kernelFile  = "boot/vmlinux"
	initrdFile  = "boot/initrd"
	cmdlineFile = "boot/cmdline"
)

// maxCmdline is the longest command line of x86 kernels (COMMAND_LINE_SIZE), in bytes.
const maxCmdline = 2048

// optional opens a regular file. It returns nil if the file is missing.
func (r *imageRoot) optional(name string) (*os.File, error) {
	file, err := r.open(name, 0)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("/%s: %w", name, err)
	}
	if info, err := file.Stat(); err != nil || !info.Mode().IsRegular() {
		file.Close()
		if err == nil {
			err = failure.Invalidf("/%s is not a regular file but %s", name, info.Mode())
		}
		return nil, err
	}
	return file, nil
}

// openMachine opens the boot files of an unpacked image: a kernel, a disk, or both.
func (s *Store) openMachine(mounts []mount.Mount) (files *DiskFiles, err error) {
	layers, err := layersOf(mounts)
	if err != nil {
		return nil, err
	}
	err = s.withRoot(mounts, func(root *imageRoot) error {
		files, err = root.machine(layers)
		return err
	})
	return files, err
}

func (r *imageRoot) machine(layers []string) (_ *DiskFiles, err error) {
	f := &DiskFiles{}
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	for _, part := range []struct {
		name string
		file **os.File
		path *string
	}{{kernelFile, &f.Kernel, &f.KernelPath}, {initrdFile, &f.Initrd, &f.InitrdPath}} {
		shown, err := r.optional(part.name)
		if err != nil {
			return nil, err
		}
		if shown == nil {
			continue
		}
		if *part.file, *part.path, err = r.openInLayer(shown, layers); err != nil {
			return nil, fmt.Errorf("/%s: %w", part.name, err)
		}
	}
	if (f.Kernel == nil) != (f.Initrd == nil) {
		return nil, failure.Invalidf("the image has only one of /%s and /%s", kernelFile, initrdFile)
	}
	if err := r.disk(f, layers); err != nil {
		return nil, err
	}
	switch {
	case f.Kernel != nil:
		f.Layout = LayoutKernel
		f.Cmdline, err = r.cmdline()
		return f, err
	case f.Disk != nil:
		f.Layout = LayoutContainerDisk
		return f, nil
	}
	return nil, failure.Invalidf("the image has neither a disk below /%s/ nor /%s and /%s", diskDir, kernelFile, initrdFile)
}

// disk opens the only file below /disk/, if that directory exists.
func (r *imageRoot) disk(f *DiskFiles, layers []string) error {
	dir, err := r.open(diskDir, unix.O_DIRECTORY)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return fmt.Errorf("/%s: %w", diskDir, err)
	}
	defer dir.Close()
	var names []string
	for {
		entries, err := dir.ReadDir(64)
		for _, entry := range entries {
			if !entry.IsDir() {
				names = append(names, entry.Name())
			}
		}
		if err == io.EOF || len(names) > 1 {
			break
		} else if err != nil {
			return fmt.Errorf("/%s: %w", diskDir, err)
		}
	}
	if len(names) == 0 {
		return nil
	}
	if len(names) > 1 {
		return failure.Invalidf("/%s/ has more than one file: %q", diskDir, names[:2])
	}
	name := path.Join(diskDir, names[0])
	shown, err := r.optional(name)
	if err != nil {
		return err
	}
	if shown == nil {
		return failure.Invalidf("/%s is a symbolic link to a missing file", name)
	}
	disk, at, err := r.openInLayer(shown, layers)
	if err != nil {
		return fmt.Errorf("/%s: %w", name, err)
	}
	if err := f.setDisk(disk, at, formatByContent(disk, name)); err != nil {
		disk.Close()
		return fmt.Errorf("/%s: %w", name, err)
	}
	return nil
}

// cmdline reads the kernel's command line. It returns "" if the image has none.
func (r *imageRoot) cmdline() (string, error) {
	file, err := r.optional(cmdlineFile)
	if file == nil || err != nil {
		return "", err
	}
	defer file.Close()
	raw, err := io.ReadAll(io.LimitReader(file, maxCmdline+1))
	if err != nil {
		return "", err
	}
	line := strings.TrimSpace(string(raw))
	if len(raw) > maxCmdline || !utf8.ValidString(line) || strings.ContainsFunc(line, unicode.IsControl) {
		return "", failure.Invalidf("/%s is not one line of at most %d bytes", cmdlineFile, maxCmdline)
	}
	return line, nil
}

// openInLayer opens a file a second time, directly in the layer that contains it. shown is the same file, opened
// through the overlay; openInLayer closes shown. The returned path needs no mount and exists as long as the layer.
func (r *imageRoot) openInLayer(shown *os.File, layers []string) (_ *os.File, _ string, err error) {
	defer shown.Close()
	target, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", shown.Fd()))
	if err != nil {
		return nil, "", err
	}
	name, ok := strings.CutPrefix(target, r.path+"/")
	if !ok {
		return nil, "", fmt.Errorf("%q is not below %q", target, r.path)
	}
	var want unix.Stat_t
	if err := unix.Fstat(int(shown.Fd()), &want); err != nil {
		return nil, "", err
	}
	for _, layer := range layers {
		dir, err := unix.Open(layer, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, "", &os.PathError{Op: "open", Path: layer, Err: err}
		}
		fd, err := unix.Openat2(dir, name, &unix.OpenHow{
			Flags:   unix.O_RDONLY | unix.O_CLOEXEC | unix.O_NONBLOCK | unix.O_NOCTTY,
			Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
		})
		unix.Close(dir)
		if err != nil {
			continue // the file is in another layer, or the error below reports that none has it
		}
		file := os.NewFile(uintptr(fd), filepath.Join(layer, name))
		var is unix.Stat_t
		if err := unix.Fstat(fd, &is); err == nil && is.Ino == want.Ino && is.Size == want.Size && is.Mode == want.Mode {
			return file, file.Name(), nil
		}
		file.Close()
	}
	return nil, "", fmt.Errorf("no layer has the image's file %q", name)
}

// layersOf returns the directories of a view's layers, highest first.
func layersOf(mounts []mount.Mount) ([]string, error) {
	if len(mounts) == 1 && mounts[0].Type == "bind" {
		return []string{mounts[0].Source}, nil
	}
	if len(mounts) == 1 && mounts[0].Type == "overlay" {
		if _, lower := overlayDirs(mounts[0]); lower != nil {
			return lower, nil
		}
	}
	return nil, fmt.Errorf("a view of %d mounts is neither a directory nor an overlay", len(mounts))
}
