package linux

import (
	"bytes"
	"context"
	"debug/elf"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
)

// busybox is the ID of the only image.
const busybox = "sha256:busybox"

// fakeImages is an ImageStore of overlays over one directory with busybox. Its state is on disk, in <dir>/<key>/.
type fakeImages struct{ base, dir string }

func openFakeImages(dir string) *fakeImages { return &fakeImages{filepath.Join(dir, "base"), dir} }

func newFakeImages(tb testing.TB, dir string) *fakeImages {
	f := openFakeImages(dir)
	if err := makeRootfs(f.base); err != nil {
		tb.Fatal(err)
	}
	return f
}

func (f *fakeImages) Get(_ context.Context, id string) (image.Image, error) {
	if id != busybox {
		return image.Image{}, fmt.Errorf("image %s: %w", id, errdefs.ErrNotFound)
	}
	return image.Image{ID: id, Kind: image.KindRootfs, Config: ocispec.Image{Config: ocispec.ImageConfig{Env: []string{"PATH=/bin"}}}}, nil
}

func (f *fakeImages) Prepare(ctx context.Context, key, id string, _ map[string]string) ([]mount.Mount, error) {
	return f.make(ctx, key, id, "upper", "work")
}

func (f *fakeImages) View(ctx context.Context, key, id string) ([]mount.Mount, error) {
	return f.make(ctx, key, id, "view")
}

func (f *fakeImages) make(ctx context.Context, key, id string, subs ...string) ([]mount.Mount, error) {
	if _, err := f.Get(ctx, id); err != nil {
		return nil, err
	}
	for _, sub := range subs {
		if err := os.MkdirAll(filepath.Join(f.dir, key, sub), 0o755); err != nil {
			return nil, err
		}
	}
	return f.Mounts(ctx, key)
}

func (f *fakeImages) Mounts(_ context.Context, key string) ([]mount.Mount, error) {
	dir := filepath.Join(f.dir, key)
	switch {
	case ledger.Exists(filepath.Join(dir, "view")):
		return []mount.Mount{{Type: "bind", Source: f.base, Options: []string{"ro", "bind"}}}, nil
	case ledger.Exists(dir):
		return []mount.Mount{{Type: "overlay", Source: "overlay", Options: []string{
			"lowerdir=" + f.base, "upperdir=" + filepath.Join(dir, "upper"), "workdir=" + filepath.Join(dir, "work"),
		}}}, nil
	}
	return nil, fmt.Errorf("snapshot %s: %w", key, errdefs.ErrNotFound)
}

func (f *fakeImages) Release(_ context.Context, key string) error {
	return os.RemoveAll(filepath.Join(f.dir, key))
}

func (f *fakeImages) Snapshots(context.Context) (keys []string, err error) {
	entries, err := os.ReadDir(f.dir)
	for _, e := range entries {
		if e.Name() != "base" {
			keys = append(keys, e.Name())
		}
	}
	return keys, err
}

func (f *fakeImages) Usage(_ context.Context, key string) (image.Usage, error) {
	return image.Usage{Bytes: 4096, Inodes: 1, Timestamp: time.Now()}, nil
}

// makeRootfs creates a root file system with Debian's busybox and its libraries. The applets are hard links, so that
// /proc/<pid>/exe names the applet.
func makeRootfs(dir string) error {
	const program = "/bin/busybox"
	for _, sub := range []string{"bin", "dev", "proc", "sys", "etc", "tmp", "root"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			return err
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "etc/passwd"), []byte("root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n"),
		0o644); err != nil {
		return err
	}
	if err := copyFile(program, filepath.Join(dir, program)); err != nil {
		return fmt.Errorf("apt-get install busybox: %w", err)
	}
	for _, applet := range strings.Fields("sh sleep cat echo ls id hostname kill env dd stat mkdir rm tr wc yes head test true setsid ps stty printf grep touch ipcs ipcmk tail ping chmod chown readlink cut nc") {
		if err := os.Link(filepath.Join(dir, program), filepath.Join(dir, "bin", applet)); err != nil {
			return err
		}
	}
	return copyLibraries(dir, program)
}

func copyLibraries(dir, program string) error {
	f, err := elf.Open(program)
	if err != nil {
		return err
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			raw, err := io.ReadAll(p.Open())
			if err != nil {
				return err
			}
			name := string(bytes.TrimRight(raw, "\x00"))
			if err := copyFile(name, filepath.Join(dir, name)); err != nil {
				return err
			}
		}
	}
	libs, _ := f.ImportedLibraries()
	for _, lib := range libs {
		found, _ := filepath.Glob("/lib/*-linux-gnu/" + lib)
		if len(found) == 0 {
			return fmt.Errorf("library %s: %w", lib, fs.ErrNotExist)
		}
		if err := copyFile(found[0], filepath.Join(dir, found[0])); err != nil {
			return err
		}
	}
	return nil
}

func copyFile(from, to string) error {
	raw, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	return os.WriteFile(to, raw, 0o755)
}
