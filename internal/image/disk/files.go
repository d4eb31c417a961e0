package disk

import (
	"errors"
	"os"
)

// Files are an image's boot files, open for reading.
type Files struct {
	MachineImage
	// Disk, Kernel and Initrd are nil if the image has none.
	Disk, Kernel, Initrd *os.File
	// DiskPath, KernelPath and InitrdPath are paths of the same files. They exist until the store releases the image,
	// even across restarts of the daemon and the node.
	DiskPath, KernelPath, InitrdPath string
	// Cmdline is the kernel's command line from /boot/cmdline; empty if the image has none.
	Cmdline string
}

// Close closes the files. The store still holds the image.
func (f *Files) Close() error {
	var errs []error
	for _, file := range []*os.File{f.Disk, f.Kernel, f.Initrd} {
		if file != nil {
			errs = append(errs, file.Close())
		}
	}
	return errors.Join(errs...)
}
