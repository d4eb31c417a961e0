package e2e

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// TestWasmPush: a component that `tripod push` has pushed runs. A second push results in the same digest.
func TestWasmPush(t *testing.T) {
	tripod, err := harness.Binary()
	if err != nil {
		t.Fatal(err)
	}
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	example := func(name string) string { return filepath.Join(harness.Root(), "examples", "wasm", name) }
	run := func(args ...string) (stdout, stderr string) {
		t.Helper()
		c := exec.CommandContext(t.Context(), tripod, args...)
		var errs strings.Builder
		c.Dir, c.Stderr = t.TempDir(), &errs
		out, err := c.Output()
		if err != nil {
			t.Fatalf("tripod %q: %v\n%s%s", args, err, out, &errs)
		}
		return strings.TrimSpace(string(out)), errs.String()
	}
	push := func(app, name string, args ...string) string {
		t.Helper()
		ref, notes := run(append([]string{"push", "--plain-http", example(app), harness.Registry(t).Addr + "/" + name}, args...)...)
		_, path, _ := strings.Cut(notes, ": ")
		if line, _ := run("check", "--plain-http", ref); !strings.HasSuffix(line, "; "+strings.TrimSpace(path)) ||
			!strings.HasPrefix(path, "core path") {
			t.Errorf("output of tripod check: got %q, want what push said: %q", line, notes)
		}
		return ref
	}
	proto := []string{"--proto", example("greeter/greeter.proto"), "--component", "example.org:Pushed@2.0.0"}
	ref := push("greeter-c/greeter-c.wasm", "pushed/greeter:1", proto...)
	if again := push("greeter-c/greeter-c.wasm", "pushed/greeter:1", proto...); again != ref {
		t.Errorf("second push: got %s, want %s", again, ref)
	}
	repo, digest, _ := strings.Cut(ref, "@")
	if !strings.HasSuffix(repo, "/pushed/greeter") || !strings.HasPrefix(digest, "sha256:") {
		t.Errorf("output of tripod push: got %q, want a reference with a digest", ref)
	}
	c := d.RunWasm(t, &harness.PodSpec{Image: harness.ImagePrefix + "pushed/greeter:1",
		Pod: []harness.PodOption{labels("example.org", "Pushed", "2.0.0")}})
	if c.Status().ImageRef == "" || c.Pod.ID != "example.org:Pushed@2.0.0#0" {
		t.Errorf("got pod %s, container status %v; want the name in the labels and an image", c.Pod.ID, c.Status())
	}
	if got := dial(t, c.Pod.IP(), greeter).call(greeter+"/SayHello", `{"name":"Ada"}`); !strings.Contains(got, "Hello, Ada!") {
		t.Errorf("answer: got %s, want \"Hello, Ada!\"", got)
	}

	push("command-go/command-go.wasm", "pushed/command:1")
	done := d.RunWasm(t, &harness.PodSpec{Image: harness.ImagePrefix + "pushed/command:1",
		Container: []harness.ContainerOption{args("out", "pushed")}})
	done.WaitExit(0)
	if log := harness.Text(done.Logs(), "stdout"); log != "pushed\n" {
		t.Errorf("log: got %q, want pushed", log)
	}
}

// TestWasmVimanaLayout: a component whose image has a Metadata message instead of descriptors runs.
func TestWasmVimanaLayout(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	c := d.RunWasm(t, &harness.PodSpec{Image: harness.ImagePrefix + "tripod/wasm/vimana:1"})
	if got := dial(t, c.Pod.IP(), "echo.v1.Echo").call("echo.v1.Echo/Echo", `{"data":"aGVsbG8="}`); got != `{"data":"aGVsbG8="}` {
		t.Errorf("answer: got %s, want the echo", got)
	}
}

// TestWasmStartsWithoutItsImage: a created container can be started after its image was removed.
func TestWasmStartsWithoutItsImage(t *testing.T) {
	ctx := context.Background()
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	c := d.RunWasm(t, &harness.PodSpec{Image: harness.GreeterC})
	c.Stop(time.Second)
	removeImage(t, d, harness.GreeterC)
	// Remove the compiled code too, on disk and in the worker.
	cache := filepath.Join(d.Root, "wasm", "cache")
	d.Stop()
	entries, listErr := os.ReadDir(cache)
	err := os.RemoveAll(cache)
	for _, pid := range workers(t) {
		err = errors.Join(err, syscall.Kill(pid, syscall.SIGKILL))
	}
	d.Start()
	if err := errors.Join(listErr, err); err != nil || len(entries) == 0 {
		t.Fatalf("entries of compiled code: got %d, error %v; want at least one", len(entries), err)
	}
	if _, err := d.CRI().StartContainer(ctx, &runtimeapi.StartContainerRequest{ContainerId: c.ID}); err != nil {
		t.Fatal(err)
	}
	dial(t, c.Pod.IP(), greeter).call(greeter+"/SayHello", `{"name":"Ada"}`)
}
