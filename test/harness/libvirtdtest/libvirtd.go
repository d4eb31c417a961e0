// Package libvirtdtest runs a real libvirtd for tests, without systemd, inside the namespaces of hack/testns.
//
//	test ──Start──▶ libvirtd ──▶ QEMU        /etc/libvirt, /run/libvirt, /var/{lib,log,cache}/libvirt are the test's own,
//	                                         bound over the host's in the mount namespace
//
// It must never run outside of these namespaces, because it mounts over the host's directories.
package libvirtdtest

import (
	"bytes"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// socket is libvirtd's socket in the test's mount namespace.
const socket = "/run/libvirt/libvirt-sock"

// config is the configuration for a libvirtd that runs without systemd: no polkit, no cgroups of its own, no virtlogd.
var config = map[string]string{
	"libvirtd.conf": `
auth_unix_rw = "none"
auth_unix_ro = "none"
`,
	"qemu.conf": `
user = "root"
group = "root"
cgroup_controllers = [ ]
namespaces = [ ]
stdio_handler = "file"
`,
}

// Daemon is a libvirtd.
type Daemon struct {
	// URI is the URI for drivers.
	URI string

	t    testing.TB
	dir  string
	cmd  *exec.Cmd
	done chan error
}

// Start starts a libvirtd, which ends with the test. Only one libvirtd can run at a time, because it always uses
// /run/libvirt.
func Start(t testing.TB) *Daemon {
	t.Helper()
	world := os.Getenv("TRIPOD_TEST_DIR")
	require.NotEmpty(t, world, "run this test with hack/testns.sh, because it mounts over libvirt's directories")
	program, err := exec.LookPath("libvirtd")
	require.NoError(t, err, "install libvirt-daemon-system (make setup)")
	dir, err := os.MkdirTemp(world, "libvirtd")
	require.NoError(t, err)
	d := &Daemon{URI: "qemu:///system?socket=" + socket, t: t, dir: dir}
	for _, target := range []string{"/etc/libvirt", "/run/libvirt", "/var/lib/libvirt", "/var/log/libvirt", "/var/cache/libvirt"} {
		source := filepath.Join(dir, strings.ReplaceAll(target[1:], "/", "-"))
		require.NoError(t, os.MkdirAll(source, 0o755))
		require.NoError(t, os.MkdirAll(target, 0o755))
		require.NoError(t, unix.Mount(source, target, "", unix.MS_BIND, ""))
		t.Cleanup(func() { require.NoError(t, unix.Unmount(target, unix.MNT_DETACH)) })
	}
	for name, text := range config {
		require.NoError(t, os.WriteFile(filepath.Join("/etc/libvirt", name), []byte(text), 0o644))
	}
	d.start(program)
	t.Cleanup(func() {
		d.end(syscall.SIGTERM)
		if t.Failed() {
			t.Logf("libvirtd:\n%s", d.Log())
		}
	})
	return d
}

func (d *Daemon) start(program string) {
	d.t.Helper()
	log, err := os.OpenFile(filepath.Join(d.dir, "log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	require.NoError(d.t, err)
	defer log.Close()
	d.cmd = exec.Command(program, "--pid-file", filepath.Join(d.dir, "pid"))
	d.cmd.Stdout, d.cmd.Stderr = log, log
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // for end; domains have sessions of their own
	require.NoError(d.t, d.cmd.Start())
	done := make(chan error, 1)
	d.done = done
	cmd := d.cmd
	go func() { done <- cmd.Wait() }()
	require.Eventually(d.t, func() bool {
		conn, err := net.Dial("unix", socket)
		if err == nil {
			conn.Close()
		}
		return err == nil
	}, time.Minute, 10*time.Millisecond, "libvirtd does not listen:\n%s", d.Log())
}

// end stops libvirtd with sig, if it is running. If libvirtd has not ended after a minute, end kills it.
//
// It also kills the children that libvirtd was about to execute. Such a child has libvirtd's connections to the domains'
// monitors, and can hang before it closes them. As QEMU serves one connection at a time, the next libvirtd would then
// wait for these domains without end.
func (d *Daemon) end(sig syscall.Signal) {
	if d.cmd == nil {
		return
	}
	_ = d.cmd.Process.Signal(syscall.SIGCONT)
	_ = d.cmd.Process.Signal(sig)
	select {
	case <-d.done:
	case <-time.After(time.Minute):
		_ = d.cmd.Process.Kill()
		<-d.done
		d.t.Errorf("libvirtd did not end within a minute of signal %v", sig)
	}
	_ = syscall.Kill(-d.cmd.Process.Pid, syscall.SIGKILL)
	d.cmd = nil
}

// Kill kills libvirtd with SIGKILL. Domains continue to run. If libvirtd was writing the state of a domain, the new file would stay
// when the domain is gone, which is libvirt's leak; Kill removes it.
func (d *Daemon) Kill() {
	d.end(syscall.SIGKILL)
	unfinished, _ := filepath.Glob("/run/libvirt/qemu/*.new")
	for _, path := range unfinished {
		require.NoError(d.t, os.Remove(path))
	}
}

// Start starts libvirtd again after Kill.
func (d *Daemon) Start() {
	d.t.Helper()
	program, err := exec.LookPath("libvirtd")
	require.NoError(d.t, err)
	d.start(program)
}

// Restart restarts libvirtd, as a package upgrade does. Domains continue to run.
func (d *Daemon) Restart() {
	d.t.Helper()
	d.end(syscall.SIGTERM)
	d.Start()
}

// Signal sends a signal to libvirtd. SIGSTOP simulates a libvirtd that hangs, until SIGCONT.
func (d *Daemon) Signal(sig syscall.Signal) {
	d.t.Helper()
	require.NoError(d.t, d.cmd.Process.Signal(sig))
}

// Log returns libvirtd's log.
func (d *Daemon) Log() string {
	text, _ := os.ReadFile(filepath.Join(d.dir, "log"))
	return string(bytes.TrimSpace(text))
}

// Wrapper returns a tripod-vmwrap that every user can execute. It copies the program that TRIPOD_VMWRAP_BIN names,
// because other users may be unable to enter that program's directory. If TRIPOD_VMWRAP_BIN is not set, Wrapper builds
// the program.
func Wrapper(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp(os.Getenv("TRIPOD_TEST_DIR"), "vmwrap")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	require.NoError(t, os.Chmod(dir, 0o755))
	path := filepath.Join(dir, "tripod-vmwrap")
	if built := os.Getenv("TRIPOD_VMWRAP_BIN"); built != "" {
		program, err := os.ReadFile(built)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(path, program, 0o755))
		return path
	}
	build := exec.Command("go", "build", "-o", path, "github.com/tripod-run/tripod/cmd/tripod-vmwrap")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := build.CombinedOutput()
	require.NoError(t, err, string(out))
	return path
}
