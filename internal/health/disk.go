package health

import (
	"errors"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Reasons for problems with the daemon's files.
const (
	DiskNotWritable = "DiskNotWritable"
	StoreDamaged    = "StoreDamaged"
)

// DiskReason returns the reason for a file that cannot be used: StoreDamaged for errdefs.ErrDataLoss, otherwise
// DiskNotWritable.
func DiskReason(err error) string {
	if errdefs.IsDataLoss(err) {
		return StoreDamaged
	}
	return DiskNotWritable
}

// DiskFault reports whether an error is due to a disk or its content rather than to the configuration. After such an
// error, the node continues to run, but without the part that the error affects.
func DiskFault(err error) bool {
	for _, errno := range []unix.Errno{unix.EROFS, unix.ENOSPC, unix.EDQUOT, unix.EIO} {
		if errors.Is(err, errno) {
			return true
		}
	}
	return errdefs.IsDataLoss(err)
}
