package cli

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestCheckNonRoot(t *testing.T) {
	for _, c := range []struct {
		image   *runtimeapi.Image
		refused bool
	}{
		{&runtimeapi.Image{Uid: &runtimeapi.Int64Value{Value: 65534}}, false},
		{&runtimeapi.Image{Uid: &runtimeapi.Int64Value{}}, true},
		{&runtimeapi.Image{Username: "nobody"}, true},
		{&runtimeapi.Image{}, true},
	} {
		if err := checkNonRoot(c.image); errdefs.IsFailedPrecondition(err) != c.refused {
			t.Errorf("image %v: got error %v, want refused: %t", c.image, err, c.refused)
		}
	}
}

// TestRunFlags: wrong combinations and wrong files are errors before a node is needed.
func TestRunFlags(t *testing.T) {
	file := filepath.Join(t.TempDir(), "pod.yaml")
	if err := os.WriteFile(file, []byte("apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec: {nodeSelector: {a: b}}"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"run"}, "needs an image"},
		{[]string{"run", "--rm", "-d", "image"}, "[detach rm]"},
		{[]string{"run", "-f", file, "image"}, "takes no arguments with -f"},
		{[]string{"run", "-f", file, "--name", "n"}, "[file name]"},
		{[]string{"run", "-f", file + ".missing"}, "no such file"},
		{[]string{"run", "-f", file}, "spec.nodeSelector: Forbidden"},
	} {
		out, err := runCommand(t, c.args...)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: got error %v and %q, want %q", c.args, err, out, c.want)
		}
	}
}

// playingRuntime runs pods and keeps the last container's message.
type playingRuntime struct {
	otherRuntime
	created *runtimeapi.ContainerConfig
}

func (*playingRuntime) ImageStatus(_ context.Context, req *runtimeapi.ImageStatusRequest) (*runtimeapi.ImageStatusResponse, error) {
	return &runtimeapi.ImageStatusResponse{Image: &runtimeapi.Image{Id: "sha256:1", Size: 1, Username: req.GetImage().GetImage()}}, nil
}

func (*playingRuntime) RunPodSandbox(context.Context, *runtimeapi.RunPodSandboxRequest) (*runtimeapi.RunPodSandboxResponse, error) {
	return &runtimeapi.RunPodSandboxResponse{PodSandboxId: "p"}, nil
}

func (*playingRuntime) PodSandboxStatus(context.Context,
	*runtimeapi.PodSandboxStatusRequest) (*runtimeapi.PodSandboxStatusResponse, error) {
	pod := &runtimeapi.PodSandboxStatus{Id: "p", Metadata: &runtimeapi.PodSandboxMetadata{Name: "web", Namespace: "default", Uid: "u"},
		CreatedAt: 1}
	return &runtimeapi.PodSandboxStatusResponse{Status: pod}, nil
}

func (r *playingRuntime) CreateContainer(_ context.Context,
	req *runtimeapi.CreateContainerRequest) (*runtimeapi.CreateContainerResponse, error) {
	r.created = req.GetConfig()
	return &runtimeapi.CreateContainerResponse{ContainerId: "c"}, nil
}

func (*playingRuntime) StartContainer(context.Context, *runtimeapi.StartContainerRequest) (*runtimeapi.StartContainerResponse, error) {
	return &runtimeapi.StartContainerResponse{}, nil
}

// TestRunFromKubectl: one line names what has no effect, and a group without a user gets the user of the image, here "app".
func TestRunFromKubectl(t *testing.T) {
	file := filepath.Join(t.TempDir(), "pod.yaml")
	manifest := `
apiVersion: v1
kind: Pod
metadata: {name: web, uid: u}
spec:
  restartPolicy: Always
  dnsPolicy: ClusterFirst
  securityContext: {runAsGroup: 7}
  containers: [{name: web, image: app}]
status: {phase: Running}
`
	if err := os.WriteFile(file, []byte(manifest), 0o644); err != nil {
		t.Fatal(err)
	}
	r := &playingRuntime{}
	serveRuntime(t, r)
	out, err := runCommand(t, "run", "-f", file, "--volume-dir", filepath.Join(t.TempDir(), "volumes"))
	want := "tripod run: warning: pod default/web: no effect without a cluster: metadata.uid, spec.dnsPolicy: ClusterFirst, spec.restartPolicy: Always, status\n"
	if err != nil || !strings.Contains(out, want) || strings.Count(out, "warning") != 1 {
		t.Errorf("run -f: got error %v and\n%s\nwant one warning:\n%s", err, out, want)
	}
	sc := r.created.GetLinux().GetSecurityContext()
	if sc.GetRunAsUser() != nil || sc.GetRunAsUsername() != "app" || sc.GetRunAsGroup().GetValue() != 7 {
		t.Errorf("security context: got %v, want the user app and the group 7", sc)
	}
}
