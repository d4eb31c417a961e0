package unitpods

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/wire"
	"github.com/tripod-run/tripod/internal/node"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// TestAdopt: a running module keeps running, with its log and its channels, and is not started twice.
func TestAdopt(t *testing.T) {
	r := newRig(t)
	p := r.create(4, uuid, withChannel)
	r.worker()
	r.print(uuid, "before")
	r.want(4, wire.ModuleLog, "before")
	r.reopen()
	r.print(uuid, "after")
	if ok, err := r.Adopt(t.Context(), 4, r.data(uuid)); !ok || err != nil {
		t.Fatalf("Adopt returned %v, %v, want true without an error", ok, err)
	}
	if ok, err := r.Adopt(t.Context(), 5, r.data(uuid)); ok || !errdefs.IsAlreadyExists(err) {
		t.Errorf("adopted twice %v, %v", ok, err)
	}
	r.want(4, wire.ModuleLog, "after")
	w := r.worker()
	r.must(w.Write(open(0, "app/c")))
	if m := r.receive(); m.Arg != channel.OpenChannel || m.Module != 4 {
		t.Errorf("received %+v, want a message of type OpenChannel", m)
	}
	if pods := r.node.Pods(); len(pods) != 1 || pods[0].ID != p.ID || pods[0].Container(p.ID).State != node.Running {
		t.Errorf("pods %v", pods)
	}
	r.must(r.Delete(t.Context(), 4, uuid))
	r.wantExited(4, 143, "killed") // it was told to end, and had a second to
	r.cleanup(4, uuid)
}

// TestAdoptWhatHasEnded: an exit while no daemon ran is reported, after the last lines.
func TestAdoptWhatHasEnded(t *testing.T) {
	r := newRig(t)
	p := r.create(0, uuid)
	r.must(r.Runtime.Close())
	r.print(uuid, "last words")
	r.guests.Exit(p.ID, 4)
	r.eventually("the container has ended", func() bool { return r.pod(uuid).Container(p.ID).State == node.Stopped })
	r.reopen()
	if ok, err := r.Adopt(t.Context(), 0, r.data(uuid)); !ok || err != nil {
		t.Fatalf("Adopt returned %v, %v, want true without an error", ok, err)
	}
	r.want(0, wire.ModuleLog, "last words")
	r.wantExited(0, 4, "exited")
	r.cleanup(0, uuid)
}

func TestAdoptWhatIsNotThere(t *testing.T) {
	r := newRig(t)
	if ok, err := r.Adopt(t.Context(), 0, r.data(uuid)); ok || err != nil {
		t.Errorf("nothing: %v, %v", ok, err)
	}
	plan, err := r.plan(r.data(uuid))
	r.must(err)
	_, err = r.node.RunSandbox(t.Context(), plan.pod, "wasm")
	r.must(err)
	if ok, err := r.Adopt(t.Context(), 0, r.data(uuid)); ok || err != nil {
		t.Errorf("a sandbox: %v, %v", ok, err)
	}
	id, err := r.node.RunSandbox(t.Context(), plan.pod, "wasm")
	r.must(err)
	plan.container.Image = &runtimeapi.ImageSpec{Image: "image"}
	_, err = r.node.CreateContainer(t.Context(), id, plan.container)
	r.must(err)
	if ok, err := r.Adopt(t.Context(), 0, r.data(uuid)); ok || err != nil {
		t.Errorf("a container that was never started: %v, %v", ok, err)
	}
	if pods := r.node.Pods(); len(pods) != 0 {
		t.Errorf("pods are left: %v, want none", pods)
	}
	r.create(0, uuid)
}

// TestAdoptAfterAReboot: a module with an unknown exit is removed, so that the manager creates it again.
func TestAdoptAfterAReboot(t *testing.T) {
	r := newRig(t)
	r.create(0, uuid, withChannel)
	r.close()
	r.must(os.RemoveAll(filepath.Join(r.dir, "pods")))
	r.open()
	if ok, err := r.Adopt(t.Context(), 0, r.data(uuid)); ok || err != nil {
		t.Fatalf("Adopt returned %v, %v, want false without an error", ok, err)
	}
	if pods := r.node.Pods(); len(pods) != 0 {
		t.Errorf("pods are left: %v, want none", pods)
	}
	r.create(0, uuid, withChannel)
}

func TestAdoptKeepsTheDeadline(t *testing.T) {
	r := newRig(t)
	r.create(0, uuid, `"resources":{"deadline":1}`)
	r.reopen()
	if ok, err := r.Adopt(t.Context(), 0, r.data(uuid)); !ok || err != nil {
		t.Fatalf("Adopt returned %v, %v, want true without an error", ok, err)
	}
	r.wantExited(0, 137, "deadline")
}

// TestCreateAfterACrash: what an earlier daemon left of a module does not prevent creating it again.
func TestCreateAfterACrash(t *testing.T) {
	r := newRig(t)
	old := r.create(0, uuid)
	r.print(uuid, "of the one before")
	r.reopen()
	p := r.create(1, uuid)
	if len(r.node.Pods()) != 1 || p.ID == old.ID {
		t.Errorf("pods %v", r.node.Pods())
	}
	r.print(uuid, "hello")
	r.want(1, wire.ModuleLog, "hello")
}

// TestOrphans: pods without a module are removed after a while; pods of other owners are not.
func TestOrphans(t *testing.T) {
	r := newRig(t, func(c *Config) { c.OrphanAge = 200 * time.Millisecond })
	r.create(0, "kept")
	r.create(1, "orphan")
	foreign, err := r.plan(r.data("foreign"))
	r.must(err)
	foreign.pod.Annotations = nil // labels alone are nothing
	_, err = r.node.RunSandbox(t.Context(), foreign.pod, "wasm")
	r.must(err)
	r.reopen()
	if ok, err := r.Adopt(t.Context(), 0, r.data("kept")); !ok || err != nil {
		t.Fatalf("Adopt returned %v, %v, want true without an error", ok, err)
	}
	r.eventually("the orphan is removed", func() bool { return len(r.node.Pods()) == 2 })
	r.pod("kept")
	r.pod("foreign")
}

// TestImagesOfFiles: a file is imported once, and again when it has changed; its image is removed when it is unused for
// a while.
func TestImagesOfFiles(t *testing.T) {
	r := newRig(t, func(c *Config) { c.ImageIdle = 100 * time.Millisecond })
	first := r.create(0, "a").Container(r.pod("a").ID)
	r.create(1, "b", `"file":"`+filepath.Join(r.modules, "m.wasm")+`"`)
	r.create(2, "c")
	if r.shelf.count() != 1 || r.shelf.imports != 2 { // one for each way to name it
		t.Errorf("%d images, %d imports", r.shelf.count(), r.shelf.imports)
	}
	if first.Config.Command[0] != "m.wasm" {
		t.Errorf("argv %v", first.Config.Command)
	}
	other := append([]byte(nil), emptyModule...)
	other = append(other, 0, 2, 1, 'x') // a custom section
	r.must(os.WriteFile(filepath.Join(r.modules, "new"), other, 0o644))
	r.must(os.Rename(filepath.Join(r.modules, "new"), filepath.Join(r.modules, "m.wasm")))
	r.create(3, "d")
	if r.shelf.count() != 2 {
		t.Errorf("%d images", r.shelf.count())
	}
	for i, uuid := range []string{"a", "b", "c"} {
		r.must(r.Delete(t.Context(), i, uuid))
		r.wantExited(i, 137, "killed")
		r.cleanup(i, uuid)
	}
	r.eventually("the first image is removed", func() bool { return r.shelf.count() == 1 })
	time.Sleep(3 * r.config.ImageIdle) // pacing: only time shows that it is not removed
	if r.shelf.count() != 1 {
		t.Error("the image of a module that runs is removed")
	}
	r.reopen()
	r.eventually("after a restart without modules", func() bool { return r.shelf.count() == 0 })
}

// TestImagesByReference: an image with a digest is pulled if it is missing, and kept.
func TestImagesByReference(t *testing.T) {
	r := newRig(t, func(c *Config) { c.ImageIdle = 50 * time.Millisecond })
	ref := "registry.example/m@sha256:" + strings.Repeat("ab", 32)
	for i, uuid := range []string{"a", "b"} {
		p := r.create(i, uuid, `"file":null`, `"image":"`+ref+`"`)
		if got := p.Container(p.ID).Config.Image.UserSpecifiedImage; got != ref {
			t.Errorf("image %q", got)
		}
	}
	if len(r.shelf.pulls) != 1 {
		t.Errorf("pulls %v", r.shelf.pulls)
	}
	time.Sleep(3 * r.config.ImageIdle) // as above
	if r.shelf.count() != 1 {
		t.Error("a pulled image is removed")
	}
}

func TestPodNames(t *testing.T) {
	for in, want := range map[string]string{
		"hello": "hello", "Hello World!": "hello-world-33333333", "": "module-33333333", "ü": "module-33333333",
		strings.Repeat("a", 80): strings.Repeat("a", 54) + "-33333333",
	} {
		if got := podName(in, uuid); got != want {
			t.Errorf("%q is %q, want %q", in, got, want)
		}
	}
	if k := key("../x"); strings.Contains(k, "/") || len(k) != 64 || key(uuid) != uuid {
		t.Errorf("key %q", k)
	}
}

var _ sandbox.Channeler = (*guests)(nil)
