package kubelet

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/harness/kube"
)

// The tests in this file affect the node, so they do not run in parallel.

// webs runs a Deployment of each kind, each in its own namespace, and returns the pods once they are ready.
func webs(t *testing.T, c *kube.Cluster) (all []*kube.Namespace, pods map[string][]corev1.Pod) {
	t.Helper()
	pods = map[string][]corev1.Pod{}
	for _, k := range kinds {
		n := c.Namespace(t)
		n.Apply(k.deployment(k.replicas))
		all = append(all, n)
	}
	for i, k := range kinds {
		pods[k.name] = all[i].WaitPods("app=web", k.replicas, k.boots)
	}
	return all, pods
}

// checkUntouched checks that the pods are ready and the same as before, with the same containers.
func checkUntouched(t *testing.T, all []*kube.Namespace, before map[string][]corev1.Pod) {
	t.Helper()
	for i, k := range kinds {
		after := all[i].WaitPods("app=web", k.replicas, kube.Timeout)
		for j, pod := range after {
			old := before[k.name][j]
			if pod.UID != old.UID || pod.Status.ContainerStatuses[0].ContainerID != old.Status.ContainerStatuses[0].ContainerID {
				t.Errorf("%s: %s was replaced by %s", k.name, kube.Describe(&old), kube.Describe(&pod))
			}
		}
	}
}

// TestKubeletRestart: after a restart of the kubelet, all pods keep running, and new pods start.
func TestKubeletRestart(t *testing.T) {
	c := kube.Shared(t)
	all, before := webs(t, c)
	if err := errors.Join(c.Kubelet.Kill(), c.Kubelet.Start()); err != nil {
		t.Fatal(err)
	}
	checkUnaffected(t, c, all, before)
}

// TestDaemonKilled: the pods serve while the daemon is down, and are unchanged when it is up again.
func TestDaemonKilled(t *testing.T) {
	c := kube.Shared(t)
	all, before := webs(t, c)
	call := func(i int) error {
		var service corev1.Service
		if err := all[i].Get("services/web", &service); err != nil {
			return err
		}
		answer, err := get("http://" + service.Spec.ClusterIP + ":8080/")
		return contains(answer, err, kinds[i].greeting)
	}
	for i := range kinds {
		// kube-proxy learns of a ready pod later than the API server.
		all[i].Await("the Service answers", kube.Timeout, func() error { return call(i) })
	}
	if err := c.Daemon.Kill(); err != nil {
		t.Fatal(err)
	}
	for i, k := range kinds {
		if err := call(i); err != nil {
			t.Errorf("request to %s while the daemon is down: %v", k.name, err)
		}
	}
	if err := errors.Join(c.Daemon.Start(), c.WaitRuntime()); err != nil {
		t.Fatal(err)
	}
	checkUnaffected(t, c, all, before)
}

// kubeletRounds is the time for several relists (one per second) and at least one sync of every pod (every 10 seconds,
// syncFrequency).
const kubeletRounds = 15 * time.Second

// checkUnaffected checks that the kubelet leaves the pods alone for kubeletRounds, and that new pods start.
func checkUnaffected(t *testing.T, c *kube.Cluster, all []*kube.Namespace, before map[string][]corev1.Pod) {
	t.Helper()
	all[0].Await("the node is ready", kube.Timeout, c.NodeReady)
	time.Sleep(kubeletRounds) // pacing: no event shows that nothing happens
	checkUntouched(t, all, before)
	for i, k := range kinds {
		all[i].Kubectl("scale", "deployment/web", fmt.Sprint("--replicas=", k.replicas+1))
	}
	for i, k := range kinds {
		all[i].WaitPods("app=web", k.replicas+1, k.boots)
		all[i].Kubectl("scale", "deployment/web", "--replicas=0")
	}
	for i := range kinds {
		all[i].WaitPods("app=web", 0, kube.Timeout)
	}
}

// TestDaemonKilledInTheMiddle: the kubelet completes its work even if the daemon is killed in the middle of it.
func TestDaemonKilledInTheMiddle(t *testing.T) {
	c := kube.Shared(t)
	scale := func(all []*kube.Namespace, to func(k kind) int) {
		for i, k := range kinds {
			all[i].Kubectl("scale", "deployment/web", fmt.Sprint("--replicas=", to(k)))
		}
	}
	up := func(k kind) int { return 2 * k.replicas }
	down := func(kind) int { return 0 }
	var all []*kube.Namespace
	for _, k := range kinds {
		n := c.Namespace(t)
		n.Apply(k.deployment(0))
		all = append(all, n)
	}
	for _, after := range []time.Duration{300 * time.Millisecond, time.Second, 2500 * time.Millisecond} {
		for _, to := range []func(kind) int{up, down} {
			scale(all, to)
			time.Sleep(after) // pacing: the kubelet is in the middle of its work
			if err := errors.Join(c.Daemon.Kill(), c.Daemon.Start(), c.WaitRuntime()); err != nil {
				t.Fatal(err)
			}
			for i, k := range kinds {
				all[i].WaitPods("app=web", to(k), kube.Timeout+k.boots)
			}
		}
	}
}

// TestUnitKilled: if the process of a pod is killed, the kubelet restarts the container in the same pod.
func TestUnitKilled(t *testing.T) {
	c := kube.Shared(t)
	for _, test := range []struct {
		kind    kind
		process string
	}{{kinds[0], "httpd"}, {kinds[1], "tripod-wasm"}, {kinds[2], "qemu-system-x86_64"}} {
		t.Run(test.kind.name, func(t *testing.T) {
			k, n := test.kind, c.Namespace(t)
			n.ExpectRestarts()
			n.Apply(k.deployment(1))
			pod := n.WaitPods("app=web", 1, k.boots)[0]
			if killAll(test.process) == 0 {
				t.Fatalf("found no process %s", test.process)
			}
			again := n.WaitPod(pod.Name, "was restarted and is ready", 2*k.boots, func(p *corev1.Pod) bool {
				return kube.Ready(p) && p.Status.ContainerStatuses[0].RestartCount > 0
			})
			if again.Status.PodIP != pod.Status.PodIP || again.Status.ContainerStatuses[0].RestartCount != 1 {
				t.Errorf("pod after the kill: got %s, want the same address and one restart", kube.Describe(again))
			}
			if end := again.Status.ContainerStatuses[0].LastTerminationState.Terminated; end == nil || end.ExitCode != 137 {
				t.Errorf("last termination state: got %+v, want exit code 137", end)
			}
			n.Await("the pod serves", kube.Timeout, func() error {
				answer, err := get("http://" + pod.Status.PodIP + "/")
				return contains(answer, err, k.greeting)
			})
		})
	}
}

// killAll kills the processes in the test's PID namespace that run a program, and returns their number.
func killAll(program string) int {
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	killed := 0
	for _, file := range files {
		data, _ := os.ReadFile(file)
		argv0, _, _ := bytes.Cut(data, []byte{0})
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file))); err == nil && filepath.Base(string(argv0)) == program {
			_ = syscall.Kill(pid, syscall.SIGKILL)
			killed++
		}
	}
	return killed
}

// TestDiskPressure: a node that is short of disk space removes unused images and evicts pods.
func TestDiskPressure(t *testing.T) {
	c := kube.Shared(t)
	n := c.Namespace(t)
	n.ExpectRestarts() // the kubelet counts one if it removes an evicted pod's container before it has reported its end
	const unused = harness.StopSignal
	n.Apply(`
apiVersion: v1
kind: Pod
metadata: {name: brief}
spec:
  restartPolicy: Never
  containers: [{name: c, image: ` + unused + `, command: ["true"]}]
---
` + client)
	n.WaitPhase("brief", corev1.PodSucceeded, kube.Timeout)
	n.WaitReady("client", kube.Timeout)
	n.Kubectl("delete", "pod", "brief")
	if err := c.RestartKubelet(map[string]any{
		"evictionHard":                     map[string]string{"nodefs.available": "99.99%", "imagefs.available": "99.99%"},
		"evictionPressureTransitionPeriod": "1s",
		"imageMinimumGCAge":                "1s",
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.RestartKubelet(); err != nil {
			t.Fatal(err)
		}
		n.Await("the pressure is over", 2*kube.Timeout, c.NodeReady)
	})
	n.WaitPod("client", "is evicted", 2*kube.Timeout, func(p *corev1.Pod) bool {
		return p.Status.Phase == corev1.PodFailed && p.Status.Reason == "Evicted"
	})
	n.Await("unused images are gone", kube.Timeout, func() error {
		out, err := c.Tripod("images", "-o", "json")
		if err == nil && strings.Contains(out, unused) {
			err = errors.New("image " + unused + " still exists")
		}
		return err
	})
}

// TestMemoryPressure: a node that is short of memory evicts pods of each kind, and says how much memory they used.
func TestMemoryPressure(t *testing.T) {
	c := kube.Shared(t)
	n := c.Namespace(t)
	n.ExpectRestarts() // the kubelet counts one if it removes an evicted pod's container before it has reported its end
	for _, k := range kinds {
		n.Apply(k.fill(`
apiVersion: v1
kind: Pod
metadata: {name: RUNTIME}
spec:
  runtimeClassName: RUNTIME
  terminationGracePeriodSeconds: 1
  containers:
  - {name: web, image: WEB, resources: {requests: {memory: 1Ki}, limits: {memory: 128Mi}}, readinessProbe: {httpGet: {port: 80}, periodSeconds: 1}}
`))
	}
	for _, k := range kinds {
		n.WaitReady(k.name, k.boots)
	}
	if err := c.RestartKubelet(map[string]any{
		// A soft threshold, because the kubelet takes a hard one off the memory that it gives to pods.
		"evictionSoft":                     map[string]string{"memory.available": "99.9%"},
		"evictionSoftGracePeriod":          map[string]string{"memory.available": "1s"},
		"evictionPressureTransitionPeriod": "1s",
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.RestartKubelet(); err != nil {
			t.Fatal(err)
		}
		n.Await("the pressure is over", 2*kube.Timeout, c.NodeReady)
	})
	for _, k := range kinds {
		waitEvent(n, k.name, "Container web was using")
		n.WaitPod(k.name, "has ended", 2*kube.Timeout, ended)
	}
	if err := c.NodeReady(); err == nil || !strings.Contains(err.Error(), "memory-pressure") {
		t.Errorf("node: got %v, want the taint memory-pressure", err)
	}
}

// ended reports whether a pod and its container have ended. The kubelet ends a pod with the phase Failed, but changes it to
// Succeeded if the container then ends with 0 before the API server knows the phase.
func ended(p *corev1.Pod) bool {
	return (p.Status.Phase == corev1.PodFailed || p.Status.Phase == corev1.PodSucceeded) &&
		p.Status.ContainerStatuses[0].State.Terminated != nil
}
