package kubelet

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/harness/kube"
)

// probed is a pod with placeholders for the image, the readiness probe and the liveness probe.
const probed = `
apiVersion: v1
kind: Pod
metadata: {name: web}
spec:
  runtimeClassName: RUNTIME
  terminationGracePeriodSeconds: 3
  containers:
  - name: c
    image: %s
    resources: RESOURCES
    readinessProbe: {periodSeconds: 1, %s}
    startupProbe: {periodSeconds: 1, failureThreshold: 120, %[2]s}
    livenessProbe: {periodSeconds: 1, failureThreshold: 2, %[3]s}
`

// TestProbes: a pod is ready once its readiness probe succeeds, and its container is restarted if its liveness probe
// fails.
func TestProbes(t *testing.T) {
	c := kube.Shared(t)
	t.Parallel()
	linux, wasm, vm := kinds[0], kinds[1], kinds[2]
	for _, test := range []struct {
		kind  kind
		probe string
		image string
		// well and bad are probes that succeed and fail.
		well, bad string
	}{
		{linux, "http", linux.web, "httpGet: {port: 80}", "httpGet: {port: 80, path: /nothing}"},
		{linux, "tcp", linux.web, "tcpSocket: {port: 80}", "tcpSocket: {port: 81}"},
		{linux, "exec", linux.web, "exec: {command: [test, -d, /www]}", "exec: {command: [test, -d, /nothing]}"},
		{wasm, "http", wasm.web, "httpGet: {port: 80}", "httpGet: {port: 80, path: /status/500}"},
		{wasm, "tcp", wasm.web, "tcpSocket: {port: 80}", "tcpSocket: {port: 81}"},
		{wasm, "grpc", harness.GreeterC, "grpc: {port: 80}", "grpc: {port: 80, service: nobody}"},
		{vm, "http", vm.web, "httpGet: {port: 80}", "httpGet: {port: 80, path: /nothing}"},
		{vm, "exec", vm.web, "exec: {command: [test, -d, /www]}", "exec: {command: [test, -d, /nothing]}"},
	} {
		t.Run(test.kind.runtimeClass()+"/"+test.probe, func(t *testing.T) {
			t.Parallel()
			test.kind.reserve(t)
			k, n := test.kind, c.Namespace(t)
			n.ExpectRestarts()
			n.Apply(k.fill(fmt.Sprintf(probed, test.image, test.well, test.well)))
			first := n.WaitReady("web", k.boots)
			if first.Status.ContainerStatuses[0].RestartCount > 0 {
				t.Errorf("pod with a successful probe: got %s, want no restart", kube.Describe(first))
			}
			n.Kubectl("delete", "pod", "web")
			n.Apply(k.fill(fmt.Sprintf(probed, test.image, test.well, test.bad)))
			again := n.WaitPod("web", "was restarted", 2*k.boots, func(p *corev1.Pod) bool {
				return len(p.Status.ContainerStatuses) > 0 && p.Status.ContainerStatuses[0].RestartCount > 0
			})
			if again.Status.ContainerStatuses[0].LastTerminationState.Terminated == nil {
				t.Errorf("the pod has no last termination state: %s", kube.Describe(again))
			}
		})
	}
}

// TestExecProbeOfComponent: a component cannot run commands, and the pod's events say so.
func TestExecProbeOfComponent(t *testing.T) {
	forKinds(t, kinds[1:2], func(t *testing.T, k kind, n *kube.Namespace) {
		n.Apply(k.fill(fmt.Sprintf(probed, k.web, "exec: {command: [\"true\"]}", "tcpSocket: {port: 80}")))
		waitEvent(n, "web", "no exec")
	})
}

// waitEvent waits for an event of a pod with a text in its message.
func waitEvent(n *kube.Namespace, pod, text string) {
	n.Await(fmt.Sprintf("an event of %s with %q", pod, text), kube.Timeout, func() error {
		var events corev1.EventList
		if err := n.Get("events", &events); err != nil {
			return err
		}
		if slices.ContainsFunc(events.Items, func(e corev1.Event) bool {
			return e.InvolvedObject.Name == pod && strings.Contains(e.Message, text)
		}) {
			return nil
		}
		return errors.New("found no such event")
	})
}
