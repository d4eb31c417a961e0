package image

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/image/internal/layer"
)

// The tests in this file are about images as they occur in the field (docs/field.md).

// special returns a tar entry without content.
func special(name string, kind byte, link string) entryOf {
	return entryOf{Header: tar.Header{Name: name, Typeflag: kind, Linkname: link, Mode: 0o755}}
}

// compressions are ways to compress a layer.
func compressions(t testing.TB) map[string]func(plain []byte) []byte {
	const half = 512
	skipped := append([]byte{0x50, 0x2a, 0x4d, 0x18, 4, 0, 0, 0}, "more"...) // zstd:chunked has its table of contents in one
	return map[string]func(plain []byte) []byte{
		"plain": slices.Clone[[]byte], "gzip": func(plain []byte) []byte { return compressGzip(t, plain) },
		"zstd": func(plain []byte) []byte { return compressZstd(t, plain) },
		"several gzip members": func(plain []byte) []byte {
			return slices.Concat(compressGzip(t, plain[:half]), compressGzip(t, plain[half:]))
		},
		"several zstd frames": func(plain []byte) []byte {
			return slices.Concat(skipped, compressZstd(t, plain[:half]), compressZstd(t, plain[half:]), skipped)
		},
	}
}

// layerTypes are media types of layers.
var layerTypes = []string{
	ocispec.MediaTypeImageLayer, ocispec.MediaTypeImageLayerGzip, ocispec.MediaTypeImageLayerZstd,
	images.MediaTypeDockerSchema2Layer, images.MediaTypeDockerSchema2LayerGzip,
}

// labelled makes an image with one layer, which no other image has.
func labelled(t testing.TB, mediaType, name string, compress func([]byte) []byte) *rawImage {
	plain := tarOf(t, file("a", name+mediaType))
	m := raw(t, plain)
	m.blobs[0] = compress(plain)
	m.manifest.Layers[0] = ocispec.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(m.blobs[0]), Size: int64(len(m.blobs[0]))}
	return m
}

// TestLayerCompressionByContent: the first bytes of a layer decide how it is decompressed, whatever its media type says.
func TestLayerCompressionByContent(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	for _, mediaType := range layerTypes {
		for name, compress := range compressions(t) {
			m := labelled(t, mediaType, name, compress)
			img, err := s.Pull(t.Context(), m.push(t, reg, "labelled"), PullOptions{})
			if err != nil {
				t.Errorf("%s labelled %s: %v", name, mediaType, err)
				continue
			}
			if found, err := s.Verify(t.Context(), true); err != nil || len(found) > 0 {
				t.Errorf("%s labelled %s: Verify: %v, %v", name, mediaType, found, err)
			}
			check(t, s.Remove(t.Context(), img.ID))
		}
	}
}

// fieldLayer is a layer above another one, and what the root filesystem then has: content by path; "-" means that there is nothing; a
// path with "/" at its end has the names in a directory.
type fieldLayer struct {
	layer []entryOf
	want  map[string]string
}

// fieldLayers returns layers as they occur in the field, and the one below all of them.
func fieldLayers(t testing.TB) (lower []byte, cases map[string]fieldLayer) {
	long := strings.Repeat("n", 200)
	lower = tarOf(t, file("x", "lower"), file("d/old", "lower"), file("d/kept", "lower"), special("l", tar.TypeSymlink, "d"),
		file("f", "lower"), file("deep/er/old", "lower"), file("deep/er/kept", "lower"), file(long, "lower"))
	return lower, map[string]fieldLayer{
		"file, then its whiteout": {[]entryOf{file("x", "new"), file(".wh.x", "")}, map[string]string{"x": "new"}},
		"whiteout, then its file": {[]entryOf{file(".wh.x", ""), file("x", "new")}, map[string]string{"x": "new"}},
		"directory, then its whiteout": {[]entryOf{special("d", tar.TypeDir, ""), file("d/new", "n"), file(".wh.d", "")},
			map[string]string{"d/": "new", "d/new": "n"}},
		"whiteout, then its directory": {[]entryOf{file(".wh.d", ""), special("d", tar.TypeDir, ""), file("d/new", "n")},
			map[string]string{"d/": "new"}},
		"whiteout of a directory": {[]entryOf{file(".wh.d", "")}, map[string]string{"d": "-", "l/": "-"}},
		"whiteout deep below":     {[]entryOf{file("deep/er/.wh.old", "")}, map[string]string{"deep/er/": "kept"}},
		"whiteout of a long name": {[]entryOf{file(".wh."+long, "")}, map[string]string{long: "-"}},
		"whiteout below a file":   {[]entryOf{file("d", "now a file"), file("d/.wh.old", "")}, map[string]string{"d": "now a file"}},
		"whiteout below a link": {[]entryOf{special("n", tar.TypeSymlink, "d"), file("n/.wh.old", "")},
			map[string]string{"d/": "kept old", "n/": "kept old"}},
		"whiteout below a lower link": {[]entryOf{file("l/.wh.old", "")}, map[string]string{"l/": "kept old"}},
		"whiteout below a lower file": {[]entryOf{file("f/.wh.old", "")}, map[string]string{"f": "lower"}},
		"whiteout of nothing": {[]entryOf{file(".wh.nothing", ""), file("d/.wh.none", "")},
			map[string]string{"d/": "kept old", "nothing": "-"}},
		"whiteout in a new directory": {[]entryOf{special("new", tar.TypeDir, ""), file("new/.wh.old", ""), file("new/f", "")},
			map[string]string{"new/": "f"}},
		"whiteout in a new one, no more": {[]entryOf{file("new/.wh.old", "")}, map[string]string{"new": "-"}},
		"opaque directory":               {[]entryOf{file("d/.wh..wh..opq", ""), file("d/new", "n")}, map[string]string{"d/": "new"}},
		"opaque directory, marked last": {[]entryOf{file("d/new", "n"), file("d/.wh.old", ""), file("d/.wh..wh..opq", "")},
			map[string]string{"d/": "new"}},
		"opaque root": {[]entryOf{file(".wh..wh..opq", ""), file("x", "new"), file("d/new", "n")},
			map[string]string{"/": "d x", "d/": "new", "x": "new"}},
		"metadata of AUFS": {[]entryOf{file(".wh..wh.aufs", ""), file(".wh..wh.plnk/7", "")},
			map[string]string{".wh..wh.aufs": "-", ".wh..wh.plnk": "-", "x": "lower"}},
		"hard link into a lower layer": {[]entryOf{special("hard", tar.TypeLink, "d/old"), file("d/new", "n")},
			map[string]string{"hard": "lower", "d/old": "lower", "d/": "kept new old"}},
		"hard link to a link to nothing": {[]entryOf{special("s", tar.TypeSymlink, "/nonexistent"), special("h", tar.TypeLink, "s")},
			map[string]string{"h": "-> /nonexistent", "s": "-> /nonexistent"}},
		"hard link to a link below": {[]entryOf{special("s", tar.TypeSymlink, "x"), special("h", tar.TypeLink, "s")},
			map[string]string{"h": "-> x", "s": "-> x"}},
		"hard link to a link over a file": {[]entryOf{special("x", tar.TypeSymlink, "d/none"), special("h", tar.TypeLink, "x")},
			map[string]string{"h": "-> d/none", "x": "-> d/none"}},
		"hard link through a link": {[]entryOf{special("d", tar.TypeSymlink, "deep/er"), special("h", tar.TypeLink, "d/old")},
			map[string]string{"h": "lower", "d": "-> deep/er"}},
		"hard link to a hidden file": {[]entryOf{special("h", tar.TypeLink, "x"), file(".wh.x", "")},
			map[string]string{"h": "lower", "x": "-"}},
		"whiteout, then a link to it": {[]entryOf{file(".wh.x", ""), special("h", tar.TypeLink, "x")},
			map[string]string{"h": "lower", "x": "-"}},
		"link into an opaque directory": {[]entryOf{file("d/.wh..wh..opq", ""), file("d/new", "n"), special("h", tar.TypeLink, "d/old")},
			map[string]string{"h": "lower", "d/": "new"}},
		"link into a removed directory": {[]entryOf{special("h", tar.TypeLink, "deep/er/old"), file(".wh.deep", "")},
			map[string]string{"h": "lower", "deep": "-"}},
		"deep directory, then a file": {[]entryOf{special("a/b", tar.TypeDir, ""), file("a", "f")}, map[string]string{"a": "f"}},
		"file, directory, link": {[]entryOf{file("e", "f"), special("e", tar.TypeDir, ""), file("e/in", ""),
			special("e", tar.TypeSymlink, "nowhere")}, map[string]string{"e": "-> nowhere"}},
		"directory, file": {[]entryOf{special("e", tar.TypeDir, ""), file("e", "f")}, map[string]string{"e": "f"}},
		"hard link without its parents": {[]entryOf{file("bin/app", "a"), special("run/files/app", tar.TypeLink, "bin/app")},
			map[string]string{"run/files/app": "a"}},
		"hard link over a lower file": {[]entryOf{special("f", tar.TypeLink, "x")}, map[string]string{"f": "lower", "x": "lower"}},
		"hard link over a lower dir":  {[]entryOf{special("d", tar.TypeLink, "x")}, map[string]string{"d": "lower"}},
		"hard link over a lower link": {[]entryOf{special("l", tar.TypeLink, "x")}, map[string]string{"l": "lower", "d/": "kept old"}},
		"hard link over its own file": {[]entryOf{file("x", "1"), file("f", "2"), special("f", tar.TypeLink, "x")},
			map[string]string{"f": "1"}},
		"longer than the opaque marker": {[]entryOf{file(".wh..wh..opqX", ""), file("d/.wh..wh..opqX", "")},
			map[string]string{"x": "lower", "d/": "kept old"}},
		"an entry of the root": {[]entryOf{special("./", tar.TypeDir, ""), file("./n", "new")},
			map[string]string{"n": "new", "x": "lower"}},
		"files below an own link": {[]entryOf{special("s", tar.TypeSymlink, "store"), file("s/src/f", "n")},
			map[string]string{"s": "-> store", "store/src/f": "n"}},
		"contiguous file": {[]entryOf{func() entryOf { e := file("c", "all"); e.Typeflag = tar.TypeCont; return e }()},
			map[string]string{"c": "all"}},
	}
}

// oddTimes returns files with times that no file system has.
func oddTimes() (entries []entryOf) {
	for name, at := range map[string]time.Time{"old": time.Date(1754, 8, 30, 0, 0, 0, 0, time.UTC),
		"far": time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC)} {
		e := file(name, "")
		e.ModTime, e.Format = at, tar.FormatPAX
		entries = append(entries, e)
	}
	return entries
}

// TestLayersOfTheField: what a root filesystem has after its layers were unpacked.
func TestLayersOfTheField(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	lower, cases := fieldLayers(t)
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			img := pull(t, s, raw(t, lower, tarOf(t, c.layer...)).push(t, reg,
				"field/"+strings.NewReplacer(" ", "-", ",", "").Replace(strings.ToLower(name))))
			mounts, err := s.Prepare(t.Context(), "c-"+img.ID, img.ID, nil)
			check(t, err)
			root := mounted(t, mounts)
			for at, want := range c.want {
				if got := look(filepath.Join(root, at), strings.HasSuffix(at, "/")); got != want {
					t.Errorf("%s: got %q, want %q", at, got, want)
				}
			}
			if found, err := s.Verify(t.Context(), true); err != nil || len(found) > 0 {
				t.Errorf("Verify: %v, %v", found, err)
			}
		})
	}
	t.Run("first layer", func(t *testing.T) {
		img := pull(t, s, raw(t,
			tarOf(t, file("x", "own"), file(".wh.x", ""), file("d/f", ""), file("d/.wh..wh..opq", ""), file("d/.wh.g", ""))).push(t, reg, "first"))
		mounts, err := s.Prepare(t.Context(), "first", img.ID, nil)
		check(t, err)
		if root := mounted(t, mounts); look(root+"/x", false) != "own" || look(root+"/d", true) != "f" {
			t.Errorf("got x %q and in d %q, want own and f", look(root+"/x", false), look(root+"/d", true))
		}
	})
	t.Run("times of no file system", func(t *testing.T) {
		entries := oddTimes()
		img := pull(t, s, raw(t, tarOf(t, entries...)).push(t, reg, "times"))
		mounts, err := s.Prepare(t.Context(), "times", img.ID, nil)
		check(t, err)
		root := mounted(t, mounts)
		for _, e := range entries {
			info, err := os.Stat(filepath.Join(root, e.Name))
			check(t, err)
			if !info.ModTime().Equal(time.Unix(0, 0)) {
				t.Errorf("%s: got the time %v, want that of the epoch", e.Name, info.ModTime())
			}
		}
	})
	t.Run("a name too long", func(t *testing.T) {
		_, err := s.Pull(t.Context(), raw(t, lower, tarOf(t, file(strings.Repeat("a/", 3000)+".wh.x", ""))).push(t, reg, "deep"), PullOptions{})
		wantError(t, err, errdefs.IsInvalidArgument, "limit of 4096")
	})
	t.Run("hard link to nothing", func(t *testing.T) {
		m := raw(t, lower, tarOf(t, special("hard", tar.TypeLink, "d/nothing")))
		_, err := s.Pull(t.Context(), m.push(t, reg, "dangling"), PullOptions{})
		wantError(t, err, errdefs.IsInvalidArgument, "layer "+m.manifest.Layers[1].Digest.String(), `"hard"`, `"d/nothing"`)
		if strings.Contains(err.Error(), s.cfg.Root) {
			t.Errorf("error %q has a path of the node", err)
		}
	})
}

// look describes what is at a path: a file's content, a link's target, or the names in a directory.
func look(path string, dir bool) string {
	if dir {
		entries, err := os.ReadDir(path)
		if err != nil {
			return "-"
		}
		var names []string
		for _, e := range entries {
			names = append(names, e.Name())
		}
		return strings.Join(names, " ")
	}
	info, err := os.Lstat(path)
	switch {
	case err != nil:
		return "-"
	case info.Mode()&fs.ModeSymlink != 0:
		target, _ := os.Readlink(path)
		return "-> " + target
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return fmt.Sprint(info.Mode(), err)
	}
	return string(text)
}

// TestCopyUpKeepsTheFile: a hard link into a lower layer leaves the file as it was: owner, mode, time, attributes, content.
func TestCopyUpKeepsTheFile(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	big := bytes.Repeat([]byte("0123456789abcdef"), 100_000)
	source := entryOf{Header: tar.Header{Name: "bin/tool", Typeflag: tar.TypeReg, Mode: 0o4755, Uid: 12, Gid: 34, Size: int64(len(big)),
		ModTime: time.Unix(1_000_000_000, 0), Format: tar.FormatPAX, PAXRecords: map[string]string{"SCHILY.xattr.user.mark": "a\x00b"}},
		body: string(big)}
	link := special("tool", tar.TypeLink, "/bin/tool") // with the file's attributes, as tar writes it
	link.Mode, link.Uid, link.Gid, link.ModTime = source.Mode, source.Uid, source.Gid, source.ModTime
	img := pull(t, s, raw(t, tarOf(t, source), tarOf(t, link)).push(t, reg, "copied"))
	mounts, err := s.Prepare(t.Context(), "copied", img.ID, nil)
	check(t, err)
	root := mounted(t, mounts)
	for _, name := range []string{"/bin/tool", "/tool"} {
		info, err := os.Lstat(root + name)
		check(t, err)
		if info.Mode() != 0o755|fs.ModeSetuid || !info.ModTime().Equal(source.ModTime) || read(t, root+name) != string(big) {
			t.Errorf("%s: got mode %v, time %v, %d bytes", name, info.Mode(), info.ModTime(), info.Size())
		}
	}
	_, lower, err := layer.Dirs(mounts)
	check(t, err)
	found := filepath.Join(lower[0], "tool")
	records := map[string]string{}
	check(t, layer.Attributes(found, records))
	if records["SCHILY.xattr.user.mark"] != "a\x00b" {
		t.Errorf("attributes of %s: got %q", found, records)
	}
}

// configured is like raw, with a change to the config.
func configured(t testing.TB, change func(*ocispec.ImageConfig), archives ...[]byte) *rawImage {
	t.Helper()
	m := raw(t, archives...)
	var config ocispec.Image
	last := len(m.blobs) - 1
	check(t, json.Unmarshal(m.blobs[last], &config))
	change(&config.Config)
	document, err := json.Marshal(config)
	check(t, err)
	m.blobs = m.blobs[:last]
	m.manifest.Config = m.add(ocispec.MediaTypeImageConfig, document)
	return m
}

// pushNested pushes an index in an index as shared:1. The inner one has two manifests with one config, and an attestation before them.
// It returns the index's reference and the two.
func pushNested(t testing.TB, reg *testRegistry) (ref string, manifests []ocispec.Descriptor) {
	t.Helper()
	plain := tarOf(t, file("shared", "text"))
	native := &ocispec.Platform{OS: "linux", Architecture: "amd64"}
	for _, blob := range [][]byte{compressGzip(t, plain), compressZstd(t, plain)} {
		m := raw(t, plain)
		m.blobs[0] = blob
		m.manifest.Layers[0] = ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayerGzip, Digest: digest.FromBytes(blob),
			Size: int64(len(blob))}
		manifests = append(manifests, m.pushAs(t, reg, "shared", ocispec.MediaTypeImageManifest, m.manifest, native))
	}
	statement := manifests[1] // as BuildKit lists its attestations
	statement.Platform = &ocispec.Platform{OS: "unknown", Architecture: "unknown"}
	var none rawImage
	inner := ocispec.Index{MediaType: ocispec.MediaTypeImageIndex, Manifests: append([]ocispec.Descriptor{statement}, manifests...)}
	inner.SchemaVersion = 2
	outer := ocispec.Index{MediaType: ocispec.MediaTypeImageIndex,
		Manifests: []ocispec.Descriptor{none.pushAs(t, reg, "shared", ocispec.MediaTypeImageIndex, inner, native)}}
	outer.SchemaVersion = 2
	return reg.pushRaw(t, "shared", "1", ocispec.MediaTypeImageIndex, outer), manifests
}

// TestConfigsOfTheField: configs as other tools write them.
func TestConfigsOfTheField(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	t.Run("empty entrypoint, relative volume", func(t *testing.T) {
		img := pull(t, s, configured(t, func(c *ocispec.ImageConfig) {
			c.Entrypoint, c.Cmd = []string{""}, []string{"sh"}
			c.Volumes = map[string]struct{}{"data": {}, "./more/": {}, "/abs": {}}
		}, tarOf(t, file("a", ""))).push(t, reg, "config"))
		volumes := slices.Sorted(maps.Keys(img.Config.Config.Volumes))
		if len(img.Config.Config.Entrypoint) != 0 || !slices.Equal(volumes, []string{"/abs", "/data", "/more"}) {
			t.Errorf("got entrypoint %q and volumes %q, want none, and those below /", img.Config.Config.Entrypoint, volumes)
		}
	})
	t.Run("type of Docker 1.10", func(t *testing.T) {
		m := raw(t, tarOf(t, file("a", "")))
		m.manifest.MediaType, m.manifest.Config.MediaType = images.MediaTypeDockerSchema2Manifest, "application/octet-stream"
		m.manifest.Layers[0].MediaType = images.MediaTypeDockerSchema2LayerGzip
		img := pull(t, s, reg.pushRaw(t, "docker", "1", m.manifest.MediaType, m.manifest, m.blobs...))
		if img.Kind != KindRootfs {
			t.Errorf("kind: got %s, want a root filesystem", img.Kind)
		}
		if _, err := s.Prepare(t.Context(), "docker", img.ID, nil); err != nil {
			t.Error(err)
		}
	})
	t.Run("types of both kinds", func(t *testing.T) {
		docker, oci := raw(t, tarOf(t, file("a", ""))), raw(t, tarOf(t, file("a", "")))
		docker.manifest.MediaType = images.MediaTypeDockerSchema2Manifest
		oci.manifest.Config.MediaType, oci.manifest.Layers[0].MediaType = images.MediaTypeDockerSchema2Config,
			images.MediaTypeDockerSchema2LayerGzip
		for _, m := range []*rawImage{docker, oci} {
			if img := pull(t, s, reg.pushRaw(t, "mixed", "1", m.manifest.MediaType, m.manifest, m.blobs...)); img.Kind != KindRootfs {
				t.Errorf("%s: kind: got %s, want a root filesystem", m.manifest.MediaType, img.Kind)
			}
		}
	})
	t.Run("two manifests of one config, in an index below another", func(t *testing.T) {
		ref, manifests := pushNested(t, reg)
		img := pull(t, s, ref)
		for _, m := range manifests {
			ref := reg.ref("shared@" + m.Digest.String())
			again := pull(t, s, ref)
			if again.ID != img.ID || !slices.Contains(again.RepoDigests, ref) || !slices.Equal(again.RepoTags, []string{reg.ref("shared:1")}) {
				t.Errorf("%s: got %+v, want the image %s", ref, again, img.ID)
			}
		}
		if found, err := s.Verify(t.Context(), true); err != nil || len(found) > 0 {
			t.Errorf("Verify: %v, %v", found, err)
		}
		check(t, s.Remove(t.Context(), img.ID))
		both := pull(t, s, reg.ref("shared:1@"+manifests[0].Digest.String()))
		if len(both.RepoTags) > 0 || !slices.Equal(both.RepoDigests, []string{reg.ref("shared@" + manifests[0].Digest.String())}) {
			t.Errorf("tag and digest: got the tags %q and the digests %q, want the digest alone", both.RepoTags, both.RepoDigests)
		}
	})
	t.Run("artifact of the same type", func(t *testing.T) {
		m := raw(t, tarOf(t, file("a", "")))
		m.manifest.Config.MediaType = "application/octet-stream"
		if img := pull(t, s, m.push(t, reg, "artifact")); img.Kind != KindArtifact {
			t.Errorf("kind: got %s, want an artifact", img.Kind)
		}
	})
	t.Run("layer of no bytes", func(t *testing.T) {
		m := raw(t, tarOf(t, file("a", "text")), nil)
		m.blobs[1] = nil // not even a compressed nothing
		m.manifest.Layers[1] = ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayer, Digest: digest.FromString("")}
		img := pull(t, s, m.push(t, reg, "nothing"))
		mounts, err := s.Prepare(t.Context(), "nothing", img.ID, nil)
		check(t, err)
		if root := mounted(t, mounts); look(root+"/a", false) != "text" {
			t.Errorf("a: got %q, want text", look(root+"/a", false))
		}
		if found, err := s.Verify(t.Context(), true); err != nil || len(found) > 0 {
			t.Errorf("Verify: %v, %v", found, err)
		}
	})
	t.Run("artifact's config of no bytes", func(t *testing.T) {
		m := raw(t, []byte("anything"))
		m.blobs[1] = nil
		m.manifest.Config = ocispec.Descriptor{MediaType: "application/vnd.example.config", Digest: digest.FromString("")}
		if img := pull(t, s, m.push(t, reg, "emptyconfig")); img.Kind != KindArtifact {
			t.Errorf("kind: got %s, want an artifact", img.Kind)
		}
	})
	for _, at := range []string{"config", "layer"} {
		t.Run("sha512 of a "+at, func(t *testing.T) {
			m := raw(t, tarOf(t, file("a", "")))
			if at == "layer" {
				m.manifest.Layers[0].Digest = digest.SHA512.FromBytes(m.blobs[0])
			} else {
				m.manifest.Config.Digest = digest.SHA512.FromBytes(m.blobs[1])
			}
			_, err := s.Pull(t.Context(), m.push(t, reg, "long"), PullOptions{})
			wantError(t, err, errdefs.IsInvalidArgument, at+" sha512:", "sha256")
		})
	}
	t.Run("no bytes of something", func(t *testing.T) {
		m := raw(t, tarOf(t, file("a", "")))
		m.manifest.Layers[0].Size = 0
		_, err := s.Pull(t.Context(), m.push(t, reg, "lie"), PullOptions{})
		wantError(t, err, errdefs.IsInvalidArgument, "size 0")
	})
}
