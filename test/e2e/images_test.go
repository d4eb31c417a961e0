package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/structpb"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// Images whose content does not matter.
const (
	markers = harness.ImagePrefix + "k8s-staging-cri-tools/test-image-"
	tags    = markers + "tags"
)

func spec(name string) *runtimeapi.ImageSpec { return &runtimeapi.ImageSpec{Image: name} }

// imageOf returns the status of an image, or nil if it does not exist.
func imageOf(t *testing.T, d *harness.Daemon, name string) *runtimeapi.Image {
	t.Helper()
	resp, err := d.Images().ImageStatus(context.Background(), spec(name), false)
	if err != nil {
		t.Fatal(err)
	}
	return resp.Image
}

func removeImage(t *testing.T, d *harness.Daemon, name string) {
	t.Helper()
	if err := d.Images().RemoveImage(context.Background(), spec(name)); err != nil {
		t.Fatal(err)
	}
}

// listImages maps the IDs of all images to their tags.
func listImages(t *testing.T, d *harness.Daemon) map[string][]string {
	t.Helper()
	all, err := d.Images().ListImages(context.Background(), nil)
	if err != nil {
		t.Fatal(err)
	}
	byID := map[string][]string{}
	for _, i := range all {
		if _, twice := byID[i.Id]; twice {
			t.Errorf("ListImages: got image %s twice", i.Id)
		}
		byID[i.Id] = i.RepoTags
	}
	return byID
}

func TestImages(t *testing.T) {
	d := harness.StartDaemon(t, harness.Set("image.pinned", []string{harness.Pause}))
	// pullAndRemove pulls an image, calls check with its status, and removes it.
	pullAndRemove := func(t *testing.T, name string, check func(*runtimeapi.Image)) {
		t.Helper()
		id := d.Pull(t, name)
		i := imageOf(t, d, name)
		if i.GetId() != id || i.GetSize() == 0 {
			t.Fatalf("status of %s: got %v, want this ID and a size", id, i)
		}
		check(i)
		removeImage(t, d, name)
		if i := imageOf(t, d, name); i != nil {
			t.Errorf("status after the removal: got %v, want none", i)
		}
	}
	t.Run("public image with tag should be pulled and removed [Conformance]", func(t *testing.T) {
		name := markers + "tag:test"
		pullAndRemove(t, name, func(i *runtimeapi.Image) {
			if !slices.Equal(i.RepoTags, []string{name}) {
				t.Errorf("tags: got %v, want %s", i.RepoTags, name)
			}
		})
	})
	t.Run("public image without tag should be pulled and removed [Conformance]", func(t *testing.T) {
		pullAndRemove(t, markers+"latest", func(i *runtimeapi.Image) {
			if !slices.Equal(i.RepoTags, []string{markers + "latest:latest"}) {
				t.Errorf("tags: got %v, want the tag latest", i.RepoTags)
			}
		})
	})
	t.Run("public image with digest should be pulled and removed [Conformance]", func(t *testing.T) {
		d.Pull(t, markers+"digest")
		name := imageOf(t, d, markers+"digest").RepoDigests[0]
		removeImage(t, d, markers+"digest")
		pullAndRemove(t, name, func(i *runtimeapi.Image) {
			if len(i.RepoTags) != 0 || !slices.Equal(i.RepoDigests, []string{name}) {
				t.Errorf("got tags %v, digests %v; want no tag and %s", i.RepoTags, i.RepoDigests, name)
			}
		})
	})
	t.Run("image status should support all kinds of references [Conformance]", func(t *testing.T) {
		id := d.Pull(t, markers+"latest")
		i := imageOf(t, d, markers+"latest:latest")
		for _, name := range []string{markers + "latest", i.RepoDigests[0], id, strings.TrimPrefix(id, "sha256:")} {
			if got := imageOf(t, d, name); got.GetId() != id {
				t.Errorf("status of %s: got %v, want the image %s", name, got, id)
			}
		}
		removeImage(t, d, id)
	})
	t.Run("image status get image fields should not have Uid|Username empty [Conformance]", func(t *testing.T) {
		for suffix, want := range map[string]string{"uid": "1002/", "username": "none/www-data", "uid-group": "1003/",
			"username-group": "none/www-data"} {
			name := markers + "user-" + suffix
			pullAndRemove(t, name, func(i *runtimeapi.Image) {
				uid := "none"
				if i.Uid != nil {
					uid = fmt.Sprint(i.Uid.Value)
				}
				if got := uid + "/" + i.Username; got != want {
					t.Errorf("user of %s: got %s, want %s", name, got, want)
				}
			})
		}
	})
	t.Run("listImage should get exactly 3 image in the result list [Conformance]", func(t *testing.T) {
		var ids []string
		for _, n := range []string{"1", "2", "3"} {
			ids = append(ids, d.Pull(t, markers+n))
		}
		all := listImages(t, d)
		for _, id := range ids {
			if all[id] == nil {
				t.Errorf("ListImages: image %s is missing", id)
			}
			removeImage(t, d, id)
		}
		if all := listImages(t, d); len(all) != 0 {
			t.Errorf("images after the removals: got %v, want none", all)
		}
	})
	t.Run("listImage should get exactly 3 repoTags in the result image [Conformance]", func(t *testing.T) {
		want := []string{tags + ":1", tags + ":2", tags + ":3"}
		var id string
		for _, name := range want {
			id = d.Pull(t, name)
		}
		if got := listImages(t, d)[id]; !slices.Equal(slices.Sorted(slices.Values(got)), want) {
			t.Errorf("tags of the image: got %v, want %v", got, want)
		}
		removeImage(t, d, id)
	})
	t.Run("removing image by one tag should remove all tags [Conformance]", func(t *testing.T) {
		for _, n := range []string{":1", ":2", ":3"} {
			d.Pull(t, tags+n)
		}
		removeImage(t, d, tags+":2")
		if all := listImages(t, d); len(all) != 0 {
			t.Errorf("images after the removal by tag: got %v, want none", all)
		}
	})
	t.Run("removing image from one registry should remove all tags from other registries [Conformance]", func(t *testing.T) {
		other := strings.Replace(tags, harness.ImagePrefix, "other.test/", 1) + ":1"
		d.Pull(t, tags+":1")
		d.Pull(t, other)
		removeImage(t, d, tags+":1")
		if i := imageOf(t, d, other); i != nil {
			t.Errorf("status of %s after the removal: got %v, want none", other, i)
		}
	})
	t.Run("should list and get image status immediately after pulling [Conformance]", func(t *testing.T) {
		id := d.Pull(t, markers+"1")
		if all := listImages(t, d); all[id] == nil || imageOf(t, d, markers+"1").GetId() != id {
			t.Errorf("images after the pull: got %v, want %s", all, id)
		}
	})
	t.Run("should not list or get image status immediately after removal [Conformance]", func(t *testing.T) {
		id := d.Pull(t, markers+"1")
		removeImage(t, d, markers+"1")
		if all := listImages(t, d); all[id] != nil || imageOf(t, d, markers+"1") != nil || imageOf(t, d, id) != nil {
			t.Errorf("images after the removal: got %v, want no %s", all, id)
		}
	})
	t.Run("should not fail on simultaneous RemoveImage calls [Conformance]", func(t *testing.T) {
		id := d.Pull(t, markers+"1")
		var calls sync.WaitGroup
		for range 10 {
			calls.Go(func() {
				if err := d.Images().RemoveImage(context.Background(), spec(id)); err != nil {
					t.Error(err)
				}
			})
		}
		calls.Wait()
	})
	t.Run("should return the same image identifier across all APIs [Conformance]", func(t *testing.T) {
		id := d.Pull(t, harness.Busybox)
		c := sleeper(t, d)
		all, err := d.Runtime().ListContainers(context.Background(), &runtimeapi.ContainerFilter{Id: c.ID})
		if err != nil || len(all) != 1 {
			t.Fatalf("ListContainers: got %v, error %v; want one container", all, err)
		}
		if s := c.Status(); s.ImageId != id || all[0].ImageId != id || imageOf(t, d, harness.Busybox).Id != id || listImages(t, d)[id] == nil {
			t.Errorf("image IDs: got %s in the status and %s in the list, want %s", s.ImageId, all[0].ImageId, id)
		}
	})
	t.Run("should return the same image identifier when pulled from different registries [Conformance]", func(t *testing.T) {
		other := strings.Replace(tags, harness.ImagePrefix, "other.test/", 1) + ":1"
		if a, b := d.Pull(t, tags+":1"), d.Pull(t, other); a != b {
			t.Errorf("IDs of the same image from two registries: got %s and %s, want the same", a, b)
		}
		i := imageOf(t, d, tags+":1")
		if len(i.RepoTags) != 2 || len(i.RepoDigests) != 2 {
			t.Errorf("got tags %v, digests %v; want two of each", i.RepoTags, i.RepoDigests)
		}
		removeImage(t, d, other)
	})
	t.Run("an index gives the image of this platform", func(t *testing.T) {
		d.Pull(t, harness.Index)
		c := startPod(t, d).Run(harness.ContainerConfig("c", harness.Index, harness.Shell("cat /platform")))
		c.WaitExit(0)
		if got := harness.Text(c.Logs(), ""); !strings.Contains(got, runtime.GOARCH) {
			t.Errorf("/platform: got %q, want %s", got, runtime.GOARCH)
		}
	})
	t.Run("a manifest without an index", func(t *testing.T) { pullAndRemove(t, harness.Bare, func(*runtimeapi.Image) {}) })
	t.Run("layers", func(t *testing.T) {
		c := startPod(t, d).Run(harness.ContainerConfig("c", harness.Layers, harness.Sleep()))
		want := "a\nb\nbecomes-dir\nkept\nlink\nlinked\nopaque\nreplaced\nsetuid\n"
		if got := c.Must("ls", "/layers"); got != want {
			t.Errorf("files in /layers: got %q, want %q", got, want)
		}
		if got := c.Must("sh", "-c",
			"cd /layers && cat replaced link && ls opaque && stat -c %a becomes-dir setuid && test a -ef b && echo linked"); got != "high\nlow\nnew\n750\n4755\nlinked\n" {
			t.Errorf("content, modes and links in /layers: got %q", got)
		}
	})
	t.Run("a pull reports its progress", func(t *testing.T) {
		conn, err := grpc.NewClient("unix://"+d.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		pull := func(name string) (messages []map[string]any, err error) {
			stream, err := conn.NewStream(t.Context(), &grpc.StreamDesc{ServerStreams: true}, "/tripod.image.v1.Images/PullWithProgress")
			if err != nil {
				return nil, err
			}
			if err := errors.Join(stream.SendMsg(&runtimeapi.PullImageRequest{Image: spec(name)}), stream.CloseSend()); err != nil {
				return nil, err
			}
			for {
				message := &structpb.Struct{}
				if err := stream.RecvMsg(message); err == io.EOF {
					return messages, nil
				} else if err != nil {
					return messages, err
				}
				messages = append(messages, message.AsMap())
			}
		}
		messages, err := pull(harness.Nginx)
		if err != nil || len(messages) < 2 {
			t.Fatalf("got messages %v, error %v; want progress and a result", messages, err)
		}
		last, before := messages[len(messages)-1], messages[len(messages)-2]
		if last["image_ref"] != imageOf(t, d, harness.Nginx).GetId() || before["total"] == 0.0 || before["done"] != before["total"] {
			t.Errorf("got %v and at the end %v; want all bytes, and the image's ID", before, last)
		}
		_, err = pull("images.test/no/such/repository:1")
		wantCode(t, err, codes.NotFound)
	})
	t.Run("pinned images say so", func(t *testing.T) {
		d.Pull(t, harness.Pause)
		d.Pull(t, harness.Busybox)
		if !imageOf(t, d, harness.Pause).Pinned || imageOf(t, d, harness.Busybox).Pinned {
			t.Error("want the pause image pinned, and no other")
		}
	})
	t.Run("I1 labels of the image are not ours", func(t *testing.T) {
		d.Pull(t, harness.Config)
		c := startPod(t, d).Run(harness.ContainerConfig("c", harness.Config))
		if s := c.Status(); len(s.Labels) != 0 || len(s.Annotations) != 0 {
			t.Errorf("got labels %v, annotations %v; want none", s.Labels, s.Annotations)
		}
	})
	t.Run("an image in use is kept for its container", func(t *testing.T) {
		d.Pull(t, harness.Bare)
		c := startPod(t, d).Create(harness.ContainerConfig("c", harness.Bare, harness.Shell("cat /bare")))
		removeImage(t, d, harness.Bare)
		c.Start()
		c.WaitExit(0)
	})
}

func TestImageFsInfo(t *testing.T) {
	d := harness.StartDaemon(t)
	used := func(t *testing.T) uint64 {
		t.Helper()
		info, err := d.Images().ImageFsInfo(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		if len(info.ImageFilesystems) == 0 || len(info.ContainerFilesystems) == 0 {
			t.Fatalf("ImageFsInfo: got %v, want file systems of images and of containers", info)
		}
		f := info.ImageFilesystems[0]
		if fi, err := os.Stat(f.FsId.GetMountpoint()); err != nil || !fi.IsDir() || f.Timestamp == 0 || f.InodesUsed == nil {
			t.Errorf("file system of images: got %v (error %v), want a directory, a time and a number of inodes", f, err)
		}
		return f.UsedBytes.GetValue()
	}
	before := used(t)
	d.Pull(t, harness.Nginx)
	d.Restart() // because the daemon caches the figures for ten seconds
	size := imageOf(t, d, harness.Nginx).Size
	t.Run("usage should increase momentarily when an image is pulled", func(t *testing.T) {
		if got := used(t); got < before+size/2 {
			t.Errorf("usage after the pull: got %d bytes, was %d; the image has %d", got, before, size)
		}
	})
	t.Run("usage should decrease eventually when an image is removed", func(t *testing.T) {
		removeImage(t, d, harness.Nginx)
		harness.Eventually(t, 30*time.Second, func() error {
			if got := used(t); got > before+size/10 {
				return fmt.Errorf("usage after the removal: got %d bytes, was %d before the pull", got, before)
			}
			return nil
		})
	})
}

// TestSplitImageFileSystem has the containers' writable layers on a file system of their own.
func TestSplitImageFileSystem(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "containers")
	mountTmpfs(t, dir, "")
	d := harness.StartDaemon(t, harness.Set("image.containers_dir", dir))
	c := startPod(t, d).Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep()))
	c.Must("sh", "-c", "dd if=/dev/zero of=/written bs=1M count=3 2>/dev/null")
	info, err := d.Images().ImageFsInfo(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	images, containers := info.ImageFilesystems[0], info.ContainerFilesystems[0]
	if images.FsId.GetMountpoint() != filepath.Join(d.Root, "image") || containers.FsId.GetMountpoint() != dir {
		t.Errorf("got file systems %v and %v, want those of the root and of %s", images.FsId, containers.FsId, dir)
	}
	layers := func() []string {
		t.Helper()
		found, err := filepath.Glob(filepath.Join(dir, "tripod-layers", "*", "*"))
		if err != nil {
			t.Fatal(err)
		}
		return found
	}
	if found := layers(); len(found) != 1 {
		t.Fatalf("layers below %s: got %v, want one", dir, found)
	}
	if info, err := os.Stat(filepath.Join(layers()[0], "fs", "written")); err != nil || info.Size() != 3<<20 {
		t.Errorf("the container's file is not in its layer: %v", err)
	}
	harness.Eventually(t, 30*time.Second, func() error {
		stats, err := d.Runtime().ContainerStats(context.Background(), c.ID)
		if err != nil {
			return err
		}
		if used := stats.GetWritableLayer(); used.GetUsedBytes().GetValue() < 3<<20 || used.GetFsId().GetMountpoint() != dir {
			return fmt.Errorf("writable layer: got %v, want 3 MiB on %s", used, dir)
		}
		return nil
	})
	d.Kill()
	d.Start()
	if got := c.Must("stat", "-c", "%s", "/written"); got != "3145728\n" {
		t.Errorf("size of the file after a restart of the daemon: got %q", got)
	}
	c.Remove()
	harness.Eventually(t, 10*time.Second, func() error {
		if left := layers(); len(left) > 0 {
			return fmt.Errorf("layers after the removal: got %v, want none", left)
		}
		return nil
	})
}
