package linux

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/mnt"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/oci"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/selinux"
	"github.com/tripod-run/tripod/test/harness/testns"
	"github.com/tripod-run/tripod/test/races"
)

// TestMain runs the tests as root in their own namespaces, because they mount file systems and create cgroups, and crun
// does not accept cgroup2 beside cgroup v1.
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
	os.Exit(races.Run(m.Run))
}

// bothRuntimes runs a test with crun and with runc.
func bothRuntimes(t *testing.T, test func(t *testing.T, r *rig)) {
	for _, name := range []string{"crun", "runc"} {
		t.Run(name, func(t *testing.T) { test(t, newRig(t, name)) })
	}
}

// rig is a backend with its own directory, images and cgroups, which the test must leave empty.
type rig struct {
	tb     testing.TB
	cfg    Config
	images *fakeImages
	log    *slog.Logger
	policy selinux.Policy // a fake kernel's, for tests of SELinux
	*Backend

	mu     sync.Mutex
	events []sandbox.Event
	wake   chan struct{} // closed on the next event
}

func newRig(tb testing.TB, runtime string) *rig {
	dir := tb.TempDir()
	if err := os.Chmod(filepath.Dir(dir), 0o711); err != nil { // roots of user namespaces must reach the run directory
		tb.Fatal(err)
	}
	r := &rig{tb: tb, images: newFakeImages(tb, filepath.Join(dir, "images")), wake: make(chan struct{})}
	r.cfg = Config{
		Root: filepath.Join(dir, "root"), RunDir: filepath.Join(dir, "run"), Runtime: runtime,
		CgroupParent: filepath.Join(testns.Cgroup(), filepath.Base(filepath.Dir(dir))),
	}
	r.log = slog.New(slog.NewTextHandler(testWriter{tb}, nil))
	tb.Cleanup(func() { r.checkEmpty() })
	r.restart()
	return r
}

func (r *rig) open() (*Backend, error) {
	b, err := Open(context.Background(), r.cfg, Services{Images: r.images, Logger: r.log})
	if err == nil && r.policy != nil {
		b.host.SELinux = true
		b.labels, err = selinux.NewPool(r.policy)
	}
	return b, err
}

type testWriter struct{ testing.TB }

func (w testWriter) Write(p []byte) (int, error) {
	w.Logf("%s", bytes.TrimSpace(p))
	return len(p), nil
}

// restart simulates a restart of the daemon. The new backend knows only the pods that it gets in Recover.
func (r *rig) restart(known ...sandbox.Known) sandbox.Found {
	r.tb.Helper()
	if r.Backend != nil {
		r.Backend.abandon()
	}
	b, err := r.open()
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

// abandon makes the backend ignore all further events, as if its process had died.
func (b *Backend) abandon() {
	defer b.Close()
	b.ledger.ReportTo(nil)
	for _, h := range b.ledger.All() {
		if _, l := h.Snapshot(); l != nil {
			l.Init.Close()
			l.Conmon.Close()
		}
	}
	b.sessions.mu.Lock()
	for _, hub := range b.sessions.hubs {
		_ = hub.Conn.Close()
	}
	b.sessions.mu.Unlock()
	b.mu.Lock()
	defer b.mu.Unlock()
	for id, p := range b.pauses {
		p.Close()
		delete(b.pauses, id)
	}
}

func (r *rig) sink(e sandbox.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, e)
	close(r.wake) // wakes all waiters
	r.wake = make(chan struct{})
}

// waitEvent waits for the event of a container, or of the pod if container is empty.
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
		wake := r.wake
		r.mu.Unlock()
		if i >= 0 {
			return found
		}
		select {
		case <-wake:
		case <-deadline:
			r.tb.Fatalf("no event of pod %s, container %q within 20 s", pod, container)
		}
	}
}

// checkEmpty fails the test if a mount, process, cgroup, directory or snapshot is left.
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
			r.tb.Errorf("entries left in %s: %v", dir, entries)
		}
	}
	if keys, _ := r.images.Snapshots(context.Background()); len(keys) > 0 {
		r.tb.Errorf("snapshots left: %v", keys)
	}
	g := r.cgroups
	for _, full := range g.Dirs(g.Parent) {
		entries, _ := os.ReadDir(full)
		for _, e := range entries {
			if e.IsDir() && e.Name() != cgroup.Mark+"conmon" {
				r.tb.Errorf("cgroup left: %s", filepath.Join(full, e.Name()))
			}
		}
	}
	if left := oci.Monitors(r.cfg.Root); len(left) > 0 {
		r.tb.Errorf("monitors left: %v", left)
	}
}

// sweep removes the remains of a failed test by recovering from an empty record.
func (r *rig) sweep() {
	b, err := r.open()
	if err != nil {
		return
	}
	_, _ = b.Recover(context.Background(), nil, func(sandbox.Event) {})
	_ = b.Close()
	for _, m := range mountsBelow(filepath.Dir(r.cfg.Root)) {
		_ = mnt.Unmount(m)
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

// pod creates a pod with its own network namespace and a PID namespace per container, unless change alters the request.
// The pod is removed at the end of the test.
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
		p.Netns = r.makeNetns(p.Pod)
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

// makeNetns makes a pod's network namespace, as the network does.
func (r *rig) makeNetns(p *sandbox.Pod) string {
	tb := r.tb
	name := filepath.Join(tb.TempDir(), "netns")
	if err := os.WriteFile(name, nil, 0o600); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = mnt.Unmount(name) })
	if p.IDMap() != nil {
		if err := r.MakeNetns(p, name); err != nil {
			tb.Fatal(err)
		}
		return name
	}
	err := mnt.OnNewThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		return unix.Mount("/proc/thread-self/ns/net", name, "", unix.MS_BIND, "")
	})
	if err != nil {
		tb.Fatal(err)
	}
	return name
}

// testContainer is a container under test.
type testContainer struct {
	pod *testPod
	*sandbox.Container
}

// container creates a container that runs a shell script. The container is removed at the end of the test.
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

// launch makes the first half of a start: conmon has created the container, whose program does not run yet.
func (c *testContainer) launch() oci.Processes {
	r, ctx := c.pod.r, context.Background()
	r.tb.Helper()
	h, _ := r.ledger.Find(c.pod.ID, c.ID)
	if _, err := r.prepareStart(ctx, c.pod.Pod, c.Container, h); err != nil {
		r.tb.Fatal(err)
	}
	s, _ := h.Snapshot()
	got, err := r.conmon.Start(ctx, oci.Launch{ID: c.ID, Bundle: r.bundleOf(h), LogPath: s.LogPath}, r.runtime)
	if err != nil {
		r.tb.Fatal(err)
	}
	return got
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

// waitExit waits for the container to end and returns its status.
func (c *testContainer) waitExit() sandbox.Status {
	c.pod.r.tb.Helper()
	return c.pod.r.waitEvent(c.pod.ID, c.ID).Status
}

// exec runs a script in the container and returns its stdout.
func (c *testContainer) exec(script string) string {
	c.pod.r.tb.Helper()
	var out, errOut bytes.Buffer
	code, err := c.pod.r.Exec(context.Background(), c.pod.Pod, c.Container, sandbox.ExecRequest{
		Cmd: []string{"/bin/sh", "-c", script}, Stdout: &out, Stderr: &errOut,
	})
	if err != nil || code != 0 {
		c.pod.r.tb.Fatalf("exec %q: got code %d, error %v, stderr %q; want success", script, code, err, &errOut)
	}
	return strings.TrimSpace(out.String())
}

func (c *testContainer) logFile() string { return filepath.Join(c.pod.logs, c.Config.LogPath) }

// log returns the messages in the CRI log file.
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
			c.pod.r.tb.Fatalf("log line %q is not in the CRI format", line)
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
	c.waitLogs(text, 1)
}

// waitLogs is like waitLog, for a text that the log contains n times.
func (c *testContainer) waitLogs(text string, n int) {
	c.pod.r.tb.Helper()
	for deadline := time.Now().Add(20 * time.Second); strings.Count(c.log(), text) < n; {
		if time.Now().After(deadline) {
			c.pod.r.tb.Fatalf("log: got %q, want it to contain %q %d times", c.log(), text, n)
		}
		time.Sleep(5 * time.Millisecond) // pacing of a poll: another process writes the log
	}
}

func (p *testPod) known(containers ...*testContainer) sandbox.Known {
	k := sandbox.Known{Pod: p.Pod}
	for _, c := range containers {
		k.Containers = append(k.Containers, c.Container)
	}
	return k
}
