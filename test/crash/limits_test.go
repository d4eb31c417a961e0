package crash

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/until"
)

// limitFiles sets the soft limit of a process's open files and returns the previous limit. It does not lower the hard
// limit, which could not be undone without privileges.
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

// freeFiles lists numbers of descriptors that a process does not use, from the lowest. A limit of number N leaves the
// process as many descriptors as there are smaller numbers in the list.
func freeFiles(t *testing.T, pid int) (free []uint64) {
	t.Helper()
	for n := range uint64(1000) {
		if _, err := os.Lstat(fmt.Sprintf("/proc/%d/fd/%d", pid, n)); os.IsNotExist(err) {
			free = append(free, n)
		}
	}
	return free
}

// TestN10DescriptorsRunOut: a daemon that cannot open more files answers the calls that need none, and refuses the
// others with ResourceExhausted or Unavailable. Its containers keep running. Once it can open files, it works again.
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
	free := freeFiles(t, d.Pid())
	refused := map[string]int{}
	// With each number of remaining files, another operation is the first to fail.
	for left := range 12 {
		old := limitFiles(t, d.Pid(), free[left])
		for name, call := range calls {
			err := call()
			switch status.Code(err) {
			case codes.ResourceExhausted, codes.Unavailable:
				refused[name]++
			case codes.OK:
			case codes.AlreadyExists: // an earlier call with the same name succeeded
			default:
				t.Errorf("%s with %d files left: got error %v, want success, ResourceExhausted or Unavailable", name, left, err)
			}
		}
		if s := c.Status(); s.State != runtimeapi.ContainerState_CONTAINER_RUNNING {
			t.Fatalf("status of the container: got %v, want running", s)
		}
		limitFiles(t, d.Pid(), old)
	}
	for name := range calls {
		if refused[name] == 0 && name != "StartContainer" { // after one success, the call does nothing
			t.Errorf("%s was never refused, want at least one refusal", name)
		}
	}
	c.Must("true")
	wantPod(t, d)
	wantReady(t, d)
	until.Within(t, time.Minute, "the networks of refused pods are released", func() bool {
		pods, err := d.CRI().ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
		records, readErr := filepath.Glob(filepath.Join(d.Dir, "root/network/attachments/*.json"))
		return err == nil && readErr == nil && len(records) == len(pods.GetItems())
	})
	fresh, err := harness.Dial(d.Socket) // the daemon accepts connections again
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
