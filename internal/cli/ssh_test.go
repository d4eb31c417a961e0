package cli

import (
	"context"
	"os"
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

func (r *podRuntime) PodSandboxStatus(_ context.Context, req *runtimeapi.PodSandboxStatusRequest) (*runtimeapi.PodSandboxStatusResponse, error) {
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

// TestSSHCommandLine checks the arguments of ssh, and that its exit code is ours.
func TestSSHCommandLine(t *testing.T) {
	_, keys := servePod(t, `printf '%s\n' "$@" "$TRIPOD_SSH_PROGRAM" "$TRIPOD_SSH_POD" "$CONTAINER_RUNTIME_ENDPOINT"; exit 7`)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	out, err := runCommand(t, "ssh", "web", "-l", "me", "-p", "2222", "--identity", "key file", "--", "ls", "-l", "a b")
	want := []string{
		"-o", `ProxyCommand="$TRIPOD_SSH_PROGRAM" port-forward --stdio "$TRIPOD_SSH_POD" %p`, "-o", "ControlPath=none", "-o", "HostKeyAlias=p",
		"-o", "StrictHostKeyChecking=accept-new",
		"-o", `UserKnownHostsFile="` + strings.NewReplacer(`"`, `\"`, "%", "%%").Replace(onlyDirectory(t, keys)) + `/p-%p"`, "-l", "me", "-p", "2222", "-i", "key file",
		"--", "web", "ls", "-l", "a b", self, "p", os.Getenv(EndpointVariable),
	}
	if got := strings.Split(strings.TrimSuffix(out, "\n"), "\n"); ExitCode(err) != 7 || !slices.Equal(got, want) {
		t.Errorf("ssh: got exit code %d (%v) and\n%q, want 7 and\n%q", ExitCode(err), err, got, want)
	}
	if out, err := runCommand(t, "ssh", "web"); ExitCode(err) != 7 || strings.Contains(out, "-p\n") {
		t.Errorf("ssh without a port: got exit code %d (%v) and %q, want 7 and no -p, so that ssh's configuration applies", ExitCode(err), err, out)
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

func TestSSHIsKilled(t *testing.T) {
	servePod(t, "kill -TERM $$")
	if _, err := runCommand(t, "ssh", "web"); ExitCode(err) != 143 {
		t.Errorf("ssh that a signal has ended: got exit code %d (%v), want 143", ExitCode(err), err)
	}
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
	if _, err := runCommand(t, "ssh", "web"); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "pod web is not running: none of its containers") {
		t.Errorf("without a running container: got %v, want ErrFailedPrecondition", err)
	}
	pod.state = runtimeapi.PodSandboxState_SANDBOX_NOTREADY
	if _, err := runCommand(t, "ssh", "web"); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "pod web is not running: it has been stopped") {
		t.Errorf("stopped: got %v, want ErrFailedPrecondition", err)
	}
}
