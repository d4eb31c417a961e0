package deb

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/until"
)

func TestMain(m *testing.M) { harness.Main(m) }

// TestPackage: the package brings a configuration that is valid and all that the daemon needs. It cannot be removed while pods
// run, whether or not the daemon answers. An upgrade keeps the edited configuration and the pods. A purge leaves nothing.
func TestPackage(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(harness.Root(), "build", "release", "tripod_*.deb"))
	if err != nil || len(files) != 1 {
		t.Fatalf("packages in build/release: got %q (%v), want one; `make deb` builds it", files, err)
	}
	h := newHost(t)
	h.copyIn(files[0], "/tmp/tripod.deb")

	h.must("dpkg", "--install", "/tmp/tripod.deb")
	h.must("tripod", "config", "check")
	installed := strings.Fields(h.must("dpkg", "--listfiles", "tripod"))
	h.configure()
	d := h.startDaemon()
	h.must("tripod", "run", "--name", "stays", harness.Busybox, "--", "sleep", "1h")

	h.refusesRemoval("stays")
	d.kill()
	h.refusesRemoval("conmon")

	h.must("dpkg", "--install", "--force-confold", "/tmp/tripod.deb")
	d = h.startDaemon()
	if pods := h.must("tripod", "pods", "--state", "ready"); !strings.Contains(pods, "stays") {
		t.Errorf("pods after the upgrade: got\n%s\nwant the pod stays", pods)
	}
	h.must("tripod", "rmp", "--all", "--force")
	d.stop()

	h.must("dpkg", "--purge", "tripod")
	for _, path := range append(installed, "/var/lib/tripod", "/run/tripod") {
		if !strings.Contains(path, "tripod") {
			continue // a directory of the system
		}
		if _, err := os.Lstat(h.path(path)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s after the purge: got error %v, want it gone", path, err)
		}
	}
}

// host is a copy of the host in which the package is installed.
type host struct {
	t    *testing.T
	root string
}

// newHost mounts a copy of the host's file system, with the world's devices, cgroups and processes.
func newHost(t *testing.T) *host {
	t.Helper()
	h := &host{t: t, root: filepath.Join(t.TempDir(), "root")}
	dir := filepath.Dir(h.root)
	h.mount("tmpfs", dir, "tmpfs", 0, "")
	// An OCI runtime's pivot_root requires that the mount below the root is private.
	if err := unix.Mount("", dir, "", unix.MS_PRIVATE, ""); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"root", "upper", "work"} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	h.mount("overlay", h.root, "overlay", 0, fmt.Sprintf("lowerdir=/,upperdir=%s/upper,workdir=%s/work", dir, dir))
	for _, name := range []string{"dev", "sys", "proc"} {
		h.mount("/"+name, h.path(name), "", unix.MS_BIND|unix.MS_REC, "")
	}
	for _, name := range []string{"run", "tmp"} {
		h.mount("tmpfs", h.path(name), "tmpfs", 0, "")
	}
	// The layers of containers cannot lie on the overlay that the copy is.
	if err := os.MkdirAll(h.path("/var/lib/tripod"), 0o700); err != nil {
		t.Fatal(err)
	}
	h.mount("tmpfs", h.path("/var/lib/tripod"), "tmpfs", 0, "mode=700")
	return h
}

// path returns where a path of the copy is for the test.
func (h *host) path(path string) string { return filepath.Join(h.root, path) }

func (h *host) mount(source, target, fstype string, flags uintptr, data string) {
	h.t.Helper()
	if err := unix.Mount(source, target, fstype, flags, data); err != nil {
		h.t.Fatalf("mount %s on %s: %v", source, target, err)
	}
	h.t.Cleanup(func() {
		if err := unix.Unmount(target, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			h.t.Errorf("unmount %s: %v", target, err)
		}
	})
}

func (h *host) copyIn(source, target string) {
	h.t.Helper()
	data, err := os.ReadFile(source)
	if err == nil {
		err = os.WriteFile(h.path(target), data, 0o644)
	}
	if err != nil {
		h.t.Fatal(err)
	}
}

// command returns a command that runs in the copy.
func (h *host) command(args ...string) *exec.Cmd {
	// env finds the program in the copy.
	c := exec.CommandContext(h.t.Context(), "/usr/bin/env", args...)
	// The names of the programs under test are for the harness only: here the package's are tested.
	c.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "DEBIAN_FRONTEND=noninteractive"}
	c.SysProcAttr = &syscall.SysProcAttr{Chroot: h.root}
	c.Dir = "/"
	return c
}

// try runs a command and returns what it prints.
func (h *host) try(args ...string) (string, error) {
	out, err := h.command(args...).CombinedOutput()
	return string(out), err
}

// must is try for a command that must succeed.
func (h *host) must(args ...string) string {
	h.t.Helper()
	out, err := h.try(args...)
	if err != nil {
		h.t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

// configure edits the package's configuration file, as an administrator does.
func (h *host) configure() {
	h.t.Helper()
	path := h.path("/etc/tripod/config.toml")
	text, err := os.ReadFile(path)
	if err != nil {
		h.t.Fatal(err)
	}
	if bytes.Contains(text, []byte("\n[")) || !bytes.Contains(text, []byte("\n#[linux]\n")) {
		h.t.Errorf("%s: got keys that are set, want all commented out", path)
	}
	text = append(text, fmt.Sprintf("\n[linux]\ncgroup_parent = %q\n[image]\nhosts_dirs = [\"/tmp/certs.d\"]\n", harness.CgroupParent())...)
	if err := os.WriteFile(path, text, 0o644); err != nil {
		h.t.Fatal(err)
	}
	if err := os.CopyFS(h.path("/tmp/certs.d"), os.DirFS(harness.Registry(h.t).HostsDir)); err != nil {
		h.t.Fatal(err)
	}
}

// refusesRemoval tries to remove and to purge the package. Both must fail with a message that contains the given text.
func (h *host) refusesRemoval(text string) {
	h.t.Helper()
	for _, action := range []string{"--remove", "--purge"} {
		out, err := h.try("dpkg", action, "tripod")
		if err == nil || !strings.Contains(out, text) || !strings.Contains(out, "tripod rmp --all --force") {
			h.t.Fatalf("dpkg %s with a running pod: got %v and\n%s\nwant a refusal with %q and the remedy", action, err, out, text)
		}
	}
	if status := h.must("dpkg-query", "--show", "--showformat=${db:Status-Status}", "tripod"); status != "installed" {
		h.t.Fatalf("status of the package after the refusal: got %q, want installed", status)
	}
}

// daemon is the daemon of the package.
type daemon struct {
	h   *host
	cmd *exec.Cmd
	log bytes.Buffer
}

func (h *host) startDaemon() *daemon {
	h.t.Helper()
	d := &daemon{h: h, cmd: h.command("tripod", "daemon")}
	d.cmd.Stderr = &d.log
	if err := d.cmd.Start(); err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() {
		d.kill()
		if h.t.Failed() {
			h.t.Logf("log of the daemon:\n%s", d.log.String())
		}
	})
	until.NoError(h.t, time.Minute, func() error {
		out, err := h.try("tripod", "info")
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	return d
}

// kill ends the daemon as a crash does.
func (d *daemon) kill() {
	_ = d.cmd.Process.Kill()
	_ = d.cmd.Wait()
}

// stop ends the daemon as systemd does.
func (d *daemon) stop() {
	d.h.t.Helper()
	_ = d.cmd.Process.Signal(syscall.SIGTERM)
	if err := d.cmd.Wait(); err != nil {
		d.h.t.Errorf("end of the daemon: %v\n%s", err, d.log.String())
	}
}
