package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// delegation is a daemon in front of another one, which has the handler "runc". Only the other one has been started.
type delegation struct{ front, back *harness.Daemon }

func newDelegation(t *testing.T) delegation {
	t.Helper()
	back := harness.StartDaemon(t)
	front := harness.NewDaemon(t,
		harness.Set("delegate", []map[string]any{{"name": "behind", "endpoint": back.Socket, "handlers": []string{"runc"}, "timeout": "1s"}}))
	// Both must have stopped before either looks for what was left behind.
	t.Cleanup(func() {
		for _, d := range []*harness.Daemon{front, back} {
			if d.Running() {
				_ = syscall.Kill(d.Pid(), syscall.SIGCONT)
			}
		}
		if front.Running() && back.Running() {
			harness.Eventually(t, waitLimit, front.RemoveAllPods)
		}
		front.Stop()
		back.Stop()
		front.EndCarriers()
		back.EndCarriers()
	})
	return delegation{front, back}
}

// lists returns an error unless the front lists exactly the given pods.
func (n delegation) lists(t *testing.T, want ...*harness.Pod) error {
	t.Helper()
	resp, err := n.front.CRI().ListPodSandbox(context.Background(), &runtimeapi.ListPodSandboxRequest{})
	if err != nil {
		return err
	}
	var got, ids []string
	for _, p := range resp.GetItems() {
		got = append(got, p.GetId())
	}
	for _, p := range want {
		ids = append(ids, p.ID)
	}
	slices.Sort(got)
	slices.Sort(ids)
	if !slices.Equal(got, ids) {
		return fmt.Errorf("ListPodSandbox: got %v, want %v", got, ids)
	}
	return nil
}

func (n delegation) mustList(t *testing.T, want ...*harness.Pod) {
	t.Helper()
	if err := n.lists(t, want...); err != nil {
		t.Fatal(err)
	}
}

// ready returns nil if the front's status has the condition of the delegate.
func (n delegation) ready() error {
	conditions, err := n.front.Conditions()
	if err != nil {
		return err
	}
	if c := conditions["DelegateReady/behind"]; !c.GetStatus() || !conditions[runtimeapi.RuntimeReady].GetStatus() {
		return fmt.Errorf("conditions %v", conditions)
	}
	return nil
}

func pause(t *testing.T, d *harness.Daemon, s syscall.Signal) {
	t.Helper()
	if err := syscall.Kill(d.Pid(), s); err != nil {
		t.Fatal(err)
	}
	if s != syscall.SIGSTOP {
		return
	}
	harness.Eventually(t, waitLimit, func() error { // a thread stops only when it next returns from the kernel
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", d.Pid()))
		if err != nil || len(threads) == 0 {
			return fmt.Errorf("threads of the daemon: got %d, error %v", len(threads), err)
		}
		for _, file := range threads {
			if stat, err := os.ReadFile(file); err == nil && !strings.Contains(string(stat), ") T ") {
				return fmt.Errorf("%s: got %s, want it stopped", file, stat)
			}
		}
		return nil
	})
}

// killedAt kills the front at a fail point in the life of a pod, and checks that the next start knows what the delegate
// has.
func (n delegation) killedAt(t *testing.T, point string, container *runtimeapi.ContainerConfig) {
	t.Helper()
	ctx := context.Background()
	n.front.Restart("TRIPOD_FAILPOINTS=" + point + "=kill")
	config := harness.PodConfig(t, "victim", func(c *runtimeapi.PodSandboxConfig) { c.Labels["victim"] = point })
	if err := os.MkdirAll(config.LogDirectory, 0o755); err != nil {
		t.Fatal(err)
	}
	pod, err := n.front.CRI().RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: config, RuntimeHandler: "runc"})
	if err == nil {
		_, err = n.front.CRI().CreateContainer(ctx,
			&runtimeapi.CreateContainerRequest{PodSandboxId: pod.GetPodSandboxId(), Config: container, SandboxConfig: config})
	}
	if err == nil {
		_, err = n.front.CRI().RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: pod.GetPodSandboxId()})
	}
	if err == nil {
		t.Fatalf("%s: no call met the fail point", point)
	}
	n.front.WaitExit(waitLimit)
	n.front.Start()
	theirs := listedPods(t, n.back, nil)
	for _, id := range theirs {
		if !slices.Contains(listedPods(t, n.front, nil), id) {
			t.Errorf("%s: the pod %s is at the delegate, and not listed", point, id)
		}
	}
	victims := listedPods(t, n.front, &runtimeapi.PodSandboxFilter{LabelSelector: map[string]string{"victim": point}})
	for _, id := range victims {
		if _, err := n.front.CRI().RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id}); err != nil {
			t.Errorf("%s: %v", point, err)
		}
	}
}

// TestDelegate has a node adopt another CRI endpoint with its pods, and stops and kills both. (make test-delegate does the
// same with containerd.)
func TestDelegate(t *testing.T) {
	ctx := context.Background()
	n := newDelegation(t)
	old := n.back.RunPod(t, harness.PodConfig(t, "old"))
	survivor := old.Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep()))
	started := survivor.Status().GetStartedAt()
	n.front.Start()
	sleeps := func(name string) *runtimeapi.ContainerConfig {
		return harness.ContainerConfig(name, harness.Busybox, harness.Shell("echo began; trap 'exit 0' TERM; sleep 3600 & wait"))
	}
	n.front.Pull(t, harness.Busybox) // for the default handler, so to this node; the delegate has it already
	own := n.front.RunPod(t, harness.PodConfig(t, "own"))
	own.Run(sleeps("own"))
	through := n.front.RunPodWith(t, harness.PodConfig(t, "through"), "runc")
	c := through.Create(sleeps("through"))
	c.Start()

	t.Run("pods of both sides are the node's", func(t *testing.T) {
		n.mustList(t, old, own, through)
		c.WaitLog("began")
		if out := strings.TrimSpace(c.Must("echo", "hello")); out != "hello" {
			t.Errorf("ExecSync: got %q, want hello", out)
		}
		if through.IP() == own.IP() {
			t.Errorf("both pods have the address %s", own.IP())
		}
		if _, err := n.back.CRI().ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: c.ID}); err != nil {
			t.Errorf("the container is not at the delegate under the same ID: %v", err)
		}
		if _, err := n.front.CRI().ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: survivor.ID}); err != nil {
			t.Error(err)
		}
		stats, err := n.front.Runtime().ListPodSandboxStats(ctx, nil)
		if err != nil || len(stats) != 3 {
			t.Errorf("ListPodSandboxStats: got %d pods, error %v; want 3", len(stats), err)
		}
		if r := c.Exec(harness.WebSocket, nil, false, "echo", "streamed"); r.Stdout != "streamed\n" {
			t.Errorf("a session by the delegate's URL: got %+v, want streamed", r)
		}
	})

	t.Run("a delegate that is stopped", func(t *testing.T) {
		pause(t, n.back, syscall.SIGSTOP)
		n.mustList(t, old, own, through)
		if err := n.ready(); err == nil {
			t.Error("the node is ready while its delegate is stopped")
		}
		more := n.front.RunPod(t, harness.PodConfig(t, "more"))
		n.mustList(t, old, own, through, more)
		more.Remove()
		_, err := n.front.CRI().StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: through.ID})
		wantCode(t, err, codes.Unavailable)

		n.front.Kill()
		n.front.StartNotReady()
		if err := n.lists(t, own); status.Code(err) != codes.Unavailable {
			t.Errorf("ListPodSandbox without a snapshot: got %v, want Unavailable", err)
		}
		pause(t, n.back, syscall.SIGCONT)
		harness.Eventually(t, waitLimit, n.ready)
		n.mustList(t, old, own, through)
	})

	t.Run("a delegate that is killed", func(t *testing.T) {
		n.back.Kill()
		n.mustList(t, old, own, through)
		_, err := n.front.CRI().ExecSync(ctx, &runtimeapi.ExecSyncRequest{ContainerId: c.ID, Cmd: []string{"true"}})
		wantCode(t, err, codes.Unavailable)
		n.back.Start()
		harness.Eventually(t, waitLimit, n.ready)
		if out := strings.TrimSpace(c.Must("echo", "again")); out != "again" {
			t.Errorf("ExecSync: got %q, want again", out)
		}
		resp, err := n.front.CRI().ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: survivor.ID})
		if err != nil || resp.GetStatus().GetStartedAt() != started {
			t.Errorf("the first container: got %v, error %v; want it running since %d", resp.GetStatus(), err, started)
		}
	})

	t.Run("the node is killed in the middle of a call", func(t *testing.T) {
		for _, point := range []string{"run-sandbox.intent", "run-sandbox.forwarded", "create-container.forwarded", "remove.forwarded"} {
			n.killedAt(t, "delegate."+point, c.Config)
		}
		n.mustList(t, old, own, through)
	})

	t.Run("the pods end through the node", func(t *testing.T) {
		c.Stop(5 * time.Second)
		through.Remove()
		n.mustList(t, old, own)
		_, err := n.front.CRI().PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: through.ID})
		wantCode(t, err, codes.NotFound)
	})
}
