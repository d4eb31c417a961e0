package linux

import (
	"bytes"
	"context"
	"crypto/rand"
	"debug/elf"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/sandbox"
	"github.com/tripod-run/tripod/test/harness/testns"
)

// TestMain runs the tests as root in namespaces of their own: they mount, make cgroups, and crun wants no cgroup2
// beside cgroup v1.
func TestMain(m *testing.M) {
	testns.Reenter()
	if !testns.Inside() {
		os.Exit(testns.Run(append([]string{"/proc/self/exe"}, os.Args[1:]...), testns.Options{Strict: true}))
	}
	if raw := os.Getenv(victimEnv); raw != "" {
		var v victim
		if err := errors.Join(json.Unmarshal([]byte(raw), &v), v.live()); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// bothRuntimes runs a test with crun and with runc.
func bothRuntimes(t *testing.T, test func(t *testing.T, r *rig)) {
	for _, name := range []string{"crun", "runc"} {
		t.Run(name, func(t *testing.T) { test(t, newRig(t, name)) })
	}
}

// rig is a backend with a directory, images and cgroups of its own, which must be empty in the end.
type rig struct {
	tb     testing.TB
	cfg    Config
	images *fakeImages
	*Backend

	mu     sync.Mutex
	events []sandbox.Event
	wake   chan struct{}
	logs   *bytes.Buffer
}

func newRig(tb testing.TB, runtime string) *rig {
	dir := tb.TempDir()
	r := &rig{tb: tb, images: newFakeImages(tb, filepath.Join(dir, "images")), wake: make(chan struct{}, 1)}
	r.cfg = Config{
		Root: filepath.Join(dir, "root"), RunDir: filepath.Join(dir, "run"), Runtime: runtime,
		CgroupParent: filepath.Join(os.Getenv(testns.EnvCgroup), filepath.Base(filepath.Dir(dir))),
		Images:       r.images, Logger: slog.New(slog.NewTextHandler(testWriter{tb}, nil)),
	}
	tb.Cleanup(func() { r.checkEmpty() })
	r.restart()
	return r
}

type testWriter struct{ testing.TB }

func (w testWriter) Write(p []byte) (int, error) {
	w.Logf("%s", bytes.TrimSpace(p))
	return len(p), nil
}

// restart is what a restart of the daemon is for the backend: a new one that knows nothing but what is told.
func (r *rig) restart(known ...sandbox.Known) sandbox.Found {
	r.tb.Helper()
	if r.Backend != nil {
		r.Backend.abandon()
	}
	b, err := New(r.cfg)
	if err != nil {
		r.tb.Fatal(err)
	}
	r.Backend = b
	found, err := b.Recover(context.Background(), known, r.sink)
	if err != nil {
		r.tb.Fatal(err)
	}
	return found
}

// abandon makes the backend deaf, as if its process were gone.
func (b *Backend) abandon() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.sink = func(sandbox.Event) {}
	for _, h := range b.containers {
		h.mu.Lock()
		if h.life != nil {
			h.life.init.close()
			h.life.conmon.close()
		}
		h.mu.Unlock()
	}
	for id, p := range b.pauses {
		p.close()
		delete(b.pauses, id)
	}
	_ = b.Close()
}

func (r *rig) sink(e sandbox.Event) {
	r.mu.Lock()
	r.events = append(r.events, e)
	r.mu.Unlock()
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// waitEvent waits for the event of a container, or of a pod when container is empty.
func (r *rig) waitEvent(pod, container string) sandbox.Event {
	r.tb.Helper()
	deadline := time.After(20 * time.Second)
	for {
		r.mu.Lock()
		i := slices.IndexFunc(r.events, func(e sandbox.Event) bool { return e.PodID == pod && e.ContainerID == container })
		var found sandbox.Event
		if i >= 0 {
			found = r.events[i]
			r.events = slices.Delete(r.events, i, i+1)
		}
		r.mu.Unlock()
		if i >= 0 {
			return found
		}
		select {
		case <-r.wake:
		case <-deadline:
			r.tb.Fatalf("no event of %s/%s", pod, container)
		}
	}
}

// checkEmpty is the leak check: no mount, process, cgroup, directory or snapshot is left.
func (r *rig) checkEmpty() {
	r.Backend.abandon()
	if r.tb.Failed() {
		r.sweep()
		return
	}
	if left := mountsBelow(filepath.Dir(r.cfg.Root)); len(left) > 0 {
		r.tb.Errorf("mounts left: %v", left)
	}
	for _, dir := range []string{r.cfg.Root, filepath.Join(r.cfg.RunDir, "pods"), r.cfg.exitDir(), r.cfg.ociDir(), r.cfg.execDir()} {
		if entries, _ := os.ReadDir(dir); len(entries) > 0 {
			r.tb.Errorf("left in %s: %v", dir, entries)
		}
	}
	if keys, _ := r.images.Snapshots(context.Background()); len(keys) > 0 {
		r.tb.Errorf("snapshots left: %v", keys)
	}
	g := r.cgroups
	for _, full := range g.dirs(g.parent) {
		entries, _ := os.ReadDir(full)
		for _, e := range entries {
			if e.IsDir() && e.Name() != conmonCgroup {
				r.tb.Errorf("cgroup left: %s", filepath.Join(full, e.Name()))
			}
		}
	}
	if left := monitors(r.cfg.Root); len(left) > 0 {
		r.tb.Errorf("monitors left: %v", left)
	}
}

// sweep removes what a failed test left, with the backend's own recovery of an empty record.
func (r *rig) sweep() {
	b, err := New(r.cfg)
	if err != nil {
		return
	}
	_, _ = b.Recover(context.Background(), nil, func(sandbox.Event) {})
	_ = b.Close()
	for _, m := range mountsBelow(filepath.Dir(r.cfg.Root)) {
		_ = unmount(m)
	}
}

func mountsBelow(dir string) (found []string) {
	raw, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(raw)) {
		if f := strings.Fields(line); len(f) > 4 && strings.HasPrefix(f[4], dir+"/") {
			found = append(found, f[4])
		}
	}
	return found
}

// testPod is a pod under test with its containers.
type testPod struct {
	r *rig
	*sandbox.Pod
	logs string
}

func newID() string {
	b := make([]byte, 32)
	_, _ = rand.Read(b)
	return hex.EncodeToString(b)
}

// pod makes a pod with a network namespace of its own and containers that have their own PID namespaces, unless
// change says otherwise. It is removed at the end.
func (r *rig) pod(change ...func(*runtimeapi.PodSandboxConfig)) *testPod {
	r.tb.Helper()
	id := newID()
	logs := filepath.Join(r.tb.TempDir(), "logs")
	config := &runtimeapi.PodSandboxConfig{
		Metadata: &runtimeapi.PodSandboxMetadata{Name: "test", Namespace: "default", Uid: id[:8]},
		Hostname: "pod-" + id[:6], LogDirectory: logs,
		Linux: &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
			NamespaceOptions: &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_CONTAINER},
		}},
	}
	for _, f := range change {
		f(config)
	}
	p := &testPod{r: r, logs: logs, Pod: &sandbox.Pod{ID: id, Handler: "linux", Config: config}}
	if config.Linux.SecurityContext.NamespaceOptions.Network == runtimeapi.NamespaceMode_POD {
		p.Netns = makeNetns(r.tb)
	}
	if err := r.Validate(p.Pod, nil); err != nil {
		r.tb.Fatal(err)
	}
	r.tb.Cleanup(func() {
		if err := errors.Join(r.StopSandbox(context.Background(), p.Pod), r.RemoveSandbox(context.Background(), p.Pod)); err != nil {
			r.tb.Error(err)
		}
	})
	if err := r.CreateSandbox(context.Background(), p.Pod); err != nil {
		r.tb.Fatal(err)
	}
	return p
}

func makeNetns(tb testing.TB) string {
	name := filepath.Join(tb.TempDir(), "netns")
	if err := os.WriteFile(name, nil, 0o600); err != nil {
		tb.Fatal(err)
	}
	err := onNewThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		return pinNamespace("/proc/thread-self/ns/net", name)
	})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = unmount(name) })
	return name
}

// testContainer is a container under test.
type testContainer struct {
	pod *testPod
	*sandbox.Container
}

// container makes a container that runs a shell script. It is removed at the end.
func (p *testPod) container(script string, change ...func(*runtimeapi.ContainerConfig)) *testContainer {
	p.r.tb.Helper()
	id := newID()
	config := &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: "c"},
		Image:    &runtimeapi.ImageSpec{Image: busybox},
		Command:  []string{"/bin/sh", "-c", script},
		LogPath:  filepath.Join("c-"+id[:6], "0.log"),
		Linux: &runtimeapi.LinuxContainerConfig{SecurityContext: &runtimeapi.LinuxContainerSecurityContext{
			NamespaceOptions: &runtimeapi.NamespaceOption{
				Pid:     p.Config.Linux.SecurityContext.NamespaceOptions.Pid,
				Network: p.Config.Linux.SecurityContext.NamespaceOptions.Network,
				Ipc:     p.Config.Linux.SecurityContext.NamespaceOptions.Ipc,
			},
		}},
	}
	for _, f := range change {
		f(config)
	}
	c := &testContainer{pod: p, Container: &sandbox.Container{ID: id, Config: config, ImageID: busybox}}
	if err := p.r.Validate(p.Pod, c.Container); err != nil {
		p.r.tb.Fatal(err)
	}
	p.r.tb.Cleanup(func() {
		if err := p.r.RemoveContainer(context.Background(), p.Pod, c.Container); err != nil {
			p.r.tb.Error(err)
		}
	})
	if _, err := p.r.CreateContainer(context.Background(), p.Pod, c.Container); err != nil {
		p.r.tb.Fatal(err)
	}
	return c
}

func (c *testContainer) start() *testContainer {
	c.pod.r.tb.Helper()
	if err := c.pod.r.StartContainer(context.Background(), c.pod.Pod, c.Container); err != nil {
		c.pod.r.tb.Fatal(err)
	}
	return c
}

func (c *testContainer) stop(grace time.Duration) {
	c.pod.r.tb.Helper()
	if err := c.pod.r.StopContainer(context.Background(), c.pod.Pod, c.Container, grace); err != nil {
		c.pod.r.tb.Fatal(err)
	}
}

func (c *testContainer) status() sandbox.Status {
	c.pod.r.tb.Helper()
	s, err := c.pod.r.Status(context.Background(), c.pod.Pod, c.Container)
	if err != nil {
		c.pod.r.tb.Fatal(err)
	}
	return s
}

// waitExit waits for the container to end and gives its status.
func (c *testContainer) waitExit() sandbox.Status {
	c.pod.r.tb.Helper()
	return c.pod.r.waitEvent(c.pod.ID, c.ID).Status
}

// exec runs a script in the container and gives what it wrote to stdout.
func (c *testContainer) exec(script string) string {
	c.pod.r.tb.Helper()
	var out, errOut bytes.Buffer
	code, err := c.pod.r.Exec(context.Background(), c.pod.Pod, c.Container, sandbox.ExecRequest{
		Cmd: []string{"/bin/sh", "-c", script}, Stdout: &out, Stderr: &errOut,
	})
	if err != nil || code != 0 {
		c.pod.r.tb.Fatalf("exec %q: code %d, %v, %s", script, code, err, &errOut)
	}
	return strings.TrimSpace(out.String())
}

func (c *testContainer) logFile() string { return filepath.Join(c.pod.logs, c.Config.LogPath) }

// log gives the messages of the CRI log file.
func (c *testContainer) log() string {
	c.pod.r.tb.Helper()
	raw, err := os.ReadFile(c.logFile())
	if err != nil {
		c.pod.r.tb.Fatal(err)
	}
	var b strings.Builder
	for line := range strings.Lines(string(raw)) {
		f := strings.SplitN(line, " ", 4)
		if len(f) != 4 {
			c.pod.r.tb.Fatalf("not a line of a CRI log: %q", line)
		}
		if _, err := time.Parse(time.RFC3339Nano, f[0]); err != nil {
			c.pod.r.tb.Fatal(err)
		}
		b.WriteString(f[1] + " " + f[3])
	}
	return b.String()
}

// waitLog waits until the log contains text.
func (c *testContainer) waitLog(text string) {
	c.pod.r.tb.Helper()
	for deadline := time.Now().Add(20 * time.Second); !strings.Contains(c.log(), text); {
		if time.Now().After(deadline) {
			c.pod.r.tb.Fatalf("%q is not in the log: %s", text, c.log())
		}
		time.Sleep(5 * time.Millisecond) // pacing; the log is another process's
	}
}

func (p *testPod) known(containers ...*testContainer) sandbox.Known {
	k := sandbox.Known{Pod: p.Pod}
	for _, c := range containers {
		k.Containers = append(k.Containers, c.Container)
	}
	return k
}

// busybox is the ID of the one image.
const busybox = "sha256:busybox"

// fakeImages gives overlays over one directory with busybox in it. What it knows is on the disk: <dir>/<key>/.
type fakeImages struct{ base, dir string }

func openFakeImages(dir string) *fakeImages { return &fakeImages{filepath.Join(dir, "base"), dir} }

func newFakeImages(tb testing.TB, dir string) *fakeImages {
	f := openFakeImages(dir)
	if err := makeRootfs(f.base); err != nil {
		tb.Fatal(err)
	}
	return f
}

func (f *fakeImages) Get(_ context.Context, id string) (image.Image, error) {
	if id != busybox {
		return image.Image{}, fmt.Errorf("image %s: %w", id, errdefs.ErrNotFound)
	}
	return image.Image{ID: id, Kind: image.KindRootfs, Config: ocispec.Image{Config: ocispec.ImageConfig{Env: []string{"PATH=/bin"}}}}, nil
}

func (f *fakeImages) Prepare(ctx context.Context, key, id string, _ map[string]string) ([]mount.Mount, error) {
	return f.make(ctx, key, id, "upper", "work")
}

func (f *fakeImages) View(ctx context.Context, key, id string) ([]mount.Mount, error) {
	return f.make(ctx, key, id, "view")
}

func (f *fakeImages) make(ctx context.Context, key, id string, subs ...string) ([]mount.Mount, error) {
	if _, err := f.Get(ctx, id); err != nil {
		return nil, err
	}
	for _, sub := range subs {
		if err := os.MkdirAll(filepath.Join(f.dir, key, sub), 0o755); err != nil {
			return nil, err
		}
	}
	return f.Mounts(ctx, key)
}

func (f *fakeImages) Mounts(_ context.Context, key string) ([]mount.Mount, error) {
	dir := filepath.Join(f.dir, key)
	switch {
	case exists(filepath.Join(dir, "view")):
		return []mount.Mount{{Type: "bind", Source: f.base, Options: []string{"ro", "bind"}}}, nil
	case exists(dir):
		return []mount.Mount{{Type: "overlay", Source: "overlay", Options: []string{
			"lowerdir=" + f.base, "upperdir=" + filepath.Join(dir, "upper"), "workdir=" + filepath.Join(dir, "work"),
		}}}, nil
	}
	return nil, fmt.Errorf("snapshot %s: %w", key, errdefs.ErrNotFound)
}

func (f *fakeImages) Release(_ context.Context, key string) error {
	return os.RemoveAll(filepath.Join(f.dir, key))
}

func (f *fakeImages) Snapshots(context.Context) (keys []string, err error) {
	entries, err := os.ReadDir(f.dir)
	for _, e := range entries {
		if e.Name() != "base" {
			keys = append(keys, e.Name())
		}
	}
	return keys, err
}

func (f *fakeImages) Usage(_ context.Context, key string) (image.Usage, error) {
	return image.Usage{Bytes: 4096, Inodes: 1, Timestamp: time.Now()}, nil
}

// makeRootfs makes a root file system of Debian's busybox and the libraries that it wants. The applets are hard links,
// so that each is a file of its own to the kernel.
func makeRootfs(dir string) error {
	const program = "/bin/busybox"
	for _, sub := range []string{"bin", "dev", "proc", "sys", "etc", "tmp", "root"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			return err
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "etc/passwd"), []byte("root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n"), 0o644); err != nil {
		return err
	}
	if err := copyFile(program, filepath.Join(dir, program)); err != nil {
		return fmt.Errorf("apt-get install busybox: %w", err)
	}
	for _, applet := range strings.Fields("sh sleep cat echo ls id hostname kill env dd stat mkdir rm tr wc yes head test true setsid ps stty printf grep touch ipcs ipcmk") {
		if err := os.Link(filepath.Join(dir, program), filepath.Join(dir, "bin", applet)); err != nil {
			return err
		}
	}
	return copyLibraries(dir, program)
}

func copyLibraries(dir, program string) error {
	f, err := elf.Open(program)
	if err != nil {
		return err
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			raw, err := io.ReadAll(p.Open())
			if err != nil {
				return err
			}
			name := string(bytes.TrimRight(raw, "\x00"))
			if err := copyFile(name, filepath.Join(dir, name)); err != nil {
				return err
			}
		}
	}
	libs, _ := f.ImportedLibraries()
	for _, lib := range libs {
		found, _ := filepath.Glob("/lib/*-linux-gnu/" + lib)
		if len(found) == 0 {
			return fmt.Errorf("library %s: %w", lib, fs.ErrNotExist)
		}
		if err := copyFile(found[0], filepath.Join(dir, found[0])); err != nil {
			return err
		}
	}
	return nil
}

func copyFile(from, to string) error {
	raw, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	return os.WriteFile(to, raw, 0o755)
}
