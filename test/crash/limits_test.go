package crash

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// limitFiles sets how many files a process may have open, and gives how many it might before. The hard limit stays, for nobody but
// who may lift it could undo that.
func limitFiles(t *testing.T, pid int, files uint64) (before uint64) {
	t.Helper()
	var limit unix.Rlimit
	if err := unix.Prlimit(pid, unix.RLIMIT_NOFILE, nil, &limit); err != nil {
		t.Fatal(err)
	}
	before, limit.Cur = limit.Cur, files
	if err := unix.Prlimit(pid, unix.RLIMIT_NOFILE, &limit, nil); err != nil {
		t.Fatal(err)
	}
	return before
}

// TestN10DescriptorsRunOut: a daemon that can open no more files answers what needs none, refuses the rest as a node that is out of
// something, keeps what runs, and does everything again once there are some.
func TestN10DescriptorsRunOut(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.PodConfig(t, "p"))
	c := pod.Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep()))
	created := pod.Create(harness.ContainerConfig("created", harness.Busybox, harness.Sleep()))
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	calls := map[string]func() error{
		"RunPodSandbox": func() error {
			return second(d.CRI().RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: harness.PodConfig(t, "new")}))
		},
		"CreateContainer": func() error {
			return second(d.CRI().CreateContainer(ctx, &runtimeapi.CreateContainerRequest{
				PodSandboxId: pod.ID, Config: harness.ContainerConfig("new", harness.Busybox, harness.Sleep()), SandboxConfig: pod.Config,
			}))
		},
		"ExecSync": func() error {
			return second(d.CRI().ExecSync(ctx, &runtimeapi.ExecSyncRequest{ContainerId: c.ID, Cmd: []string{"true"}, Timeout: 20}))
		},
		"PullImage": func() error {
			return second(d.ImageCRI().PullImage(ctx, &runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: harness.Nginx}}))
		},
		"StartContainer": func() error {
			return second(d.CRI().StartContainer(ctx, &runtimeapi.StartContainerRequest{ContainerId: created.ID}))
		},
	}
	open, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", d.Pid()))
	if err != nil {
		t.Fatal(err)
	}
	refused := map[string]int{}
	// At each number of files that are left something else is the first that fails.
	for left := range 12 {
		old := limitFiles(t, d.Pid(), uint64(len(open)+left))
		for name, call := range calls {
			err := call()
			switch status.Code(err) {
			case codes.ResourceExhausted, codes.Unavailable:
				refused[name]++
			case codes.OK:
			case codes.AlreadyExists: // an earlier call of its name went well
			default:
				t.Errorf("%s with %d files left: %v", name, left, err)
			}
		}
		if s := c.Status(); s.State != runtimeapi.ContainerState_CONTAINER_RUNNING {
			t.Fatalf("the container that runs: %v", s)
		}
		limitFiles(t, d.Pid(), old)
	}
	for name := range calls {
		if refused[name] == 0 && name != "StartContainer" { // once it has started it is not started again
			t.Errorf("%s never ran out of files", name)
		}
	}
	c.Must("true")
	wantPod(t, d)
	wantReady(t, d)
	fresh, err := harness.Dial(d.Socket) // who could not be accepted is now
	if err != nil {
		t.Fatal(err)
	}
	defer fresh.Close()
	if _, err := runtimeapi.NewRuntimeServiceClient(fresh).Version(ctx, &runtimeapi.VersionRequest{}); err != nil {
		t.Error(err)
	}
	if err := d.RemoveAllPods(); err != nil {
		t.Error(err)
	}
}
