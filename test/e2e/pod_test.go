package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

const (
	ready    = runtimeapi.PodSandboxState_SANDBOX_READY
	notReady = runtimeapi.PodSandboxState_SANDBOX_NOTREADY
	exited   = runtimeapi.ContainerState_CONTAINER_EXITED
	running  = runtimeapi.ContainerState_CONTAINER_RUNNING
	created  = runtimeapi.ContainerState_CONTAINER_CREATED
)

// listedPods returns the IDs of the pods that ListPodSandbox returns for a filter.
func listedPods(t *testing.T, d *harness.Daemon, filter *runtimeapi.PodSandboxFilter) []string {
	t.Helper()
	all, err := d.Runtime().ListPodSandbox(context.Background(), filter)
	if err != nil {
		t.Fatal(err)
	}
	ids := make([]string, len(all))
	for i, p := range all {
		ids[i] = p.Id
	}
	return ids
}

func TestPodSandbox(t *testing.T) {
	ctx := context.Background()
	d := harness.StartDaemon(t)
	d.Pull(t, harness.Busybox)
	t.Run("runtime should support running PodSandbox [Conformance]", func(t *testing.T) {
		p := startPod(t, d)
		if s := p.Status(); s.State != ready || s.CreatedAt == 0 || s.GetNetwork().GetIp() == "" {
			t.Errorf("status: got %v, want ready with an address", s)
		}
	})
	t.Run("runtime should support stopping PodSandbox [Conformance]", func(t *testing.T) {
		p := startPod(t, d)
		c := p.Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep()))
		p.Stop()
		if s := p.Status(); s.State != notReady {
			t.Errorf("status: got %v, want not ready", s)
		}
		if s := c.Status(); s.State != exited {
			t.Errorf("state of its container: got %v, want exited", s.State)
		}
	})
	t.Run("runtime should support removing PodSandbox [Conformance]", func(t *testing.T) {
		p := d.RunPod(t, harness.PodConfig(t, "p"))
		c := p.Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep()))
		p.Remove()
		_, err := d.CRI().PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: p.ID})
		wantCode(t, err, codes.NotFound)
		_, err = d.CRI().ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: c.ID})
		wantCode(t, err, codes.NotFound)
		if got := listedPods(t, d, nil); slices.Contains(got, p.ID) {
			t.Errorf("ListPodSandbox after the removal: got %v, want no %s", got, p.ID)
		}
	})
	t.Run("a running pod can be removed without a stop", func(t *testing.T) {
		p := d.RunPod(t, harness.PodConfig(t, "p"))
		p.Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep()))
		if err := d.Runtime().RemovePodSandbox(ctx, p.ID); err != nil {
			t.Error(err)
		}
	})
	t.Run("runtime should support preserving PodSandbox attributes [Conformance]", func(t *testing.T) {
		labels, annotations := map[string]string{"app": "web", "tier": "front"}, map[string]string{"note": "línea\nzwei", "empty": ""}
		p := startPod(t, d, func(c *runtimeapi.PodSandboxConfig) {
			c.Metadata.Attempt, c.Labels, c.Annotations = 2, labels, annotations
		})
		s := p.Status()
		if s.Metadata.String() != p.Config.Metadata.String() || !maps.Equal(s.Labels, labels) || !maps.Equal(s.Annotations, annotations) {
			t.Errorf("status: got %v, want the attributes of %v", s, p.Config)
		}
		if n := s.GetLinux().GetNamespaces().GetOptions(); n.GetPid() != runtimeapi.NamespaceMode_CONTAINER ||
			n.GetNetwork() != runtimeapi.NamespaceMode_POD {
			t.Errorf("namespaces: got %v, want PID CONTAINER and network POD", n)
		}
		for name, f := range map[string]*runtimeapi.PodSandboxFilter{
			"ID": {Id: p.ID}, "short ID": {Id: p.ID[:12]}, "label": {LabelSelector: map[string]string{"tier": "front"}},
			"state": {State: &runtimeapi.PodSandboxStateValue{State: ready}, LabelSelector: map[string]string{"app": "web"}},
		} {
			if got := listedPods(t, d, f); !slices.Equal(got, []string{p.ID}) {
				t.Errorf("ListPodSandbox by %s: got %v, want only %s", name, got, p.ID)
			}
		}
		if got := listedPods(t, d,
			&runtimeapi.PodSandboxFilter{Id: p.ID, State: &runtimeapi.PodSandboxStateValue{State: notReady}}); len(got) != 0 {
			t.Errorf("ListPodSandbox by another state: got %v, want none", got)
		}
	})
	t.Run("N3 RunPodSandbox again is the same pod", func(t *testing.T) {
		p := startPod(t, d)
		again, err := d.Runtime().RunPodSandbox(ctx, p.Config, "")
		if err != nil || again != p.ID {
			t.Errorf("repeated RunPodSandbox: got %s, error %v; want %s", again, err, p.ID)
		}
	})
	t.Run("N3 a caller that gives up and comes back", func(t *testing.T) {
		config := harness.PodConfig(t, "p")
		short, cancel := context.WithTimeout(ctx, time.Millisecond)
		defer cancel()
		_, err := d.CRI().RunPodSandbox(short, &runtimeapi.RunPodSandboxRequest{Config: config})
		wantCode(t, err, codes.DeadlineExceeded)
		p := d.RunPod(t, config)
		defer p.Remove()
		if got := listedPods(t, d, &runtimeapi.PodSandboxFilter{LabelSelector: config.Labels}); !slices.Equal(got, []string{p.ID}) {
			t.Errorf("pods: got %v, want only %s", got, p.ID)
		}
	})
	t.Run("an unknown handler is refused", func(t *testing.T) {
		_, err := d.CRI().RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: harness.PodConfig(t, "p"), RuntimeHandler: "gvisor"})
		wantCode(t, err, codes.InvalidArgument)
	})
	t.Run("verbose status", func(t *testing.T) {
		p := startPod(t, d)
		resp, err := d.Runtime().PodSandboxStatus(ctx, p.ID, true)
		if err != nil || len(resp.Info) == 0 {
			t.Errorf("verbose status: got %v, error %v; want information", resp, err)
		}
	})
}

// TestKubeletHabits makes the calls of a kubelet over the life of pods, including crashes of the kubelet and the
// daemon.
func TestKubeletHabits(t *testing.T) {
	ctx := context.Background()
	d := harness.StartDaemon(t)
	d.Pull(t, harness.Busybox)
	t.Run("a second attempt while the first is still there", func(t *testing.T) {
		p := startPod(t, d)
		first := p.Run(harness.ContainerConfig("c", harness.Busybox, harness.Shell("exit 1")))
		first.WaitExit(1)
		config := harness.ContainerConfig("c", harness.Busybox, harness.Sleep())
		config.Metadata.Attempt, config.LogPath = 1, "c-1.log"
		second := p.Run(config)
		if first.ID == second.ID || first.Status().State != exited || second.Status().State != running {
			t.Errorf("attempts: got first %v, second %v; want two IDs, the first exited, the second running", first.Status(), second.Status())
		}
		if got := listed(t, d, &runtimeapi.ContainerFilter{PodSandboxId: p.ID}); len(got) != 2 {
			t.Errorf("ListContainers: got %v, want both attempts", got)
		}
		first.Remove() // the kubelet keeps only the last dead attempt
		second.Must("true")
	})
	t.Run("containers come and go, and the dead are collected", func(t *testing.T) {
		p := startPod(t, d)
		var dead []*harness.Container
		for n := range uint32(5) {
			config := harness.ContainerConfig("c", harness.Busybox, harness.Shell("exit 1"))
			config.Metadata.Attempt, config.LogPath = n, fmt.Sprintf("c/%d.log", n)
			if err := os.MkdirAll(filepath.Join(p.Config.LogDirectory, "c"), 0o755); err != nil {
				t.Fatal(err)
			}
			c := p.Run(config)
			c.WaitExit(1)
			dead = append(dead, c)
		}
		for _, c := range dead {
			c.Remove()
		}
		if got := listed(t, d, &runtimeapi.ContainerFilter{PodSandboxId: p.ID}); len(got) != 0 {
			t.Errorf("ListContainers after the removals: got %v, want none", got)
		}
	})
	t.Run("a stopped container is started again", func(t *testing.T) {
		p := startPod(t, d)
		c := p.Run(harness.ContainerConfig("c", harness.Busybox, harness.Shell("echo run >>/runs; exit $(wc -l </runs)")))
		first := c.WaitExit(1)
		c.Start()
		harness.Eventually(t, waitLimit, func() error {
			if s := c.Status(); s.State != exited || s.ExitCode != 2 || s.StartedAt <= first.StartedAt {
				return fmt.Errorf("status: got %v, want a second end with code 2", s)
			}
			return nil
		})
	})
	t.Run("a new attempt at a pod", func(t *testing.T) {
		config := harness.PodConfig(t, "p")
		old := d.RunPod(t, config)
		old.Stop()
		config.Metadata.Attempt++
		next := d.RunPod(t, config)
		defer next.Remove()
		if next.ID == old.ID || old.Status().State != notReady {
			t.Errorf("sandboxes: got old %s (%v), new %s; want two IDs and the old one not ready", old.ID, old.Status().State, next.ID)
		}
		old.Remove()
		next.Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep())).Must("true")
	})
	for name, restart := range map[string]func(){"a restart": func() { d.Restart() }, "SIGKILL": func() { d.Kill(); d.Start() }} {
		t.Run("status after "+name, func(t *testing.T) {
			p := startPod(t, d)
			up := p.Run(harness.ContainerConfig("up", harness.Busybox, harness.Sleep()))
			ended := p.Run(harness.ContainerConfig("ended", harness.Busybox, harness.Shell("exit 5")))
			ended.WaitExit(5)
			ends := p.Run(harness.ContainerConfig("ends", harness.Busybox, harness.Shell("while ! test -e /end; do usleep 10000; done; exit 6")))
			cold, warm := p.Create(harness.ContainerConfig("cold", harness.Busybox, harness.Sleep())),
				p.Create(harness.ContainerConfig("warm", harness.Busybox, harness.Sleep()))
			before := map[*harness.Container]*runtimeapi.ContainerStatus{up: up.Status(), ended: ended.Status(), cold: cold.Status()}
			pod := p.Status()
			ends.Must("touch", "/end")
			restart()
			if s := p.Status(); s.String() != pod.String() {
				t.Errorf("pod status after the restart: got %v, want %v", s, pod)
			}
			for c, was := range before {
				if s := c.Status(); s.String() != was.String() {
					t.Errorf("container status after the restart: got %v, want %v", s, was)
				}
			}
			ends.WaitExit(6)
			up.Must("true")
			cold.Remove()
			warm.Start()
			warm.Must("true")
			up.Stop(10 * time.Second)
			up.WaitState(exited)
		})
	}
	t.Run("a container that ends while the daemon is down", func(t *testing.T) {
		p := startPod(t, d)
		c := p.Run(harness.ContainerConfig("c", harness.Busybox, harness.Command("sleep", "86543")))
		d.Kill()
		killByCommand(t, "sleep\x0086543\x00")
		d.Start()
		if s := c.WaitExit(137); s.FinishedAt < s.StartedAt {
			t.Errorf("status: got %v, want valid times", s)
		}
	})
	t.Run("events of a container's life", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(ctx, waitLimit)
		defer cancel()
		stream, err := d.CRI().GetContainerEvents(ctx, &runtimeapi.GetEventsRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := stream.Header(); err != nil { // returns once the subscription is active
			t.Fatal(err)
		}
		c := startPod(t, d).Run(harness.ContainerConfig("c", harness.Busybox, harness.Shell("exit 4")))
		c.WaitExit(4)
		c.Remove()
		var got []string
		for len(got) < 4 {
			e, err := stream.Recv()
			if err != nil {
				t.Fatalf("events after %v: got error %v, want DELETED", got, err)
			}
			if e.ContainerId != c.ID {
				continue
			}
			if e.PodSandboxStatus.GetId() != c.Pod.ID || e.CreatedAt == 0 {
				t.Errorf("event: got %v, want a time and the pod's status", e)
			}
			got = append(got, strings.TrimSuffix(strings.TrimPrefix(e.ContainerEventType.String(), "CONTAINER_"), "_EVENT"))
		}
		if want := "CREATED STARTED STOPPED DELETED"; strings.Join(got, " ") != want {
			t.Errorf("events: got %v, want %s", got, want)
		}
	})
}

// TestVerboseStatus: the verbose status of pods and containers is one JSON object with the same keys for every kind of
// pod.
func TestVerboseStatus(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	for kind, c := range map[string]*harness.Container{
		"linux": d.RunPod(t, harness.PodConfig(t, "linux")).Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep())),
		"wasm":  d.RunWasm(t, &harness.PodSpec{Name: "wasm", Image: harness.GreeterC}),
	} {
		pod, err := d.CRI().PodSandboxStatus(t.Context(), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: c.Pod.ID, Verbose: true})
		if err != nil {
			t.Fatal(err)
		}
		container, err := d.CRI().ContainerStatus(t.Context(), &runtimeapi.ContainerStatusRequest{ContainerId: c.ID, Verbose: true})
		if err != nil {
			t.Fatal(err)
		}
		type about struct {
			SandboxID, Handler, State string
			Pid                       int
			Config                    struct{ Metadata struct{ Name string } }
			CNIResult                 struct{ IPs []struct{ Address string } }
		}
		read := func(info map[string]string) (a about) {
			if err := json.Unmarshal([]byte(info["info"]), &a); err != nil || len(info) != 1 {
				t.Errorf("%s: verbose information: got %v, error %v; want one JSON object", kind, info, err)
			}
			return a
		}
		ofPod, ofContainer := read(pod.Info), read(container.Info)
		if ofPod.SandboxID != c.Pod.ID || ofPod.Handler != kind || ofPod.Config.Metadata.Name != pod.Status.Metadata.Name {
			t.Errorf("%s: pod information: got %+v, want its ID, handler and configuration", kind, ofPod)
		}
		if ips := ofPod.CNIResult.IPs; len(ips) != 1 || !strings.HasPrefix(ips[0].Address, c.Pod.IP()+"/") {
			t.Errorf("%s: addresses in the CNI result: got %v, want only %s", kind, ips, c.Pod.IP())
		}
		if ofContainer.SandboxID != c.Pod.ID || ofContainer.Handler != kind ||
			ofContainer.Config.Metadata.Name != container.Status.Metadata.Name || ofContainer.Pid == 0 {
			t.Errorf("%s: container information: got %+v, want its pod, handler, configuration and PID", kind, ofContainer)
		}
	}
}
