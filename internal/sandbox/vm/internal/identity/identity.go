// Package identity gives a guest that continues from a saved state, like others, random numbers and a clock of its own.
// Programs of the guest use it. It must not import fmt, because tripod-agent does not.
package identity

import (
	"errors"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// SeedSize is the size of Reseed's seed in bytes.
const SeedSize = 64

// maxSkew is how far the guest's clock may be from the node's before it is set. The machine's own clock has whole seconds.
const maxSkew = 5 * time.Millisecond

// rndReseedCRNG is RNDRESEEDCRNG in linux/random.h.
const rndReseedCRNG = 0x5207

// Reseed adds SeedSize random bytes to the kernel's random numbers, and makes all of them depend on them from now on. See
// random(4).
func Reseed(seed []byte) error {
	if len(seed) < SeedSize {
		return errors.New("the seed is too short")
	}
	pool := struct {
		bits, size int32
		data       [SeedSize]byte
	}{8 * SeedSize, SeedSize, [SeedSize]byte(seed)}
	f, err := os.OpenFile("/dev/urandom", os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), unix.RNDADDENTROPY, uintptr(unsafe.Pointer(&pool))); errno != 0 {
		return os.NewSyscallError("RNDADDENTROPY", errno)
	}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), rndReseedCRNG, 0); errno != 0 {
		return os.NewSyscallError("RNDRESEEDCRNG", errno)
	}
	return nil
}

// SetClock corrects the guest's clock, which is behind the node's by the given time.
func SetClock(behind time.Duration) error {
	if behind.Abs() <= maxSkew {
		return nil
	}
	now := unix.NsecToTimeval(time.Now().Add(behind).UnixNano())
	return os.NewSyscallError("settimeofday", unix.Settimeofday(&now))
}
