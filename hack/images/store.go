package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/test/harness/registry"
	"github.com/tripod-run/tripod/test/harness/testns"
)

//go:embed *.go pause nonewprivs shell guest
var sources embed.FS

// store is the directory into which the images are built.
type store string

func (s store) path(elem ...string) string {
	return filepath.Join(append([]string{string(s)}, elem...)...)
}

// build makes everything, unless everything is up to date with the packages and sources. Concurrent builds wait for
// each other.
func (s store) build(ctx context.Context) error {
	unlock, err := s.lock()
	if err != nil {
		return err
	}
	defer unlock()
	debs, err := findDebs(ctx)
	if err != nil {
		return err
	}
	comps, err := components(ctx)
	if err != nil {
		return err
	}
	agnhost := agnhostProgram(ctx)
	key := buildKey(debs.files, comps, agnhost)
	if have, err := os.ReadFile(s.path("key")); err == nil && bytes.Equal(have, key) {
		return nil
	}
	start := time.Now()
	for _, old := range []string{"key", "oci", "registry"} {
		if err := os.RemoveAll(s.path(old)); err != nil {
			return err
		}
	}
	if err := debs.fetch(ctx, s.path("debs")); err != nil {
		return err
	}
	scratch, err := os.MkdirTemp(string(s), "scratch-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(scratch)
	images, err := s.newSet(ctx, debs, agnhost, scratch)
	if err != nil {
		return err
	}
	disk, err := diskArtifact(s.path("vm"))
	if err != nil {
		return err
	}
	comps = append(comps, disk)
	if err := s.writeLayout(images, comps); err != nil {
		return err
	}
	if err := s.fillInPrivate(); err != nil {
		return err
	}
	fmt.Fprintf(os.Stderr, "built %d images in %s, %.1f s\n", len(images)+len(comps), s, time.Since(start).Seconds())
	return os.WriteFile(s.path("key"), key, 0o644)
}

// lock makes the directory, and waits until no other process builds in it.
func (s store) lock() (unlock func(), err error) {
	if err := os.MkdirAll(string(s), 0o755); err != nil {
		return nil, err
	}
	f, err := os.Open(string(s))
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() { f.Close() }, nil
}

// buildKey returns a text that contains everything that the images depend on.
func buildKey(debs []string, comps []component, agnhost string) []byte {
	var b bytes.Buffer
	// The path of agnhost contains the version of agnhost, so a new version changes the key.
	fmt.Fprintf(&b, "%s %s\n%s\n%s\n", runtime.Version(), runtime.GOARCH, strings.Join(debs, "\n"), agnhost)
	for _, c := range comps {
		fmt.Fprintf(&b, "%s %s\n", c.name, c.Manifest.Digest)
	}
	writeSources(&b)
	return b.Bytes()
}

// writeSources writes the digests of this program's sources. Its tests change nothing that it makes.
func writeSources(b io.Writer) {
	_ = fs.WalkDir(sources, ".", func(name string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() && !strings.HasSuffix(name, "_test.go") {
			data, _ := sources.ReadFile(name)
			fmt.Fprintf(b, "%s %x\n", name, sha256.Sum256(data))
		}
		return err
	})
}

// writeLayout writes one OCI image layout with all images, and the lists of images and components.
func (s store) writeLayout(images []image, comps []component) error {
	p, err := layout.Write(s.path("oci"), empty.Index)
	if err != nil {
		return err
	}
	var list bytes.Buffer
	for _, im := range images {
		hash, err := im.append(p)
		if err != nil {
			return fmt.Errorf("%s: %w", im.name, err)
		}
		fmt.Fprintf(&list, "%s %s\n", im.name, hash)
	}
	for _, c := range comps {
		fmt.Fprintf(&list, "%s %s\n", c.name, c.Manifest.Digest)
	}
	yaml := "defaultTestContainerImage: registry.k8s.io/" + e2e + "busybox:1.29-2\n" +
		"webServerTestImage: registry.k8s.io/" + e2e + "nginx:1.14-2\n"
	return errors.Join(os.WriteFile(s.path("images.txt"), list.Bytes(), 0o644), os.WriteFile(s.path("images.yaml"), []byte(yaml), 0o644))
}

// append adds the image to a layout. It returns the digest that the image's name refers to.
func (im image) append(p layout.Path) (v1.Hash, error) {
	named := layout.WithAnnotations(map[string]string{ocispec.AnnotationRefName: im.name})
	if im.bare {
		one, err := im.manifest(runtime.GOARCH)
		if err != nil {
			return v1.Hash{}, err
		}
		if err := p.AppendImage(one, named); err != nil {
			return v1.Hash{}, err
		}
		return one.Digest()
	}
	arches := im.arches
	if arches == nil {
		arches = []string{runtime.GOARCH}
	}
	var manifests []ocispec.Descriptor
	for _, arch := range arches {
		one, err := im.manifest(arch)
		if err != nil {
			return v1.Hash{}, err
		}
		d, err := partial.Descriptor(one)
		if err != nil {
			return v1.Hash{}, err
		}
		if err := p.WriteImage(one); err != nil {
			return v1.Hash{}, err
		}
		manifests = append(manifests, ocispec.Descriptor{MediaType: string(d.MediaType), Digest: digest.Digest(d.Digest.String()), Size: d.Size,
			Platform: &ocispec.Platform{OS: "linux", Architecture: arch}})
	}
	return appendIndex(p, im.name, manifests)
}

// appendIndex writes an image index. When skopeo copies an index, it marshals the index again, with the field order of
// the image specification's Go types. So the index keeps its digest only if appendIndex uses the same order.
func appendIndex(p layout.Path, name string, manifests []ocispec.Descriptor) (v1.Hash, error) {
	data, err := json.Marshal(ocispec.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageIndex,
		Manifests: manifests})
	if err != nil {
		return v1.Hash{}, err
	}
	hash, size, err := v1.SHA256(bytes.NewReader(data))
	if err != nil {
		return v1.Hash{}, err
	}
	if err := p.WriteBlob(hash, io.NopCloser(bytes.NewReader(data))); err != nil {
		return v1.Hash{}, err
	}
	return hash, p.AppendDescriptor(v1.Descriptor{MediaType: types.OCIImageIndex, Digest: hash, Size: size,
		Annotations: map[string]string{ocispec.AnnotationRefName: name}})
}

// manifest builds the image for one platform. If the image has several platforms, the result contains a file that names
// the platform, for tests.
func (im image) manifest(arch string) (v1.Image, error) {
	layers := im.layers
	if im.arches != nil {
		l, err := mark("platform", "linux/"+arch).layer()
		if err != nil {
			return nil, err
		}
		layers = append(layers[:len(layers):len(layers)], l)
	}
	one, err := mutate.AppendLayers(mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON),
		layers...)
	if err != nil {
		return nil, err
	}
	cf, err := one.ConfigFile()
	if err != nil {
		return nil, err
	}
	cf = cf.DeepCopy()
	cf.OS, cf.Architecture, cf.Config = "linux", arch, im.config
	cf.Created = v1.Time{Time: time.Unix(0, 0).UTC()}
	return mutate.ConfigFile(one, cf)
}

// fillInPrivate fills the storage in build/images/registry by pushing the images to a docker-registry. The
// docker-registry runs in its own network namespace, so it uses no port of the host.
func (s store) fillInPrivate() error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	if code := testns.Run([]string{self, "fill"}, testns.Options{Strict: true}); code != 0 {
		return fmt.Errorf("fill the registry: exit code %d", code)
	}
	return nil
}

func (s store) fill(ctx context.Context) error {
	srv, err := registry.Start(ctx, s.path("registry"), "127.0.0.1:0")
	if err != nil {
		return err
	}
	return errors.Join(s.push(ctx, srv.Addr), srv.Stop())
}

// push copies the images to a registry with skopeo, pushes the components without skopeo, and checks that the registry
// has the expected digests.
func (s store) push(ctx context.Context, addr string) error {
	list, err := os.ReadFile(s.path("images.txt"))
	if err != nil {
		return err
	}
	comps, err := components(ctx)
	if err != nil {
		return err
	}
	disk, err := diskArtifact(s.path("vm"))
	if err != nil {
		return err
	}
	comps = append(comps, disk)
	for line := range strings.Lines(string(list)) {
		name, want, _ := strings.Cut(strings.TrimSpace(line), " ")
		if i := slices.IndexFunc(comps, func(c component) bool { return c.name == name }); i >= 0 {
			if err := errors.Join(comps[i].push(ctx, addr), verify(ctx, addr, name, want)); err != nil {
				return err
			}
			continue
		}
		out, err := exec.CommandContext(ctx, "skopeo", "copy", "--all", "--quiet", "--insecure-policy", "--dest-tls-verify=false",
			"oci:"+s.path("oci")+":"+name, "docker://"+addr+"/"+name).CombinedOutput()
		if err != nil {
			return fmt.Errorf("skopeo copy %s: %w\n%s", name, err, out)
		}
		if err := verify(ctx, addr, name, want); err != nil {
			return err
		}
	}
	return nil
}

func verify(ctx context.Context, addr, name, want string) error {
	repo, tag, _ := strings.Cut(name, ":")
	req, err := http.NewRequestWithContext(ctx, http.MethodHead, "http://"+addr+"/v2/"+repo+"/manifests/"+tag, nil)
	if err != nil {
		return err
	}
	req.Header["Accept"] = []string{string(types.OCIImageIndex), string(types.OCIManifestSchema1)}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	resp.Body.Close()
	if got := resp.Header.Get("Docker-Content-Digest"); got != want {
		return fmt.Errorf("%s: the registry has digest %q (%s), want %q", name, got, resp.Status, want)
	}
	return nil
}
