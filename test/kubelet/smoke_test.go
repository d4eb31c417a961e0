package kubelet

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/tripod-run/tripod/test/harness/kube"
)

// TestSmoke is the only test of this package in `make test`. For each kind, and for containers in machines, it runs a Deployment
// with a Service, calls the Service from the node and from a pod, checks the log and exec, and deletes the Deployment.
func TestSmoke(t *testing.T) {
	all := kinds
	if kinds[0].class == "" {
		all = append(slices.Clone(kinds), inMachines(kinds[0]))
	}
	forKinds(t, all, func(t *testing.T, k kind, n *kube.Namespace) {
		n.Apply(client + "---" + k.deployment(k.replicas))
		pods := n.WaitPods("app=web", k.replicas, k.boots)
		n.WaitReady("client", kube.Timeout)
		checkService(t, k, n)
		checkExec(t, k, n, pods[0].Name)
		if k.name == "vm" {
			n.WaitLog("TRIPOD-GUEST-READY", kube.Timeout, pods[0].Name)
		}
		n.Kubectl("delete", "deployment", "web", "--cascade=foreground", "--timeout=60s")
		if left := n.Pods("app=web"); len(left) > 0 {
			t.Errorf("pods after the deletion of the Deployment: got %s, want none", kube.Describe(&left[0]))
		}
	})
}

// checkService calls the Service "web" at its cluster address and at its node port.
func checkService(t *testing.T, k kind, n *kube.Namespace) {
	t.Helper()
	var service corev1.Service
	if err := n.Get("services/web", &service); err != nil {
		t.Fatal(err)
	}
	cluster := "http://" + service.Spec.ClusterIP + ":8080/"
	port := fmt.Sprintf("http://%s:%d/", kube.NodeIP, service.Spec.Ports[0].NodePort)
	for _, url := range []string{cluster, port} {
		n.Await(url+" from the node", kube.Timeout, func() error {
			answer, err := get(url)
			return contains(answer, err, k.greeting)
		})
		n.Await(url+" from a pod", kube.Timeout, func() error {
			answer, err := n.TryKubectl("exec", "client", "--", "wget", "-qO-", url)
			return contains(answer, err, k.greeting)
		})
	}
}

// checkExec runs commands in a pod. If the kind has no exec, it checks the reason of the refusal.
func checkExec(t *testing.T, k kind, n *kube.Namespace, pod string) {
	t.Helper()
	if !k.exec {
		if out, err := n.TryKubectl("exec", pod, "--", "true"); err == nil || !strings.Contains(err.Error(), "no exec") {
			t.Errorf("exec: got error %v, output %s; want a refusal with a reason", err, out)
		}
		return
	}
	n.Await("exec in "+pod, k.boots, func() error { // a machine's agent starts after its web server
		answer, err := n.TryKubectl("exec", pod, "--", "hostname")
		return contains(answer, err, pod)
	})
	out, err := n.TryKubectl("exec", pod, "--", "sh", "-c", "exit 42")
	if err == nil || !strings.Contains(err.Error(), "exit code 42") {
		t.Errorf("exec of a failing command: got error %v, output %s; want exit code 42", err, out)
	}
}
