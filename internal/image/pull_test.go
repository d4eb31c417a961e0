package image

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

func idOf(t testing.TB, img v1.Image) string {
	t.Helper()
	h, err := img.ConfigName()
	check(t, err)
	return h.String()
}

func digestOf(t testing.TB, what interface{ Digest() (v1.Hash, error) }) string {
	t.Helper()
	h, err := what.Digest()
	check(t, err)
	return h.String()
}

func TestPullAndGetAgree(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	src := imageOf(t, v1.Config{User: "1000:100", Env: []string{"A=b"}, Labels: map[string]string{"x": "y"}},
		tarOf(t, file("a", "lower")), tarOf(t, file("b", "upper")))
	ref := reg.push(t, "some/app:1", src)
	img := pull(t, s, ref)

	byDigest := reg.ref("some/app@") + digestOf(t, src)
	if img.ID != idOf(t, src) || !slices.Equal(img.RepoTags, []string{ref}) || !slices.Equal(img.RepoDigests, []string{byDigest}) {
		t.Errorf("Pull() = ID %s, tags %q, digests %q; want ID %s, tag %s, digest %s", img.ID, img.RepoTags, img.RepoDigests, idOf(t, src), ref,
			byDigest)
	}
	if img.Kind != KindRootfs || img.User != "1000:100" || img.Config.Config.Env[0] != "A=b" || img.Size == 0 || len(img.Layers) != 2 {
		t.Errorf("Pull() = %+v, want a rootfs of two layers with its user and environment", img)
	}
	for _, called := range []string{ref, byDigest, reg.ref("some/app:1@" + digestOf(t, src)), img.ID, img.ID[len("sha256:"):],
		img.ID[len("sha256:"):][:12]} {
		got, err := s.Get(t.Context(), called)
		if err != nil || got.ID != img.ID {
			t.Errorf("Get(%q) = %s, %v; want %s", called, got.ID, err, img.ID)
		}
	}
	all, err := s.List(t.Context())
	check(t, err)
	if len(all) != 1 || all[0].ID != img.ID {
		t.Errorf("List() = %+v, want image %s alone", all, img.ID)
	}
	for _, unknown := range []string{"", "busybox", "sha256:", "sha256:ffff", "UPPER", reg.ref("some/app:2")} {
		_, err := s.Get(t.Context(), unknown)
		wantError(t, err, errdefs.IsNotFound)
	}
}

func TestPullUnpacks(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	dir := entryOf{}
	dir.Header.Name, dir.Header.Typeflag, dir.Header.Mode = "tmp/", '5', 0o1777
	src := imageOf(t, v1.Config{},
		tarOf(t, dir, file("kept", "lower"), file("gone", "x"), file("d/old", "x"), file("changed", "lower")),
		tarOf(t, file(".wh.gone", ""), file("d/.wh..wh..opq", ""), file("d/new", "y"), file("changed", "upper"), file("tmp/f", "")))
	img := pull(t, s, reg.push(t, "app:1", src))
	mounts, err := s.Prepare(t.Context(), "c1", img.ID, nil)
	check(t, err)
	root := mounted(t, mounts)
	if read(t, root+"/kept") != "lower" || read(t, root+"/changed") != "upper" || read(t, root+"/d/new") != "y" {
		t.Error("the unpacked files are not those of the layers")
	}
	for _, gone := range []string{"gone", "d/old", ".wh.gone", "d/.wh..wh..opq"} {
		if _, err := os.Lstat(filepath.Join(root, gone)); !os.IsNotExist(err) {
			t.Errorf("Lstat(%s): got error %v, want not exist", gone, err)
		}
	}
	if fi, err := os.Stat(root + "/tmp"); err != nil || fi.Mode() != os.ModeDir|os.ModeSticky|0o777 {
		t.Errorf("mode of a directory that the upper layer does not list: got %v, %v; want the lower layer's", fi, err)
	}
	check(t, os.WriteFile(root+"/written", []byte("w"), 0o600))
}

func TestPullByDigestHasNoTag(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	src := oneFileImage(t, "x")
	reg.push(t, "app:1", src)
	ref := reg.ref("app@" + digestOf(t, src))
	img := pull(t, s, ref)
	if len(img.RepoTags) != 0 || !slices.Equal(img.RepoDigests, []string{ref}) {
		t.Errorf("got tags %q and digests %q, want no tags and digest %s", img.RepoTags, img.RepoDigests, ref)
	}
	if _, err := s.Get(t.Context(), reg.ref("app:1")); !errdefs.IsNotFound(err) {
		t.Errorf("Get by a tag that was never pulled: got error %v, want not found", err)
	}
	// If a reference has a tag and a digest, the digest applies.
	if again := pull(t, s, reg.ref("app:other@"+digestOf(t, src))); len(again.RepoTags) != 0 || again.ID != img.ID {
		t.Errorf("Pull by tag and digest = %+v, want image %s without tags", again, img.ID)
	}
}

func TestPullOfMovedTagKeepsTheOldImage(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	ref := reg.push(t, "app:1", oneFileImage(t, "old"))
	old := pull(t, s, ref)
	reg.push(t, "app:1", oneFileImage(t, "new"))
	img := pull(t, s, ref)
	kept, err := s.Get(t.Context(), old.ID)
	check(t, err)
	if img.ID == old.ID || !slices.Equal(img.RepoTags, []string{ref}) || len(kept.RepoTags) != 0 ||
		!slices.Equal(kept.RepoDigests, old.RepoDigests) {
		t.Errorf("after the tag moved: got new %+v, old %+v; want the tag at the new image only", img, kept)
	}
	check(t, s.Close())
	again, err := open(t, Config{Root: s.cfg.Root}).List(t.Context())
	check(t, err)
	if len(again) != 2 {
		t.Fatalf("List() after a restart = %+v, want two images", again)
	}
	for _, i := range again {
		if wantTag := i.ID == img.ID; wantTag != slices.Equal(i.RepoTags, []string{ref}) {
			t.Errorf("after a restart: got %+v, want the tag at image %s only", i, img.ID)
		}
	}
}

func TestPullFromTwoRegistriesIsOneImage(t *testing.T) {
	one, two, s := newRegistry(t), newRegistry(t), open(t, Config{})
	src := oneFileImage(t, "x")
	a := pull(t, s, one.push(t, "app:1", src))
	b := pull(t, s, two.push(t, "other/app:2", src))
	all, _ := s.List(t.Context())
	if a.ID != b.ID || len(b.RepoTags) != 2 || len(b.RepoDigests) != 2 || len(all) != 1 {
		t.Errorf("images: got %+v, want one with two tags and two digests", all)
	}
	if n := two.count("GET", "/blobs/"); n != 0 {
		t.Errorf("got %d requests for stored blobs, want 0", n)
	}
}

func TestPullAgainAsksOnlyTheDigest(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	ref := reg.push(t, "app:1", oneFileImage(t, "x"))
	pull(t, s, ref)
	reg.forget()
	pull(t, s, ref)
	if head, get := reg.count("HEAD", "/manifests/1"), reg.count("GET", "/v2/app"); head != 1 || get != 0 {
		t.Errorf("second pull: got %d HEAD and %d GET requests, want 1 and 0", head, get)
	}
}

func TestPullChoosesThePlatform(t *testing.T) {
	reg := newRegistry(t)
	arm, amd := oneFileImage(t, "arm"), oneFileImage(t, "amd")
	file, err := arm.ConfigFile()
	check(t, err)
	file = file.DeepCopy()
	file.Architecture = "arm64"
	arm, err = mutate.ConfigFile(arm, file)
	check(t, err)
	add := func(img mutate.Appendable, arch string) mutate.IndexAddendum {
		return mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: arch}}}
	}
	unknown := mutate.IndexAddendum{Add: oneFileImage(t, "attestation"),
		Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "unknown", Architecture: "unknown"}}}
	inner := mutate.AppendManifests(empty.Index, unknown, add(arm, "arm64"), add(amd, "amd64"))
	outer := mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: inner})
	ref := reg.push(t, "multi:1", outer)

	for platform, want := range map[string]v1.Image{"linux/amd64": amd, "linux/arm64": arm} {
		s := open(t, Config{Platform: platform})
		img := pull(t, s, ref)
		if img.ID != idOf(t, want) || img.RepoDigests[0] != reg.ref("multi@"+digestOf(t, outer)) || string(img.Manifest) != digestOf(t, want) {
			t.Errorf("%s: Pull() = %+v, want image %s", platform, img, idOf(t, want))
		}
		check(t, s.Close())
		if again, err := open(t, Config{Root: s.cfg.Root, Platform: platform}).Get(t.Context(), ref); err != nil || again.ID != img.ID {
			t.Errorf("%s: Get after a restart = %+v, %v; want image %s", platform, again, err, img.ID)
		}
	}
	_, err = open(t, Config{Platform: "linux/s390x"}).Pull(t.Context(), ref, PullOptions{})
	wantError(t, err, errdefs.IsNotFound, "linux/arm64", ref)
	_, err = open(t, Config{Platform: "linux/s390x"}).Pull(t.Context(), reg.push(t, "single:1", amd), PullOptions{})
	wantError(t, err, errdefs.IsInvalidArgument, "linux/amd64")
}

func TestPullKinds(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	content := func(repo string) string {
		switch repo {
		case "qcow2":
			return string(qcow2Of(t, 1<<20))
		case "raw":
			return string(compressZstd(t, []byte("content of "+repo)))
		}
		return string(wasmOf("content of " + repo))
	}
	artifact := func(repo, configType, layerType, config string) string {
		m := &rawImage{}
		m.manifest.SchemaVersion, m.manifest.MediaType = 2, ocispec.MediaTypeImageManifest
		m.manifest.Annotations = map[string]string{"vendor/note": repo}
		m.manifest.Config = m.add(configType, []byte(config))
		m.manifest.Layers = []ocispec.Descriptor{m.add(layerType, []byte(content(repo)))}
		return m.push(t, reg, repo)
	}
	for repo, c := range map[string]struct {
		config, layer, document string
		kind                    Kind
	}{
		"cncf":   {"application/vnd.wasm.config.v0+json", "application/wasm", `{"created":"2026-01-01T00:00:00Z"}`, KindComponent},
		"vimana": {"application/vnd.oci.image.config.v1+json", "application/wasm", `{}`, KindComponent},
		"qcow2":  {ocispec.MediaTypeEmptyJSON, "application/vnd.tripod.disk.qcow2", `{}`, KindDisk},
		"raw":    {"application/vnd.example", "application/vnd.tripod.disk.raw+zstd", `text`, KindDisk},
		"chart":  {"application/vnd.cncf.helm.config.v1+json", "application/tar", `{"a":1}`, KindArtifact},
	} {
		img := pull(t, s, artifact(repo, c.config, c.layer, c.document))
		if img.Kind != c.kind || img.ID != img.Manifest.String() || img.Annotations["vendor/note"] != repo || img.ChainID != "" {
			t.Errorf("%s: Pull() = %+v, want the kind %s and the manifest's annotations", repo, img, c.kind)
		}
		if got := read(t, blobPath(s, img.Layers[0].Digest)); got != content(repo) {
			t.Errorf("%s: blob: got %q, want %q", repo, got, content(repo))
		}
		_, err := s.Prepare(t.Context(), "c", img.ID, nil)
		wantError(t, err, errdefs.IsInvalidArgument, string(c.kind))
	}
	check(t, s.Close())
	s = open(t, Config{Root: s.cfg.Root})
	all, _ := s.List(t.Context())
	if len(all) != 5 {
		t.Errorf("List() after a restart = %d images, want 5", len(all))
	}
	for _, img := range all {
		check(t, s.Remove(t.Context(), img.ID))
	}
	wantEmpty(t, s)
}

func TestPullReportsProgress(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	src, err := random.Image(1<<20, 3)
	check(t, err)
	var last Progress
	calls := 0
	_, err = s.Pull(t.Context(), reg.push(t, "big:1", src), PullOptions{OnProgress: func(p Progress) {
		if p.Total > 0 && p.Done > p.Total || p.Total == last.Total && p.Done < last.Done {
			t.Errorf("progress went from %+v to %+v", last, p)
		}
		last = p
		calls++
	}})
	check(t, err)
	if last.Total < 3<<20 || last.Done != last.Total {
		t.Errorf("last of %d progress reports: got %+v, want all of at least 3 MiB", calls, last)
	}
}

func TestPinnedImages(t *testing.T) {
	reg := newRegistry(t)
	ref := reg.push(t, "pause:1", oneFileImage(t, "x"))
	s := open(t, Config{PinnedImages: []string{ref}})
	if img := pull(t, s, ref); !img.Pinned {
		t.Error("Pinned = false for a pinned image, want true")
	}
	if img := pull(t, s, reg.push(t, "other:1", oneFileImage(t, "y"))); img.Pinned {
		t.Error("Pinned = true for another image, want false")
	}
}

func TestSharedLayersAreFetchedOnce(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	base := tarOf(t, file("base", "b"))
	for i := range 3 {
		pull(t, s, reg.push(t, fmt.Sprintf("app%d:1", i), imageOf(t, v1.Config{}, base, tarOf(t, file("top", fmt.Sprint(i))))))
		if n := reg.count("GET", digest.FromBytes(base).Encoded()); (n == 1) != (i == 0) {
			t.Errorf("image %d: got %d requests for the base layer", i, n)
		}
	}
}
