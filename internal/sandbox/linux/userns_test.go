package linux

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/mnt"
	"github.com/tripod-run/tripod/test/harness/testns"
)

// firstID is the first of the node's IDs in the tests' user namespaces.
const firstID = 1 << 24

// mapped requests a user namespace.
func mapped(c *runtimeapi.PodSandboxConfig) {
	uids, gids := testIDs().Mappings()
	c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = &runtimeapi.UserNamespace{Uids: uids, Gids: gids}
}

func testIDs() sandbox.IDMap {
	r := sandbox.IDRange{First: firstID, Length: sandbox.IDMapLength}
	return sandbox.IDMap{Users: r, Groups: r}
}

// mappedVolume mounts a host path, with the pod's mappings.
func mappedVolume(host, path string, change ...func(*runtimeapi.Mount)) func(*runtimeapi.ContainerConfig) {
	return func(c *runtimeapi.ContainerConfig) {
		m := &runtimeapi.Mount{HostPath: host, ContainerPath: path}
		m.UidMappings, m.GidMappings = testIDs().Mappings()
		for _, f := range change {
			f(m)
		}
		c.Mounts = append(c.Mounts, m)
	}
}

func TestUserNamespace(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p := r.pod(mapped)
		dir := filepath.Join(t.TempDir(), "volume")
		if err := errors.Join(os.Mkdir(dir, 0o700), os.WriteFile(filepath.Join(dir, "secret"), []byte("s3cret\n"), 0o400)); err != nil {
			t.Fatal(err)
		}
		c := p.container("echo up; "+forever, mappedVolume(dir, "/volume")).start()
		c.waitLog("up")
		for script, want := range map[string]string{
			"cat /proc/self/uid_map": fmt.Sprintf("0 %d 65536", firstID),
			"cat /proc/self/gid_map": fmt.Sprintf("0 %d 65536", firstID),
			"id -u; id -g":           "0 0",
			"stat -c %u:%g / /bin/sh /etc/hosts /dev/shm /volume": "0:0 0:0 0:0 0:0 0:0",
			"cat /volume/secret":                                     "s3cret",
			"echo hi > /volume/new; stat -c %u /volume/new":          "0",
			"echo hi > /bin/new; stat -c %u /bin/new; rm /bin/new":   "0",
			"echo 127.0.0.9 nine >> /etc/hosts; tail -n1 /etc/hosts": "127.0.0.9 nine",
			"hostname": p.Config.Hostname,
			"cat /proc/sys/net/ipv4/ip_unprivileged_port_start":  "0",
			"ls -d /sys/class/net/lo":                            "/sys/class/net/lo",
			"echo x > /dev/null; stat -c %n /dev/null /dev/ptmx": "/dev/null /dev/ptmx",
			"echo 1 > /proc/sys/kernel/panic || echo denied":     "denied",
		} {
			if got := strings.Join(strings.Fields(c.exec(script)), " "); got != want {
				t.Errorf("%s: %q, want %q", script, got, want)
			}
		}
		var st unix.Stat_t
		if err := unix.Stat(filepath.Join(dir, "new"), &st); err != nil || st.Uid != 0 {
			t.Errorf("a file of the pod's root in the volume: owner %d, %v; want the node's root", st.Uid, err)
		}
		s, err := r.Status(context.Background(), p.Pod, c.Container)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Stat(fmt.Sprintf("/proc/%d", s.Pid), &st); err != nil || st.Uid != firstID {
			t.Errorf("the container's process belongs to user %d, %v", st.Uid, err)
		}
	})
}

// TestStoppedSandboxReleasesVolumes: once a sandbox is stopped, nothing keeps the file systems of its volumes mounted,
// although its containers still exist. Otherwise the device of a volume would be busy when it is detached.
func TestStoppedSandboxReleasesVolumes(t *testing.T) {
	r := newRig(t, "crun")
	p := r.pod(mapped)
	dir := t.TempDir()
	if err := unix.Mount("volume-of-"+p.ID, dir, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	c := p.container("echo up; "+forever, mappedVolume(dir, "/volume")).start()
	c.waitLog("up")
	c.stop(0)
	if err := errors.Join(r.StopSandbox(t.Context(), p.Pod), unix.Unmount(dir, 0)); err != nil {
		t.Fatal(err)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, "volume-of-"+p.ID) {
			t.Errorf("the volume is still mounted: %s", line)
		}
	}
	if err := r.RemoveContainer(t.Context(), p.Pod, c.Container); err != nil {
		t.Error(err)
	}
}

// TestImageIsCopied: if the file system of an image's layers cannot map owners, as an overlay cannot, the image's files
// are copied. Their owners, modes and capabilities are those that they have in the image.
func TestImageIsCopied(t *testing.T) {
	r := newRig(t, "crun")
	base := r.images.base
	capable := filepath.Join(base, "bin", "capable")
	for _, err := range []error{
		os.WriteFile(filepath.Join(base, "of-user"), nil, 0o640), os.Chown(filepath.Join(base, "of-user"), 1000, 2000),
		os.WriteFile(filepath.Join(base, "setuid"), nil, 0o600), os.Chmod(filepath.Join(base, "setuid"), 0o755|os.ModeSetuid),
		os.Symlink("/etc/passwd", filepath.Join(base, "link")), copyFile("/bin/busybox", capable),
		// cap_net_bind_service
		unix.Setxattr(capable, "security.capability", []byte("\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"),
			0),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	unmapable(t, base)
	p := r.pod(mapped)
	early := &sandbox.Container{ID: newID(), Config: &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: "early"}, Image: &runtimeapi.ImageSpec{Image: busybox}, Command: []string{"true"},
	}, ImageID: busybox}
	adjusted := *early
	_, err := r.CreateSpecified(t.Context(), p.Pod, early, func(context.Context, *specs.Spec) (*sandbox.Container, error) {
		if dir := filepath.Join(r.cfg.podRunDir(p.ID), "mounts", early.ID); ledger.Exists(dir) {
			t.Errorf("clones are mounted in %s before the container is adjusted", dir)
		}
		return &adjusted, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if facts, err := r.Inspect(t.Context(), p.Pod, early); err != nil || facts["imageOwners"] != "copied" {
		t.Errorf("after an adjustment, imageOwners = %v, %v; want copied", facts["imageOwners"], err)
	}
	if err := r.RemoveContainer(t.Context(), p.Pod, early); err != nil {
		t.Fatal(err)
	}
	c := p.container("echo up; " + forever).start()
	c.waitLog("up")
	for script, want := range map[string]string{
		"stat -c %u:%g:%a /of-user /setuid /etc/passwd": "1000:2000:640 0:0:4755 0:0:644",
		"stat -c %u / /bin/sh /link":                    "0 0 0",
		"touch /root/new && stat -c %u /root/new":       "0",
	} {
		if got := strings.Join(strings.Fields(c.exec(script)), " "); got != want {
			t.Errorf("%s: %q, want %q", script, got, want)
		}
	}
	attr := make([]byte, 64)
	n, err := unix.Getxattr(filepath.Join(rootfsDir(r.cfg.bundle(p.ID, c.ID)), "bin/capable"), "security.capability", attr)
	if err != nil || n != 24 || attr[3] != 3 || attr[23] != byte(firstID>>24) {
		t.Errorf("capabilities of a copied program: %x, %v; want version 3 with the pod's root", attr[:max(n, 0)], err)
	}
	facts, err := r.Inspect(t.Context(), p.Pod, c.Container)
	if err != nil || facts["imageOwners"] != "copied" {
		t.Errorf("imageOwners = %v, %v; want copied", facts["imageOwners"], err)
	}
	c.stop(0)
	r.restart(p.known(c))
	c.start().exec("stat /root/new")
	c.stop(0)

	// As if the daemon had been killed while it copied the files after a reboot.
	bundle := r.cfg.bundle(p.ID, c.ID)
	for _, err := range []error{
		mnt.Unexpose(r.cfg.podRunDir(p.ID), c.ID), os.Rename(filepath.Join(bundle, "copied"), filepath.Join(bundle, "copying")),
		os.Chown(filepath.Join(rootfsDir(bundle), "of-user"), 1000, 2000),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	r.restart(p.known(c))
	if got := c.start().exec("stat -c %u:%g /of-user"); got != "1000:2000" || !ledger.Exists(filepath.Join(bundle, "copied")) {
		t.Errorf("after an interrupted copy: got owner %s and mark %v, want 1000:2000 and a mark", got,
			ledger.Exists(filepath.Join(bundle, "copied")))
	}

	volume := filepath.Join(t.TempDir(), "volume")
	if err := os.Mkdir(volume, 0o755); err != nil {
		t.Fatal(err)
	}
	unmapable(t, volume)
	id := newID()
	refused := &sandbox.Container{ID: id, Config: proto.CloneOf(c.Config), ImageID: busybox}
	mappedVolume(volume, "/volume")(refused.Config)
	_, err = r.CreateContainer(t.Context(), p.Pod, refused)
	if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "/volume") {
		t.Errorf("a volume whose owners cannot be mapped: error = %v, want FailedPrecondition", err)
	}
	if err := r.RemoveContainer(t.Context(), p.Pod, refused); err != nil {
		t.Error(err)
	}
}

// unmapable mounts an overlay, which cannot be mapped, over a directory with the same content.
func unmapable(t *testing.T, dir string) {
	t.Helper()
	scratch := t.TempDir()
	for _, name := range []string{"upper", "work"} {
		if err := os.Mkdir(filepath.Join(scratch, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	options := fmt.Sprintf("lowerdir=%s,upperdir=%[2]s/upper,workdir=%[2]s/work", dir, scratch)
	if err := unix.Mount("overlay", dir, "overlay", 0, options); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := mnt.Unmount(dir); err != nil {
			t.Error(err)
		}
	})
}

// TestDoctorTriesUserNamespaces: tripod check reports whether pods can have user namespaces.
func TestDoctorTriesUserNamespaces(t *testing.T) {
	findings := Doctor(t.Context(), Config{Runtime: "crun", CgroupParent: testns.Cgroup() + "/doctor-users"}, false)
	for _, f := range findings {
		if f.Subject == "user namespaces with crun" {
			if !f.OK {
				t.Errorf("%+v", f)
			}
			return
		}
	}
	t.Errorf("no finding about user namespaces in %+v", findings)
}

// TestMountsKeepTheirFlags: a bind mount has the flags of the mount that it is made from, read-only or not, also in a user
// namespace, where the kernel refuses to lift them.
func TestMountsKeepTheirFlags(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		dir := t.TempDir()
		if err := unix.Mount("flags", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := mnt.Unmount(dir); err != nil {
				t.Error(err)
			}
		})
		for name, change := range map[string]func(*runtimeapi.PodSandboxConfig){"plain": func(*runtimeapi.PodSandboxConfig) {},
			"user namespace": mapped} {
			p := r.pod(change)
			volume := func(path string, readOnly bool) func(*runtimeapi.ContainerConfig) {
				if name != "plain" {
					return mappedVolume(dir, path, func(m *runtimeapi.Mount) { m.Readonly = readOnly })
				}
				return func(c *runtimeapi.ContainerConfig) {
					c.Mounts = append(c.Mounts, &runtimeapi.Mount{HostPath: dir, ContainerPath: path, Readonly: readOnly})
				}
			}
			c := p.container("/bin/busybox grep ' /vol-' /proc/mounts; echo end; "+forever, volume("/vol-ro", true),
				volume("/vol-rw", false)).start()
			c.waitLog("end")
			log := c.log()
			for path, access := range map[string]string{"/vol-ro": "ro,", "/vol-rw": "rw,"} {
				if !strings.Contains(log, " "+path+" tmpfs "+access+"nosuid,nodev,noexec") {
					t.Errorf("%s, %s: got mounts\n%swant %snosuid,nodev,noexec", name, path, log, access)
				}
			}
			c.stop(0)
		}
	})
}
