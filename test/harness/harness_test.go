package harness

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/pelletier/go-toml/v2"
	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// TestMain makes the test binary act as its own daemon: `harness.test daemon --config FILE`.
func TestMain(m *testing.M) {
	if len(os.Args) == 4 && os.Args[1] == "daemon" {
		if err := serve(os.Args[3]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	Main(m)
}

// stubRuntime is a runtime that is ready and has no pods.
type stubRuntime struct {
	runtimeapi.UnimplementedRuntimeServiceServer
}

func (stubRuntime) Version(context.Context, *runtimeapi.VersionRequest) (*runtimeapi.VersionResponse, error) {
	return &runtimeapi.VersionResponse{Version: "0.1.0", RuntimeName: "tiny", RuntimeVersion: os.Getenv("TINY"), RuntimeApiVersion: "v1"}, nil
}

func (stubRuntime) Status(context.Context, *runtimeapi.StatusRequest) (*runtimeapi.StatusResponse, error) {
	ready := &runtimeapi.RuntimeCondition{Type: runtimeapi.RuntimeReady, Status: true}
	return &runtimeapi.StatusResponse{Status: &runtimeapi.RuntimeStatus{Conditions: []*runtimeapi.RuntimeCondition{ready}}}, nil
}

func (stubRuntime) ListPodSandbox(context.Context, *runtimeapi.ListPodSandboxRequest) (*runtimeapi.ListPodSandboxResponse, error) {
	return &runtimeapi.ListPodSandboxResponse{}, nil
}

func serve(config string) error {
	data, err := os.ReadFile(config)
	if err != nil {
		return err
	}
	var c struct {
		State string
		GRPC  struct{ Socket string }
	}
	if err := toml.Unmarshal(data, &c); err != nil {
		return err
	}
	if os.Getenv("TINY") == "fails" {
		return fmt.Errorf("cannot start")
	}
	if err := os.MkdirAll(c.State, 0o700); err != nil {
		return err
	}
	_ = os.Remove(c.GRPC.Socket)
	l, err := net.Listen("unix", c.GRPC.Socket)
	if err != nil {
		return err
	}
	s := grpc.NewServer()
	runtimeapi.RegisterRuntimeServiceServer(s, stubRuntime{})
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, s.Stop)
	return s.Serve(l)
}

func useStub(t *testing.T) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("TRIPOD_BIN", self)
}

func TestDaemon(t *testing.T) {
	useStub(t)
	d := StartDaemon(t, Env("TINY=one"), Set("network.default.mtu", 1400))
	version := func() string {
		t.Helper()
		v, err := d.Runtime().Version(t.Context(), "v1")
		if err != nil {
			t.Fatal(err)
		}
		return v.RuntimeVersion
	}
	if got := version(); got != "one" {
		t.Errorf("version after the first start = %q, want the environment's one", got)
	}
	before := d.Pid()
	d.Kill()
	if d.Running() || d.cmd.ProcessState.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Errorf("state after Kill = %v, want killed", d.cmd.ProcessState)
	}
	d.Restart("TINY=two")
	if got := version(); got != "two" || d.Pid() == before {
		t.Errorf("after Restart: version %q, PID %d; want two and a PID other than %d", got, d.Pid(), before)
	}
	d.Stop()
	err := d.TryStart("TINY=fails")
	if err == nil || !strings.Contains(err.Error(), "cannot start") {
		t.Errorf("TryStart of a failing daemon: got error %v, want its log", err)
	}
	config, err := os.ReadFile(d.ConfigPath())
	if err != nil || !strings.Contains(string(config), "mtu = 1400") || !strings.Contains(string(config), d.Socket) {
		t.Errorf("the configuration lacks the MTU or the socket (error %v):\n%s", err, config)
	}
}

func TestRegistryServesTheImages(t *testing.T) {
	r := Registry(t)
	for _, name := range []string{"e2e-test-images/busybox/manifests/1.29-2", "tripod/index/manifests/1"} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+r.Addr+"/v2/"+name, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Accept", "application/vnd.oci.image.index.v1+json")
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			t.Errorf("GET %s: got status %s, want 200", name, resp.Status)
		}
	}
	if again := Registry(t); again != r {
		t.Error("the second call of Registry returned another registry")
	}
}

// TestLeaks leaves one thing of each kind behind, and expects a report until it is removed.
func TestLeaks(t *testing.T) {
	id := strings.Repeat("ab", 32)
	const killSleep = "until pid=$(pidof sleep); do :; done; kill $pid" // setsid may not have executed sleep yet
	leaks := []struct{ kind, name, leave, clean string }{
		{"process", "sleep 4242", "setsid sleep 4242 >/dev/null 2>&1 &", killSleep},
		{"mount", "/run/leak", "mkdir /run/leak; mount -t tmpfs x /run/leak", "umount /run/leak; rmdir /run/leak"},
		{"cgroup", "/tN/pod" + id, "mkdir -p " + testCgroup() + "/tN/pod" + id, "rmdir " + testCgroup() + "/tN/pod" + id},
		{"cgroup", "/busy", "mkdir " + testCgroup() + "/busy; sh -c 'echo $$ >" + testCgroup() +
			"/busy/cgroup.procs; exec setsid sleep 4343 >/dev/null 2>&1' &",
			killSleep},
		{"network link", "leak0 veth", "ip link add leak0 type veth peer name leak1", "ip link del leak0"},
		{"iptables chain", "CNI-DN-0123456789abcdef", "iptables -t nat -N CNI-DN-0123456789abcdef", "iptables -t nat -X CNI-DN-0123456789abcdef"},
		{"IP lease", "10.1.2.3", "mkdir -p /run/cni/net; touch /run/cni/net/10.1.2.3", "rm -r /run/cni"},
		{"path", id, "mkdir -p /run/pods/" + id, "rm -r /run/pods"},
		{"path", "/run/netns/leak", "ip netns add leak", "ip netns del leak; umount /run/netns; rmdir /run/netns"},
	}
	for _, l := range leaks {
		t.Run(l.kind, func(t *testing.T) {
			before := Snapshot(nil)
			runScript(t, l.leave)
			Eventually(t, 5*time.Second, func() error {
				err := before.Leaks(Snapshot(nil))
				if err == nil || !strings.Contains(err.Error(), l.kind+": ") || !strings.Contains(err.Error(), l.name) {
					return errors.Join(errors.New("not found"), err)
				}
				return nil
			})
			runScript(t, l.clean)
			Eventually(t, 5*time.Second, func() error { return before.Leaks(Snapshot(nil)) })
		})
	}
}

func TestOpenFilesAndSnapshots(t *testing.T) {
	useStub(t)
	d := StartDaemon(t)
	before := Snapshot(d)
	conn, err := net.Dial("unix", d.Socket)
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(d.Root, "overlayfs", "snapshots", "7")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	Eventually(t, 5*time.Second, func() error {
		err := before.Leaks(Snapshot(d))
		if err == nil || !strings.Contains(err.Error(), "socket") || !strings.Contains(err.Error(), "snapshots/7") {
			return errors.Join(errors.New("not found"), err)
		}
		return nil
	})
	conn.Close()
	os.RemoveAll(dir)
	Eventually(t, 5*time.Second, func() error { return before.Leaks(Snapshot(d)) })
}

// testCgroup returns the test's own cgroup in a hierarchy that every host has.
func testCgroup() string {
	if _, err := os.Stat("/sys/fs/cgroup/pids"); err == nil {
		return "/sys/fs/cgroup/pids" + CgroupParent()
	}
	return "/sys/fs/cgroup" + CgroupParent()
}

func runScript(t *testing.T, text string) {
	t.Helper()
	if out, err := exec.Command("sh", "-c", text).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", text, err, out)
	}
}

func TestParseLog(t *testing.T) {
	lines, err := ParseLog("2026-11-21T08:00:00.000000001Z stdout P hello \n2026-11-21T08:00:00.5Z stdout F world\n" +
		"2026-11-21T08:00:01Z stderr F \n")
	if err != nil || len(lines) != 3 {
		t.Fatalf("ParseLog = %v, %v; want 3 lines", lines, err)
	}
	if got := Text(lines, "stdout"); got != "hello world\n" {
		t.Errorf("Text of stdout = %q, want %q", got, "hello world\n")
	}
	if got := Text(lines, "stderr"); got != "\n" {
		t.Errorf("Text of stderr = %q, want a newline", got)
	}
	for _, bad := range []string{"hello\n", "2026-11-21T08:00:00Z stdout F no end", "yesterday stdout F x\n",
		"2026-11-21T08:00:00Z stdin F x\n", "2026-11-21T08:00:00Z stdout X x\n"} {
		if _, err := ParseLog(bad); err == nil {
			t.Errorf("ParseLog(%q) succeeded, want an error", bad)
		}
	}
}
