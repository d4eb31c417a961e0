package cli

import (
	"context"
	"errors"
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
	gone := filepath.Join(keys, "gone")
	if err := errors.Join(os.MkdirAll(keys, 0o700), os.WriteFile(gone, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	out, err := runCommand(t, "ssh", "web", "-l", "me", "-p", "2222", "--identity", "key file", "--", "ls", "-l", "a b")
	want := []string{
		"-o", `ProxyCommand="$TRIPOD_SSH_PROGRAM" port-forward --stdio "$TRIPOD_SSH_POD" %p`, "-o", "HostKeyAlias=p", "-o", "StrictHostKeyChecking=accept-new",
		"-o", `UserKnownHostsFile="` + strings.NewReplacer(`"`, `\"`, "%", "%%").Replace(keys) + `/p"`, "-p", "2222", "-l", "me", "-i", "key file",
		"--", "web", "ls", "-l", "a b", self, "p", os.Getenv(EndpointVariable),
	}
	if got := strings.Split(strings.TrimSuffix(out, "\n"), "\n"); ExitCode(err) != 7 || !slices.Equal(got, want) {
		t.Errorf("ssh: got exit code %d (%v) and\n%q, want 7 and\n%q", ExitCode(err), err, got, want)
	}
	if _, err := os.Stat(gone); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the host keys of a pod that is gone: got %v, want no file", err)
	}
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
