package wasi

import (
	"io/fs"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// fileType returns the case of descriptor-type.
func fileType(m fs.FileMode) int {
	if m.IsRegular() {
		return 6
	}
	for _, t := range []struct {
		bit  fs.FileMode
		kind int
	}{{fs.ModeDir, 3}, {fs.ModeSymlink, 5}, {fs.ModeNamedPipe, 4}, {fs.ModeSocket, 7}, {fs.ModeCharDevice, 2}, {fs.ModeDevice, 1}} {
		if m&t.bit != 0 {
			return t.kind
		}
	}
	return 0
}

// statAt calls Stat or Lstat on a path below the directory, depending on the path-flags.
func (d *descriptor) statAt(flags uint32, name string) (fs.FileInfo, error) {
	if flags&symlinkFollow != 0 {
		return d.dir.Stat(name)
	}
	return d.dir.Lstat(name)
}

// info returns the FileInfo of the descriptor's file or directory.
func (d *descriptor) info() (fs.FileInfo, error) {
	if d.file != nil {
		return d.file.Stat()
	}
	return d.dir.Stat(".")
}

func (c *Call) stat(info fs.FileInfo, err error) error {
	if err != nil {
		return err
	}
	c.OK()
	c.Out = wit.AppendCase(c.Out, fileType(info.Mode()))
	sys, _ := info.Sys().(*syscall.Stat_t)
	if sys == nil {
		sys = &syscall.Stat_t{}
	}
	c.Out = wit.AppendU64(wit.AppendU64(c.Out, uint64(sys.Nlink)), uint64(info.Size()))
	for _, t := range []syscall.Timespec{sys.Atim, sys.Mtim, sys.Ctim} {
		c.Out = wit.AppendOption(c.Out, true)
		c.Out = wit.AppendU32(wit.AppendU64(c.Out, uint64(t.Sec)), uint32(t.Nsec))
	}
	return nil
}

// hash writes a hash of the file's identity and of the times when its content and its metadata changed.
func (c *Call) hash(info fs.FileInfo, err error) error {
	if err != nil {
		return err
	}
	sys, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return unix.ENOTSUP
	}
	c.OK()
	c.Out = wit.AppendU64(c.Out, sys.Ino^uint64(sys.Mtim.Nano()))
	c.Out = wit.AppendU64(c.Out, sys.Dev^uint64(sys.Ctim.Nano()))
	return nil
}

// timestamp reads a new-timestamp. It returns the zero time if the guest wants no change.
func (c *Call) timestamp() time.Time {
	switch c.In.Case(3) {
	case 1:
		return time.Now()
	case 2:
		return time.Unix(int64(c.In.U64()), int64(c.In.U32()))
	}
	return time.Time{}
}
