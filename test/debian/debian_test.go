package debian

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

const (
	image = harness.ImagePrefix + "tripod/vm/debian:12"
	// bootTime limits how long an emulated Debian can take until cloud-init is done. It takes 35 s on an idle machine.
	bootTime = 20 * time.Minute
	sshKey   = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIFBqYXJ0IG9mIGEgdGVzdCwgbm90IGEga2V5IGF0IGFsbCE= me@test"
)

func TestMain(m *testing.M) { harness.Main(m) }

// push pushes the image to the tests' registry: a kernel with its initrd, and the root file system as a disk.
func push(t *testing.T) {
	t.Helper()
	dir := filepath.Join(harness.Root(), "build", "images", "debian")
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		r, w := io.Pipe()
		go func() { w.CloseWithError(pack(w, dir)) }()
		return r, nil
	}, tarball.WithCompressionLevel(1))
	if err != nil {
		t.Fatalf("%v; hack/images/debian.sh builds the image", err)
	}
	pushLayer(t, image, layer)
}

// pushLayer pushes an image of one layer to the tests' registry.
func pushLayer(t *testing.T, image string, layer v1.Layer) {
	t.Helper()
	img, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		t.Fatal(err)
	}
	ref, err := name.ParseReference(harness.Registry(t).Addr+"/"+strings.TrimPrefix(image, harness.ImagePrefix), name.Insecure)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(ref, img, remote.WithContext(t.Context())); err != nil {
		t.Fatal(err)
	}
}

// pack writes the layer of the image.
func pack(to io.Writer, dir string) error {
	w := tar.NewWriter(to)
	for _, f := range [][2]string{{"boot/vmlinux", "vmlinuz"}, {"boot/initrd", "initrd.img"}, {"boot/cmdline", "cmdline"},
		{"disk/disk.qcow2", "disk.qcow2"}} {
		data, err := os.ReadFile(filepath.Join(dir, f[1]))
		if err != nil {
			return err
		}
		if err := w.WriteHeader(&tar.Header{Name: f[0], Mode: 0o644, Size: int64(len(data))}); err != nil {
			return err
		}
		if _, err := io.Copy(w, bytes.NewReader(data)); err != nil {
			return err
		}
	}
	return w.Close()
}

// TestCloudInit: Debian's cloud-init applies the pod's configuration: host name, key, network, environment, files,
// shared directories, our agent, the user's commands. The power button shuts the guest down.
func TestCloudInit(t *testing.T) {
	push(t)
	d := harness.StartDaemon(t, harness.VM(t), harness.Set("vm.default_memory", 512<<20))
	for _, form := range []string{"nocloud", "configdrive"} {
		t.Run(form, func(t *testing.T) { cloudInit(t, d, form) })
	}
}

func cloudInit(t *testing.T, d *harness.Daemon, form string) {
	shared, closed, secret := directory(t, "shared"), directory(t, "closed"), filepath.Join(directory(t, "secret"), "name")
	began := time.Now()
	c := d.RunVM(t, &harness.PodSpec{
		Name: "debian-" + form, Image: image,
		Pod: []harness.PodOption{func(p *runtimeapi.PodSandboxConfig) {
			p.Hostname = "real-" + form
			p.Annotations = map[string]string{
				"VirtletCloudInitImageType": form, "VirtletSSHKeys": sshKey,
				// Without "locale: false", cloud-init generates a locale, which takes half a minute.
				"VirtletCloudInitUserData": "locale: false\nruncmd: [[sh, -c, 'echo run by cloud-init >/run/by-the-user']]\n",
			}
			p.DnsConfig = &runtimeapi.DNSConfig{Servers: []string{"10.9.8.7"}, Searches: []string{"svc.cluster.test"}}
		}},
		Container: []harness.ContainerOption{func(c *runtimeapi.ContainerConfig) {
			c.Envs = []*runtimeapi.KeyValue{{Key: "GREETING", Value: []byte("it's $me")}}
			c.Mounts = []*runtimeapi.Mount{
				{HostPath: shared, ContainerPath: "/srv/shared"}, {HostPath: closed, ContainerPath: "/srv/closed", Readonly: true},
				{HostPath: secret, ContainerPath: "/etc/secret/name", Readonly: true},
			}
		}},
	})
	run := func(script string) (string, error) { return runIn(t, d, c.ID, script) }
	harness.Eventually(t, bootTime, func() error {
		// `cloud-init status --wait` waits for this file too, but starts a Python program each time.
		out, err := run("cat /run/cloud-init/result.json")
		if err != nil {
			return fmt.Errorf("cloud-init is not done: %q, %w", out, err)
		}
		return nil
	})
	t.Logf("cloud-init is done after %s", time.Since(began).Round(time.Second))
	for what, want := range map[string]struct{ script, has string }{
		"errors": {"tr -d ' \\n' </run/cloud-init/result.json", `"errors":[]`},
		"form": {"cat /run/cloud-init/result.json",
			map[string]string{"nocloud": "DataSourceNoCloud ", "configdrive": "DataSourceConfigDrive "}[form]},
		"host name":    {"hostname", "real-" + form + "\n"},
		"ssh key":      {"cat ~debian/.ssh/authorized_keys", sshKey},
		"address":      {"ip -o -4 address", " " + c.Pod.IP() + "/"},
		"route":        {"ip route", "default via "},
		"rendered by":  {"ls /etc/netplan", "50-cloud-init.yaml"},
		"DNS":          {"resolvectl dns; cat /etc/netplan/50-cloud-init.yaml", "10.9.8.7"},
		"domains":      {"resolvectl domain; cat /etc/netplan/50-cloud-init.yaml", "svc.cluster.test"},
		"environment":  {"set -a; . /etc/cloud/environment; echo \"$GREETING\"", "it's $me\n"},
		"secret":       {"cat /etc/secret/name", "secret\n"},
		"own commands": {"cat /run/by-the-user", "run by cloud-init"},
		"share": {"cat /srv/shared/name && echo from the guest >/srv/shared/note && grep /srv/ /proc/mounts",
			"share0 /srv/shared virtiofs rw"},
		"closed share": {"cat /srv/closed/name && ! touch /srv/closed/note 2>/dev/null && grep /srv/ /proc/mounts",
			"share1 /srv/closed virtiofs ro"},
		"agent": {"systemctl is-active tripod-agent", "active\n"},
	} {
		if out, err := run(want.script); err != nil || !strings.Contains(out, want.has) {
			t.Errorf("%s: got %q, error %v; want it to contain %q", what, out, err, want.has)
		}
	}
	if note, err := os.ReadFile(filepath.Join(shared, "note")); err != nil || string(note) != "from the guest\n" {
		t.Errorf("the guest's file on the node: got %q, error %v; want %q", note, err, "from the guest\n")
	}
	if banner := greeting(t, net.JoinHostPort(c.Pod.IP(), "22")); !strings.HasPrefix(banner, "SSH-2.0-") {
		t.Errorf("greeting on port 22: got %q, want an SSH banner", banner)
	}
	c.WaitConsole("Debian GNU/Linux 12 real-" + form + " ttyS0")
	c.Stop(5 * time.Minute)
	if s := c.WaitExit(0); s.Reason != "Completed" {
		t.Errorf("status after the stop: got %v, want reason Completed", s)
	}
}

// runIn runs a script in the guest of a container and returns its output.
func runIn(t *testing.T, d *harness.Daemon, id, script string) (string, error) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	resp, err := d.CRI().ExecSync(ctx, &runtimeapi.ExecSyncRequest{ContainerId: id, Cmd: []string{"sh", "-c", script}, Timeout: 50})
	if err == nil && resp.ExitCode != 0 {
		err = fmt.Errorf("code %d: %s", resp.ExitCode, resp.Stderr)
	}
	return string(resp.GetStdout()), err
}

// greeting connects to a server and returns the first bytes that it sends.
func greeting(t *testing.T, address string) string {
	t.Helper()
	conn, err := net.DialTimeout("tcp", address, time.Minute)
	if err != nil {
		t.Error(err)
		return ""
	}
	defer conn.Close()
	_ = conn.SetReadDeadline(time.Now().Add(time.Minute))
	buf := make([]byte, 64)
	n, err := conn.Read(buf)
	if err != nil {
		t.Error(err)
	}
	return string(buf[:n])
}

// directory creates a directory with a file "name" that contains name.
func directory(t *testing.T, name string) string {
	t.Helper()
	dir, err := os.MkdirTemp(harness.Dir(), "debian-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "name"), []byte(name+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}
