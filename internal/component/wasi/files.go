package wasi

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"unicode/utf8"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// maxOpen is the maximum number of open files and directories per instance.
const maxOpen = 256

// descriptor is the resource "descriptor" of wasi:filesystem/types. It is a file, or a directory that paths are
// relative to.
type descriptor struct {
	state *State
	// file is the open file; nil for a directory.
	file *os.File
	// dir is the open directory. No path can lead out of it. top is the preopened directory from which the guest has
	// reached dir. The field at is the path of dir relative to top.
	dir, top *os.Root
	at       string
	flags    uint32
	readOnly bool
}

// Bits of descriptor-flags, open-flags and path-flags.
const (
	flagRead = 1 << iota
	flagWrite
	flagFileSync
	flagDataSync
	flagReadSync
	flagMutate

	openCreate    = 1
	openDirectory = 2
	openExclusive = 4
	openTruncate  = 8

	symlinkFollow = 1
)

// Close closes the file or directory.
func (d *descriptor) Close() error {
	d.state.openMore(-1)
	if d.file != nil {
		return d.file.Close()
	}
	return d.dir.Close()
}

// errReadOnly is an errno, like all errors in this file, so that errorCode can convert it.
const errReadOnly = unix.EROFS

// preopens returns the guest's directories. Each call opens the directories again.
func preopens(c *Call) error {
	var opened []*descriptor
	var names []string
	for _, p := range c.options.Preopens {
		root, err := c.openRoot(p.Path)
		if err != nil {
			for _, d := range opened {
				_ = d.Close()
			}
			return err
		}
		opened = append(opened, &descriptor{state: c.State, dir: root, top: root, at: ".", flags: dirFlags(p.ReadOnly), readOnly: p.ReadOnly})
		names = append(names, p.Guest)
	}
	c.Out = wit.AppendLen(c.Out, len(opened))
	for i, d := range opened {
		c.Own(d)
		c.Out = wit.AppendString(c.Out, names[i])
	}
	return nil
}

func (c *Call) openRoot(path string) (*os.Root, error) {
	if !c.openMore(1) {
		return nil, fmt.Errorf("the limit of open files and directories is reached (%d are open in this instance): %w", c.open,
			errdefs.ErrResourceExhausted)
	}
	root, err := os.OpenRoot(path)
	if err != nil {
		c.openMore(-1)
	}
	return root, err
}

func dirFlags(readOnly bool) uint32 {
	if readOnly {
		return flagRead
	}
	return flagRead | flagMutate
}

// onDescriptor, onFile and onDir make methods of descriptors from the given function. If the function returns an error,
// the guest gets the error as an error-code.
func onDescriptor(do func(c *Call, d *descriptor) error) Func {
	return func(c *Call) error {
		d, err := Get[*descriptor](c.State, c.In.U32())
		if err != nil {
			return err
		}
		start := len(c.Out)
		if err := do(c, d); err != nil {
			c.Out = c.Out[:start]
			c.FailedWith(errorCode(err))
		}
		return nil
	}
}

func onFile(needs uint32, do func(c *Call, d *descriptor) error) Func {
	return onDescriptor(func(c *Call, d *descriptor) error {
		switch {
		case d.file == nil:
			return unix.EISDIR
		case d.flags&needs != needs:
			return unix.EBADF
		}
		return do(c, d)
	})
}

func onDir(changes bool, do func(c *Call, d *descriptor) error) Func {
	return onDescriptor(func(c *Call, d *descriptor) error {
		switch {
		case d.dir == nil:
			return unix.ENOTDIR
		case changes && d.readOnly:
			return errReadOnly
		}
		return do(c, d)
	})
}

// done writes an ok result without a value if err is nil. It returns err.
func done(c *Call, err error) error {
	if err == nil {
		c.OK()
	}
	return err
}

// position converts an offset that the guest has passed.
func position(n uint64) (int64, error) {
	if int64(n) < 0 {
		return 0, unix.EINVAL
	}
	return int64(n), nil
}

func readVia(c *Call, d *descriptor) error {
	at, err := position(c.In.U64())
	if err != nil {
		return err
	}
	c.OK()
	c.Own(&InputStream{Input: &fileInput{d.file, at}})
	return nil
}

func writeVia(c *Call, d *descriptor) error {
	at, err := position(c.In.U64())
	if err != nil {
		return err
	}
	c.OK()
	c.Own(&OutputStream{Output: direct{io.NewOffsetWriter(d.file, at)}})
	return nil
}

func appendVia(c *Call, d *descriptor) error {
	c.OK()
	c.Own(&OutputStream{Output: direct{appender{d.file}}})
	return nil
}

// fileInput is the Input that reads a file from an offset. A file is always ready.
type fileInput struct {
	file io.ReaderAt
	at   int64
}

func (f *fileInput) Next(n int) ([]byte, error) {
	buf := make([]byte, n)
	n, err := f.file.ReadAt(buf, f.at)
	f.at += int64(n)
	if n > 0 {
		return buf[:n], nil
	}
	return nil, err
}

func (f *fileInput) Ready() bool { return true }
func (f *fileInput) Begin()      {}
func (f *fileInput) Fill()       {}

// appender writes to the current end of a file.
type appender struct{ file *os.File }

func (a appender) Write(p []byte) (int, error) {
	end, err := a.file.Seek(0, io.SeekEnd)
	if err != nil {
		return 0, err
	}
	return a.file.WriteAt(p, end)
}

func readAt(c *Call, d *descriptor) error {
	n := clampLength(c.In.U64())
	at, err := position(c.In.U64())
	if err != nil {
		return err
	}
	buf := make([]byte, n)
	n, err = d.file.ReadAt(buf, at)
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	c.OK()
	c.Out = wit.AppendBool(wit.AppendBytes(c.Out, buf[:n]), err != nil)
	return nil
}

func writeAt(c *Call, d *descriptor) error {
	data := c.In.Bytes()
	at, err := position(c.In.U64())
	if err != nil {
		return err
	}
	n, err := d.file.WriteAt(data, at)
	if err != nil {
		return err
	}
	c.OK()
	c.Out = wit.AppendU64(c.Out, uint64(n))
	return nil
}

// openAt implements open-at, for files and directories.
func openAt(c *Call, d *descriptor) error {
	follow, name := c.In.U32()&symlinkFollow != 0, c.In.String()
	how, flags := c.In.U32(), c.In.U32()
	if d.readOnly && (flags&(flagWrite|flagMutate) != 0 || how&(openCreate|openTruncate) != 0) {
		return errReadOnly
	}
	if !follow {
		if info, err := d.dir.Lstat(name); err == nil && info.Mode()&fs.ModeSymlink != 0 {
			return unix.ELOOP
		}
	}
	if !c.openMore(1) {
		return unix.EDQUOT
	}
	opened, err := d.openAny(name, how, flags)
	if err != nil {
		c.openMore(-1)
		return err
	}
	c.OK()
	c.Own(opened)
	return nil
}

func (d *descriptor) openAny(name string, how, flags uint32) (*descriptor, error) {
	made := &descriptor{state: d.state, top: d.top, at: path.Join(d.at, name), readOnly: d.readOnly}
	info, err := d.dir.Stat(name)
	if isDir := err == nil && info.IsDir(); isDir || how&openDirectory != 0 {
		switch {
		case err != nil:
			return nil, err
		case !isDir:
			return nil, unix.ENOTDIR
		case how&openExclusive != 0:
			return nil, unix.EEXIST
		case flags&flagWrite != 0 || how&openTruncate != 0:
			return nil, unix.EISDIR
		}
		made.flags = dirFlags(d.readOnly)
		made.dir, err = d.dir.OpenRoot(name)
		return made, err
	}
	// Refuse pipes and devices, which could make the guest wait outside its limits.
	if err == nil && !info.Mode().IsRegular() {
		return nil, unix.EPERM
	}
	made.flags = flags &^ flagMutate
	made.file, err = d.dir.OpenFile(name, openMode(how, flags), 0o666)
	return made, err
}

// openMode returns the flags for open(2).
func openMode(how, flags uint32) int {
	mode := unix.O_NONBLOCK | map[uint32]int{flagWrite: os.O_WRONLY, flagRead | flagWrite: os.O_RDWR}[flags&(flagRead|flagWrite)]
	for _, m := range []struct {
		on   bool
		mode int
	}{
		{how&openCreate != 0, os.O_CREATE}, {how&openExclusive != 0, os.O_EXCL}, {how&openTruncate != 0, os.O_TRUNC},
		{flags&flagFileSync != 0, unix.O_SYNC}, {flags&flagDataSync != 0, unix.O_DSYNC},
	} {
		if m.on {
			mode |= m.mode
		}
	}
	return mode
}

// entries is the resource directory-entry-stream.
type entries struct {
	state   *State
	dir     *os.File
	leftOut int // names that are not UTF-8, which the guest could not pass back
}

// Close closes the directory.
func (e *entries) Close() error {
	e.state.openMore(-1)
	return e.dir.Close()
}

func readDirectory(c *Call, d *descriptor) error {
	if !c.openMore(1) {
		return unix.EDQUOT
	}
	f, err := d.dir.Open(".")
	if err != nil {
		c.openMore(-1)
		return err
	}
	c.OK()
	c.Own(&entries{state: c.State, dir: f})
	return nil
}

func readEntry(c *Call) error {
	e, err := Get[*entries](c.State, c.In.U32())
	if err != nil {
		return err
	}
	next, err := e.dir.ReadDir(1)
	for ; err == nil && !utf8.ValidString(next[0].Name()); next, err = e.dir.ReadDir(1) {
		e.leftOut++
	}
	switch {
	case errors.Is(err, io.EOF):
		e.report()
		c.OK()
		c.Out = wit.AppendOption(c.Out, false)
	case err != nil:
		c.FailedWith(errorCode(err))
	default:
		c.OK()
		c.Out = wit.AppendOption(c.Out, true)
		c.Out = wit.AppendCase(c.Out, fileType(next[0].Type()))
		c.Out = wit.AppendString(c.Out, next[0].Name())
	}
	return nil
}

// report writes to the log how many entries were left out.
func (e *entries) report() {
	if e.leftOut > 0 && e.state.options.Log != nil {
		e.state.options.Log(logEntry(levelWarn, "wasi:filesystem",
			fmt.Sprintf("a directory has names that are not UTF-8: %d of its entries are left out", e.leftOut)))
	}
	e.leftOut = 0
}

// commonRoot returns a root that contains both directories, and the two names as paths below that root.
func commonRoot(d, other *descriptor, name, otherName string) (root *os.Root, a, b string, err error) {
	if d == other {
		return d.dir, name, otherName, nil
	}
	if other.dir == nil {
		return nil, "", "", unix.ENOTDIR
	}
	if d.top != other.top {
		return nil, "", "", unix.EXDEV
	}
	if !fs.ValidPath(name) || !fs.ValidPath(otherName) {
		return nil, "", "", unix.EPERM
	}
	return d.top, path.Join(d.at, name), path.Join(other.at, otherName), nil
}

// move returns the implementation of rename-at. The implementation also serves link-at, whose path-flags the caller
// must have read before.
func move(do func(root *os.Root, from, to string) error) func(c *Call, d *descriptor) error {
	return func(c *Call, d *descriptor) error {
		from := c.In.String()
		other, err := Get[*descriptor](c.State, c.In.U32())
		if err != nil {
			return err
		}
		if other.readOnly {
			return errReadOnly
		}
		root, from, to, err := commonRoot(d, other, from, c.In.String())
		if err != nil {
			return err
		}
		return done(c, do(root, from, to))
	}
}

// remove returns the implementation of remove-directory-at or unlink-file-at. It checks the type, because
// os.Root.Remove removes files and directories alike.
func remove(directory bool) func(c *Call, d *descriptor) error {
	return func(c *Call, d *descriptor) error {
		name := c.In.String()
		info, err := d.dir.Lstat(name)
		switch {
		case err != nil:
			return err
		case info.IsDir() && !directory:
			return unix.EISDIR
		case !info.IsDir() && directory:
			return unix.ENOTDIR
		}
		return done(c, d.dir.Remove(name))
	}
}
