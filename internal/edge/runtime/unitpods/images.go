package unitpods

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path"
	"slices"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/edge/wire"
	"github.com/tripod-run/tripod/internal/image"
)

// imageOf finds or makes the module's image, from a file or a reference, and puts it into the plan. The image counts as
// used until imports.leave.
func (r *Runtime) imageOf(ctx context.Context, data wire.ModuleData, p *plan) (id string, err error) {
	file, ref := data.File(), data.Image()
	switch {
	case file != "" && ref != "":
		return "", fmt.Errorf("a module has a file (%q) or an image (%q), not both: %w", file, ref, errdefs.ErrInvalidArgument)
	case file != "":
		id, err = r.files.fromFile(ctx, file)
		if len(p.container.Command) == 0 {
			p.container.Command = []string{path.Base(file)}
		}
	case ref != "":
		id, err = r.files.fromReference(ctx, ref)
	default:
		err = fmt.Errorf("a module needs a file or an image: %w", errdefs.ErrInvalidArgument)
	}
	if err != nil {
		return "", err
	}
	p.container.Image = &runtimeapi.ImageSpec{Image: id, UserSpecifiedImage: ref}
	return id, nil
}

// imports makes images from modules' files, and removes the images of files that no module uses.
type imports struct {
	images Images
	roots  []string
	idle   time.Duration
	log    *slog.Logger

	// removing is read-locked while an image is looked up or made, and write-locked while images are removed.
	removing sync.RWMutex

	mu    sync.Mutex
	files map[string]imported  // by path
	users map[string]int       // number of modules, by image ID
	since map[string]time.Time // by image ID, when the last module stopped using the image
}

// imported is a file with its image.
type imported struct {
	version version
	id      string
}

// version identifies a version of a file's content.
type version struct {
	dev, ino     uint64
	size         int64
	mtime, ctime unix.Timespec
}

func newImports(c Config, log *slog.Logger) *imports {
	return &imports{
		images: c.Images, roots: c.ModuleRoots, idle: c.ImageIdle, log: log,
		files: map[string]imported{}, users: map[string]int{}, since: map[string]time.Time{},
	}
}

// fromFile returns the image of a file. It makes the image if there is none or the file has changed.
func (i *imports) fromFile(ctx context.Context, name string) (string, error) {
	i.removing.RLock()
	defer i.removing.RUnlock()
	file, err := openFile(i.roots, name)
	if err != nil {
		return "", fmt.Errorf("file: %w", err)
	}
	defer file.Close()
	now, err := versionOf(file)
	if err != nil {
		return "", fmt.Errorf("file %s: %w", name, err)
	}
	i.mu.Lock()
	known := i.files[name]
	i.mu.Unlock()
	if known.id != "" && known.version == now {
		if _, err := i.images.Get(ctx, known.id); err == nil {
			i.join(known.id)
			return known.id, nil
		}
	}
	img, err := i.images.ImportFile(ctx, file)
	if err != nil {
		return "", fmt.Errorf("file: %w", err)
	}
	i.mu.Lock()
	i.files[name] = imported{now, img.ID}
	i.mu.Unlock()
	i.join(img.ID)
	return img.ID, nil
}

func versionOf(file *os.File) (version, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &st); err != nil {
		return version{}, err
	}
	return version{st.Dev, st.Ino, st.Size, st.Mtim, st.Ctim}, nil
}

// fromReference returns the image of a reference, which must have a digest. It pulls the image if it is missing.
func (i *imports) fromReference(ctx context.Context, ref string) (string, error) {
	named, err := reference.ParseDockerRef(ref)
	if err != nil {
		return "", fmt.Errorf("image %q: %w: %w", ref, err, errdefs.ErrInvalidArgument)
	}
	if _, ok := named.(reference.Digested); !ok {
		return "", fmt.Errorf("image %q has no digest: use name@sha256:…, so that every node runs the same: %w", ref, errdefs.ErrInvalidArgument)
	}
	i.removing.RLock()
	defer i.removing.RUnlock()
	img, err := i.images.Get(ctx, named.String())
	if errdefs.IsNotFound(err) {
		img, err = i.images.Pull(ctx, named.String(), image.PullOptions{})
	}
	if err != nil {
		return "", err
	}
	i.join(img.ID)
	return img.ID, nil
}

// join counts one more module that uses an image. leave counts one less.
func (i *imports) join(id string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.users[id]++
	delete(i.since, id)
}

func (i *imports) leave(id string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.users[id]--; i.users[id] <= 0 {
		delete(i.users, id)
		i.since[id] = time.Now()
	}
}

// collect removes the images of files that no module has used for ImageIdle.
func (i *imports) collect(ctx context.Context) {
	i.removing.Lock()
	defer i.removing.Unlock()
	all, err := i.images.List(ctx)
	if err != nil {
		i.log.Warn("cannot remove unused images of files; retrying", "err", err)
		return
	}
	existing := map[string]bool{}
	for _, img := range all {
		if !ofFile(img) {
			continue
		}
		existing[img.ID] = true
		if !i.expired(img.ID) {
			continue
		}
		if err := i.images.Remove(ctx, img.ID); err != nil && !errdefs.IsNotFound(err) {
			i.log.Warn("cannot remove the image of a file; retrying", "image", img.ID, "err", err)
			continue
		}
		delete(existing, img.ID)
		i.log.Info("removed the image of a file that no module uses", "image", img.ID)
	}
	i.forget(existing)
}

// ofFile reports whether all names of an image come from ImportFile.
func ofFile(img image.Image) bool {
	other := func(ref string) bool { return !image.IsLocal(ref) }
	return len(img.RepoTags) > 0 && !slices.ContainsFunc(img.RepoTags, other) && !slices.ContainsFunc(img.RepoDigests, other)
}

func (i *imports) expired(id string) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.users[id] > 0 {
		return false
	}
	since, ok := i.since[id]
	if !ok { // not used since this daemon started
		since = time.Now()
		i.since[id] = since
	}
	return time.Since(since) >= i.idle
}

// forget drops the entries of images that no longer exist.
func (i *imports) forget(existing map[string]bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	for id := range i.since {
		if !existing[id] {
			delete(i.since, id)
		}
	}
	for name, f := range i.files {
		if !existing[f.id] {
			delete(i.files, name)
		}
	}
}
