package image

import (
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
)

func TestPrepareIsIdempotent(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	one := pull(t, s, reg.push(t, "one:1", oneFileImage(t, "1")))
	two := pull(t, s, reg.push(t, "two:1", oneFileImage(t, "2")))
	first, err := s.Prepare(t.Context(), "c1", one.ID, map[string]string{"pod": "p1"})
	check(t, err)
	again, err := s.Prepare(t.Context(), "c1", one.ID, nil)
	check(t, err)
	asked, err := s.Mounts(t.Context(), "c1")
	check(t, err)
	if !reflect.DeepEqual(first, again) || !reflect.DeepEqual(first, asked) {
		t.Errorf("mounts: got %v, again %v, asked %v; want the same", first, again, asked)
	}
	_, err = s.Prepare(t.Context(), "c1", two.ID, nil)
	wantError(t, err, errdefs.IsAlreadyExists, "c1", two.ID)
	_, err = s.View(t.Context(), "c1", one.ID)
	wantError(t, err, errdefs.IsAlreadyExists)
	_, err = s.Prepare(t.Context(), "c2", "sha256:"+strings.Repeat("0", 64), nil)
	wantError(t, err, errdefs.IsNotFound)
	for _, key := range []string{"", one.ChainID, "extract-1 x"} {
		_, err := s.Prepare(t.Context(), key, one.ID, nil)
		wantError(t, err, errdefs.IsInvalidArgument)
		wantError(t, s.Release(t.Context(), key), errdefs.IsInvalidArgument)
	}
	if img, err := s.Get(t.Context(), one.ID); err != nil || time.Since(img.LastUsed) > time.Minute {
		t.Errorf("LastUsed = %v, %v; want within the last minute", img.LastUsed, err)
	}
}

func TestSnapshotsOutliveARestart(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	img := pull(t, s, reg.push(t, "app:1", imageOf(t, v1.Config{}, tarOf(t, file("a", "1")), tarOf(t, file("b", "2")))))
	mounts, err := s.Prepare(t.Context(), "c1", img.ID, nil)
	check(t, err)
	root := mounted(t, mounts)
	check(t, os.WriteFile(root+"/written", []byte("w"), 0o600))
	view, err := s.View(t.Context(), "c1/volume#0", img.ID)
	check(t, err)
	volume := mounted(t, view)
	if read(t, volume+"/a") != "1" {
		t.Error("the view does not have the image's files")
	}
	if err := os.WriteFile(volume+"/x", nil, 0o600); err == nil {
		t.Error("a write to the view succeeded, want an error")
	}
	check(t, s.Remove(t.Context(), img.ID))
	check(t, s.Close())

	s = open(t, Config{Root: s.cfg.Root})
	check(t, s.Collect(t.Context()))
	keys, err := s.Snapshots(t.Context())
	check(t, err)
	slices.Sort(keys)
	if !slices.Equal(keys, []string{"c1", "c1/volume#0"}) {
		t.Errorf("Snapshots() = %q, want c1 and c1/volume#0", keys)
	}
	again, err := s.Mounts(t.Context(), "c1")
	check(t, err)
	if !reflect.DeepEqual(mounts, again) || read(t, root+"/written") != "w" {
		t.Errorf("mounts after a restart: got %v, want %v with the written file", again, mounts)
	}
	_, err = s.Mounts(t.Context(), "c2")
	wantError(t, err, errdefs.IsNotFound)
}

// If an image is removed while containers are made from it, each gets a complete root filesystem or an error.
func TestRemoveWhilePreparing(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	ref := reg.push(t, "app:1", imageOf(t, v1.Config{}, tarOf(t, file("a", "1")), tarOf(t, file("b", "2"))))
	for round := range 10 {
		img := pull(t, s, ref)
		var wg sync.WaitGroup
		var mu sync.Mutex
		made := map[string]bool{}
		for i := range 8 {
			wg.Go(func() {
				key := fmt.Sprintf("c%d-%d", round, i)
				_, err := s.Prepare(t.Context(), key, img.ID, nil)
				if err != nil && !errdefs.IsNotFound(err) {
					t.Errorf("Prepare: got error %v, want none or not found", err)
				}
				mu.Lock()
				made[key] = err == nil
				mu.Unlock()
			})
		}
		wg.Go(func() {
			if err := s.Remove(t.Context(), img.ID); err != nil {
				t.Errorf("Remove: %v", err)
			}
			if err := s.Collect(t.Context()); err != nil {
				t.Errorf("Collect: %v", err)
			}
		})
		wg.Wait()
		check(t, s.Collect(t.Context()))
		for key, ok := range made {
			if !ok {
				continue
			}
			mounts, err := s.Mounts(t.Context(), key)
			check(t, err)
			t.Run(key, func(t *testing.T) {
				root := mounted(t, mounts)
				if read(t, root+"/a")+read(t, root+"/b") != "12" {
					t.Error("files of the image are missing")
				}
			})
			check(t, s.Release(t.Context(), key))
		}
	}
	wantEmpty(t, s)
}

// An image whose layers were deleted from the store is no longer listed, so that it is pulled again.
func TestLostLayersDropTheImage(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	ref := reg.push(t, "app:1", oneFileImage(t, "x"))
	img := pull(t, s, ref)
	check(t, s.snaps.Remove(s.withNamespace(t.Context()), img.ChainID))
	_, err := s.Prepare(t.Context(), "c1", img.ID, nil)
	wantError(t, err, errdefs.IsNotFound, "pull it again")
	if _, err := s.Get(t.Context(), ref); !errdefs.IsNotFound(err) {
		t.Errorf("Get of an image without its layers: got error %v, want not found", err)
	}
	pull(t, s, ref)
	_, err = s.Prepare(t.Context(), "c1", img.ID, nil)
	check(t, err)
}

func TestUsageFollowsTheLayer(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	img := pull(t, s, reg.push(t, "app:1", oneFileImage(t, "x")))
	mounts, err := s.Prepare(t.Context(), "c1", img.ID, nil)
	check(t, err)
	first, err := s.Usage(t.Context(), "c1")
	check(t, err)
	if first.Timestamp.IsZero() || first.Bytes > 8192 {
		t.Errorf("usage of a new layer: got %+v, want at most 8192 bytes", first)
	}
	root := mounted(t, mounts)
	check(t, os.WriteFile(root+"/big", make([]byte, 1<<20), 0o600))
	check(t, s.Close())

	// After a restart the cache is empty, and calls do not wait for measurements.
	s = open(t, Config{Root: s.cfg.Root})
	eventually(t, func() error {
		u, err := s.Usage(t.Context(), "c1")
		check(t, err)
		if u.Bytes < 1<<20 || u.Inodes < 2 {
			return fmt.Errorf("usage %+v", u)
		}
		return nil
	})
	_, err = s.Usage(t.Context(), "c2")
	wantError(t, err, errdefs.IsNotFound, "c2")
	check(t, s.Release(t.Context(), "c1"))
	_, err = s.Usage(t.Context(), "c1")
	wantError(t, err, errdefs.IsNotFound)
}

func TestFsInfoIsAccurate(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	before, err := s.FsInfo(t.Context())
	check(t, err)
	text := strings.Repeat("incompressible? no matter, the layer is not compressed", 20_000)
	img := pull(t, s, reg.push(t, "app:1", oneFileImage(t, text)))
	renew := func() FsUsage {
		s.renewFsInfo()
		u, err := s.FsInfo(t.Context())
		check(t, err)
		return u
	}
	after := renew()
	// The content counts twice: as a blob and unpacked.
	grown := int64(after.UsedBytes) - int64(before.UsedBytes)
	if want := 2 * int64(len(text)); grown < want || grown > want+want/10+1<<18 {
		t.Errorf("usage grew by %d bytes, want about %d", grown, want)
	}
	if after.Mountpoint != s.cfg.Root || after.InodesUsed <= before.InodesUsed {
		t.Errorf("FsInfo() = %+v after %+v, want more inodes", after, before)
	}
	_, err = s.Prepare(t.Context(), "c1", img.ID, nil)
	check(t, err)
	if renew(); s.fs.containers.InodesUsed == 0 || s.fs.images.UsedBytes > after.UsedBytes+1<<18 {
		t.Errorf("got images %+v and containers %+v, want the writable layer among the containers", s.fs.images, s.fs.containers)
	}
	check(t, s.Release(t.Context(), "c1"))
	check(t, s.Remove(t.Context(), img.ID))
	wantEmpty(t, s)
	if u := renew(); u.UsedBytes > before.UsedBytes+1<<18 {
		t.Errorf("usage after all was removed: got %d bytes, want about %d", u.UsedBytes, before.UsedBytes)
	}
}

func TestIDPrefixes(t *testing.T) {
	var x index
	for _, id := range []string{"sha256:aa11", "sha256:aa22", "sha256:bb33"} {
		x.put(&details{id: id, kind: KindDisk}, nil, "docker.io/library/"+strings.TrimPrefix(id, "sha256:")+"x:latest")
	}
	for prefix, want := range map[string]string{"aa1": "sha256:aa11", "sha256:b": "sha256:bb33", "aa22": "sha256:aa22",
		"aa11x": "sha256:aa11"} {
		if e, err := x.find(prefix); err != nil || e.image.ID != want {
			t.Errorf("find(%s) = %v, %v; want %s", prefix, e, err, want)
		}
	}
	_, err := x.find("aa")
	wantError(t, err, errdefs.IsInvalidArgument, "more than one")
	_, err = x.find("cc")
	wantError(t, err, errdefs.IsNotFound)
}

func TestConfigIsChecked(t *testing.T) {
	for word, cfg := range map[string]Config{
		"absolute": {Root: "image"}, "platform": {Root: "/x", Platform: "a/b/c/d"}, "pinned": {Root: "/x", PinnedImages: []string{"A:B:C"}},
		"negative": {Root: "/x", PullTimeout: -1},
	} {
		_, err := Open(t.Context(), cfg)
		wantError(t, err, errdefs.IsInvalidArgument, word)
	}
}

// The maximum number of layers in a long path can still be mounted: the options must fit in a page.
func TestManyLayersMount(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{Root: t.TempDir() + "/" + strings.Repeat("long", 20) + "/image"})
	var archives [][]byte
	for i := range s.cfg.Limits.Layers {
		archives = append(archives, tarOf(t, file(fmt.Sprint(i), "x")))
	}
	img := pull(t, s, reg.push(t, "app:1", imageOf(t, v1.Config{}, archives...)))
	mounts, err := s.Prepare(t.Context(), "c", img.ID, nil)
	check(t, err)
	entries, err := os.ReadDir(mounted(t, mounts))
	check(t, err)
	if len(entries) != s.cfg.Limits.Layers {
		t.Errorf("got %d files, want one of each of %d layers", len(entries), s.cfg.Limits.Layers)
	}
}
