package vm

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/image/disk"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/boot"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/tap"
	"github.com/tripod-run/tripod/test/harness/cdimage"
	"github.com/tripod-run/tripod/test/harness/testns"
	"github.com/tripod-run/tripod/test/until"
)

// imageStore is a fake image store. An image's name says what it contains: disk…, kernel… or cd…, a CD-ROM; others contain
// none of these.
type imageStore struct {
	dir string

	mu     sync.Mutex
	leases map[string]string // key to image
}

const diskSize = 1 << 20

func (s *imageStore) Machine(_ context.Context, id string) (*disk.MachineImage, error) {
	switch {
	case strings.HasPrefix(id, "disk"):
		return &disk.MachineImage{Layout: disk.LayoutContainerDisk, Format: "raw", VirtualSize: diskSize}, nil
	case strings.HasPrefix(id, "cd"):
		return &disk.MachineImage{Layout: disk.LayoutDiskArtifact, Format: "raw", VirtualSize: diskSize, ISO9660: true}, nil
	case strings.HasPrefix(id, "kernel"):
		return &disk.MachineImage{Layout: disk.LayoutKernel}, nil
	}
	return nil, fmt.Errorf("image %s has neither a disk nor a kernel: %w", id, errdefs.ErrInvalidArgument)
}

func (s *imageStore) OpenDisk(ctx context.Context, key, id string) (*disk.Files, error) {
	made, err := s.Machine(ctx, id)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if old := s.leases[key]; old != "" && old != id {
		return nil, fmt.Errorf("%s holds %s: %w", key, old, errdefs.ErrAlreadyExists)
	}
	s.leases[key] = id
	path := filepath.Join(s.dir, id)
	content := bootSector(id)
	if id == "cd-uefi" {
		content = cdimage.Build(false, make([]byte, 2048))
	}
	if err := os.WriteFile(path, content, 0o600); err != nil {
		return nil, err
	}
	f, err := os.Open(path)
	if made.Layout == disk.LayoutKernel {
		return &disk.Files{MachineImage: *made, Kernel: f, KernelPath: path, Cmdline: "console=ttyS0 quiet"}, err
	}
	return &disk.Files{MachineImage: *made, Disk: f, DiskPath: path}, err
}

// bootSector returns an image's boot sector. If the name contains uefi, the boot sector is for UEFI, without code. If
// the name contains cut, the boot sector has code, and a partition that is longer than the disk. Otherwise it is all
// zeros.
func bootSector(id string) []byte {
	boot := make([]byte, 512)
	signed, kind := true, byte(0xef)
	switch {
	case strings.Contains(id, "uefi"):
		boot[458] = 1
	case strings.Contains(id, "cut"):
		boot[0], boot[458], boot[460], kind = 0xf4, 1, 0xff, 0x83 // 0xff0000 sectors
	default:
		signed = false
	}
	if signed {
		boot[450], boot[454], boot[510], boot[511] = kind, 1, 0x55, 0xaa
	}
	return boot
}

func (s *imageStore) CloseDisk(_ context.Context, key string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.leases, key)
	return nil
}

func (s *imageStore) Disks(context.Context) ([]string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.leases)), nil
}

// wires is a fake network in which each pod has one interface.
type wires struct {
	mu     sync.Mutex
	serves map[string]int // by namespace
	fail   error
}

func (w *wires) Wire(_ context.Context, netns string, o tap.Options) ([]tap.Interface, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.fail != nil {
		return nil, w.fail
	}
	if o.UID == 0 || netns == "" {
		return nil, fmt.Errorf("wired %+v in %q: %w", o, netns, errdefs.ErrInvalidArgument)
	}
	if err := os.WriteFile(o.Record, []byte("wired"), 0o600); err != nil {
		return nil, err
	}
	return w.Read(o.Record)
}

func (w *wires) Read(record string) ([]tap.Interface, error) {
	if _, err := os.Stat(record); err != nil {
		return nil, fmt.Errorf("%w: %w", err, errdefs.ErrNotFound)
	}
	return []tap.Interface{{
		Link: "eth0", Tap: "tap0", MAC: "02:00:00:00:00:01", MTU: 1500, Addrs: []netip.Prefix{netip.MustParsePrefix("127.0.0.1/8")},
		Routes: []tap.Route{{Dst: netip.MustParsePrefix("0.0.0.0/0"), GW: netip.MustParseAddr("127.0.0.254")}},
	}}, nil
}

func (w *wires) Unwire(_ context.Context, _, record string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.fail != nil {
		return w.fail
	}
	return ledger.RemoveFile(record)
}

func (w *wires) Serve(_ context.Context, netns string, _ []tap.Interface, _ tap.Config) (io.Closer, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.serves[netns]++
	return closer(func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.serves[netns]--
	}), nil
}

func (w *wires) serving() (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, served := range w.serves {
		n += served
	}
	return n
}

func (w *wires) set(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.fail = err
}

type closer func()

func (c closer) Close() error { c(); return nil }

// rig is a backend under test with its fakes. The backend can be stopped, as if the daemon were killed, and opened
// again on the same files.
type rig struct {
	testing.TB
	*Backend
	config settings
	images *imageStore
	wires  *wires
	driver *hypervisor
	events chan sandbox.Event
	known  map[string]sandbox.Known
}

func newRig(t testing.TB, change ...func(*settings)) *rig {
	t.Helper()
	parent := testns.Cgroup()
	if parent == "" {
		t.Fatal("run by hack/testns.sh: the tests make cgroups")
	}
	tree, err := cgroup.Open(cgroup.DriverCgroupfs, parent+"/vm")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	r := &rig{
		TB: t, images: &imageStore{dir: t.TempDir(), leases: map[string]string{}}, wires: &wires{serves: map[string]int{}},
		driver: &hypervisor{machines: map[string]*guest{}}, events: make(chan sandbox.Event, 1000), known: map[string]sandbox.Known{},
	}
	section := config.Default().VM
	section.UIDBase, section.UIDCount, section.BootTimeout = 300_000, 3, 0
	r.config = settings{
		Config: Config{VM: section, Annotations: sandbox.AllowList{"*"}, Root: filepath.Join(dir, "root"), RunDir: filepath.Join(dir, "run")},
		Driver: r.driver, Images: r.images, Network: r.wires, Cgroup: tree,
		Virtiofs: func(context.Context) error { return errdefs.ErrNotFound },
		UEFI:     func() (boot.UEFI, error) { return boot.UEFI{}, errdefs.ErrFailedPrecondition },
		Logger:   slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
	for _, c := range change {
		c(&r.config)
	}
	r.open()
	t.Cleanup(func() {
		for _, k := range r.known {
			r.must(r.RemoveSandbox(r.ctx(), k.Pod))
		}
		r.must(r.Close())
		r.noneLeft()
	})
	return r
}

// open makes a backend and calls Recover with the known pods.
func (r *rig) open() sandbox.Found {
	r.Helper()
	b, err := newBackend(r.config)
	r.must(err)
	r.Backend = b
	found, err := b.Recover(r.ctx(), slices.Collect(maps.Values(r.known)), func(e sandbox.Event) { r.events <- e })
	r.must(err)
	return found
}

// stop cuts the backend off from machines and node, as if the daemon's process had ended.
func (r *rig) stop() { r.must(r.Close()) }

// restart stops the backend and opens another one.
func (r *rig) restart() {
	r.Helper()
	r.stop()
	r.open()
}

func (r *rig) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), 30*time.Second)
	r.Cleanup(cancel)
	return ctx
}

func (r *rig) must(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

// noneLeft checks that no files, leases, machines, responders or cgroups of pods are left.
func (r *rig) noneLeft() {
	r.Helper()
	for _, dir := range []string{r.config.podsDir(), r.config.disksDir()} {
		entries, err := os.ReadDir(dir)
		if err != nil || len(entries) > 0 {
			r.Errorf("ReadDir(%s) = %v, %v; want no entries", dir, entries, err)
		}
	}
	if leased, _ := r.images.Disks(r.ctx()); len(leased) > 0 {
		r.Errorf("leases left: %v", leased)
	}
	if len(r.driver.machines) > 0 {
		r.Errorf("machines left: %v", r.driver.machines)
	}
	if n := r.wires.serving(); n != 0 {
		r.Errorf("%d responders left", n)
	}
	for _, dir := range r.config.Cgroup.Dirs(r.config.Cgroup.Parent) {
		if left, _ := filepath.Glob(filepath.Join(dir, "tripod-vm-*")); len(left) > 0 {
			r.Errorf("cgroups left: %v", left)
		}
	}
}

func hashOf(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:])
}

// pod makes a pod.
func (r *rig) pod(name string, change ...func(*runtimeapi.PodSandboxConfig)) *sandbox.Pod {
	r.Helper()
	p := r.podConfig(name, change...)
	r.must(r.Validate(p, nil))
	r.known[p.ID] = sandbox.Known{Pod: p}
	r.must(r.CreateSandbox(r.ctx(), p))
	return p
}

func (r *rig) podConfig(name string, change ...func(*runtimeapi.PodSandboxConfig)) *sandbox.Pod {
	config := &runtimeapi.PodSandboxConfig{
		Metadata: &runtimeapi.PodSandboxMetadata{Name: name, Namespace: "test", Uid: name}, Annotations: map[string]string{},
		LogDirectory: filepath.Join(r.TempDir(), "logs"), Linux: &runtimeapi.LinuxPodSandboxConfig{},
	}
	for _, c := range change {
		c(config)
	}
	return &sandbox.Pod{ID: hashOf(name), Handler: "vm", Config: config, Netns: "/somewhere/" + name,
		IPs: []netip.Addr{netip.MustParseAddr("127.0.0.1")}}
}

// container returns a container with the image, without creating it.
func (r *rig) container(p *sandbox.Pod, image string) *sandbox.Container {
	return &sandbox.Container{ID: p.ID, ImageID: image, Config: &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: "c"}, Image: &runtimeapi.ImageSpec{Image: image},
		LogPath: "c.log", Linux: &runtimeapi.LinuxContainerConfig{},
	}}
}

func (r *rig) create(p *sandbox.Pod, image string, change ...func(*runtimeapi.ContainerConfig)) *sandbox.Container {
	r.Helper()
	c := r.container(p, image)
	for _, change := range change {
		change(c.Config)
	}
	r.must(r.Validate(p, c))
	_, err := r.CreateContainer(r.ctx(), p, c)
	r.must(err)
	r.known[p.ID] = sandbox.Known{Pod: p, Containers: []*sandbox.Container{c}}
	return c
}

// run makes a pod and starts its container.
func (r *rig) run(name, image string) (*sandbox.Pod, *sandbox.Container) {
	r.Helper()
	p := r.pod(name)
	c := r.create(p, image)
	r.must(r.StartContainer(r.ctx(), p, c))
	return p, c
}

// wantState checks the state in a container's status, and returns the status.
func (r *rig) wantState(p *sandbox.Pod, c *sandbox.Container, want sandbox.State) sandbox.Status {
	r.Helper()
	s, err := r.Status(r.ctx(), p, c)
	r.must(err)
	if s.State != want {
		r.Fatalf("Status(%s) = %+v, want state %d", p.Config.Metadata.Name, s, want)
	}
	return s
}

// waitEnd waits for the event of a container's end.
func (r *rig) waitEnd(c *sandbox.Container) sandbox.Status {
	r.Helper()
	timeout := time.After(20 * time.Second)
	for {
		select {
		case e := <-r.events:
			if e.ContainerID == c.ID {
				return e.Status
			}
		case <-timeout:
			r.Fatal("no event reports the end of the container")
		}
	}
}

// eventually polls until a condition holds.
func (r *rig) eventually(what string, holds func() bool) {
	r.Helper()
	until.Holds(r, what, holds)
}

// log returns the content of the container's log.
func (r *rig) log(p *sandbox.Pod) string {
	raw, err := os.ReadFile(filepath.Join(p.Config.LogDirectory, "c.log"))
	r.must(err)
	return string(raw)
}
