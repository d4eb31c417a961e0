package layer

import (
	"archive/tar"
	"bytes"
	"context"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/containerd/v2/pkg/archive"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/image/internal/failure"
)

// The names of whiteouts (image-spec, layer.md). Other names with whiteoutMeta are metadata of AUFS.
const (
	whiteoutPrefix = ".wh."
	whiteoutMeta   = ".wh..wh."
	whiteoutOpaque = ".wh..wh..opq"
)

// stack is the directory of a layer that is being unpacked, and the directories of the layers below, highest first, with
// whiteouts in the overlay's form.
type stack struct {
	root  string
	lower []string
}

// whiteouts collects the whiteouts of a layer. A whiteout hides what the layers below have, and nothing of its own layer,
// wherever it stands in the archive. So they are made after all other entries, and only where there is something to hide: the
// overlay would show the others as files.
type whiteouts struct {
	stack
	found []*tar.Header
	names map[string]bool // of those found
	bytes int             // of their names
	// copied are the files that were copied up for hard links, unless the archive has written them, too, and made are the
	// directories that were made for them.
	copied, made map[string]bool
}

// maxWhiteoutBytes limits the names of a layer's whiteouts together.
const maxWhiteoutBytes = 64 << 20

func newWhiteouts(root string, lower []string) *whiteouts {
	return &whiteouts{stack: stack{root, lower}, names: map[string]bool{}, copied: map[string]bool{}, made: map[string]bool{}}
}

// noFile reports whether an entry of a layer is no file: a whiteout, or metadata of AUFS.
func noFile(name string) bool {
	return strings.HasPrefix(path.Base(name), whiteoutPrefix) || strings.Contains("/"+name, "/"+whiteoutMeta)
}

// take notes an entry if it is a whiteout. It also takes the metadata of AUFS.
func (w *whiteouts) take(h *tar.Header) (bool, error) {
	if !noFile(h.Name) {
		return false, nil
	}
	name := path.Clean("/" + h.Name)
	if strings.Contains(path.Dir(name)+"/", "/"+whiteoutMeta) || w.names[name] {
		return true, nil
	}
	if w.bytes += len(name); w.bytes > maxWhiteoutBytes {
		return false, failure.Invalidf("the whiteouts of the layer have names of more than %d bytes", maxWhiteoutBytes)
	}
	w.names[name] = true
	w.found = append(w.found, &tar.Header{Name: name, Uid: h.Uid, Gid: h.Gid})
	return true, nil
}

// wrote notes that the archive has an entry: it is the layer's own, and so are the directories above it.
func (w *whiteouts) wrote(name string) {
	if len(w.copied) == 0 && len(w.made) == 0 {
		return
	}
	name = path.Clean("/" + name)
	delete(w.copied, name)
	for ; name != "/"; name = path.Dir(name) {
		delete(w.made, name)
	}
}

// uncover removes the files that were copied up and that the layer's whiteouts hide.
func (w *whiteouts) uncover() error {
	for name := range w.copied {
		covered := false
		for at := name; at != "/" && !covered; at = path.Dir(at) {
			dir := path.Dir(at)
			covered = w.names[path.Join(dir, whiteoutPrefix+path.Base(at))] || w.names[path.Join(dir, whiteoutOpaque)]
		}
		if !covered {
			continue
		}
		if err := os.Remove(filepath.Join(w.root, name)); err != nil && !failure.IsGone(err) {
			return err
		}
		for dir := path.Dir(name); w.made[dir]; dir = path.Dir(dir) {
			_ = os.Remove(filepath.Join(w.root, dir)) // unless it has other files
		}
	}
	return nil
}

// apply makes the whiteouts.
func (w *whiteouts) apply(ctx context.Context) error {
	if err := w.uncover(); err != nil {
		return err
	}
	marks := newMarks()
	for _, h := range w.found { // first, because what a marked directory hides needs no whiteout
		if dir, base := path.Split(h.Name); base == whiteoutOpaque {
			w.hideAll(path.Clean(dir), h, marks)
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
	for _, h := range w.found {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		dir, base := path.Split(h.Name)
		if hidden := strings.TrimPrefix(base, whiteoutPrefix); hidden != "" && hidden != "." && hidden != ".." &&
			!strings.HasPrefix(base, whiteoutMeta) {
			w.hide(path.Join(dir, hidden), h, marks)
		}
	}
	return w.write(ctx, marks)
}

// hide adds what hides a path of the lower layers.
func (w *whiteouts) hide(name string, by *tar.Header, to *marks) {
	if !w.shows(path.Dir(name), to) || w.find(name) == nil {
		return
	}
	switch own, err := os.Lstat(filepath.Join(w.root, name)); {
	case err != nil:
		to.add(path.Join(path.Dir(name), whiteoutPrefix+path.Base(name)), by)
	case own.IsDir():
		to.opaque[name] = true
		to.add(path.Join(name, whiteoutOpaque), by)
	}
}

// hideAll adds what hides the content that a directory has in the lower layers. The overlay does not look at the marker of
// its root.
func (w *whiteouts) hideAll(dir string, by *tar.Header, to *marks) {
	if dir == "/" {
		for _, lower := range w.lower {
			entries, _ := os.ReadDir(lower)
			for _, e := range entries {
				w.hide("/"+e.Name(), by, to)
			}
		}
		return
	}
	if own, err := os.Lstat(filepath.Join(w.root, dir)); err == nil && !own.IsDir() || !w.shows(path.Dir(dir), to) {
		return
	}
	if below := w.find(dir); below != nil && below.IsDir() {
		to.opaque[dir] = true
		to.add(path.Join(dir, whiteoutOpaque), by)
	}
}

// shows reports whether a directory of the lower layers can be seen through this layer.
func (w *whiteouts) shows(dir string, with *marks) bool {
	for at := dir; at != "/"; at = path.Dir(at) {
		own, err := os.Lstat(filepath.Join(w.root, at))
		if err == nil && !own.IsDir() || with.opaque[at] {
			return false
		}
	}
	return true
}

// find returns the entry that the lower layers together have at a path, or nil. It follows no links.
func (s stack) find(name string) fs.FileInfo {
	_, info := s.locate(name)
	return info
}

// locate is like find, and also returns the entry's path on the disk.
func (s stack) locate(name string) (file string, info fs.FileInfo) {
	layers := s.lower
	for at, rest := "", strings.Trim(name, "/"); ; {
		part, more, deeper := strings.Cut(rest, "/")
		at, rest = path.Join(at, part), more
		file, info = "", nil
		var next []string
	search:
		for _, layer := range layers {
			here := filepath.Join(layer, at)
			found, err := os.Lstat(here)
			switch {
			case err != nil:
				continue
			case isWhiteout(found), info != nil && !found.IsDir():
				break search
			case info == nil:
				file, info = here, found
			}
			if !found.IsDir() {
				break
			}
			next = append(next, layer)
			if isOpaque(here) {
				break
			}
		}
		if info == nil || !deeper {
			return file, info
		}
		if layers = next; len(layers) == 0 {
			return "", nil
		}
	}
}

// isWhiteout reports whether an entry hides those below it: a device with the number 0.
func isWhiteout(info fs.FileInfo) bool {
	st, ok := info.Sys().(*syscall.Stat_t)
	return ok && info.Mode()&fs.ModeCharDevice != 0 && st.Rdev == 0
}

func isOpaque(dir string) bool {
	value := make([]byte, 1)
	n, err := unix.Lgetxattr(dir, "trusted.overlay.opaque", value)
	return err == nil && n == 1 && value[0] == 'y'
}

// marks are the whiteouts that are needed, in the form of an archive.
type marks struct {
	headers []*tar.Header
	names   map[string]bool
	opaque  map[string]bool // the directories that hide what is below them
}

func newMarks() *marks { return &marks{names: map[string]bool{}, opaque: map[string]bool{}} }

func (m *marks) add(name string, by *tar.Header) {
	if m.names[name] {
		return
	}
	m.names[name] = true
	m.headers = append(m.headers, &tar.Header{Name: name, Typeflag: tar.TypeReg, Uid: by.Uid, Gid: by.Gid, Format: tar.FormatPAX})
}

// write makes the whiteouts as containerd does, and the directories that they need. The other directories keep their times.
func (w *whiteouts) write(ctx context.Context, m *marks) error {
	if len(m.headers) == 0 {
		return nil
	}
	var buf bytes.Buffer
	out := tar.NewWriter(&buf)
	times := map[string]time.Time{}
	for _, h := range m.headers {
		if err := out.WriteHeader(h); err != nil {
			return err
		}
		for dir := path.Dir(h.Name); ; dir = path.Dir(dir) {
			full := filepath.Join(w.root, dir)
			if info, err := os.Lstat(full); err == nil {
				times[full] = info.ModTime()
			}
			if dir == "/" {
				break
			}
		}
	}
	if err := out.Close(); err != nil {
		return err
	}
	if _, err := archive.Apply(ctx, w.root, &buf, archive.WithConvertWhiteout(archive.OverlayConvertWhiteout),
		archive.WithParents(w.lower)); err != nil {
		return err
	}
	for dir, at := range times {
		if err := os.Chtimes(dir, at, at); err != nil {
			return err
		}
	}
	return nil
}

// copyUp copies a file of the lower layers into this layer, so that a hard link can refer to it. It returns the number of
// bytes copied.
func (w *whiteouts) copyUp(ctx context.Context, name string) (int64, error) {
	source, info := w.locate(name)
	if info == nil || !w.shows(path.Dir(name), newMarks()) {
		return 0, failure.Invalidf("no layer has the target")
	}
	for dir := path.Dir(name); dir != "/"; dir = path.Dir(dir) {
		if _, err := os.Lstat(filepath.Join(w.root, dir)); failure.IsGone(err) {
			w.made[dir] = true
		}
	}
	w.copied[name] = true
	if info.IsDir() {
		return 0, failure.Invalidf("the target is a directory")
	}
	target := ""
	if info.Mode()&fs.ModeSymlink != 0 {
		var err error
		if target, err = os.Readlink(source); err != nil {
			return 0, err
		}
	}
	h, err := tar.FileInfoHeader(info, target)
	if err != nil {
		return 0, err
	}
	h.Name, h.Format, h.PAXRecords = strings.Trim(name, "/"), tar.FormatPAX, map[string]string{}
	if err := Attributes(source, h.PAXRecords); err != nil {
		return 0, err
	}
	from, to := io.Pipe()
	defer from.Close()
	go func() {
		out := tar.NewWriter(to)
		err := out.WriteHeader(h)
		if err == nil && info.Mode().IsRegular() {
			err = copyFile(out, source)
		}
		if err == nil {
			err = out.Close()
		}
		to.CloseWithError(err)
	}()
	_, err = archive.Apply(ctx, w.root, from, archive.WithParents(w.lower))
	return h.Size, err
}

func copyFile(to io.Writer, name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.Copy(to, f)
	return err
}

// Attributes adds a file's extended attributes to PAX records, without those of the overlay.
func Attributes(name string, to map[string]string) error {
	list := make([]byte, 64<<10) // the kernel's limit (XATTR_LIST_MAX)
	n, err := unix.Llistxattr(name, list)
	if err != nil {
		return err
	}
	value := make([]byte, 64<<10) // likewise (XATTR_SIZE_MAX)
	for _, key := range strings.Split(strings.TrimRight(string(list[:n]), "\x00"), "\x00") {
		if key == "" || strings.HasPrefix(key, "trusted.") {
			continue
		}
		size, err := unix.Lgetxattr(name, key, value)
		if err != nil {
			return err
		}
		to["SCHILY.xattr."+key] = string(value[:size])
	}
	return nil
}
