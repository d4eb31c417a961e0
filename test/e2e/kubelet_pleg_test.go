package e2e

import (
	"context"
	"maps"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// pleg is the kubelet's pod lifecycle event generator (pkg/kubelet/pleg/generic.go of Kubernetes 1.37). A kubelet decides
// by its cache of pods, and renews a pod's entry only when a relist finds one of its IDs in another state.
//
// It holds containers and sandboxes in one map by bare ID, containers first: what has the ID of a sandbox that is ready
// can start unseen.
type pleg struct {
	// seen is the state of each ID at the last relist, by the pod's UID.
	seen map[string]map[string]string
	// cache is what the kubelet believes of each pod.
	cache map[string]*podStatus
}

// The states of PLEG. A container that is created and does not run is unknown to it.
const (
	plegRunning = "running"
	plegExited  = "exited"
	plegUnknown = "unknown"
)

// plegStates are the states of a pod's IDs now.
func (k *kubelet) plegStates(p *kubePod) map[string]string {
	k.t.Helper()
	ctx, byUID := context.Background(), map[string]string{"io.kubernetes.pod.uid": p.uid}
	states := map[string]string{}
	sandboxes, err := k.runtime.ListPodSandbox(ctx, &runtimeapi.PodSandboxFilter{LabelSelector: byUID})
	k.must(err)
	for _, s := range sandboxes {
		states[s.Id] = plegExited
		if s.State == ready {
			states[s.Id] = plegRunning
		}
	}
	containers, err := k.runtime.ListContainers(ctx, &runtimeapi.ContainerFilter{LabelSelector: byUID})
	k.must(err)
	for _, c := range containers {
		switch c.State {
		case running:
			states[c.Id] = plegRunning
		case exited:
			states[c.Id] = plegExited
		default:
			states[c.Id] = plegUnknown
		}
	}
	return states
}

// relistPod is one relist of a pod: the cache is renewed when there is an event.
func (k *kubelet) relistPod(p *kubePod) {
	k.t.Helper()
	now := k.plegStates(p)
	if maps.Equal(now, k.pleg.seen[p.uid]) && k.pleg.cache[p.uid] != nil {
		return
	}
	k.pleg.seen[p.uid], k.pleg.cache[p.uid] = now, k.status(p)
}

// cached is the pod as the kubelet believes it to be.
func (k *kubelet) cached(p *kubePod) *podStatus {
	k.t.Helper()
	k.relistPod(p)
	return k.pleg.cache[p.uid]
}
