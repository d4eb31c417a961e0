package kubelet

import (
	"errors"
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/tripod-run/tripod/test/harness/kube"
)

// TestEventsAndStreams: with the feature gates EventedPLEG and CRIListStreaming, the kubelet follows the runtime's events
// and streams all lists. Pods of each kind live as they do without, also over a restart of the daemon.
func TestEventsAndStreams(t *testing.T) {
	c := kube.Shared(t)
	if err := c.RestartKubelet(map[string]any{"featureGates": map[string]bool{
		"PodAndContainerStatsFromCRI": true, "EventedPLEG": true, "CRIListStreaming": true,
	}}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.RestartKubelet(); err != nil {
			t.Error(err)
		}
	})
	all, _ := webs(t, c)
	lives(t, all)
	all[0].Await("the kubelet's figures about events", kube.Timeout, func() error {
		text, err := figures(c, "metrics")
		return errors.Join(err, above(text, 0, "kubelet_evented_pleg_connection_success_count"),
			above(text, 0, "kubelet_evented_pleg_connection_latency_seconds_count"))
	})
	all[0].Await("the runtime's figures about streams", kube.Timeout, func() error {
		text, err := get("http://" + kube.MetricsAddress + "/metrics")
		for _, list := range []string{"StreamPodSandboxes", "StreamContainers", "StreamImages", "StreamPodSandboxStats"} {
			err = errors.Join(err, above(text, 0, "tripod_cri_calls_total", "method", list, "code", "OK"))
		}
		return err
	})
	// The kubelet gives up the events after five attempts without a pause, and then only polls.
	if err := errors.Join(c.Daemon.Kill(), c.Daemon.Start(), c.WaitRuntime()); err != nil {
		t.Fatal(err)
	}
	lives(t, all)
}

// lives runs a container of each kind to its end, and waits for each pod "ends" as the kubelet reports it.
func lives(t *testing.T, all []*kube.Namespace) {
	t.Helper()
	for i, k := range kinds {
		all[i].Apply(k.fill(fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: ends}
spec:
  runtimeClassName: RUNTIME
  restartPolicy: Never
  containers: [{name: c, resources: RESOURCES, %s}]
`, k.prints)))
	}
	for i, k := range kinds {
		all[i].WaitPhase("ends", corev1.PodSucceeded, k.boots)
		all[i].Kubectl("delete", "pod", "ends", "--wait=false")
		all[i].WaitGone("pods/ends", kube.Timeout)
	}
}
