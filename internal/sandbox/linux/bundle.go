package linux

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierrors "k8s.io/cri-api/pkg/errors"

	"github.com/tripod-run/tripod/internal/cdi"
	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/mnt"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/notifier"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/shared"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/spec"
)

var (
	fpSnapshot = failpoint.New("linux.create-container.snapshot")
	fpBundle   = failpoint.New("linux.create-container.bundle")
	fpMounted  = failpoint.New("linux.create-container.mounted")
)

func rootfsDir(bundle string) string  { return filepath.Join(bundle, "rootfs") }
func volumesDir(bundle string) string { return filepath.Join(bundle, "volumes") }
func configFile(bundle string) string { return filepath.Join(bundle, "config.json") }

// volumeKey returns the key of an image volume's snapshot. The number is the volume's index in the request's mounts.
func volumeKey(id string, n int) string { return fmt.Sprintf("%s%s-volume-%d", snapshotPrefix, id, n) }

// volumeDir returns the path on which the image volume with the given number is mounted.
func volumeDir(bundle string, n int) string {
	return filepath.Join(volumesDir(bundle), strconv.Itoa(n))
}

// CreateContainer implements sandbox.Backend. For an existing container it returns the stored answer. It removes the
// remains of a failed attempt.
func (b *Backend) CreateContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) (sandbox.Resolved, error) {
	return b.CreateSpecified(ctx, p, c, func(context.Context, *specs.Spec) (*sandbox.Container, error) { return c, nil })
}

// CreateSpecified implements sandbox.Specifier.
func (b *Backend) CreateSpecified(
	ctx context.Context, p *sandbox.Pod, c *sandbox.Container, adjust func(context.Context, *specs.Spec) (*sandbox.Container, error),
) (sandbox.Resolved, error) {
	made, known, err := b.ledger.Known(p.ID, c.ID)
	if err != nil || known {
		return made.Resolved, err
	}
	b.joins.Expect() // in time for a start that follows
	config, answer, err := b.specify(ctx, p, c)
	if err != nil {
		return sandbox.Resolved{}, err
	}
	adjusted, err := adjust(ctx, config)
	if err != nil {
		return sandbox.Resolved{}, err
	}
	if adjusted != c {
		c = adjusted
		if config, answer, err = b.build(ctx, p, c); err != nil {
			return sandbox.Resolved{}, err
		}
	}
	if err := b.install(p, c, config); err != nil {
		return sandbox.Resolved{}, err
	}
	_, cgroup := b.cgroups.container(p, c.ID)
	return answer, b.ledger.Create(p.ID, c.ID, state{
		Record: ledger.Record{Phase: ledger.Created}, BootID: bootID(), OwnPID: ownPID(config), Forgettable: forgettable(config),
		Cgroup: cgroup, TTY: c.Config.GetTty(), Resolved: answer,
	})
}

// Spec implements sandbox.Specifier.
func (b *Backend) Spec(p *sandbox.Pod, c *sandbox.Container) (*specs.Spec, error) {
	h, err := b.ledger.Find(p.ID, c.ID)
	if err != nil {
		return nil, err
	}
	if h == nil {
		return nil, fmt.Errorf("container %s: %w", c.ID, errdefs.ErrNotFound)
	}
	config, err := readConfig(b.bundleOf(h))
	if errors.Is(err, os.ErrNotExist) { // it is being removed
		return nil, fmt.Errorf("%w: %w", err, errdefs.ErrNotFound)
	}
	return config, err
}

// specify makes the container's layer and bundle, mounts its file systems and builds its OCI specification. It removes
// the remains of a failed attempt.
func (b *Backend) specify(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) (*specs.Spec, sandbox.Resolved, error) {
	bundle := b.cfg.bundle(p.ID, c.ID)
	if ledger.Exists(bundle) {
		if err := b.RemoveContainer(ctx, p, c); err != nil {
			return nil, sandbox.Resolved{}, fmt.Errorf("remove the remains of an earlier attempt: %w", err)
		}
	}
	if err := b.prepareLayer(ctx, p, c); err != nil {
		return nil, sandbox.Resolved{}, err
	}
	if err := fpSnapshot.Hit(ctx); err != nil {
		return nil, sandbox.Resolved{}, err
	}
	if err := os.MkdirAll(bundle, 0o700); err != nil {
		return nil, sandbox.Resolved{}, fmt.Errorf("make the bundle: %w", err)
	}
	if err := fpBundle.Hit(ctx); err != nil {
		return nil, sandbox.Resolved{}, err
	}
	config, answer, err := b.build(ctx, p, c)
	if err != nil {
		return nil, sandbox.Resolved{}, err
	}
	return config, answer, fpMounted.Hit(ctx)
}

// ownPID reports whether the container gets its own PID namespace.
func ownPID(config *specs.Spec) bool {
	for _, ns := range config.Linux.Namespaces {
		if ns.Type == specs.PIDNamespace {
			return ns.Path == ""
		}
	}
	return false
}

// build mounts the container's file systems and builds its OCI specification.
func (b *Backend) build(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) (*specs.Spec, sandbox.Resolved, error) {
	bundle := b.cfg.bundle(p.ID, c.ID)
	img, err := b.images.Get(ctx, c.ImageID)
	if err != nil {
		return nil, sandbox.Resolved{}, fmt.Errorf("image %s: %w", c.ImageID, err)
	}
	labels, err := b.labelContainer(p, c)
	if err != nil {
		return nil, sandbox.Resolved{}, err
	}
	volumes, err := b.mountAll(ctx, p, c, labels.Mount)
	if err != nil {
		return nil, sandbox.Resolved{}, err
	}
	run := b.cfg.podRunDir(p.ID)
	at, files := shared.PinsOf(p, run), shared.FilesOf(p, run)
	pid := at.PID
	if spec.ContainerModes(p, c).Target != "" {
		pid = b.targetPin(p.ID, c.ID)
	}
	oci, _ := b.cgroups.container(p, c.ID)
	dirs := map[string]string{}
	for path, v := range volumes {
		dirs[path] = v.dir
	}
	config, answer, err := spec.Build(spec.Input{
		Pod: p, Container: c, Image: img.Config.Config, Rootfs: rootfsDir(bundle),
		Net: at.Net, IPC: at.IPC, UTS: at.UTS, PID: pid, User: at.User,
		CgroupsPath: oci, ShmPath: files.Shm,
		ResolvConf: files.ResolvConf, Hosts: files.Hosts, HostnameFile: files.Hostname,
		ImageVolumes: dirs, Labels: labels,
	}, b.hostNow())
	if err != nil {
		return nil, sandbox.Resolved{}, err
	}
	for _, m := range answer.Mounts {
		if v, ok := volumes[m.ContainerPath]; ok {
			m.Image.ImageRef = v.imageID
		}
	}
	return config, answer, b.complete(p, c, config)
}

// complete adds to a specification what does not come from the request's fields. The notifier comes last, because a
// plugin of the node can replace the seccomp profile.
func (b *Backend) complete(p *sandbox.Pod, c *sandbox.Container, config *specs.Spec) error {
	if err := b.injectDevices(config, c); err != nil {
		return err
	}
	if err := spec.Adjust(config, c.Adjustment, b.host); err != nil {
		return err
	}
	if action := b.notifierAction(p, c); action != "" {
		return notifier.Apply(config.Linux.Seccomp, b.cfg.notifierSocket(), notifierMetadata(p.ID, c.ID, action))
	}
	return nil
}

// injectDevices adds the CDI devices that a container requests to its specification.
func (b *Backend) injectDevices(config *specs.Spec, c *sandbox.Container) error {
	names, err := cdi.Names(c.Config)
	if err != nil {
		return err
	}
	return cdi.New(b.cfg.CDIDirs).Inject(config, names)
}

// volume is an image mounted for a container: its path on the host and the image's ID.
type volume struct{ dir, imageID string }

// mountAll mounts the root file system and the image volumes unless they are mounted already. It returns the volumes,
// keyed by their path in the container. All files get the SELinux label, if it is not "".
func (b *Backend) mountAll(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, label string) (map[string]volume, error) {
	bundle := b.cfg.bundle(p.ID, c.ID)
	mounts, err := b.images.Mounts(ctx, snapshotPrefix+c.ID)
	if err != nil {
		return nil, fmt.Errorf("root file system of container %s: %w", c.ID, err)
	}
	if mounts, err = b.labels.Layer(mounts, label); err != nil {
		return nil, fmt.Errorf("root file system of container %s: %w", c.ID, err)
	}
	if err := b.mountLayer(ctx, p, mounts, bundle); err != nil {
		return nil, err
	}
	volumes := map[string]volume{}
	for n, m := range c.Config.GetMounts() {
		if m.GetImage().GetImage() == "" {
			continue
		}
		v, err := b.mountVolume(ctx, p, c.ID, n, m, label)
		if err != nil {
			return nil, fmt.Errorf("%w: mounts[%d], image %s: %w", crierrors.ErrImageVolumeMountFailed, n, m.Image.Image, err)
		}
		volumes[m.ContainerPath] = v
	}
	return volumes, nil
}

func (b *Backend) mountVolume(ctx context.Context, p *sandbox.Pod, id string, n int, m *runtimeapi.Mount, label string) (volume, error) {
	img, err := b.images.Get(ctx, m.Image.Image)
	if err != nil {
		return volume{}, err
	}
	bundle := b.cfg.bundle(p.ID, id)
	dir := volumeDir(bundle, n)
	if err := os.MkdirAll(dir, 0o700); err != nil { // make it before the snapshot, because removal finds the snapshot by this directory
		return volume{}, err
	}
	mounts, err := b.images.View(ctx, volumeKey(id, n), img.ID)
	if err != nil {
		return volume{}, err
	}
	if mounts, err = b.labels.View(mounts, label, bundle); err != nil {
		return volume{}, err
	}
	if err := b.mountView(p, mounts, dir); err != nil {
		return volume{}, err
	}
	dir, err = spec.ResolveSubPath(dir, m.ImageSubPath)
	return volume{dir, img.ID}, err
}

// mountView mounts an image volume unless it is mounted already.
func (b *Backend) mountView(p *sandbox.Pod, mounts []mount.Mount, dir string) error {
	if p.IDMap() == nil {
		return mnt.Mount(mounts, dir)
	}
	users, err := shared.OpenUsers(p, b.cfg.podRunDir(p.ID))
	if err != nil {
		return err
	}
	defer users.Close()
	return mnt.MappedView(mounts, users, dir)
}

// remount restores the mounts and the specification before a start, and returns the latter. A reboot removes the mounts,
// and a power failure can damage files that were written shortly before the failure, including the container's layer.
func (b *Backend) remount(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, h *handle) (*specs.Spec, error) {
	lost, err := b.layerLost(ctx, h)
	if err != nil {
		return nil, err
	}
	config, readErr := readConfig(b.bundleOf(h))
	switch {
	case lost:
		config, err = b.renewLayer(ctx, p, c, h)
	case readErr != nil:
		config, _, err = b.build(ctx, p, c)
	case mnt.IsMounted(rootfsDir(b.bundleOf(h))) && b.exposed(p, c.ID):
		return config, nil
	case p.IDMap() != nil:
		config, _, err = b.build(ctx, p, c)
	default:
		_, err := b.mountAll(ctx, p, c, config.Linux.MountLabel)
		return config, err
	}
	if err != nil {
		return nil, err
	}
	return config, b.install(p, c, config)
}

// install makes what a new specification needs outside the bundle, and writes the specification.
func (b *Backend) install(p *sandbox.Pod, c *sandbox.Container, config *specs.Spec) error {
	if err := spec.Relabel(c.Config, config.Linux.MountLabel); err != nil {
		return err
	}
	if p.IDMap() != nil {
		if err := b.expose(p, c.ID, config); err != nil {
			return err
		}
	}
	return ledger.WriteJSON(configFile(b.cfg.bundle(p.ID, c.ID)), config)
}

func readConfig(bundle string) (*specs.Spec, error) {
	raw, err := os.ReadFile(configFile(bundle))
	if err != nil {
		return nil, err
	}
	config := new(specs.Spec)
	if err := json.Unmarshal(raw, config); err != nil {
		return nil, fmt.Errorf("%s: %w", configFile(bundle), err)
	}
	return config, nil
}

// volumesIn lists the numbers of a bundle's image volumes, as strings.
func volumesIn(bundle string) (names []string, err error) {
	entries, err := os.ReadDir(volumesDir(bundle))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names, err
}

// unmountAll unmounts a container's file systems.
func (b *Backend) unmountAll(podID, id string) error {
	bundle := b.cfg.bundle(podID, id)
	volumes, err := volumesIn(bundle)
	err = errors.Join(err, mnt.Unexpose(b.cfg.podRunDir(podID), id), mnt.Unmount(rootfsDir(bundle)))
	for _, name := range volumes {
		err = errors.Join(err, mnt.Unmount(filepath.Join(volumesDir(bundle), name)))
	}
	return err
}

// releaseSnapshots releases the snapshots of the container and of its image volumes. It finds the volumes by their
// mount points.
func (b *Backend) releaseSnapshots(ctx context.Context, bundle, id string) error {
	volumes, err := volumesIn(bundle)
	if err != nil {
		return err
	}
	keys := []string{snapshotPrefix + id}
	for _, name := range volumes {
		keys = append(keys, snapshotPrefix+id+"-volume-"+name)
	}
	for _, key := range keys {
		if err := b.images.Release(ctx, key); err != nil && !errdefs.IsNotFound(err) {
			return err
		}
	}
	return nil
}

// removeBundle removes the bundle. It first calls rmdir on each directory that serves as a mount point. rmdir fails if
// something is still mounted on the directory, or if the directory is not empty. So the recursive removal that follows
// never enters a mount.
func removeBundle(bundle string) error {
	volumes, err := volumesIn(bundle)
	if err != nil {
		return err
	}
	if err := ledger.RemoveFile(rootfsDir(bundle)); err != nil {
		return err
	}
	for _, name := range volumes {
		if err := ledger.RemoveFile(filepath.Join(volumesDir(bundle), name)); err != nil {
			return err
		}
	}
	return os.RemoveAll(bundle)
}

// containerOfKey returns the container ID in a snapshot key, or "" if the key is not ours.
func containerOfKey(key string) string {
	rest, ours := strings.CutPrefix(key, snapshotPrefix)
	id, _, _ := strings.Cut(rest, "-volume-")
	if !ours || !cgroup.ID().MatchString(id) {
		return ""
	}
	return id
}
