package cli

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// podRuntime has the pod of otherRuntime, in this state and with these running containers.
type podRuntime struct {
	otherRuntime
	state      runtimeapi.PodSandboxState
	containers []*runtimeapi.Container
}

func (r *podRuntime) PodSandboxStatus(_ context.Context,
	req *runtimeapi.PodSandboxStatusRequest) (*runtimeapi.PodSandboxStatusResponse, error) {
	if req.GetPodSandboxId() != "p" {
		return nil, status.Error(codes.NotFound, "no such pod")
	}
	return &runtimeapi.PodSandboxStatusResponse{Status: &runtimeapi.PodSandboxStatus{
		Id: "p", State: r.state, CreatedAt: 1, Metadata: &runtimeapi.PodSandboxMetadata{Name: "web", Namespace: "shop", Uid: "u"},
	}}, nil
}

func (r *podRuntime) ListContainers(context.Context, *runtimeapi.ListContainersRequest) (*runtimeapi.ListContainersResponse, error) {
	return &runtimeapi.ListContainersResponse{Containers: r.containers}, nil
}

// servePod serves a running pod, and puts the script in PATH as the only program ssh. It returns the directory of host keys.
func servePod(t *testing.T, script string) (pod *podRuntime, keys string) {
	t.Helper()
	pod = &podRuntime{containers: []*runtimeapi.Container{{Id: "c"}}}
	serveRuntime(t, pod)
	bin, cache := t.TempDir(), filepath.Join(t.TempDir(), `a "b" %h`)
	t.Setenv("PATH", bin)
	t.Setenv("XDG_CACHE_HOME", cache)
	if script != "" {
		if err := os.WriteFile(filepath.Join(bin, "ssh"), []byte("#!/bin/sh\n"+script), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return pod, filepath.Join(cache, "tripod", "known_hosts")
}

// TestSSHCommandLine checks the arguments and the environment of ssh.
func TestSSHCommandLine(t *testing.T) {
	_, keys := servePod(t, "exit 1")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	endpoint := os.Getenv(EndpointVariable)
	t.Setenv(EndpointVariable, "unix:///another")
	var args, env []string
	ssh := func(words ...string) {
		t.Helper()
		app := &App{Stdout: io.Discard, Stderr: io.Discard, exec: func(_ string, a, e []string) error { args, env = a, e; return nil }}
		if err := runApp(t.Context(), app, append([]string{"ssh", "--endpoint", endpoint, "web"}, words...)...); err != nil {
			t.Fatal(err)
		}
	}
	ssh("-l", "me", "-p", "2222", "--identity", "key file", "--", "ls", "-l", "a b")
	want := []string{
		"ssh", "-o", `ProxyCommand="$TRIPOD_SSH_PROGRAM" port-forward --stdio "$TRIPOD_SSH_POD" %p`, "-o", "ControlPath=none", "-o",
		"HostKeyAlias=p",
		"-o", "StrictHostKeyChecking=accept-new",
		"-o", `UserKnownHostsFile="` + strings.NewReplacer(`"`, `\"`, "%", "%%").Replace(onlyDirectory(t, keys)) + `/p-%p"`, "-l", "me", "-p",
		"2222", "-i", "key file",
		"--", "web", "ls", "-l", "a b",
	}
	if !slices.Equal(args, want) {
		t.Errorf("ssh: got\n%q, want\n%q", args, want)
	}
	for name, value := range map[string]string{"TRIPOD_SSH_PROGRAM": self, "TRIPOD_SSH_POD": "p", EndpointVariable: endpoint} {
		set := slices.DeleteFunc(slices.Clone(env), func(v string) bool { return !strings.HasPrefix(v, name+"=") })
		if !slices.Equal(set, []string{name + "=" + value}) {
			t.Errorf("environment of ssh: got %q, want %s=%s once", set, name, value)
		}
	}
	ssh()
	if slices.Contains(args, "-p") {
		t.Errorf("ssh without a port: got %q, want no -p, so that ssh's configuration applies", args)
	}
}

// TestSSHReplacesProcess: a shell waits for ssh itself, so it sees that the user has stopped ssh (~^Z).
func TestSSHReplacesProcess(t *testing.T) {
	const child = "TRIPOD_TEST_SSH"
	if os.Getenv(child) != "" {
		err := runApp(t.Context(), &App{Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr}, "ssh", "web")
		t.Fatalf("the process was not replaced: %v", err)
	}
	servePod(t, `echo "$$"; exit 7`)
	c := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestSSHReplacesProcess$")
	c.Env = append(os.Environ(), child+"=1")
	out, err := c.Output()
	if c.ProcessState.ExitCode() != 7 || string(out) != fmt.Sprintln(c.Process.Pid) {
		t.Errorf("ssh: got %q, %v, want the process ID %d and exit code 7", out, err, c.Process.Pid)
	}
}

// onlyDirectory returns the path of the one directory in a directory.
func onlyDirectory(t *testing.T, dir string) string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 {
		t.Fatalf("%s has %v (%v), want one directory", dir, entries, err)
	}
	return filepath.Join(dir, entries[0].Name())
}

// TestSSHRemovesKeys: keys go with their pods, but an endpoint does not remove those of another endpoint's pods.
func TestSSHRemovesKeys(t *testing.T) {
	pod, keys := servePod(t, "")
	ssh := func() {
		t.Helper()
		if _, err := runCommand(t, "ssh", "web"); !errdefs.IsUnavailable(err) { // there is no ssh
			t.Fatal(err)
		}
	}
	ssh()
	dir := onlyDirectory(t, keys)
	for _, name := range []string{"p-22", "p-2222", "p-22.old", "gone-22"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	left := func(want ...string) {
		t.Helper()
		entries, err := os.ReadDir(dir)
		var got []string
		for _, e := range entries {
			got = append(got, e.Name())
		}
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("the host keys of the first endpoint are %q (%v), want %q", got, err, want)
		}
	}
	first := os.Getenv(EndpointVariable)
	serveRuntime(t, pod)
	ssh()
	left("gone-22", "p-22", "p-22.old", "p-2222")
	t.Setenv(EndpointVariable, first)
	ssh()
	left("p-22", "p-22.old", "p-2222")
}

func TestSSHRefuses(t *testing.T) {
	pod, _ := servePod(t, "")
	for _, args := range [][]string{{"ssh"}, {"ssh", "web", "ls"}, {"ssh", "--", "web"}, {"ssh", "web", "api", "--", "ls"}} {
		if _, err := runCommand(t, args...); err == nil || !strings.Contains(err.Error(), "ssh POD -- COMMAND") {
			t.Errorf("%q: got %v, want the right form", args, err)
		}
	}
	if _, err := runCommand(t, "ssh", "web"); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "openssh-client") {
		t.Errorf("without ssh: got %v, want ErrUnavailable with the package", err)
	}
	if _, err := runCommand(t, "ssh", "other"); err == nil || !strings.Contains(err.Error(), `"other"`) {
		t.Errorf("a pod that is not there: got %v", err)
	}
	pod.containers = nil
	if _, err := runCommand(t, "ssh", "web"); !errdefs.IsFailedPrecondition(err) ||
		!strings.Contains(err.Error(), "pod web is not running: none of its containers") {
		t.Errorf("without a running container: got %v, want ErrFailedPrecondition", err)
	}
	pod.state = runtimeapi.PodSandboxState_SANDBOX_NOTREADY
	if _, err := runCommand(t, "ssh", "web"); !errdefs.IsFailedPrecondition(err) ||
		!strings.Contains(err.Error(), "pod web is not running: it has been stopped") {
		t.Errorf("stopped: got %v, want ErrFailedPrecondition", err)
	}
}

// TestPortForwardRefuses: with --stdio there is nothing to listen on.
func TestPortForwardRefuses(t *testing.T) {
	serveRuntime(t, &podRuntime{})
	if _, err := runCommand(t, "port-forward", "--stdio", "--address", "0.0.0.0", "web", "22"); err == nil ||
		!strings.Contains(err.Error(), "[address stdio]") {
		t.Errorf("--stdio with --address: got %v, want an error that names both", err)
	}
}
