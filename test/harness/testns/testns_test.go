package testns

import (
	"bufio"
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestMain makes this test binary act as testns: if runEnv is set, it runs its arguments in a new world.
func TestMain(m *testing.M) {
	Reenter()
	if mode := os.Getenv(runEnv); mode != "" {
		os.Unsetenv(runEnv)
		os.Exit(Run(os.Args[1:], Options{Strict: mode == "strict"}))
	}
	os.Exit(m.Run())
}

const runEnv = "TESTNS_TEST_RUN"

func command(t *testing.T, mode, script string) (*exec.Cmd, *bytes.Buffer) {
	t.Helper()
	c := exec.Command("/proc/self/exe", "sh", "-c", script)
	c.Env = append(os.Environ(), runEnv+"="+mode)
	var stderr bytes.Buffer
	c.Stderr = &stderr
	return c, &stderr
}

// hostDir returns the path, outside of its world, of the directory of the run that has printed its cgroup.
func hostDir(cgroup string) string { return filepath.Join(baseDir(), strings.TrimSpace(cgroup)) }

// checkRemoved fails the test if anything of the run is left on the host.
func checkRemoved(t *testing.T, dir string) {
	t.Helper()
	if filepath.Base(dir) == "." || !strings.Contains(dir, prefix) {
		t.Fatalf("%q is not the directory of a run", dir)
	}
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("directory %s still exists, or Stat failed: %v", dir, err)
	}
	for _, root := range CgroupRoots() {
		if _, err := os.Stat(filepath.Join(root, filepath.Base(dir))); !os.IsNotExist(err) {
			t.Errorf("cgroup %s still exists in %s", filepath.Base(dir), root)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(mounts, []byte(filepath.Base(dir))) {
		t.Errorf("a mount of %s still exists", dir)
	}
	if !Inside() {
		if left, err := os.ReadDir(mountPoint); err != nil || len(left) > 0 {
			t.Errorf("outside of the worlds, %s has %d entries, %v", mountPoint, len(left), err)
		}
	}
}

func TestExitCodeAndCleanUp(t *testing.T) {
	c, stderr := command(t, "lenient", `
		set -e
		echo $TRIPOD_TEST_CGROUP
		for h in $(awk '$3 ~ /^cgroup/ {print $2}' /proc/mounts); do
			mkdir -p $h$TRIPOD_TEST_CGROUP/a/b
		done
		mount -t tmpfs x $TRIPOD_TEST_DIR/tmp
		touch $TRIPOD_TEST_DIR/tmp/file
		ip link add br0 type bridge
		ip netns add pod
		ip netns exec pod sleep 1000 &
		exit 7`)
	out, err := c.Output()
	if c.ProcessState.ExitCode() != 7 {
		t.Fatalf("exit code %d (%v), want 7\n%s", c.ProcessState.ExitCode(), err, stderr)
	}
	if !strings.Contains(stderr.String(), "sleep 1000") {
		t.Errorf("stderr does not name the process that still runs: %s", stderr)
	}
	checkRemoved(t, hostDir(string(out)))
}

func TestStrictFailsOnLeftovers(t *testing.T) {
	c, stderr := command(t, "strict", "setsid sleep 1000 & exit 0")
	_ = c.Run()
	if c.ProcessState.ExitCode() != exitSetup {
		t.Errorf("exit code %d, want %d\n%s", c.ProcessState.ExitCode(), exitSetup, stderr)
	}
}

func TestIsolation(t *testing.T) {
	c, stderr := command(t, "strict", `
		set -e
		test "$(cat /proc/sys/net/ipv4/ip_forward)" = 1
		test "$(cat /proc/1/comm)" = exe -o "$(cat /proc/1/cmdline | tr '\0' ' ' | cut -c1-14)" = /proc/self/exe
		test -d /sys/fs/cgroup
		test -z "$(ls -A /run)"
		test "$(stat -c "%F %u:%g %a" /dev/null)" = "character special file 12:34 666"
		test "$TRIPOD_TEST_DIR $TMPDIR" = "/var/tmp/tripod-test /var/tmp/tripod-test/tmp"
		test "$(cat $TRIPOD_TEST_DIR/cgroup)" = "$TRIPOD_TEST_CGROUP"
		test "$(findmnt -no PROPAGATION /)" = shared
		test "$(findmnt -no FSTYPE /sys/fs/cgroup/unified || echo tmpfs)" = tmpfs
		test "$(ls /sys/class/net/ >/dev/null; ip -o link | wc -l)" = 1
		ip -o link show lo | grep -q UP`)
	if err := c.Run(); err != nil {
		t.Errorf("the checks inside failed: %v\n%s", err, stderr)
	}
}

// TestSignal sends a signal to the supervisor. The command must receive it, and nothing may be left behind.
func TestSignal(t *testing.T) {
	c, stderr := command(t, "lenient", `trap 'exit 42' TERM; echo $TRIPOD_TEST_CGROUP; sleep 1000 & wait`)
	dir := hostDir(startAndReadLine(t, c))
	if err := c.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	_ = c.Wait()
	if c.ProcessState.ExitCode() != 42 {
		t.Errorf("exit code %d, want 42\n%s", c.ProcessState.ExitCode(), stderr)
	}
	checkRemoved(t, dir)
}

// TestKilledSupervisor: the processes end with a killed supervisor, and a later run removes its directory and cgroups.
func TestKilledSupervisor(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	c, _ := command(t, "lenient", `
		for h in $(awk '$3 ~ /^cgroup/ {print $2}' /proc/mounts); do mkdir -p $h$TRIPOD_TEST_CGROUP; done
		echo $TRIPOD_TEST_CGROUP; sleep 1000`)
	dir := hostDir(startAndReadLine(t, c))
	if err := c.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = c.Wait() // returns once all holders of the output pipe, and so the whole world, have ended
	old := time.Now().Add(-time.Hour)
	if err := os.Chtimes(dir, old, old); err != nil {
		t.Fatal(err)
	}
	next, stderr := command(t, "strict", "true")
	if err := next.Run(); err != nil {
		t.Fatalf("the later run failed: %v\n%s", err, stderr)
	}
	checkRemoved(t, dir)
}

func startAndReadLine(t *testing.T, c *exec.Cmd) string {
	t.Helper()
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return line
}

// TestNested checks that nested namespaces have their own processes, mounts, network and name, and that Kill ends them.
func TestNested(t *testing.T) {
	if !Inside() {
		c := exec.Command("/proc/self/exe", "/proc/self/exe", "-test.run=^TestNested$")
		c.Env = append(os.Environ(), runEnv+"=strict")
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return
	}
	if err := unix.Mount("world", "/run", "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	world := filepath.Join(os.Getenv(EnvDir), "world")
	if err := errors.Join(os.Mkdir(world, 0o700), unix.Mount("world", world, "tmpfs", 0, "")); err != nil {
		t.Fatal(err)
	}
	n, err := Nest()
	if err != nil {
		t.Fatal(err)
	}
	var first *exec.Cmd
	err = n.Do(func() error {
		first = exec.Command("sleep", "1000")
		if err := errors.Join(unix.Sethostname([]byte("nested")), os.WriteFile("/run/nested", nil, 0o600), first.Start()); err != nil {
			return err
		}
		out, err := exec.Command("sh", "-c",
			"hostname; ls /run; ps -o comm= -e; ip -o link | wc -l; grep -c "+world+" /proc/self/mounts").CombinedOutput()
		if got, want := strings.Join(strings.Fields(string(out)), " "), "nested nested exe sleep sleep sh ps 1 0"; got != want {
			t.Errorf("hostname, /run, processes, links and mounts of the world: got %s, want %s (%v)", got, want, err)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if name, _ := os.Hostname(); name == "nested" {
		t.Error("the nested namespaces' name is the world's as well")
	}
	if _, err := os.Stat("/run/nested"); err == nil {
		t.Error("the nested namespaces' /run is the world's as well")
	}
	ended := make(chan error)
	go func() { ended <- first.Wait() }()
	if err := n.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err == nil || err.Error() != "signal: killed" {
		t.Errorf("process in killed namespaces: got %v, want signal: killed", err)
	}
	if err := n.Do(func() error { return nil }); err == nil {
		t.Error("Do in killed namespaces: got no error")
	}
}
