package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/opencontainers/go-digest"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/test/races"
)

// Variables that turn the test program into a store that dies during an operation (see helperProcess).
const (
	helperRoot  = "TRIPOD_IMAGE_TEST_ROOT"
	helperOrder = "TRIPOD_IMAGE_TEST_ORDER"

	helperTranslations = "TRIPOD_IMAGE_TEST_TRANSLATIONS"
)

func TestMain(m *testing.M) {
	if root := os.Getenv(helperRoot); root != "" {
		if err := helperProcess(root, os.Getenv(helperOrder)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(races.Run(m.Run))
}

// helperProcess opens the store at root and executes an order: "pull REF" or "remove REF".
func helperProcess(root, order string) error {
	if err := failpoint.Check(); err != nil {
		return err
	}
	ctx := context.Background()
	s, err := Open(ctx, Config{Root: root, Translation: Translation{Prefix: "virtlet.cloud/", Dir: os.Getenv(helperTranslations)}})
	if err != nil {
		return err
	}
	switch what, ref, _ := strings.Cut(order, " "); what {
	case "pull":
		_, err = s.Pull(ctx, ref, PullOptions{})
	case "remove":
		err = s.Remove(ctx, ref)
	case "root-disk":
		_, err = s.OpenRootDisk(ctx, "killed", ref)
	}
	if err != nil {
		return err
	}
	return s.Close()
}

// helper runs the test program as a separate process.
func helper(t testing.TB, root, order, failpoints string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), helperRoot+"="+root, helperOrder+"="+order, failpoint.Variable+"="+failpoints)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}

// flaky serves a registry's blobs in pieces: each connection breaks after some bytes.
type flaky struct {
	piece  int64
	served atomic.Int64 // bytes
	broken chan struct{}
	once   sync.Once
}

func (f *flaky) serve(blobs map[string][]byte) func(http.ResponseWriter, *http.Request) bool {
	return func(w http.ResponseWriter, r *http.Request) bool {
		blob, ok := blobs[r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]]
		if !ok || r.Method != http.MethodGet {
			return false
		}
		http.ServeContent(&pieceWriter{ResponseWriter: w, f: f, left: f.piece}, r, "", testTime, strings.NewReader(string(blob)))
		return true
	}
}

type pieceWriter struct {
	http.ResponseWriter
	f    *flaky
	left int64
}

func (w *pieceWriter) Write(p []byte) (int, error) {
	if int64(len(p)) > w.left {
		n, _ := w.ResponseWriter.Write(p[:w.left])
		w.f.served.Add(int64(n))
		w.ResponseWriter.(http.Flusher).Flush()
		w.f.once.Do(func() { close(w.f.broken) })
		panic(http.ErrAbortHandler)
	}
	n, err := w.ResponseWriter.Write(p)
	w.left -= int64(n)
	w.f.served.Add(int64(n))
	return n, err
}

// oneLayer makes an image of one layer that does not compress, and the blobs by digest.
func oneLayer(t testing.TB, size int64) (v1.Image, map[string][]byte, int64) {
	t.Helper()
	layer, err := random.Layer(size, "application/vnd.oci.image.layer.v1.tar")
	check(t, err)
	rc, err := layer.Uncompressed()
	check(t, err)
	defer rc.Close()
	archive := new(strings.Builder)
	_, err = io.Copy(archive, rc)
	check(t, err)
	src := imageOf(t, v1.Config{}, []byte(archive.String()))
	return src, map[string][]byte{digest.FromString(archive.String()).String(): []byte(archive.String())}, int64(archive.Len())
}

func TestPullResumesAfterBrokenConnections(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	src, blobs, size := oneLayer(t, 1<<20)
	ref := reg.push(t, "app:1", src)
	f := &flaky{piece: 100 << 10, broken: make(chan struct{})}
	reg.setHook(f.serve(blobs))
	pull(t, s, ref)
	if n := f.served.Load(); n < size || n > size+size/10 {
		t.Errorf("got %d bytes served, want the blob's %d and at most 10 %% more", n, size)
	}
}

func TestPullResumesAfterRestart(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	src, blobs, size := oneLayer(t, 1<<20)
	ref := reg.push(t, "app:1", src)
	f := &flaky{piece: size / 2, broken: make(chan struct{})}
	serve := f.serve(blobs)
	reg.setHook(func(w http.ResponseWriter, r *http.Request) bool {
		select {
		case <-f.broken:
			panic(http.ErrAbortHandler) // the registry is gone permanently
		default:
			return serve(w, r)
		}
	})
	_, err := s.Pull(t.Context(), ref, PullOptions{})
	wantError(t, err, errdefs.IsUnavailable, ref)
	check(t, s.Collect(t.Context()))
	check(t, s.Close())

	s = open(t, Config{Root: s.cfg.Root})
	check(t, s.Collect(t.Context()))
	f.piece = size
	reg.setHook(serve)
	pull(t, s, ref)
	if n := f.served.Load(); n != size {
		t.Errorf("got %d bytes served in two pulls, want %d", n, size)
	}
}

func TestPullResumesAfterSIGKILL(t *testing.T) {
	reg := newRegistry(t)
	root := t.TempDir() + "/image"
	src, blobs, size := oneLayer(t, 8<<20)
	ref := reg.push(t, "app:1", src)
	stop := make(chan struct{})
	letGo := sync.OnceFunc(func() { close(stop) })
	defer letGo()
	reg.setHook(func(w http.ResponseWriter, r *http.Request) bool {
		blob, ok := blobs[r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]]
		if !ok {
			return false
		}
		w.Header().Set("Content-Length", fmt.Sprint(len(blob)))
		_, _ = w.Write(blob[:size/2])
		w.(http.Flusher).Flush()
		<-stop
		return true
	})
	cmd := helper(t, root, "pull "+ref, "")
	check(t, cmd.Start())
	// containerd writes a MiB at a time, so the last one sent may be missing.
	eventually(t, func() error {
		if n := ingested(root); n < size/2-1<<20 {
			return fmt.Errorf("%d bytes on the disk", n)
		}
		return nil
	})
	check(t, cmd.Process.Kill())
	_ = cmd.Wait()
	letGo()
	kept := ingested(root)

	f := &flaky{piece: size, broken: make(chan struct{})}
	reg.setHook(f.serve(blobs))
	s := open(t, Config{Root: root})
	if all, _ := s.List(t.Context()); len(all) != 0 {
		t.Errorf("List() = %+v, want no incomplete images", all)
	}
	check(t, s.Collect(t.Context()))
	img := pull(t, s, ref)
	if n := f.served.Load(); n != size-kept {
		t.Errorf("got %d bytes served after the crash, want %d", n, size-kept)
	}
	check(t, s.Remove(t.Context(), img.ID))
	if left, err := s.leases.List(s.withNamespace(t.Context())); err != nil || len(left) != 0 {
		t.Errorf("leases after the pull: got %+v, %v; want none", left, err)
	}
	wantEmpty(t, s)
}

// ingested returns the number of bytes of downloads under way on disk.
func ingested(root string) (sum int64) {
	entries, _ := os.ReadDir(root + "/content/ingest")
	for _, e := range entries {
		if fi, err := os.Stat(root + "/content/ingest/" + e.Name() + "/data"); err == nil {
			sum += fi.Size()
		}
	}
	return sum
}

// After a kill at any point of a pull or a removal, the reopened store is consistent: the image exists or not, can be
// pulled, and its removal leaves nothing behind.
func TestCrashAtEveryLine(t *testing.T) {
	failpoint.Needed(t)
	points := 0
	for _, point := range failpoint.Names() {
		what, ok := map[string]string{"pull": "pull", "remove": "remove"}[strings.Split(point, ".")[1]]
		if !strings.HasPrefix(point, "image.") || !ok {
			continue
		}
		points++
		t.Run(point, func(t *testing.T) {
			reg := newRegistry(t)
			ref := reg.push(t, "app:1", imageOf(t, v1.Config{}, tarOf(t, file("a", "1")), tarOf(t, file("b", "2"))))
			root := t.TempDir() + "/image"
			if what == "remove" {
				s := open(t, Config{Root: root})
				pull(t, s, ref)
				check(t, s.Close())
			}
			out, err := helper(t, root, what+" "+ref, point+"=kill").CombinedOutput()
			if err == nil || !strings.Contains(err.Error(), "killed") {
				t.Fatalf("helper process: got error %v, want killed; output: %s", err, out)
			}
			s := open(t, Config{Root: root})
			img := pull(t, s, ref)
			mounts, err := s.Prepare(t.Context(), "c", img.ID, nil)
			check(t, err)
			t.Run("files", func(t *testing.T) {
				dir := mounted(t, mounts)
				if read(t, dir+"/a")+read(t, dir+"/b") != "12" {
					t.Error("the unpacked files are incomplete")
				}
			})
			check(t, s.Release(t.Context(), "c"))
			check(t, s.Remove(t.Context(), ref))
			wantEmpty(t, s)
			if left, err := s.leases.List(s.withNamespace(t.Context())); err != nil || len(left) != 0 {
				t.Errorf("leases after the pull: got %+v, %v; want none", left, err)
			}
		})
	}
	if points < 4 {
		t.Errorf("got %d fail points, want at least 4", points)
	}
}

// Layers that were unpacked but not synced before a power failure are not trusted.
func TestUnfinishedLayersAreUnpackedAgain(t *testing.T) {
	failpoint.Needed(t)
	reg := newRegistry(t)
	root := t.TempDir() + "/image"
	base := tarOf(t, file("base", "good"))
	s := open(t, Config{Root: root})
	kept := pull(t, s, reg.push(t, "kept:1", imageOf(t, v1.Config{}, base)))
	_, err := s.Prepare(t.Context(), "running", kept.ID, nil)
	check(t, err)
	check(t, s.Remove(t.Context(), kept.ID)) // now only the container keeps the base layer
	check(t, s.Close())
	ref := reg.push(t, "app:1", imageOf(t, v1.Config{}, base, tarOf(t, file("top", "good"))))
	_ = helper(t, root, "pull "+ref, "image.pull.sync=kill").Run()

	// The power failure destroyed unsynced data.
	lost := findFile(t, root+"/snapshots/snapshots", "top")
	check(t, os.Truncate(lost, 0))
	s = open(t, Config{Root: root})
	img := pull(t, s, ref)
	mounts, err := s.Prepare(t.Context(), "c", img.ID, nil)
	check(t, err)
	dir := mounted(t, mounts)
	if read(t, dir+"/top")+read(t, dir+"/base") != "goodgood" {
		t.Error("a layer that was never synced was not unpacked again")
	}
	if _, err := s.Mounts(t.Context(), "running"); err != nil {
		t.Errorf("Mounts of the running container: %v", err)
	}
}

// held is a registry whose blobs wait until they are released; it records clients that disconnect.
type held struct {
	asked, gone, release chan struct{}
}

func hold(reg *testRegistry) *held {
	h := &held{asked: make(chan struct{}, 100), gone: make(chan struct{}, 100), release: make(chan struct{})}
	reg.setHook(func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.Contains(r.URL.Path, "/blobs/") {
			return false
		}
		h.asked <- struct{}{}
		select {
		case <-h.release:
		case <-r.Context().Done():
			h.gone <- struct{}{}
		}
		return false
	})
	return h
}

func TestPullOutlivesItsFirstCaller(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	ref := reg.push(t, "app:1", oneFileImage(t, "x"))
	h := hold(reg)
	results := make(chan error, 2)
	pullWith := func(ctx context.Context) { _, err := s.Pull(ctx, ref, PullOptions{}); results <- err }
	first, leaveFirst := context.WithCancel(t.Context())
	go pullWith(first)
	<-h.asked
	go pullWith(t.Context())
	eventually(t, func() error {
		s.flights.mu.Lock()
		defer s.flights.mu.Unlock()
		for _, f := range s.flights.all {
			if f.waiters == 2 {
				return nil
			}
		}
		return errors.New("the second caller has not joined")
	})
	leaveFirst()
	wantError(t, <-results, errdefs.IsCanceled, ref)
	close(h.release)
	check(t, <-results)
	if len(h.gone) != 0 {
		t.Error("the pull ended when the first of two callers left")
	}
}

func TestPullEndsWithItsLastCaller(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	ref := reg.push(t, "app:1", oneFileImage(t, "x"))
	h := hold(reg)
	result := make(chan error)
	ctx, leave := context.WithCancel(t.Context())
	go func() { _, err := s.Pull(ctx, ref, PullOptions{}); result <- err }()
	<-h.asked
	leave()
	wantError(t, <-result, errdefs.IsCanceled, ref)
	<-h.gone
	reg.setHook(nil)
	pull(t, s, ref)
}

func TestLeasesOfFailedPullsExpire(t *testing.T) {
	reg := newRegistry(t)
	src, blobs, size := oneLayer(t, 1<<20)
	ref := reg.push(t, "app:1", src)
	f := &flaky{piece: size / 2, broken: make(chan struct{})}
	serve := f.serve(blobs)
	s := open(t, Config{})
	reg.setHook(func(w http.ResponseWriter, r *http.Request) bool {
		select {
		case <-f.broken:
			panic(http.ErrAbortHandler)
		default:
			return serve(w, r)
		}
	})
	for range 3 {
		_, err := s.Pull(t.Context(), ref, PullOptions{})
		wantError(t, err, errdefs.IsUnavailable)
	}
	ctx := s.withNamespace(t.Context())
	all, err := s.leases.List(ctx)
	check(t, err)
	if len(all) != 1 || all[0].Labels["containerd.io/gc.expire"] == "" {
		t.Fatalf("leases: got %+v, want one that expires", all)
	}
	expires, err := time.Parse(time.RFC3339, all[0].Labels["containerd.io/gc.expire"])
	check(t, err)
	if left := time.Until(expires); left < s.cfg.ResumeWindow || left > 2*s.cfg.ResumeWindow {
		t.Errorf("the lease expires in %v, want %v to %v", left, s.cfg.ResumeWindow, 2*s.cfg.ResumeWindow)
	}
	check(t, s.Collect(ctx))
	statuses, err := s.content.ListStatuses(ctx)
	check(t, err)
	if len(statuses) != 1 || statuses[0].Offset != size/2 {
		t.Errorf("downloads under way: got %+v, want one at %d bytes", statuses, size/2)
	}
	check(t, s.leases.Delete(ctx, leases.Lease{ID: all[0].ID})) // as the collector does when it expires
	wantEmpty(t, s)
}

// An unrecorded snapshot directory from a crash does not block the next snapshot.
func TestCrashLeavesADirectory(t *testing.T) {
	reg := newRegistry(t)
	ref := reg.push(t, "app:1", imageOf(t, v1.Config{}, tarOf(t, file("a", "1")), tarOf(t, file("b", "2"))))
	root := t.TempDir() + "/image"
	s := open(t, Config{Root: root})
	check(t, s.Close())
	for id := range 20 {
		check(t, os.MkdirAll(fmt.Sprintf("%s/snapshots/snapshots/%d/fs/left", root, id+1), 0o755))
	}
	s = open(t, Config{Root: root})
	img := pull(t, s, ref)
	mounts, err := s.Prepare(t.Context(), "c", img.ID, nil)
	check(t, err)
	t.Run("files", func(t *testing.T) {
		dir := mounted(t, mounts)
		if _, err := os.Stat(dir + "/left"); read(t, dir+"/a")+read(t, dir+"/b") != "12" || err == nil {
			t.Error("the directory has files from before the crash")
		}
	})
	check(t, s.Release(t.Context(), "c"))
	check(t, s.Remove(t.Context(), ref))
	wantEmpty(t, s)
}
