package e2e

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// TestVMTranslatedImage: a Virtlet pod with the annotation and a translated image name. The disk is downloaded by HTTP
// over a connection that breaks once. After its image is removed and the daemon restarted, the machine still starts
// from it.
func TestVMTranslatedImage(t *testing.T) {
	disk, err := os.ReadFile(harness.VMFile(t, "disk.qcow2"))
	if err != nil {
		t.Fatal(err)
	}
	var asked, resumed atomic.Int32
	files := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("ETag", `"1"`)
		if asked.Add(1) == 1 {
			w.Header().Set("Content-Length", fmt.Sprint(len(disk)))
			_, _ = w.Write(disk[:len(disk)/2])
			panic(http.ErrAbortHandler)
		}
		if r.Header.Get("Range") != "" {
			resumed.Add(1)
		}
		http.ServeContent(w, r, "", time.Time{}, strings.NewReader(string(disk)))
	}))
	t.Cleanup(files.Close)
	rules := t.TempDir()
	text := fmt.Sprintf("prefix: lab\ntranslations:\n- {regexp: '^debian/(\\d+)$', url: '%s/$1/disk.img'}\n", files.URL)
	if err := os.WriteFile(filepath.Join(rules, "10-lab.yaml"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	d := harness.StartDaemon(t, harness.VM(t), harness.Set("vm.translations_dir", rules))

	config := harness.PodConfig(t, "vm")
	config.Annotations = map[string]string{"kubernetes.io/target-runtime": "virtlet.cloud"}
	pod := d.RunPod(t, config)
	t.Cleanup(pod.Remove)
	const image = "virtlet.cloud/lab/debian/12"
	id := d.Pull(t, image)
	if asked.Load() != 2 || resumed.Load() != 1 {
		t.Errorf("requests to the server: got %d, %d of them for a range; want 2 and 1", asked.Load(), resumed.Load())
	}
	if img := imageOf(t, d, image); img == nil || img.Id != id || len(img.RepoTags) != 1 || img.RepoTags[0] != image+":latest" ||
		img.Size < uint64(len(disk)) {
		t.Errorf("image status: got %+v, want the ID %s and one tag", img, id)
	}
	c := pod.Run(harness.ContainerConfig("c", image))
	c.WaitGuest()
	if got := c.Status(); got.ImageRef != id || got.ImageId != id {
		t.Errorf("image of the container: got ref %q, ID %q; want %q", got.ImageRef, got.ImageId, id)
	}
	removeImage(t, d, image)
	d.Kill()
	d.Start()
	c.Stop(30 * time.Second)
	c.WaitExit(0)
	c.Start()
	c.WaitGuestBoot(2)
	if again := d.Pull(t, image); again != id {
		t.Errorf("ID after another pull: got %s, want %s", again, id)
	}
}

// TestVMBadImages: CreateContainer refuses an image that no machine can run, with the reason (fault I5).
func TestVMBadImages(t *testing.T) {
	d := harness.StartDaemon(t, harness.VM(t))
	for image, word := range map[string]string{harness.BackingDisk: "backing file", harness.TwoDisks: "more than one file",
		tags + ":1": "neither a disk"} {
		pod := d.RunPodWith(t, harness.PodConfig(t, "bad"), "vm")
		d.Pull(t, image)
		_, err := d.CRI().CreateContainer(context.Background(), &runtimeapi.CreateContainerRequest{
			PodSandboxId: pod.ID, Config: harness.ContainerConfig("c", image), SandboxConfig: pod.Config,
		})
		wantCode(t, err, codes.InvalidArgument)
		if err != nil && !strings.Contains(err.Error(), word) {
			t.Errorf("%s: got error %v, want %q in it", image, err, word)
		}
		pod.Remove()
	}
	_, err := d.ImageCRI().PullImage(context.Background(), &runtimeapi.PullImageRequest{Image: spec("virtlet.cloud/unknown")})
	wantCode(t, err, codes.NotFound)
}

// TestVMDiskArtifact: a machine boots from a disk that is a layer of an artifact.
func TestVMDiskArtifact(t *testing.T) {
	d := harness.StartDaemon(t, harness.VM(t))
	d.RunVM(t, &harness.PodSpec{Image: harness.DiskArtifact}).WaitGuest()
}
