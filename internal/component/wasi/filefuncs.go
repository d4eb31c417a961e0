package wasi

import (
	"errors"
	"fmt"
	"os"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/component/wit"
)

var fileFuncs = map[string]Func{
	"[method]descriptor.read-via-stream":   onFile(flagRead, readVia),
	"[method]descriptor.write-via-stream":  onFile(flagWrite, writeVia),
	"[method]descriptor.append-via-stream": onFile(flagWrite, appendVia),
	"[method]descriptor.advise":            onFile(0, func(c *Call, _ *descriptor) error { return done(c, nil) }),
	"[method]descriptor.sync-data":         onDescriptor(syncFile),
	"[method]descriptor.sync":              onDescriptor(syncFile),
	"[method]descriptor.get-flags": onDescriptor(func(c *Call, d *descriptor) error {
		c.OK()
		c.Out = wit.AppendU32(c.Out, d.flags)
		return nil
	}),
	"[method]descriptor.get-type": onDescriptor(func(c *Call, d *descriptor) error {
		info, err := d.info()
		if err != nil {
			return err
		}
		c.OK()
		c.Out = wit.AppendCase(c.Out, fileType(info.Mode()))
		return nil
	}),
	"[method]descriptor.set-size": onFile(flagWrite, func(c *Call, d *descriptor) error {
		size, err := position(c.In.U64())
		if err != nil {
			return err
		}
		return done(c, d.file.Truncate(size))
	}),
	"[method]descriptor.set-times": onDescriptor(func(c *Call, d *descriptor) error {
		accessed, modified := c.timestamp(), c.timestamp()
		switch {
		case d.readOnly:
			return errReadOnly
		case d.file == nil:
			return done(c, d.dir.Chtimes(".", accessed, modified))
		}
		return done(c, os.Chtimes(fmt.Sprintf("/proc/self/fd/%d", d.file.Fd()), accessed, modified))
	}),
	"[method]descriptor.read":           onFile(flagRead, readAt),
	"[method]descriptor.write":          onFile(flagWrite, writeAt),
	"[method]descriptor.read-directory": onDir(false, readDirectory),
	"[method]descriptor.create-directory-at": onDir(true, func(c *Call, d *descriptor) error {
		return done(c, d.dir.Mkdir(c.In.String(), 0o777))
	}),
	"[method]descriptor.stat": onDescriptor(func(c *Call, d *descriptor) error { return c.stat(d.info()) }),
	"[method]descriptor.stat-at": onDir(false, func(c *Call, d *descriptor) error {
		return c.stat(d.statAt(c.In.U32(), c.In.String()))
	}),
	"[method]descriptor.set-times-at": onDir(true, func(c *Call, d *descriptor) error {
		follow, name := c.In.U32()&symlinkFollow != 0, c.In.String()
		if info, err := d.dir.Lstat(name); err == nil && !follow && fileType(info.Mode()) == 5 {
			return unix.ENOTSUP // setting the times of the link itself is not supported
		}
		return done(c, d.dir.Chtimes(name, c.timestamp(), c.timestamp()))
	}),
	"[method]descriptor.link-at": onDir(true, func(c *Call, d *descriptor) error {
		if c.In.U32()&symlinkFollow != 0 {
			return unix.EINVAL
		}
		return move((*os.Root).Link)(c, d)
	}),
	"[method]descriptor.open-at": onDir(false, openAt),
	"[method]descriptor.readlink-at": onDir(false, func(c *Call, d *descriptor) error {
		to, err := d.dir.Readlink(c.In.String())
		if err == nil && !utf8.ValidString(to) {
			err = unix.EILSEQ
		}
		if err != nil {
			return err
		}
		c.OK()
		c.Out = wit.AppendString(c.Out, to)
		return nil
	}),
	"[method]descriptor.remove-directory-at": onDir(true, remove(true)),
	"[method]descriptor.rename-at":           onDir(true, move((*os.Root).Rename)),
	"[method]descriptor.symlink-at": onDir(true, func(c *Call, d *descriptor) error {
		return done(c, d.dir.Symlink(c.In.String(), c.In.String()))
	}),
	"[method]descriptor.unlink-file-at": onDir(true, remove(false)),
	"[method]descriptor.is-same-object": isSame,
	"[method]descriptor.metadata-hash":  onDescriptor(func(c *Call, d *descriptor) error { return c.hash(d.info()) }),
	"[method]descriptor.metadata-hash-at": onDir(false, func(c *Call, d *descriptor) error {
		return c.hash(d.statAt(c.In.U32(), c.In.String()))
	}),
	"[method]directory-entry-stream.read-directory-entry": readEntry,
	"filesystem-error-code":                               streamErrorCode,
}

var preopenFuncs = map[string]Func{"get-directories": preopens}

func syncFile(c *Call, d *descriptor) error {
	if d.file == nil || d.flags&flagWrite == 0 {
		return done(c, nil)
	}
	return done(c, d.file.Sync())
}

func isSame(c *Call) error {
	d, err1 := Get[*descriptor](c.State, c.In.U32())
	other, err2 := Get[*descriptor](c.State, c.In.U32())
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	a, errA := d.info()
	b, errB := other.info()
	c.Out = wit.AppendBool(c.Out, errA == nil && errB == nil && os.SameFile(a, b))
	return nil
}

// streamErrorCode writes the error-code for a stream's error, or none if the stream does not belong to a file.
func streamErrorCode(c *Call) error {
	e, err := Get[*StreamError](c.State, c.In.U32())
	if err != nil {
		return err
	}
	_, known := errors.AsType[unix.Errno](e.Cause)
	c.Out = wit.AppendOption(c.Out, known)
	if known {
		c.Out = wit.AppendCase(c.Out, errorCode(e.Cause))
	}
	return nil
}

// errorCodes are the Linux error numbers for the cases of error-code, in the order of the cases.
var errorCodes = [...]unix.Errno{
	unix.EACCES, unix.EAGAIN, unix.EALREADY, unix.EBADF, unix.EBUSY, unix.EDEADLK, unix.EDQUOT, unix.EEXIST, unix.EFBIG, unix.EILSEQ,
	unix.EINPROGRESS, unix.EINTR, unix.EINVAL, unix.EIO, unix.EISDIR, unix.ELOOP, unix.EMLINK, unix.EMSGSIZE, unix.ENAMETOOLONG, unix.ENODEV,
	unix.ENOENT, unix.ENOLCK, unix.ENOMEM, unix.ENOSPC, unix.ENOTDIR, unix.ENOTEMPTY, unix.ENOTRECOVERABLE, unix.ENOTSUP,
	unix.ENOTTY, unix.ENXIO, unix.EOVERFLOW, unix.EPERM, unix.EPIPE, unix.EROFS, unix.ESPIPE, unix.ETXTBSY, unix.EXDEV,
}

// errorCode returns the case of error-code for an error. An error without a Linux error number comes from os.Root and
// means that a path leads out of the directory.
func errorCode(err error) int {
	number, ok := errors.AsType[unix.Errno](err)
	if !ok {
		number = unix.EPERM
	}
	for i, e := range errorCodes {
		if e == number {
			return i
		}
	}
	return 13 // io
}
