package image

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"

	"github.com/tripod-run/tripod/internal/image/disk"
)

func TestTranslatedNames(t *testing.T) {
	files := newFiles(t)
	q, raw := qcow2Of(t, 5<<20), randomBytes(t, 3000)
	for path, data := range map[string][]byte{
		"/cirros": q, "/big.qcow2": q, "/disk.raw": raw, "/fedora.raw.xz": compressXz(t, raw), "/img.gz": compressGzip(t, q),
		"/any":         compressZstd(t, raw),
		"/hostile.raw": qcow2WithBackingFile(t),
	} {
		files.put(path, data, `"`+path+`"`)
	}
	s := open(t, Config{Translation: files.translations(t)})
	for name, c := range map[string]struct {
		want  disk.MachineImage
		plain []byte
	}{
		"cirros":        {disk.MachineImage{Layout: disk.LayoutTranslated, Format: disk.FormatQcow2, VirtualSize: 5 << 20}, q},
		"big.qcow2":     {disk.MachineImage{Layout: disk.LayoutTranslated, Format: disk.FormatQcow2, VirtualSize: 5 << 20}, q},
		"disk.raw":      {disk.MachineImage{Layout: disk.LayoutTranslated, Format: disk.FormatRaw, VirtualSize: 3072}, raw},
		"fedora.raw.xz": {disk.MachineImage{Layout: disk.LayoutTranslated, Format: disk.FormatRaw, VirtualSize: 3072}, raw},
		"img.gz":        {disk.MachineImage{Layout: disk.LayoutTranslated, Format: disk.FormatQcow2, VirtualSize: 5 << 20}, q},
		"any":           {disk.MachineImage{Layout: disk.LayoutTranslated, Format: disk.FormatRaw, VirtualSize: 3072}, raw},
		"hostile.raw": {disk.MachineImage{Layout: disk.LayoutTranslated, Format: disk.FormatRaw,
			VirtualSize: uint64(len(qcow2WithBackingFile(t))+511) &^ 511}, qcow2WithBackingFile(t)},
	} {
		ref := "virtlet.cloud/" + name
		if !s.Translated(ref) {
			t.Errorf("Translated(%s) = false, want true", ref)
		}
		img := pull(t, s, ref)
		m, err := s.Machine(t.Context(), ref)
		check(t, err)
		_, text := openAndRead(t, s, name, img.ID)
		if *m != c.want || text != string(c.plain) || img.Kind != KindDisk || !slices.Contains(img.RepoTags, ref+":latest") ||
			!slices.Contains(img.RepoDigests, ref+"@"+img.Layers[0].Digest.String()) || img.Size <= uint64(img.Layers[0].Size) {
			t.Errorf("%s: got Machine %+v and image %+v, want %+v", name, m, img, c.want)
		}
		// All calls return one ID, and the list has one image.
		for _, again := range []string{ref, ref + ":latest", img.ID, img.RepoDigests[0]} {
			if got, err := s.Get(t.Context(), again); err != nil || got.ID != img.ID {
				t.Errorf("Get(%s) = %+v, %v; want image %s", again, got, err, img.ID)
			}
		}
		check(t, s.CloseDisk(t.Context(), name))
	}
	for _, ref := range []string{"docker.io/library/x", "virtlet.cloudy/x", "UPPER", "virtlet.cloud"} {
		if s.Translated(ref) {
			t.Errorf("Translated(%s) = true, want false", ref)
		}
	}
	all, err := s.List(t.Context())
	check(t, err)
	if len(all) != 6 { // cirros and big.qcow2 are one image
		t.Errorf("List() = %d images, want 6", len(all))
	}
	if usage, err := s.FsInfo(t.Context()); err != nil || usage.UsedBytes < uint64(len(q)) {
		t.Errorf("FsInfo() = %+v, %v; want at least %d bytes", usage, err, len(q))
	}
	root := s.cfg.Root
	check(t, s.Close())
	s = open(t, Config{Root: root})
	if again, err := s.List(t.Context()); err != nil || len(again) != len(all) {
		t.Errorf("List() after a restart = %d images, %v; want %d", len(again), err, len(all))
	}
	for _, img := range all {
		check(t, s.Remove(t.Context(), img.ID))
	}
	wantEmpty(t, s)
}

func TestTranslationPrefix(t *testing.T) {
	files := newFiles(t)
	files.put("/a", randomBytes(t, 1000), "")
	for prefix, ref := range map[string]string{"virtlet/": "virtlet/a", "virtlet": "docker.io/virtlet/a:latest",
		"vms.example:5000/x": "vms.example:5000/x/a"} {
		c := files.translations(t)
		c.Prefix = prefix
		pull(t, open(t, Config{Translation: c}), ref)
	}
	if open(t, Config{}).Translated("virtlet.cloud/a") {
		t.Error("Translated() = true without a prefix, want false")
	}
	_, err := Open(t.Context(), Config{Root: t.TempDir(), Translation: Translation{Prefix: "no prefix/"}})
	wantError(t, err, errdefs.IsInvalidArgument, "no prefix")
}

// TestDownloadRevalidates: a repeated pull asks the server and downloads only what has changed.
func TestDownloadRevalidates(t *testing.T) {
	for name, etag := range map[string]string{"etag": `"1"`, "weak": `W/"1"`, "date": ""} {
		t.Run(name, func(t *testing.T) {
			files := newFiles(t)
			s := open(t, Config{Translation: files.translations(t)})
			files.put("/disk", randomBytes(t, 5000), etag)
			first := pull(t, s, "virtlet.cloud/disk")
			second := pull(t, s, "virtlet.cloud/disk")
			other := pull(t, s, "virtlet.cloud/disk:tagged")
			if first.ID != second.ID || first.ID != other.ID || len(files.asked()) != 3 || files.sent.Load() != 5000 {
				t.Errorf("image IDs: got %s, %s and %s after %d bytes; want one image after 5000", first.ID, second.ID, other.ID, files.sent.Load())
			}
			if !slices.Equal(other.RepoTags, []string{"virtlet.cloud/disk:latest", "virtlet.cloud/disk:tagged"}) {
				t.Errorf("tags: got %q, want disk:latest and disk:tagged", other.RepoTags)
			}
			if name == "date" {
				return
			}
			files.put("/disk", randomBytes(t, 6000), `"2"`)
			third := pull(t, s, "virtlet.cloud/disk")
			if third.ID == first.ID || !slices.Equal(third.RepoTags, []string{"virtlet.cloud/disk:latest"}) {
				t.Errorf("image of the changed file: got %+v, want another ID and the tag latest", third)
			}
			check(t, s.Remove(t.Context(), first.ID))
			check(t, s.Remove(t.Context(), third.ID))
			wantEmpty(t, s)
		})
	}
}

func TestDownloadByDigest(t *testing.T) {
	files := newFiles(t)
	data := randomBytes(t, 5000)
	files.put("/disk", data, `"1"`)
	s := open(t, Config{Translation: files.translations(t)})
	ref := "virtlet.cloud/disk@" + digest.FromBytes(data).String()
	img := pull(t, s, ref)
	if len(img.RepoTags) != 0 || !slices.Equal(img.RepoDigests, []string{ref}) {
		t.Errorf("names: got %+v, want only the digest reference %s", img, ref)
	}
	files.asked()
	if again := pull(t, s, ref); again.ID != img.ID || len(files.asked()) != 0 {
		t.Errorf("second pull by digest: got image %s after %d requests, want %s after none", again.ID, len(files.asked()), img.ID)
	}
	wrong := "virtlet.cloud/disk@" + digest.FromString("x").String()
	_, err := s.Pull(t.Context(), wrong, PullOptions{})
	wantError(t, err, errdefs.IsDataLoss, wrong, files.URL+"/disk", digest.FromBytes(data).String())
	_, err = s.Pull(t.Context(), "virtlet.cloud/disk@sha512:"+strings.Repeat("0", 128), PullOptions{})
	wantError(t, err, errdefs.IsInvalidArgument, "sha256")
	check(t, s.Remove(t.Context(), ref))
	wantEmpty(t, s)
}

// TestDownloadResumes: data downloaded before a broken connection or a restart of the daemon is not downloaded again.
func TestDownloadResumes(t *testing.T) {
	const size, had = 1 << 20, 700 << 10
	files := newFiles(t)
	data := randomBytes(t, size)
	files.put("/disk", data, `"1"`)
	var breaks atomic.Int32
	files.setHook(files.breaking("/disk", had, &breaks))
	breaks.Store(1)
	s := open(t, Config{Translation: files.translations(t)})
	pull(t, s, "virtlet.cloud/disk")
	asked := files.asked()
	if len(asked) != 2 || asked[1].Header.Get("Range") != fmt.Sprintf("bytes=%d-", had) || asked[1].Header.Get("If-Range") != `"1"` ||
		files.sent.Load() != size {
		t.Errorf("got %d requests and %d bytes, the last with %v; want 2 requests and %d bytes, resumed at %d", len(asked), files.sent.Load(),
			asked[len(asked)-1].Header, size, had)
	}

	// Across a restart: the server stops answering, the pull fails, and the next one resumes.
	config := files.translations(t)
	root := filepath.Join(t.TempDir(), "image")
	s = open(t, Config{Root: root, Translation: config})
	down := func(w http.ResponseWriter, r *http.Request) bool {
		if files.breaking("/disk", had, &breaks)(w, r) {
			return true
		}
		w.WriteHeader(http.StatusServiceUnavailable)
		return true
	}
	breaks.Store(1)
	files.setHook(down)
	_, err := s.Pull(t.Context(), "virtlet.cloud/disk", PullOptions{})
	wantError(t, err, errdefs.IsUnavailable, "virtlet.cloud/disk", "503")
	check(t, s.Collect(t.Context()))
	check(t, s.Close())
	files.setHook(nil)
	files.sent.Store(0)
	s = open(t, Config{Root: root, Translation: config})
	var progress Progress
	img, err := s.Pull(t.Context(), "virtlet.cloud/disk", PullOptions{OnProgress: func(p Progress) { progress = p }})
	check(t, err)
	if files.sent.Load() != size-had || img.Layers[0].Digest != digest.FromBytes(data) || progress.Done != size || progress.Total != size {
		t.Errorf("got %d bytes sent and progress %+v, want %d bytes and progress to %d", files.sent.Load(), progress, size-had, size)
	}
	check(t, s.Remove(t.Context(), img.ID))
	wantEmpty(t, s)
}

// TestV4PartsOfAnotherBoot: an incomplete download may have lost data in a power failure. It resumes only if a digest
// will check it; if the digest does not match, it is downloaded again from the start.
func TestV4PartsOfAnotherBoot(t *testing.T) {
	const size, had = 300 << 10, 200 << 10
	data := randomBytes(t, size)
	for name, ref := range map[string]string{"plain": "virtlet.cloud/disk",
		"digest": "virtlet.cloud/disk@" + digest.FromBytes(data).String()} {
		t.Run(name, func(t *testing.T) {
			files := newFiles(t)
			files.put("/disk", data, `"1"`)
			var breaks atomic.Int32
			breaks.Store(1)
			files.setHook(func(w http.ResponseWriter, r *http.Request) bool {
				if !files.breaking("/disk", had, &breaks)(w, r) {
					w.WriteHeader(http.StatusServiceUnavailable)
				}
				return true
			})
			root, config := filepath.Join(t.TempDir(), "image"), files.translations(t)
			s := open(t, Config{Root: root, Translation: config})
			_, err := s.Pull(t.Context(), ref, PullOptions{})
			wantError(t, err, errdefs.IsUnavailable)
			check(t, s.Close())
			// Power failure: the part keeps its length and loses its content.
			part := findFile(t, filepath.Join(root, "content", "ingest"), "data")
			check(t, os.WriteFile(part, make([]byte, had), 0o600))
			files.setHook(nil)
			s = open(t, Config{Root: root, Translation: config})
			s.boot = "another"
			img := pull(t, s, ref)
			if img.Layers[0].Digest != digest.FromBytes(data) {
				t.Error("the image contains the damaged part")
			}
		})
	}
}

// TestDownloadOfAChangedFile: a part is never completed with another version of the file.
func TestDownloadOfAChangedFile(t *testing.T) {
	const size, had = 300 << 10, 200 << 10
	for name, etag := range map[string]string{"etag": `"1"`, "weak": `W/"1"`, "nothing": "-"} {
		t.Run(name, func(t *testing.T) {
			files := newFiles(t)
			files.put("/disk", randomBytes(t, size), etag)
			next := randomBytes(t, size)
			var breaks atomic.Int32
			breaks.Store(1)
			half := files.breaking("/disk", had, &breaks)
			files.setHook(func(w http.ResponseWriter, r *http.Request) bool {
				if breaks.Load() == 1 {
					defer func() {
						changed := "-"
						if etag != "-" {
							changed = `"2"`
						}
						files.put("/disk", next, changed)
						panic(http.ErrAbortHandler)
					}()
					func() {
						defer func() { _ = recover() }()
						half(w, r)
					}()
				}
				return false
			})
			s := open(t, Config{Translation: files.translations(t)})
			img := pull(t, s, "virtlet.cloud/disk")
			if img.Layers[0].Digest != digest.FromBytes(next) {
				t.Error("the image contains parts of two versions of the file")
			}
			check(t, s.Remove(t.Context(), img.ID))
			wantEmpty(t, s)
		})
	}
}
