package console

import (
	"io"
	"math"
	"os"

	"golang.org/x/sys/unix"
)

// A hub locks the part of the serial log that its clients have not received (fcntl(2), open file description locks), so
// that the relay does not free it. The kernel drops the lock of a process that dies.

// lockFrom sets or removes the lock on the file from the given offset on.
func lockFrom(f *os.File, kind int16, offset int64) error {
	return withFD(f, func(fd int) error {
		if kind == unix.F_RDLCK && offset > 0 { // the received part
			done := unix.Flock_t{Type: unix.F_UNLCK, Whence: io.SeekStart, Len: offset}
			if err := unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, &done); err != nil {
				return err
			}
		}
		lock := unix.Flock_t{Type: kind, Whence: io.SeekStart, Start: offset}
		return unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, &lock)
	})
}

// lockedFrom returns the first offset that a hub has locked, or the largest offset. If locks do not work, it returns 0.
func lockedFrom(f *os.File) int64 {
	from := int64(math.MaxInt64)
	err := withFD(f, func(fd int) error {
		probe := unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart}
		// Of several locks, the kernel returns any one. So look before each lock until there is none.
		for {
			if err := unix.FcntlFlock(uintptr(fd), unix.F_OFD_GETLK, &probe); err != nil {
				return err
			}
			if probe.Type == unix.F_UNLCK {
				return nil
			}
			from = probe.Start
			if from == 0 {
				return nil
			}
			probe = unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart, Len: from}
		}
	})
	if err != nil {
		return 0
	}
	return from
}
