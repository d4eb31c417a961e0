package wasi

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path"
	"strings"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// Blobs keeps the objects of wasi:blobstore in a directory of the host, usually a volume. A container is a directory in
// it, and an object is a regular file in a container. Nothing follows a link.
//
//	<volume>/<container>/<object>
//	<volume>/..tripod-uploads/    objects that are being written, and containers that are being deleted
//
// An object appears, complete, by one rename. So readers never see a part of it, a reader of the previous object keeps
// that one, and a crash leaves at most a file among the uploads. Whoever writes an upload holds a lock on it (flock(2)),
// and a Blobs removes those that nobody holds before its own first upload. All instances of a pod share a Blobs.
type Blobs struct {
	dir string
	// cleaned says that leftovers were removed, or are being removed. It is reset if a part of them remains.
	cleaned atomic.Bool
}

// NewBlobs returns the store in a directory of the host, for example "/proc/self/fd/7".
func NewBlobs(dir string) *Blobs { return &Blobs{dir: dir} }

// uploadsDir is invisible to guests, because names that begin with two dots are reserved.
const uploadsDir = "..tripod-uploads"

const (
	// maxBlobName is the maximum length of a name in bytes, as file systems have it.
	maxBlobName = 255
	// maxLeftovers bounds how many leftover uploads a Blobs looks at.
	maxLeftovers = 1000
	// copyStep is how many bytes a copy makes between two checks whether the guest's call has ended.
	copyStep = 4 << 20
	// listStep is the same for the entries of a directory.
	listStep = 256
)

// The errors of wasi:blobstore have no path of the host.
var (
	errBlobName     = errors.New("a name has 1 to 255 bytes, no slash and no NUL, is not a dot, and does not begin with two dots")
	errNoContainer  = errors.New("there is no such container")
	errHasContainer = errors.New("the container exists")
	errNoObject     = errors.New("there is no such object")
	errNotObject    = errors.New("a directory, link or special file has the name of the object")
)

func isBlobName(name string) bool {
	return name != "" && name != "." && len(name) <= maxBlobName && utf8.ValidString(name) &&
		!strings.HasPrefix(name, "..") && !strings.ContainsAny(name, "/\x00")
}

// blobText returns the text of an error for the guest.
func blobText(err error) string {
	if number, ok := errors.AsType[unix.Errno](err); ok {
		return number.Error()
	}
	if isEscape(err) {
		return errNotObject.Error()
	}
	return err.Error()
}

// open opens the directory of the store, for a container with a valid name.
func (b *Blobs) open(container string) (*os.Root, error) {
	if !isBlobName(container) {
		return nil, errBlobName
	}
	return os.OpenRoot(b.dir)
}

// in calls do with the directory of the store and the path of a container, which must exist.
func (b *Blobs) in(container string, do func(root *os.Root) error) error {
	root, err := b.open(container)
	if err != nil {
		return err
	}
	defer root.Close()
	info, err := root.Lstat(container)
	if errors.Is(err, fs.ErrNotExist) || err == nil && !info.IsDir() {
		return errNoContainer
	}
	if err != nil {
		return err
	}
	return do(root)
}

// object returns the FileInfo of an object in a container.
func object(root *os.Root, container, name string) (fs.FileInfo, error) {
	if !isBlobName(name) {
		return nil, errBlobName
	}
	info, err := root.Lstat(path.Join(container, name))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, errNoObject
	case err == nil && !info.Mode().IsRegular():
		return nil, errNotObject
	}
	return info, err
}

// create makes a container.
func (b *Blobs) create(container string) error {
	root, err := b.open(container)
	if err != nil {
		return err
	}
	defer root.Close()
	if err := root.Mkdir(container, 0o777); errors.Is(err, fs.ErrExist) {
		return errHasContainer
	} else if err != nil {
		return err
	}
	return syncDir(root, ".")
}

// created returns when a container was made or, if the file system does not know, when it was changed last.
func (b *Blobs) created(container string) (made time.Time, err error) {
	err = b.in(container, func(root *os.Root) error {
		dir, err := root.Open(container)
		if err != nil {
			return err
		}
		defer dir.Close()
		var s unix.Statx_t
		if err := unix.Statx(int(dir.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_BTIME|unix.STATX_MTIME, &s); err != nil {
			return err
		}
		at := s.Mtime
		if s.Mask&unix.STATX_BTIME != 0 {
			at = s.Btime
		}
		made = time.Unix(at.Sec, int64(at.Nsec))
		return nil
	})
	return made, err
}

// remove deletes a container with all that is in it. It disappears at once.
func (b *Blobs) remove(ctx context.Context, container string) error {
	return b.in(container, func(root *os.Root) error {
		uploads, err := openUploads(root)
		if err != nil {
			return err
		}
		defer uploads.Close()
		b.clean(ctx, uploads)
		name := rand.Text()
		if err := root.Rename(container, path.Join(uploadsDir, name)); err != nil {
			return err
		}
		if err := syncDir(root, "."); err != nil {
			return err
		}
		if err := discardDir(ctx, uploads, name); err != nil {
			b.cleaned.Store(false) // the rest is a leftover
			return err
		}
		return nil
	})
}

// discardDir removes a directory and all that is in it, unless ctx ends first. Guests make trees of any depth and width,
// so it keeps two directories open and remembers no names: it moves what is below to the top until all is empty.
func discardDir(ctx context.Context, root *os.Root, name string) error {
	for {
		err := eachEntry(ctx, root, name, func(entry string) error {
			if err := root.Remove(entry); !errors.Is(err, unix.ENOTEMPTY) {
				return exceptMissing(err)
			}
			return eachEntry(ctx, root, entry, func(below string) error {
				err := root.Remove(below)
				if errors.Is(err, unix.ENOTEMPTY) {
					err = root.Rename(below, path.Join(name, rand.Text()))
				}
				return exceptMissing(err)
			})
		})
		if err != nil {
			return err
		}
		if err := root.Remove(name); !errors.Is(err, unix.ENOTEMPTY) {
			return exceptMissing(err)
		}
	}
}

// eachEntry calls do with the path of each entry of a directory, if there is such a directory. Entries that do adds to the
// directory may be left out.
func eachEntry(ctx context.Context, root *os.Root, name string, do func(entry string) error) error {
	dir, err := root.OpenFile(name, os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return exceptMissing(err)
	}
	defer dir.Close()
	for {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		names, err := dir.Readdirnames(listStep)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		for _, n := range names {
			if err := do(path.Join(name, n)); err != nil {
				return err
			}
		}
	}
}

// exceptMissing returns err, or nil if it says that a file is missing: somebody else has removed it.
func exceptMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// empty removes the objects of a container.
func empty(ctx context.Context, root *os.Root, container string) error {
	dir, err := root.Open(container)
	if err != nil {
		return err
	}
	defer dir.Close()
	_, _, err = objects(ctx, dir, math.MaxInt, func(name string) error {
		return exceptMissing(root.Remove(path.Join(container, name)))
	})
	return err
}

// objects calls each with the names of the next objects in a directory, at most most of them. It returns their number, and
// whether the directory has no others.
func objects(ctx context.Context, dir *os.File, most int, each func(name string) error) (n int, end bool, err error) {
	for n < most && !end {
		if ctx.Err() != nil {
			return n, false, context.Cause(ctx)
		}
		entries, err := dir.ReadDir(min(most-n, listStep))
		if end = errors.Is(err, io.EOF); err != nil && !end {
			return n, false, err
		}
		for _, e := range entries {
			if !e.Type().IsRegular() || !isBlobName(e.Name()) {
				continue
			}
			n++
			if err := each(e.Name()); err != nil {
				return n, false, err
			}
		}
	}
	return n, end, nil
}

// read opens an object for reading.
func (b *Blobs) read(container, name string) (file *os.File, err error) {
	err = b.in(container, func(root *os.Root) error {
		if _, err := object(root, container, name); err != nil {
			return err
		}
		file, err = root.OpenFile(path.Join(container, name), os.O_RDONLY|unix.O_NONBLOCK, 0) // a pipe must not block
		if errors.Is(err, fs.ErrNotExist) {
			return errNoObject
		}
		return err
	})
	return file, err
}

// delete removes an object, if there is one.
func (b *Blobs) delete(container, name string) error {
	return b.in(container, func(root *os.Root) error {
		_, err := object(root, container, name)
		if err == nil {
			err = root.Remove(path.Join(container, name))
		}
		if errors.Is(err, errNoObject) {
			return nil
		}
		return exceptMissing(err)
	})
}

// move renames an object.
func (b *Blobs) move(container, name, toContainer, toName string) error {
	return b.in(container, func(root *os.Root) error {
		if _, err := object(root, container, name); err != nil {
			return err
		}
		return b.in(toContainer, func(*os.Root) error {
			if err := rename(root, path.Join(container, name), toContainer, toName); err != nil {
				return err
			}
			return syncDir(root, container)
		})
	})
}

// rename gives a file the name of an object, and makes that durable.
func rename(root *os.Root, from, container, name string) error {
	if _, err := object(root, container, name); err != nil && !errors.Is(err, errNoObject) {
		return err
	}
	if err := root.Rename(from, path.Join(container, name)); err != nil {
		return err
	}
	return syncDir(root, container)
}

func syncDir(root *os.Root, name string) error {
	dir, err := root.Open(name)
	if err != nil {
		return err
	}
	defer dir.Close()
	return dir.Sync()
}

// openUploads opens the directory of uploads, and makes it if it is missing.
func openUploads(root *os.Root) (*os.Root, error) {
	if err := root.Mkdir(uploadsDir, 0o777); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	if info, err := root.Lstat(uploadsDir); err != nil {
		return nil, err
	} else if !info.IsDir() {
		return nil, fmt.Errorf("the volume has a file with the reserved name %s", uploadsDir)
	}
	return root.OpenRoot(uploadsDir)
}

// prepare removes leftovers before an upload, at most until ctx ends. Its errors are those of the upload, too.
func (b *Blobs) prepare(ctx context.Context) {
	root, err := os.OpenRoot(b.dir)
	if err != nil {
		return
	}
	defer root.Close()
	uploads, err := openUploads(root)
	if err != nil {
		return
	}
	defer uploads.Close()
	b.clean(ctx, uploads)
}

// clean removes leftovers, unless this Blobs has done so. Nobody waits while another call does. If ctx ends first, the next
// call goes on.
func (b *Blobs) clean(ctx context.Context, uploads *os.Root) {
	if b.cleaned.CompareAndSwap(false, true) && !removeLeftovers(ctx, uploads) {
		b.cleaned.Store(false)
	}
}

// removeLeftovers removes what writers have left that ended without warning. It returns false if ctx ended first. Other
// errors do not matter: the next Blobs tries again.
func removeLeftovers(ctx context.Context, uploads *os.Root) (done bool) {
	dir, err := uploads.Open(".")
	if err != nil {
		return true
	}
	defer dir.Close()
	entries, _ := dir.ReadDir(maxLeftovers)
	for _, e := range entries {
		switch {
		case ctx.Err() != nil:
			return false
		case e.IsDir():
			_ = discardDir(ctx, uploads, e.Name())
		case e.Type().IsRegular():
			removeUnlocked(uploads, e.Name())
		}
	}
	return ctx.Err() == nil
}

// removeUnlocked removes an upload unless somebody writes it.
func removeUnlocked(uploads *os.Root, name string) {
	file, err := uploads.OpenFile(name, os.O_WRONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return
	}
	defer file.Close()
	if unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
		_ = uploads.Remove(name)
	}
}

// upload is an object that is being written.
type upload struct {
	blobs *Blobs
	name  string // in the directory of uploads
	file  *os.File
}

// begin makes a file for an object.
func (b *Blobs) begin() (*upload, error) {
	root, err := os.OpenRoot(b.dir)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	uploads, err := openUploads(root)
	if err != nil {
		return nil, err
	}
	defer uploads.Close()
	for {
		name := rand.Text()
		file, err := uploads.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
		if err != nil {
			return nil, err
		}
		if locked(file) {
			return &upload{b, name, file}, nil
		}
		file.Close()
	}
}

// locked locks a new upload. It returns false if the upload has been taken for a leftover in the meantime. A file system
// that knows no locks keeps its leftovers.
func locked(file *os.File) bool {
	if errors.Is(unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB), unix.EWOULDBLOCK) {
		return false
	}
	var s unix.Stat_t
	return unix.Fstat(int(file.Fd()), &s) == nil && s.Nlink > 0
}

// commit makes the upload an object.
func (u *upload) commit(container, name string) error {
	if err := u.file.Sync(); err != nil {
		return err
	}
	return u.blobs.in(container, func(root *os.Root) error {
		return rename(root, path.Join(uploadsDir, u.name), container, name)
	})
}

// close ends the upload. Without a commit, nothing is left of it.
func (u *upload) close() {
	defer u.file.Close()
	root, err := os.OpenRoot(u.blobs.dir)
	if err != nil {
		return
	}
	defer root.Close()
	_ = root.Remove(path.Join(uploadsDir, u.name))
}

// copy copies an object.
func (b *Blobs) copy(ctx context.Context, container, name, toContainer, toName string) error {
	from, err := b.read(container, name)
	if err != nil {
		return err
	}
	defer from.Close()
	b.prepare(ctx)
	u, err := b.begin()
	if err != nil {
		return err
	}
	defer u.close()
	for {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if _, err := io.CopyN(u.file, from, copyStep); errors.Is(err, io.EOF) {
			return u.commit(toContainer, toName)
		} else if err != nil {
			return err
		}
	}
}
