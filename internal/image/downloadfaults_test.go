package image

import (
	"context"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/image/registry"
)

func TestDownloadErrors(t *testing.T) {
	files := newFiles(t)
	https := httptest.NewUnstartedServer(http.HandlerFunc(files.serve))
	https.Config.ErrorLog = log.New(io.Discard, "", 0)
	https.StartTLS()
	defer https.Close()
	files.put("/good.raw", randomBytes(t, 1000), "")
	files.put("/big", randomBytes(t, 70_000), "")
	files.put("/html", []byte("<!DOCTYPE html><html>log in</html>"), "")
	files.put("/empty", nil, "")
	files.put("/backed", qcow2WithBackingFile(t), "")
	files.put("/cut", qcow2Of(t, 1<<20)[:9000], "")
	files.put("/cut.xz", compressXz(t, randomBytes(t, 9000))[:4000], "")
	endless := func(w http.ResponseWriter, _ *http.Request) bool {
		for range 1 << 20 {
			if _, err := w.Write(make([]byte, 4096)); err != nil {
				break
			}
		}
		return true
	}
	status := func(code int) func(http.ResponseWriter, *http.Request) bool {
		return func(w http.ResponseWriter, _ *http.Request) bool {
			w.WriteHeader(code)
			return true
		}
	}
	text := "translations:\n- {regexp: '^tls/(.*)', url: '" + https.URL + "/$1'}\n- {name: nowhere, url: 'http://127.0.0.1:1/x'}\n" +
		"- {name: secret, url: 'http://me:hunter2@127.0.0.1:1/x?token=hunter3'}\n" +
		"- {regexp: '^once/(.*)', url: '" + files.URL + "/$1', transport: once}\n- {regexp: '^slow/(.*)', url: '" + files.URL +
		"/$1', transport: slow}\n" +
		"- {regexp: '^(good.raw|big|html|empty|backed|cut|cut.xz|none)$', url: '" + files.URL +
		"/$1'}\ntransports: {once: {maxRedirects: 0}, slow: {timeout: 100}}\n"
	s := open(t, Config{Translation: rules(t, text), Limits: Limits{UnpackedBytes: 64 << 10}})
	hang := func(_ http.ResponseWriter, r *http.Request) bool {
		<-r.Context().Done()
		return true
	}
	redirect := func(w http.ResponseWriter, r *http.Request) bool {
		if r.URL.Path == "/good.raw" {
			http.Redirect(w, r, "/else", http.StatusFound)
		}
		return r.URL.Path == "/good.raw"
	}
	for what, c := range map[string]struct {
		name string
		hook func(http.ResponseWriter, *http.Request) bool
		is   func(error) bool
		word string
	}{
		"not there":          {"none", nil, errdefs.IsNotFound, files.URL + "/none"},
		"no rule":            {"unknown", nil, errdefs.IsNotFound, "no translation file"},
		"unauthorized":       {"good.raw", status(401), errdefs.IsUnauthorized, "401"},
		"forbidden":          {"good.raw", status(403), errdefs.IsPermissionDenied, "403"},
		"overloaded":         {"good.raw", status(503), errdefs.IsUnavailable, "503"},
		"not modified":       {"good.raw", status(304), errdefs.IsFailedPrecondition, "not modified"},
		"nobody listens":     {"nowhere", nil, errdefs.IsUnavailable, "refused"},
		"secrets":            {"secret", nil, errdefs.IsUnavailable, "refused"},
		"unknown authority":  {"tls/good.raw", nil, errdefs.IsFailedPrecondition, "certificate"},
		"redirect":           {"once/good.raw", redirect, errdefs.IsFailedPrecondition, "redirect"},
		"too large":          {"big", nil, errdefs.IsResourceExhausted, "65536"},
		"endless":            {"good.raw", endless, errdefs.IsResourceExhausted, "65536"},
		"a page":             {"html", nil, errdefs.IsInvalidArgument, "text/html"},
		"empty":              {"empty", nil, errdefs.IsInvalidArgument, "empty"},
		"I5 backing file":    {"backed", nil, errdefs.IsInvalidArgument, "backing file"},
		"cut off":            {"cut", nil, errdefs.IsInvalidArgument, "cut off"},
		"cut off xz":         {"cut.xz", nil, errdefs.IsInvalidArgument, "xz"},
		"slow":               {"slow/good.raw", hang, errdefs.IsUnavailable, "100ms"},
		"range nobody asked": {"good.raw", status(416), errdefs.IsDataLoss, "416"},
	} {
		t.Run(what, func(t *testing.T) {
			files.setHook(c.hook)
			_, err := s.Pull(t.Context(), "virtlet.cloud/"+c.name, PullOptions{Auth: &registry.Auth{Username: "u", Password: "p"}})
			wantError(t, err, c.is, "virtlet.cloud/"+c.name, c.word)
			for _, secret := range []string{"hunter2", "hunter3"} {
				if strings.Contains(err.Error(), secret) {
					t.Errorf("error %q contains the secret %q", err, secret)
				}
			}
		})
	}
	for _, r := range files.asked() {
		if r.Header.Get("Authorization") != "" {
			t.Error("the file server received a registry's login")
		}
	}
	files.setHook(nil)
	bad := open(t, Config{Translation: rules(t, "translations: nonsense")})
	_, err := bad.Pull(t.Context(), "virtlet.cloud/x", PullOptions{})
	wantError(t, err, errdefs.IsFailedPrecondition, "rules.yaml")
	if all, _ := s.List(t.Context()); len(all) > 0 {
		t.Errorf("List after failed downloads = %+v, want no images", all)
	}
	trusted := strings.ReplaceAll(string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: https.Certificate().Raw})), "\n", "\\n")
	tls := open(t, Config{Translation: rules(t,
		fmt.Sprintf("translations: [{name: x, url: '%s/good.raw', transport: t}]\ntransports: {t: {tls: {certificates: [{cert: \"%s\"}]}}}\n",
			https.URL, trusted))})
	pull(t, tls, "virtlet.cloud/x")
}

// TestV4KilledDownload: a daemon that dies at any step of a download leaves no incomplete image.
func TestV4KilledDownload(t *testing.T) {
	failpoint.Needed(t)
	files := newFiles(t)
	data := randomBytes(t, 1<<20)
	files.put("/disk", data, `"1"`)
	root, config := filepath.Join(t.TempDir(), "image"), files.translations(t)
	for _, point := range []string{"image.download.commit", "image.pull.record"} {
		cmd := helper(t, root, "pull virtlet.cloud/disk", point+"=kill")
		cmd.Env = append(cmd.Env, helperTranslations+"="+config.Dir)
		if err := cmd.Run(); err == nil {
			t.Fatalf("%s: the process was not killed", point)
		}
		s := open(t, Config{Root: root, Translation: config})
		if all, err := s.List(t.Context()); err != nil || len(all) > 0 {
			t.Errorf("%s: List() = %+v, %v; want no images", point, all, err)
		}
		check(t, s.Close())
	}
	if sent := files.sent.Load(); sent >= 2<<20 {
		t.Errorf("got %d bytes sent after a kill at the end, want less than 2 MiB", sent)
	}
	s := open(t, Config{Root: root, Translation: config})
	img := pull(t, s, "virtlet.cloud/disk")
	if _, text := openAndRead(t, s, "c", img.ID); text != string(data) {
		t.Error("the disk's content differs from the file's")
	}
	check(t, s.CloseDisk(t.Context(), "c"))
	check(t, s.Remove(t.Context(), img.ID))
	wantEmpty(t, s)
}

// TestN6DownloadedBlobIsEmpty: a disk whose file lost its content is detected and downloaded again.
func TestN6DownloadedBlobIsEmpty(t *testing.T) {
	failpoint.Needed(t)
	files := newFiles(t)
	data := randomBytes(t, 9000)
	files.put("/disk", data, `"1"`)
	root, config := filepath.Join(t.TempDir(), "image"), files.translations(t)
	s := open(t, Config{Root: root, Translation: config})
	img := pull(t, s, "virtlet.cloud/disk")
	check(t, os.Chmod(blobPath(s, img.Layers[0].Digest), 0o600))
	check(t, os.Truncate(blobPath(s, img.Layers[0].Digest), 0))
	if again := pull(t, s, "virtlet.cloud/disk"); again.ID != img.ID || read(t, blobPath(s, again.Layers[0].Digest)) != string(data) {
		t.Error("another pull did not repair the damaged disk")
	}
	check(t, os.Chmod(blobPath(s, img.Layers[0].Digest), 0o600))
	check(t, os.Truncate(blobPath(s, img.Layers[0].Digest), 0))
	check(t, s.Close())
	s = open(t, Config{Root: root, Translation: config})
	if _, err := s.Get(t.Context(), "virtlet.cloud/disk"); !errdefs.IsNotFound(err) {
		t.Errorf("Get of the damaged image after a restart: got error %v, want not found", err)
	}
	pull(t, s, "virtlet.cloud/disk")
	// A full disk is reported as such, and nothing of the download is left.
	files.put("/other", randomBytes(t, 9000), "")
	check(t, failpoint.Arm("image.download.commit", "1*error(no space left on device)"))
	_, err := s.Pull(t.Context(), "virtlet.cloud/other", PullOptions{})
	check(t, failpoint.Arm("image.download.commit", ""))
	if err == nil {
		t.Error("a pull to a full disk succeeded, want an error")
	}
	check(t, s.Remove(t.Context(), img.ID))
	wantEmpty(t, s)
}

// TestDownloadsJoin: many pods with one cold image cause one download (fault I8).
func TestDownloadsJoin(t *testing.T) {
	files := newFiles(t)
	files.put("/disk", randomBytes(t, 100<<10), `"1"`)
	s := open(t, Config{Translation: files.translations(t)})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Go(func() {
			ref := "virtlet.cloud/disk"
			if i%2 == 1 {
				ref += ":tagged"
			}
			if _, err := s.Pull(ctx, ref, PullOptions{}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if sent := files.sent.Load(); sent != 100<<10 {
		t.Errorf("got %d bytes sent for concurrent pulls, want %d", sent, 100<<10)
	}
}

// TestN5DownloadToAFullDisk: a disk that does not fit, downloaded or unpacked, is reported as such and leaves nothing
// behind.
func TestN5DownloadToAFullDisk(t *testing.T) {
	dir := t.TempDir()
	check(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=6m"))
	t.Cleanup(func() { check(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	files := newFiles(t)
	files.put("/big", randomBytes(t, 5<<20), `"1"`)
	files.put("/wide.gz", compressGzip(t, make([]byte, 8<<20)), `"2"`)
	files.put("/small", randomBytes(t, 2<<20), `"3"`)
	s := open(t, Config{Root: filepath.Join(dir, "image"), Translation: files.translations(t)})
	for _, name := range []string{"big", "wide.gz"} {
		_, err := s.Pull(t.Context(), "virtlet.cloud/"+name, PullOptions{})
		wantError(t, err, errdefs.IsResourceExhausted, "no space left", name)
	}
	check(t, s.Collect(t.Context()))
	pull(t, s, "virtlet.cloud/small") // half of the disk: the failures left no data behind
}

// TestDownloadOfARemovedImage: after a concurrent pull and removal, the image is either complete or missing.
func TestDownloadOfARemovedImage(t *testing.T) {
	files := newFiles(t)
	data := randomBytes(t, 5000)
	files.put("/disk", data, `"1"`)
	s := open(t, Config{Translation: files.translations(t)})
	first := pull(t, s, "virtlet.cloud/disk")
	files.setHook(func(http.ResponseWriter, *http.Request) bool {
		files.setHook(nil)
		check(t, s.Remove(t.Context(), first.ID))
		check(t, s.Collect(t.Context()))
		return false // the server answers "not modified"
	})
	_, err := s.Pull(t.Context(), "virtlet.cloud/disk", PullOptions{})
	wantError(t, err, errdefs.IsUnavailable, "removed")
	img := pull(t, s, "virtlet.cloud/disk")
	if _, text := openAndRead(t, s, "c", img.ID); text != string(data) {
		t.Error("the disk's content differs from the file's")
	}
}

// TestV4NamelessIngests: the next Open removes what a kill leaves of a download that was just started or removed.
func TestV4NamelessIngests(t *testing.T) {
	s := open(t, Config{})
	root := s.cfg.Root
	check(t, s.Close())
	for _, dir := range []string{"begun", "removed", "torn"} {
		check(t, os.MkdirAll(filepath.Join(root, "content/ingest", dir), 0o700))
	}
	check(t, os.WriteFile(filepath.Join(root, "content/ingest/removed/data"), randomBytes(t, 1000), 0o600))
	check(t, os.WriteFile(filepath.Join(root, "content/ingest/torn/ref"), nil, 0o600))
	wantEmpty(t, open(t, Config{Root: root}))
}
