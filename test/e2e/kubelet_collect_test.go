package e2e

import (
	"context"
	"maps"
	"os"
	"slices"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// collect removes the garbage of a running pod: all dead containers of a name except the newest, and all sandboxes
// without containers except the newest.
func (k *kubelet) collect(p *kubePod, s *podStatus) {
	k.t.Helper()
	dead := map[string]int{}
	for _, c := range s.containers {
		if c.State == running {
			continue
		}
		if dead[c.Metadata.Name]++; dead[c.Metadata.Name] > 1 {
			k.removeContainer(c)
		}
	}
	containers, err := k.runtime.ListContainers(context.Background(), nil)
	k.must(err)
	for _, sandbox := range s.sandboxes[min(1, len(s.sandboxes)):] {
		inUse := slices.ContainsFunc(containers, func(c *runtimeapi.Container) bool { return c.PodSandboxId == sandbox.Id })
		if sandbox.State != ready && !inUse {
			k.removeSandbox(sandbox.Id)
		}
	}
}

// removeContainer removes the log and then the container, like the kubelet.
func (k *kubelet) removeContainer(c *runtimeapi.ContainerStatus) {
	k.t.Helper()
	if err := os.Remove(c.LogPath); err != nil && !os.IsNotExist(err) {
		k.t.Error(err)
	}
	k.must(k.runtime.RemoveContainer(context.Background(), c.Id))
}

func (k *kubelet) removeSandbox(id string) {
	k.t.Helper()
	k.must(k.runtime.StopPodSandbox(context.Background(), id))
	k.must(k.runtime.RemovePodSandbox(context.Background(), id))
}

// relist lists all pods and containers, like the kubelet's pod lifecycle event generator, and checks the invariants.
func (k *kubelet) relist() map[string]string {
	k.t.Helper()
	ctx := context.Background()
	sandboxes, err := k.runtime.ListPodSandbox(ctx, nil)
	k.must(err)
	containers, err := k.runtime.ListContainers(ctx, &runtimeapi.ContainerFilter{})
	k.must(err)
	states := map[string]string{}
	readyOf := map[string]string{}
	for _, s := range sandboxes {
		states[s.Id] = s.State.String()
		if uid := s.Metadata.Uid; s.State == ready {
			if readyOf[uid] != "" {
				k.t.Errorf("ready sandboxes of pod %s: got two, want at most one", uid)
			}
			readyOf[uid] = s.Id
		}
	}
	for _, c := range containers {
		if _, ok := states[c.PodSandboxId]; !ok {
			k.t.Errorf("sandbox of container %s: got %s, want one of the listed %v", c.Id, c.PodSandboxId, slices.Collect(maps.Keys(states)))
		}
		states[c.Id] = c.State.String()
	}
	return states
}
