package disk

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/containerd/containerd/v2/core/mount"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/image/internal/failure"
	"github.com/tripod-run/tripod/internal/image/internal/layer"
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

// Open opens the boot files of an unpacked image: a kernel, a disk, or both. The mounts are those of a view of it
// in the image store below dir.
func Open(dir string, mounts []mount.Mount) (files *Files, err error) {
	layers, err := layer.ViewDirs(mounts)
	if err != nil {
		return nil, err
	}
	err = layer.WithRoot(dir, mounts, func(root *layer.Root) error {
		files, err = open(root, layers)
		return err
	})
	return files, err
}

// open opens the boot files below the root of an image with these layers.
func open(r *layer.Root, layers []string) (_ *Files, err error) {
	f := &Files{}
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
		shown, err := r.Optional(part.name)
		if err != nil {
			return nil, err
		}
		if shown == nil {
			continue
		}
		if *part.file, *part.path, err = r.OpenInLayer(shown, layers); err != nil {
			return nil, fmt.Errorf("/%s: %w", part.name, err)
		}
	}
	if (f.Kernel == nil) != (f.Initrd == nil) {
		return nil, failure.Invalidf("the image has only one of /%s and /%s", kernelFile, initrdFile)
	}
	if err := findDisk(r, f, layers); err != nil {
		return nil, err
	}
	switch {
	case f.Kernel != nil:
		f.Layout = LayoutKernel
		f.Cmdline, err = cmdlineOf(r)
		return f, err
	case f.Disk != nil:
		f.Layout = LayoutContainerDisk
		return f, nil
	}
	return nil, failure.Invalidf("the image has neither a disk below /%s/ nor /%s and /%s", diskDir, kernelFile, initrdFile)
}

// findDisk opens the only file below /disk/, if that directory exists.
func findDisk(r *layer.Root, f *Files, layers []string) error {
	dir, err := r.Open(diskDir, unix.O_DIRECTORY)
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
	shown, err := r.Optional(name)
	if err != nil {
		return err
	}
	if shown == nil {
		return failure.Invalidf("/%s is a symbolic link to a missing file", name)
	}
	disk, at, err := r.OpenInLayer(shown, layers)
	if err != nil {
		return fmt.Errorf("/%s: %w", name, err)
	}
	if err := f.setDisk(disk, at, formatByContent(disk, name)); err != nil {
		disk.Close()
		return fmt.Errorf("/%s: %w", name, err)
	}
	return nil
}

// cmdlineOf reads the kernel's command line. It returns "" if the image has none.
func cmdlineOf(r *layer.Root) (string, error) {
	file, err := r.Optional(cmdlineFile)
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
