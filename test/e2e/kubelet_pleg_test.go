package e2e

import (
	"context"
	"maps"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// pleg models the kubelet's pod lifecycle event generator (pkg/kubelet/pleg/generic.go of Kubernetes 1.37). The kubelet
// decides according to its cache of pods, and updates a pod in it only if a relist finds one of its IDs in another
// state.
//
// It keeps containers and sandboxes in one map by ID, containers first. So it can miss the start of a container whose
// ID is also that of a ready sandbox.
type pleg struct {
	// seen maps the pod's UID to the state of each of its IDs at the last relist.
	seen map[string]map[string]string
	// cache is the kubelet's cache of pods, by UID.
	cache map[string]*podStatus
}

// The states of PLEG. A container that was created but not started is unknown.
const (
	plegRunning = "running"
	plegExited  = "exited"
	plegUnknown = "unknown"
)

// plegStates returns the current states of a pod's IDs.
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

// relistPod makes one relist of a pod, and updates the cache if a state has changed.
func (k *kubelet) relistPod(p *kubePod) {
	k.t.Helper()
	now := k.plegStates(p)
	if maps.Equal(now, k.pleg.seen[p.uid]) && k.pleg.cache[p.uid] != nil {
		return
	}
	k.pleg.seen[p.uid], k.pleg.cache[p.uid] = now, k.status(p)
}

// cached returns the pod's status in the cache.
func (k *kubelet) cached(p *kubePod) *podStatus {
	k.t.Helper()
	k.relistPod(p)
	return k.pleg.cache[p.uid]
}
