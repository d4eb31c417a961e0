package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/harness/libvirtdtest"
)

// apiVolume is the directory of a ConfigMap-like volume as a kubelet creates it: its files are replaced atomically.
type apiVolume struct {
	t     *testing.T
	dir   string
	turns int
}

func newAPIVolume(t *testing.T, kind, name string) *apiVolume {
	t.Helper()
	v := &apiVolume{t: t, dir: filepath.Join(t.TempDir(), "volumes", "kubernetes.io~"+kind, name)}
	if err := os.MkdirAll(v.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return v
}

// write sets the value of a key, the only one in the volume.
func (v *apiVolume) write(key, value string) {
	v.t.Helper()
	v.turns++
	version := fmt.Sprintf("..version%d", v.turns)
	next := filepath.Join(v.dir, version)
	err := errors.Join(
		os.Mkdir(next, 0o755), os.WriteFile(filepath.Join(next, key), []byte(value), 0o644),
		os.Symlink(version, filepath.Join(v.dir, "..data_tmp")), os.Rename(filepath.Join(v.dir, "..data_tmp"), filepath.Join(v.dir, "..data")),
	)
	if v.turns == 1 {
		err = errors.Join(err, os.Symlink(filepath.Join("..data", key), filepath.Join(v.dir, key)))
	} else {
		err = errors.Join(err, os.RemoveAll(filepath.Join(v.dir, fmt.Sprintf("..version%d", v.turns-1))))
	}
	if err != nil {
		v.t.Fatal(err)
	}
}

// TestVMVolumes: a disk machine uses directories like a container. Owners, modes, pipes, links, renames and memory
// mappings of the guest are the same on the node. The guest sees changes on the node, including ConfigMaps. The node
// enforces read-only mounts.
func TestVMVolumes(t *testing.T) {
	for _, name := range []string{"nocloud", "configdrive", "libvirt"} {
		t.Run(name, func(t *testing.T) {
			options, form, stop := []harness.Option{harness.VM(t)}, "nocloud", func() {}
			data, closed, config := shareDir(t, "data-"+name), shareDir(t, "closed-"+name), newAPIVolume(t, "configmap", "settings")
			config.write("color", "red\n")
			switch name {
			case "configdrive":
				form = name
				mountOverlay(t, data) // a file system without ID mapping
			case "libvirt":
				lv := libvirtdtest.Start(t)
				t.Setenv("TRIPOD_VMWRAP_BIN", libvirtdtest.Wrapper(t))
				options, stop = append(options, harness.Set("vm.driver", "libvirt"), harness.Set("vm.libvirt_uri", lv.URI)), lv.Kill
			}
			d := harness.StartDaemon(t, options...)
			t.Cleanup(stop) // before the harness checks for leftovers
			sub := filepath.Join(data, "theirs")
			program := filepath.Join(data, "mmap")
			build := exec.CommandContext(t.Context(), "go", "build", "-o", program, "./testdata/mmap")
			if out, err := build.CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			if err := errors.Join(os.Mkdir(sub, 0o700), os.WriteFile(filepath.Join(sub, "file"), []byte("theirs\n"), 0o600),
				os.Chown(sub, 999, 999), os.Chown(filepath.Join(sub, "file"), 999, 999)); err != nil {
				t.Fatal(err)
			}
			c := d.RunVM(t, &harness.PodSpec{
				Image: harness.DiskGuest,
				Pod: []harness.PodOption{func(p *runtimeapi.PodSandboxConfig) {
					p.Annotations = map[string]string{"tripod.dev/vm.cloud-init-image-type": form}
				}},
				Container: []harness.ContainerOption{func(c *runtimeapi.ContainerConfig) {
					c.Mounts = []*runtimeapi.Mount{
						{HostPath: sub, ContainerPath: "/data/sub"}, // from a subPath, and below the next mount
						{HostPath: data, ContainerPath: "/data"}, {HostPath: closed, ContainerPath: "/closed", Readonly: true},
						{HostPath: config.dir, ContainerPath: "/etc/settings", Readonly: true},
					}
				}},
			})
			c.WaitGuest()
			waitAgent(t, d, c)
			if out := c.Must("sh", "-c",
				"cat /data/sub/file /data/theirs/file /etc/settings/color; grep -c virtiofs /proc/mounts"); out != "theirs\ntheirs\nred\n4\n" {
				t.Fatalf("files in the guest: got %q, want theirs twice, red and four mounts", out)
			}
			c.Must("sh", "-c", `set -e; cd /data
				echo new >new; chown 1000:1001 new; chmod 640 new; mkfifo pipe; ln -s new link; ln new hard
				echo one >a; echo two >b; mv b a; mkdir -m 700 db; chown 999:999 db; ./mmap mapped "by a mapping"
				(cat pipe >through &); echo "through the pipe" >pipe; sync`)
			for name, want := range map[string]string{
				"new": "1000:1001 -rw-r-----", "hard": "1000:1001 -rw-r-----", "pipe": "0:0 prw-r--r--", "link": "0:0 Lrwxrwxrwx",
				"db": "999:999 drwx------", "theirs": "999:999 drwx------",
			} {
				info, err := os.Lstat(filepath.Join(data, name))
				if err != nil {
					t.Fatal(err)
				}
				st := info.Sys().(*syscall.Stat_t)
				if got := fmt.Sprintf("%d:%d %s", st.Uid, st.Gid, info.Mode()); got != want {
					t.Errorf("%s on the node: got %s, want %s", name, got, want)
				}
			}
			for name, want := range map[string]string{"a": "two\n", "mapped": "by a mapping"} {
				if got, err := os.ReadFile(filepath.Join(data, name)); err != nil || string(got) != want {
					t.Errorf("content of %s on the node: got %q, error %v; want %q", name, got, err, want)
				}
			}
			if _, stderr, code := c.ExecSync("sh", "-c", "mount -o remount,rw /closed; echo no >/closed/note"); code == 0 ||
				!strings.Contains(stderr, "Read-only file system") {
				t.Errorf("write to a read-only share: got code %d, stderr %s; want \"Read-only file system\"", code, stderr)
			}
			for _, color := range []string{"green\n", "blue\n"} {
				config.write("color", color)
				harness.Eventually(t, harness.GuestTimeout, func() error {
					if out := c.Must("cat", "/etc/settings/color"); out != color {
						return fmt.Errorf("ConfigMap in the guest: got %q, want %q", out, color)
					}
					return nil
				})
			}
		})
	}
}

// mountOverlay mounts an overlay on a directory.
func mountOverlay(t *testing.T, dir string) {
	t.Helper()
	upper, work := dir+".upper", dir+".work"
	options := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", dir, upper, work)
	if err := errors.Join(os.Mkdir(upper, 0o755), os.Mkdir(work, 0o755), syscall.Mount("overlay", dir, "overlay", 0, options)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(syscall.Unmount(dir, 0), os.RemoveAll(upper), os.RemoveAll(work)); err != nil {
			t.Error(err)
		}
	})
}

// virtiofsdOf returns the main processes of the machine's virtiofsds.
func virtiofsdOf(t *testing.T, d *harness.Daemon, c *harness.Container) (pids []int) {
	t.Helper()
	resp, err := d.CRI().ContainerStatus(t.Context(), &runtimeapi.ContainerStatusRequest{ContainerId: c.ID, Verbose: true})
	if err != nil {
		t.Fatal(err)
	}
	var info struct {
		Definition struct{ Name string }
	}
	if err := json.Unmarshal([]byte(resp.Info["info"]), &info); err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(filepath.Join(d.Root, "vm", "qemu", info.Definition.Name, "state.json"))
	var state struct{ Shares []struct{ Pid int } }
	if err := errors.Join(err, json.Unmarshal(raw, &state)); err != nil {
		t.Fatal(err)
	}
	for _, s := range state.Shares {
		pids = append(pids, s.Pid)
	}
	return pids
}

// TestN2VMLosesVirtiofsd (N1, N2): a machine keeps its directories over SIGKILL of the daemon. If virtiofsd is killed,
// the machine ends with a reason, and has its directories again after its next start.
func TestN2VMLosesVirtiofsd(t *testing.T) {
	d := harness.StartDaemon(t, harness.VM(t))
	data := shareDir(t, "lost")
	c := d.RunVM(t, &harness.PodSpec{Image: harness.Guest, Container: []harness.ContainerOption{func(c *runtimeapi.ContainerConfig) {
		c.Mounts = []*runtimeapi.Mount{{HostPath: data, ContainerPath: "/data"}}
	}}})
	c.WaitGuest()
	waitAgent(t, d, c)
	for _, down := range []bool{false, true} {
		pids := virtiofsdOf(t, d, c)
		if len(pids) != 1 {
			t.Fatalf("virtiofsd processes: got %v, want one", pids)
		}
		d.Kill()
		d.Start()
		waitAgent(t, d, c)
		c.Must("sh", "-c", "echo survived >/data/note; sync")
		if down {
			d.Kill()
		}
		if err := syscall.Kill(pids[0], syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		if down {
			d.Start()
		}
		if s := c.WaitExit(137); s.Reason != "Error" || !strings.Contains(s.Message, "virtiofsd of the share share0") {
			t.Errorf("end of the machine: got reason %s, message %s; want Error because of virtiofsd", s.Reason, s.Message)
		}
		c.Start()
		waitAgent(t, d, c)
		if out := c.Must("cat", "/data/note"); out != "survived\n" {
			t.Errorf("file after the next start: got %q, want survived", out)
		}
	}
	c.Stop(30 * time.Second)
	c.WaitExit(0)
}

// TestVMShareDriver: without virtiofsd, directories are shared with 9p and ConfigMaps are copied, which the status
// reports. A pod that requires virtio-fs is refused.
func TestVMShareDriver(t *testing.T) {
	d := harness.StartDaemon(t, harness.VM(t), harness.Set("vm.default_memory", 256<<20), harness.Set("vm.virtiofsd", "/nowhere/virtiofsd"))
	data, config := shareDir(t, "9p"), newAPIVolume(t, "configmap", "settings")
	config.write("color", "red\n")
	mounts := func(c *runtimeapi.ContainerConfig) {
		c.Mounts = []*runtimeapi.Mount{{HostPath: data, ContainerPath: "/data"},
			{HostPath: config.dir, ContainerPath: "/etc/settings", Readonly: true}}
	}
	c := d.RunVM(t, &harness.PodSpec{Image: harness.FullGuest, Container: []harness.ContainerOption{mounts}})
	c.WaitGuest()
	waitAgent(t, d, c)
	if out := c.Must("sh", "-c", "cat /data/name /etc/settings/color; grep -c ' 9p ' /proc/mounts"); out != "9p\nred\n1\n" {
		t.Errorf("files in the guest: got %q, want 9p, red and one 9p mount", out)
	}
	resp, err := d.CRI().ContainerStatus(t.Context(), &runtimeapi.ContainerStatusRequest{ContainerId: c.ID, Verbose: true})
	if err != nil || !strings.Contains(resp.Info["info"], "no virtio-fs") {
		t.Errorf("verbose status: got %v, error %v; want \"no virtio-fs\" in it", resp, err)
	}
	pod := d.RunPodWith(t, harness.PodConfig(t, "demands", func(p *runtimeapi.PodSandboxConfig) {
		p.Annotations = map[string]string{"tripod.dev/vm.share-driver": "virtiofs"}
	}), "vm")
	t.Cleanup(pod.Remove)
	_, err = d.CRI().CreateContainer(t.Context(), &runtimeapi.CreateContainerRequest{
		PodSandboxId: pod.ID, Config: harness.ContainerConfig("c", harness.FullGuest, mounts), SandboxConfig: pod.Config,
	})
	if err == nil || !strings.Contains(err.Error(), "tripod.dev/vm.share-driver: virtiofs") ||
		!strings.Contains(err.Error(), "there is no virtiofsd") {
		t.Errorf("CreateContainer with virtio-fs: got error %v, want a refusal that names the annotation", err)
	}
}
