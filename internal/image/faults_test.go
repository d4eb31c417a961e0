package image

import (
	"archive/tar"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/image/internal/layer"
	"github.com/tripod-run/tripod/internal/keys"
)

// These tests are named after rows of the table of bad inputs and faults.

func TestFaultI1LabelsOfImagesAreNeverOurs(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	hostile := map[string]string{
		keys.Owner: "rootfs", labelRoot: "yes", keys.Pull: "x", "containerd.io/gc.ref.content.0": "sha256:" + strings.Repeat("0", 64),
		"containerd.io/snapshot/uidmapping": "0:1000:1", "containerd.io/gc.expire": "2000-01-01T00:00:00Z",
		"org.opencontainers.image.ref.name": "../x",
	}
	m := raw(t, tarOf(t, file("a", "b")))
	m.manifest.Annotations = hostile
	m.manifest.Layers[0].Annotations = hostile
	m.manifest.Config.Annotations = hostile
	config := map[string]any{}
	check(t, json.Unmarshal(m.blobs[1], &config))
	config["config"] = map[string]any{"Labels": hostile}
	document, err := json.Marshal(config)
	check(t, err)
	m.blobs = m.blobs[:1]
	m.manifest.Config = m.add(ocispec.MediaTypeImageConfig, document)
	img := pull(t, s, m.push(t, reg, "app"))
	if img.Config.Config.Labels[keys.Owner] != "rootfs" || img.Annotations[labelRoot] != "yes" {
		t.Errorf("got image %+v, want the labels and annotations of its author", img)
	}

	ctx := s.withNamespace(t.Context())
	if keys, err := s.Snapshots(ctx); err != nil || len(keys) != 0 {
		t.Errorf("Snapshots() = %q, %v; want none", keys, err)
	}
	check(t, s.snaps.Walk(ctx, func(_ context.Context, info snapshots.Info) error {
		for key := range hostile {
			if _, ok := info.Labels[key]; ok {
				t.Errorf("snapshot %s has the image's label %s", info.Name, key)
			}
		}
		return nil
	}))
	records, err := s.records.List(ctx)
	check(t, err)
	for _, r := range records {
		delete(r.Labels, keys.Public)
		if len(r.Labels) != 0 || len(r.Target.Annotations) != 0 {
			t.Errorf("record %+v has the image's labels or annotations", r)
		}
	}
	_, err = s.Prepare(ctx, "c", img.ID, hostile) // these labels are in no metadata of containerd
	check(t, err)
	check(t, s.Release(ctx, "c"))
	check(t, s.Remove(ctx, img.ID))
	wantEmpty(t, s)
}

func TestFaultI2UserIsHandedOnAsItIs(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	for i, user := range []string{"4294967296", "-1", "0:99999999999999999999", "root:wheel", strings.Repeat("u", 1<<20)} {
		ref := reg.push(t, fmt.Sprintf("app:%d", i), imageOf(t, v1.Config{User: user}, tarOf(t, file("a", "b"))))
		if img := pull(t, s, ref); img.User != user {
			t.Errorf("User: got %.40q, want %.40q", img.User, user)
		}
	}
	ref := reg.push(t, "app:huge", imageOf(t, v1.Config{User: strings.Repeat("u", 9<<20)}, tarOf(t, file("a", "b"))))
	_, err := s.Pull(t.Context(), ref, PullOptions{})
	wantError(t, err, errdefs.IsInvalidArgument, "config", "limit")
}

func TestFaultI4BadManifests(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{Limits: Limits{Layers: 3}})
	archive := tarOf(t, file("a", "b"))
	for name, c := range map[string]struct {
		change func(m *rawImage)
		word   string
	}{
		"no layers":         {func(m *rawImage) { m.manifest.Layers = nil }, "no layers"},
		"too many layers":   {func(m *rawImage) { l := m.manifest.Layers[0]; m.manifest.Layers = []ocispec.Descriptor{l, l, l, l} }, "4 layers"},
		"negative size":     {func(m *rawImage) { m.manifest.Layers[0].Size = -1 }, "size -1"},
		"no size":           {func(m *rawImage) { m.manifest.Config.Size = 0 }, "size 0"},
		"absurd size":       {func(m *rawImage) { m.manifest.Layers[0].Size = 1 << 62 }, "limit"},
		"bad digest":        {func(m *rawImage) { m.manifest.Layers[0].Digest = "sha256:../../../etc/passwd" }, "digest"},
		"unknown algorithm": {func(m *rawImage) { m.manifest.Config.Digest = "md5:d41d8cd98f00b204e9800998ecf8427e" }, "digest"},
		"encrypted layer":   {func(m *rawImage) { m.manifest.Layers[0].MediaType += "+encrypted" }, "is encrypted"},
		"more layers than the config": {func(m *rawImage) {
			m.manifest.Layers = append(m.manifest.Layers, m.manifest.Layers[0])
		}, "lists 1 layers, its manifest 2"},
		"config is no JSON": {func(m *rawImage) { m.manifest.Config = m.add(ocispec.MediaTypeImageConfig, []byte("text")) }, "config"},
		"config of bad layers": {func(m *rawImage) {
			m.manifest.Config = m.add(ocispec.MediaTypeImageConfig,
				[]byte(`{"os":"linux","architecture":"amd64","rootfs":{"type":"layers","diff_ids":["../x"]}}`))
		}, "../x"},
		"wrong diff ID": {func(m *rawImage) {
			m.manifest.Config = m.add(ocispec.MediaTypeImageConfig,
				fmt.Appendf(nil, `{"rootfs":{"type":"layers","diff_ids":[%q]}}`, digest.FromString("x")))
		}, "but the config says"},
	} {
		t.Run(name, func(t *testing.T) {
			m := raw(t, archive)
			c.change(m)
			// The test library's registry checks little of a manifest, which is useful here.
			_, err := s.Pull(t.Context(), m.push(t, reg, "bad/"+strings.ReplaceAll(strings.ToLower(name), " ", "-")), PullOptions{})
			wantError(t, err, errdefs.IsInvalidArgument, c.word)
		})
	}
	if all, _ := s.List(t.Context()); len(all) != 0 {
		t.Errorf("List after invalid images = %+v, want no images", all)
	}
	wantEmpty(t, s)
}

func TestFaultI4DocumentsWithWrongTypes(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	serve := func(mediaType string, document []byte, size int) {
		reg.setHook(func(w http.ResponseWriter, r *http.Request) bool {
			w.Header().Set("Content-Type", mediaType)
			w.Header().Set("Docker-Content-Digest", digest.FromBytes(document).String())
			w.Header().Set("Content-Length", strconv.Itoa(size))
			if r.Method == http.MethodGet {
				_, _ = w.Write(document)
			}
			return true
		})
	}
	m := raw(t, tarOf(t, file("a", "b")))
	manifest, err := json.Marshal(m.manifest)
	check(t, err)
	for name, c := range map[string]struct {
		mediaType string
		document  string
		word      string
	}{
		"manifest called index": {ocispec.MediaTypeImageIndex, string(manifest), "is a manifest"},
		"index called manifest": {ocispec.MediaTypeImageManifest, `{"manifests":[{}]}`, "is an index"},
		"schema 1":              {ocispec.MediaTypeImageManifest, `{"fsLayers":[{"blobSum":"x"}]}`, "schema 1"},
		"html":                  {"text/html", `<html>log in</html>`, "text/html"},
		"no JSON":               {ocispec.MediaTypeImageManifest, `manifest`, "manifest"},
	} {
		t.Run(name, func(t *testing.T) {
			serve(c.mediaType, []byte(c.document), len(c.document))
			_, err := s.Pull(t.Context(), reg.ref("lies:1"), PullOptions{})
			wantError(t, err, errdefs.IsInvalidArgument, c.word)
		})
	}
	serve(ocispec.MediaTypeImageManifest, manifest, 100<<20)
	_, err = s.Pull(t.Context(), reg.ref("lies:2"), PullOptions{})
	wantError(t, err, errdefs.IsInvalidArgument, "limit of 8388608")
}

// endless serves an index for every digest, each referring to another.
func TestFaultI4EndlessIndexNesting(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	documents := map[string][]byte{}
	child := ocispec.Descriptor{MediaType: ocispec.MediaTypeImageManifest, Digest: digest.FromString("end"), Size: 3}
	for range 50 {
		document, err := json.Marshal(ocispec.Index{MediaType: ocispec.MediaTypeImageIndex, Manifests: []ocispec.Descriptor{child}})
		check(t, err)
		child = ocispec.Descriptor{MediaType: ocispec.MediaTypeImageIndex, Digest: digest.FromBytes(document), Size: int64(len(document))}
		documents[child.Digest.String()] = document
	}
	documents["1"] = documents[child.Digest.String()]
	reg.setHook(func(w http.ResponseWriter, r *http.Request) bool {
		document := documents[r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]]
		w.Header().Set("Content-Type", ocispec.MediaTypeImageIndex)
		w.Header().Set("Docker-Content-Digest", digest.FromBytes(document).String())
		w.Header().Set("Content-Length", strconv.Itoa(len(document)))
		_, _ = w.Write(document)
		return true
	})
	_, err := s.Pull(t.Context(), reg.ref("nested:1"), PullOptions{})
	wantError(t, err, errdefs.IsInvalidArgument, "more than 4 nested indexes")
	if n := reg.count("GET"); n > 10 {
		t.Errorf("got %d GET requests for nested indexes, want at most 10", n)
	}
	wantEmpty(t, s)
}

func TestFaultI4WrongDigestOrSize(t *testing.T) {
	for name, body := range map[string]func(blob []byte) []byte{
		"wrong digest": func(b []byte) []byte { c := append([]byte(nil), b...); c[len(c)/2] ^= 1; return c },
		"too long":     func(b []byte) []byte { return append(append([]byte(nil), b...), 'x') },
		"too short":    func(b []byte) []byte { return b[:len(b)-1] },
	} {
		t.Run(name, func(t *testing.T) {
			reg, s := newRegistry(t), open(t, Config{})
			m := raw(t, tarOf(t, file("a", strings.Repeat("b", 1000))))
			ref := m.push(t, reg, "app")
			layer := m.blobs[0]
			reg.setHook(func(w http.ResponseWriter, r *http.Request) bool {
				if !strings.HasSuffix(r.URL.Path, digest.FromBytes(layer).String()) {
					return false
				}
				http.ServeContent(w, r, "", testTime, strings.NewReader(string(body(layer))))
				return true
			})
			_, err := s.Pull(t.Context(), ref, PullOptions{})
			wantError(t, err, errdefs.IsDataLoss, digest.FromBytes(layer).String())
			reg.setHook(nil)
			pull(t, s, ref) // the wrong content left nothing behind
		})
	}
}

func TestFaultI4HostileLayers(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{Limits: Limits{UnpackedBytes: 1 << 20, UnpackedFiles: 100}})
	header := func(name string, kind byte, link string) entryOf {
		return entryOf{Header: tar.Header{Name: name, Typeflag: kind, Linkname: link, Mode: 0o644}}
	}
	var many []entryOf
	for i := range 101 {
		many = append(many, file(strconv.Itoa(i), ""))
	}
	outside := filepath.Join(filepath.Dir(s.cfg.Root), "outside")
	check(t, os.WriteFile(outside, []byte("safe"), 0o600))
	for name, c := range map[string]struct {
		archive []byte
		word    string
	}{
		"dotdot":            {tarOf(t, file("../../../outside", "x")), "out of the root"},
		"dotdot below":      {tarOf(t, file("a/../../../outside", "x")), "out of the root"},
		"hard link out":     {tarOf(t, header("link", tar.TypeLink, "../../../../outside")), "out of the root"},
		"whiteout out":      {tarOf(t, file("../.wh.outside", "")), "out of the root"},
		"bomb":              {tarOf(t, file("big", strings.Repeat("\x00", 2<<20))), "bytes unpacked"},
		"bomb after end":    {append(tarOf(t, file("a", "b")), make([]byte, 2<<20)...), "bytes unpacked"},
		"files without end": {tarOf(t, many...), "files"},
		"sparse bomb":       {sparse(t, 1<<40), "bytes unpacked"},
		"not an archive":    {[]byte(strings.Repeat("no tar at all ", 100)), "not a readable archive"},
		"truncated":         {tarOf(t, file("a", strings.Repeat("b", 5000)))[:2000], "not a readable archive"},
	} {
		t.Run(name, func(t *testing.T) {
			ref := raw(t, c.archive).push(t, reg, "hostile/"+strings.ReplaceAll(name, " ", "-"))
			_, err := s.Pull(t.Context(), ref, PullOptions{})
			wantError(t, err, errdefs.IsInvalidArgument, c.word, ref)
		})
	}
	t.Run("not gzip", func(t *testing.T) {
		m := raw(t, tarOf(t, file("a", "b")))
		m.blobs[0] = []byte("not gzip at all")
		m.manifest.Layers[0].Digest, m.manifest.Layers[0].Size = digest.FromBytes(m.blobs[0]), int64(len(m.blobs[0]))
		_, err := s.Pull(t.Context(), m.push(t, reg, "hostile/gzip"), PullOptions{})
		wantError(t, err, errdefs.IsInvalidArgument, "gzip")
	})
	t.Run("symlink then file through it", func(t *testing.T) {
		img := pull(t, s, raw(t, tarOf(t, header("d", tar.TypeSymlink, "../../../../.."), file("d/outside", "x"), file("e/f", "y"),
			header("hard", tar.TypeLink, "/e/f"))).push(t, reg, "hostile/symlink"))
		mounts, err := s.Prepare(t.Context(), "c", img.ID, nil)
		check(t, err)
		root := mounted(t, mounts)
		if read(t, root+"/outside") != "x" || read(t, root+"/hard") != "y" {
			t.Error("links were not resolved inside the root")
		}
	})
	if read(t, outside) != "safe" {
		t.Error("a layer changed a file outside its root")
	}
}

// sparse returns an archive of a few hundred bytes with a file of size bytes of holes (GNU sparse format 1.0 in PAX).
func sparse(t testing.TB, size int64) []byte {
	t.Helper()
	body := make([]byte, 512)
	copy(body, "1\n"+strconv.FormatInt(size, 10)+"\n0\n")
	// The library's writer refuses these keys, so the block with them is first written as another type, in byte 156;
	// its checksum, six octal digits, begins at byte 148 (POSIX pax interchange format).
	records := ""
	for _, kv := range []string{"GNU.sparse.major=1", "GNU.sparse.minor=0", "GNU.sparse.name=sparse",
		"GNU.sparse.realsize=" + strconv.FormatInt(size, 10)} {
		records += fmt.Sprintf("%d %s\n", len(kv)+4, kv)
	}
	pax := tarOf(t, file("PaxHeaders.0/sparse", records))[:1024]
	copy(pax[148:], fmt.Sprintf("%06o", sumOf(t, pax)+'x'-tar.TypeReg))
	pax[156] = 'x'
	return append(pax, tarOf(t, file("sparse", string(body)))...)
}

func sumOf(t testing.TB, header []byte) int64 {
	t.Helper()
	sum, err := strconv.ParseInt(string(header[148:154]), 8, 64)
	check(t, err)
	return sum
}

func TestFaultI4DevicesAndOverlayAttributesAreLeftOut(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	device := entryOf{Header: tar.Header{Name: "disk", Typeflag: tar.TypeBlock, Mode: 0o666, Devmajor: 8}}
	whiteout := entryOf{Header: tar.Header{Name: "etc", Typeflag: tar.TypeChar}}
	tricky := file("file", "x")
	tricky.Format = tar.FormatPAX
	tricky.PAXRecords = map[string]string{"SCHILY.xattr.trusted.overlay.redirect": "/etc", "SCHILY.xattr.user.ours": "1"}
	img := pull(t, s, raw(t, tarOf(t, file("etc/passwd", "root")), tarOf(t, device, whiteout, tricky)).push(t, reg, "app"))
	mounts, err := s.Prepare(t.Context(), "c", img.ID, nil)
	check(t, err)
	root := mounted(t, mounts)
	if _, err := os.Lstat(root + "/disk"); !os.IsNotExist(err) {
		t.Errorf("Lstat of a device in the image: got error %v, want not exist", err)
	}
	if read(t, root+"/etc/passwd") != "root" {
		t.Error("a device 0:0 in a layer hid a directory")
	}
	upper, lower, err := layer.Dirs(mounts)
	check(t, err)
	for _, dir := range append(lower, upper) {
		if n, err := unix.Lgetxattr(dir+"/file", "trusted.overlay.redirect", nil); err == nil {
			t.Errorf("%s/file has the attribute trusted.overlay.redirect of %d bytes, want none", dir, n)
		}
	}
}

func TestFaultI8HundredPullsAreOne(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	src, err := random.Image(100<<10, 4)
	check(t, err)
	ref := reg.push(t, "app:1", src)
	var wg sync.WaitGroup
	gate := make(chan struct{})
	ids := make([]string, 100)
	for i := range ids {
		wg.Go(func() {
			<-gate
			img, err := s.Pull(t.Context(), ref, PullOptions{})
			if err != nil {
				t.Error(err)
			}
			ids[i] = img.ID
		})
	}
	close(gate)
	wg.Wait()
	layers, err := src.Layers()
	check(t, err)
	for _, l := range layers {
		if n := reg.count("GET", digestOf(t, l)); n != 1 {
			t.Errorf("got %d requests for a layer, want 1", n)
		}
	}
	for _, id := range ids {
		if id != idOf(t, src) {
			t.Errorf("pulled ID: got %q, want %q", id, idOf(t, src))
		}
	}
	unpacked := 0
	check(t, s.snaps.Walk(s.withNamespace(t.Context()), func(_ context.Context, info snapshots.Info) error {
		unpacked++
		return nil
	}))
	if unpacked != len(layers) {
		t.Errorf("got %d unpacked snapshots, want %d", unpacked, len(layers))
	}
}

// Concurrent pulls of other references to the same blobs share transfers and layers.
func TestFaultI8SharedBlobsOfManyReferences(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	base := tarOf(t, file("base", strings.Repeat("b", 1<<20)))
	var refs []string
	for i := range 10 {
		refs = append(refs, reg.push(t, fmt.Sprintf("app%d:1", i), imageOf(t, v1.Config{}, base, tarOf(t, file("top", fmt.Sprint(i))))))
	}
	var wg sync.WaitGroup
	for _, ref := range refs {
		wg.Go(func() {
			if _, err := s.Pull(t.Context(), ref, PullOptions{}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := reg.count("GET", digest.FromBytes(base).Encoded()); n != 1 {
		t.Errorf("got %d requests for the shared layer, want 1", n)
	}
	if all, _ := s.List(t.Context()); len(all) != 10 {
		t.Errorf("List() = %d images, want 10", len(all))
	}
}

func TestFaultN5DiskFull(t *testing.T) {
	dir := t.TempDir()
	check(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=6m"))
	t.Cleanup(func() { check(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	reg, s := newRegistry(t), open(t, Config{Root: filepath.Join(dir, "image")})
	small := pull(t, s, reg.push(t, "small:1", oneFileImage(t, "x")))

	big, err := random.Image(5<<20, 1)
	check(t, err)
	_, err = s.Pull(t.Context(), reg.push(t, "big:1", big), PullOptions{})
	wantError(t, err, errdefs.IsResourceExhausted, "no space left", "big:1")
	ref := raw(t, tarOf(t, file("zeros", strings.Repeat("\x00", 8<<20)))).push(t, reg, "wide")
	_, err = s.Pull(t.Context(), ref, PullOptions{})
	wantError(t, err, errdefs.IsResourceExhausted, "no space left", ref)

	// Existing images remain usable, and the failures do not keep the disk full.
	check(t, s.Collect(t.Context()))
	if _, err := s.Get(t.Context(), small.ID); err != nil {
		t.Error(err)
	}
	pull(t, s, reg.push(t, "other:1", oneFileImage(t, strings.Repeat("y", 1<<20))))
	check(t, s.Close())
	s = open(t, Config{Root: s.cfg.Root})
	if all, _ := s.List(t.Context()); len(all) != 2 {
		t.Errorf("List() after a restart = %d images, want 2", len(all))
	}
}

func TestFaultN6DamagedBlobs(t *testing.T) {
	zero := func(t *testing.T, path string) { check(t, os.Truncate(path, 0)) }
	flip := func(t *testing.T, path string) {
		b, err := os.ReadFile(path)
		check(t, err)
		b[len(b)/2] ^= 1
		check(t, os.WriteFile(path, b, 0o400))
	}
	gone := func(t *testing.T, path string) { check(t, os.Remove(path)) }
	for name, damage := range map[string]func(*testing.T, string){"zero": zero, "flipped": flip, "gone": gone} {
		for _, what := range []string{"manifest", "config", "layer"} {
			t.Run(name+" "+what, func(t *testing.T) {
				reg, s := newRegistry(t), open(t, Config{})
				ref := reg.push(t, "app:1", imageOf(t, v1.Config{}, tarOf(t, file("a", "1")), tarOf(t, file("b", "2"))))
				other := pull(t, s, reg.push(t, "other:1", oneFileImage(t, "other")))
				img := pull(t, s, ref)
				dgst := map[string]digest.Digest{"manifest": img.Manifest, "config": digest.Digest(img.ID), "layer": img.Layers[0].Digest}[what]
				damage(t, blobPath(s, dgst))

				check(t, s.Close())
				s = open(t, Config{Root: s.cfg.Root})
				// A layer's blob is not needed once it is unpacked; damage shows only when it is read.
				listed := what == "layer" && name == "flipped"
				if _, err := s.Get(t.Context(), ref); (err == nil) != listed {
					t.Errorf("Get after Open: got error %v, want an image: %v", err, listed)
				}
				if _, err := s.Get(t.Context(), other.ID); err != nil {
					t.Errorf("Get of the intact image: %v", err)
				}
				again := pull(t, s, ref)
				mounts, err := s.Prepare(t.Context(), "c", again.ID, nil)
				check(t, err)
				root := mounted(t, mounts)
				if again.ID != img.ID || read(t, root+"/a")+read(t, root+"/b") != "12" {
					t.Errorf("image after another pull: got %+v, want %s with its files", again, img.ID)
				}
			})
		}
	}
}

// The digest reveals a blob that was damaged on disk before its layer was unpacked, and the blob is fetched again.
func TestFaultN6CorruptLayerIsFetchedAgain(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	archive := tarOf(t, file("a", strings.Repeat("1", 5000)))
	ref := reg.push(t, "app:1", imageOf(t, v1.Config{}, archive))
	img := pull(t, s, ref)
	// As after a crash between transfer and unpacking, with damaged memory.
	ctx := s.withNamespace(t.Context())
	check(t, s.snaps.Remove(ctx, img.ChainID))
	b := []byte(read(t, blobPath(s, digest.FromBytes(archive))))
	b[1000] ^= 1
	check(t, os.WriteFile(blobPath(s, digest.FromBytes(archive)), b, 0o400))
	reg.forget()
	pull(t, s, ref)
	if n := reg.count("GET", digest.FromBytes(archive).String()); n != 1 {
		t.Errorf("got %d requests for the layer, want 1", n)
	}
	mounts, err := s.Prepare(ctx, "c", img.ID, nil)
	check(t, err)
	if read(t, mounted(t, mounts)+"/a") != strings.Repeat("1", 5000) {
		t.Error("the damaged layer was unpacked")
	}
}
