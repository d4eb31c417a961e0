package spec

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness/testns"
)

// These tests run specifications with the real OCI runtimes. The program in the container is testdata/probe, which
// reports what it finds and what it can do. It is built without cgo because nothing else is in the root file system.

const probeProgram = "/probe"

// probeDir contains the probe, which is built once, on first use.
var probeDir string

func TestMain(m *testing.M) {
	devices := openDevices()
	before := ownersOf(devices)
	code := m.Run()
	if after := ownersOf(devices); after != before {
		fmt.Fprintf(os.Stderr, "the tests changed devices of the host: before\n%s\nafter\n%s\n", before, after)
		code = 1
	}
	if probeDir != "" {
		os.RemoveAll(probeDir)
	}
	os.Exit(code)
}

// openDevices opens the devices that every container shares with the host. Their paths would not do, because tests of
// another package, which share the world, mount devices of their own there for a while.
func openDevices() map[string]int {
	devices := map[string]int{}
	for _, name := range []string{"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty"} {
		fd, err := unix.Open(name, unix.O_PATH|unix.O_CLOEXEC, 0)
		if err != nil {
			panic(err)
		}
		devices[name] = fd
	}
	return devices
}

// ownersOf lists the owners and modes of devices.
func ownersOf(devices map[string]int) string {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(devices)) {
		var st unix.Stat_t
		err := unix.Fstat(devices[name], &st)
		fmt.Fprintln(&b, name, st.Uid, st.Gid, st.Mode, err)
	}
	return b.String()
}

var buildProbe = sync.OnceValues(func() (string, error) {
	var err error
	if probeDir, err = os.MkdirTemp("", "tripod-probe-"); err != nil {
		return "", err
	}
	binary := filepath.Join(probeDir, "probe")
	build := exec.Command("go", "build", "-o", binary, "./testdata/probe")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return binary, os.Chmod(probeDir, 0o755)
})

func probeBinary(t *testing.T) string {
	t.Helper()
	binary, err := buildProbe()
	require.NoError(t, err)
	return binary
}

// report is the output of the probe.
type report struct {
	Status map[string]string // /proc/self/status
	Cwd    string
	Env    []string
	Mounts map[string]string // mount point → options and optional fields
	Did    map[string]string // requested action → "", the error, or the content read
}

// runtimes are the supported OCI runtimes. crun 1.8 refuses hosts with cgroup2 beside the v1 hierarchies, so it runs in
// a mount namespace without it. Only that mount's propagation changes, because a private copy of the tree would make
// shared mounts private.
var runtimes = map[string][]string{
	"runc": {"runc"},
	"crun": {"unshare", "--mount", "--propagation", "unchanged", "sh", "-c", `
		if mountpoint -q /sys/fs/cgroup/unified; then
			mount --make-private /sys/fs/cgroup && umount /sys/fs/cgroup/unified || exit 125
		fi
		exec crun "$@"`, "crun"},
}

// testNamespaces starts a process with its own network, IPC and UTS namespaces, for pods to use.
func testNamespaces(t *testing.T) (pid int) {
	t.Helper()
	holder := exec.Command(probeBinary(t), "hold")
	holder.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS}
	stdin, err := holder.StdinPipe()
	require.NoError(t, err)
	stdout, err := holder.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, holder.Start())
	t.Cleanup(func() {
		stdin.Close()
		_ = holder.Wait()
	})
	_, err = stdout.Read(make([]byte, 6))
	require.NoError(t, err)
	return holder.Process.Pid
}

// realInput returns a container that can run. Its program is the probe, which executes the given actions.
func realInput(t *testing.T, actions ...string) Input {
	t.Helper()
	in := testInput(t)
	pid := testNamespaces(t)
	in.Net, in.IPC, in.UTS = fmt.Sprintf("/proc/%d/ns/net", pid), fmt.Sprintf("/proc/%d/ns/ipc", pid), fmt.Sprintf("/proc/%d/ns/uts", pid)
	in.ShmPath = t.TempDir()
	files := t.TempDir()
	in.ResolvConf, in.Hosts, in.HostnameFile = filepath.Join(files, "resolv.conf"), filepath.Join(files, "hosts"),
		filepath.Join(files, "hostname")
	writeFile(t, in.ResolvConf, "nameserver 192.0.2.1\n")
	writeFile(t, in.Hosts, "pod's\n")
	writeFile(t, in.HostnameFile, "web-0\n")
	c := in.Container.Config
	c.Command = append([]string{probeProgram}, actions...)
	c.Mounts = []*runtimeapi.Mount{{HostPath: probeBinary(t), ContainerPath: probeProgram, Readonly: true}}
	c.Linux.SecurityContext.NamespaceOptions = &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_CONTAINER}
	in.Container.ID = fmt.Sprintf("tripod-spec-test-%d-%s", os.Getpid(), strings.ReplaceAll(t.Name(), "/", "-"))
	in.CgroupsPath = filepath.Join("/", testns.Cgroup(), in.Container.ID)
	return in
}

// run runs s with a runtime and returns the container's output after its end.
func run(t *testing.T, runtime []string, id string, s *specs.Spec) ([]byte, error) {
	t.Helper()
	bundle := t.TempDir()
	writeFile(t, filepath.Join(bundle, "config.json"), toJSON(t, s))
	cmd := ociCommand(runtime, filepath.Join(bundle, "state"), "run", "--bundle", bundle, id)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return out, fmt.Errorf("%s: %w: %s", runtime[0], err, stderr.String())
	}
	return out, nil
}

// onBoth runs the result of input with both runtimes and calls check with the probe's report.
func onBoth(t *testing.T, h Host, input func(t *testing.T) Input, check func(t *testing.T, r report)) {
	for name, runtime := range runtimes {
		t.Run(name, func(t *testing.T) {
			in := input(t)
			s, _ := build(t, in, h)
			out, err := run(t, runtime, in.Container.ID, s)
			require.NoError(t, err)
			var r report
			require.NoError(t, json.Unmarshal(out, &r), "%s", out)
			check(t, r)
		})
	}
}

func realHost(t *testing.T) Host {
	t.Helper()
	h, err := Probe()
	require.NoError(t, err)
	return h
}

func succeeded(t *testing.T, r report, actions ...string) {
	t.Helper()
	for _, action := range actions {
		did, ok := r.Did[action]
		assert.True(t, ok && !strings.HasPrefix(did, "error:"), "%s: got %q, want success", action, did)
	}
}

func failed(t *testing.T, r report, actions ...string) {
	t.Helper()
	for _, action := range actions {
		assert.True(t, strings.HasPrefix(r.Did[action], "error:"), "%s succeeded: %s", action, r.Did[action])
	}
}

func memoryLimitFile(h Host, cgroup string) string {
	if h.CgroupV2 {
		return filepath.Join("/sys/fs/cgroup", cgroup, "memory.max")
	}
	return filepath.Join("/sys/fs/cgroup/memory", cgroup, "memory.limit_in_bytes")
}

// ociCommand returns a command with an empty pipe as stdin. Otherwise os/exec would use /dev/null, and crun 1.8 would
// make the container's user its owner.
func ociCommand(runtime []string, state string, args ...string) *exec.Cmd {
	cmd := exec.Command(runtime[0], append(append(append([]string{}, runtime[1:]...), "--root", state), args...)...)
	cmd.Stdin = strings.NewReader("")
	return cmd
}

// startHeld starts a container whose program is the probe with "hold". It returns the runtime's state directory once
// the container runs. The container ends with the test.
func startHeld(t *testing.T, runtime []string, id string, s *specs.Spec) (state string) {
	t.Helper()
	bundle := t.TempDir()
	state = filepath.Join(bundle, "state")
	writeFile(t, filepath.Join(bundle, "config.json"), toJSON(t, s))
	cmd := ociCommand(runtime, state, "run", "--bundle", bundle, id)
	cmd.Stdin = nil
	stdin, err := cmd.StdinPipe()
	require.NoError(t, err)
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		stdin.Close()
		assert.NoError(t, cmd.Wait(), stderr.String())
	})
	_, err = stdout.Read(make([]byte, 6))
	require.NoError(t, err)
	// crun run writes its state only after the program has started.
	require.Eventually(t, func() bool {
		out, err := ociCommand(runtime, state, "state", id).Output()
		return err == nil && bytes.Contains(out, []byte(`"running"`))
	}, 30*time.Second, 10*time.Millisecond)
	return state
}
