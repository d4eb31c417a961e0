package cluster

import (
	"errors"
	"fmt"
	"net/netip"
	"path"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/harness/kube"
)

// kinds are the kinds of pods. Each has a Deployment and a Service that are named after it.
var kinds = []struct {
	name string
	// web is an image that serves HTTP on port 80. Its answers contain greeting.
	web, greeting, resources string
	boots                    time.Duration
}{
	{"linux", harness.Httpd, "It works!", "{}", kube.Timeout},
	{"wasm", harness.HelloHTTP, "hello from /", "{requests: {cpu: 10m}, limits: {cpu: 500m, memory: 64Mi}}", kube.Timeout},
	{"vm", harness.Guest, "hello from", "{requests: {cpu: 100m}, limits: {memory: 128Mi}}", 2 * harness.GuestTimeout},
}

// deployment is a Deployment with a pod on each node that is alive, and its Service.
const deployment = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: KIND}
spec:
  replicas: 2
  selector: {matchLabels: {app: KIND}}
  template:
    metadata: {labels: {app: KIND}}
    spec:
      runtimeClassName: KIND
      terminationGracePeriodSeconds: 5
      tolerations:
      - {key: node.kubernetes.io/unreachable, operator: Exists, effect: NoExecute, tolerationSeconds: 2}
      topologySpreadConstraints:
      - maxSkew: 1
        topologyKey: kubernetes.io/hostname
        whenUnsatisfiable: DoNotSchedule
        nodeTaintsPolicy: Honor
        labelSelector: {matchLabels: {app: KIND}}
      containers:
      - name: web
        image: WEB
        ports: [{containerPort: 80}]
        readinessProbe: {httpGet: {port: 80}, periodSeconds: 1}
        resources: RESOURCES
---
apiVersion: v1
kind: Service
metadata: {name: KIND}
spec:
  type: NodePort
  selector: {app: KIND}
  ports: [{port: 8080, targetPort: 80}]
`

// client is a pod on a node, named after it, from which the test calls other pods. Its programs find names by the C
// library, as most programs do.
const client = `
apiVersion: v1
kind: Pod
metadata: {name: client-NODE}
spec:
  nodeName: NODE
  terminationGracePeriodSeconds: 1
  containers: [{name: client, image: "registry.k8s.io/e2e-test-images/glibc-dns-testing:2.1.1", command: [sleep, "3600"]}]
`

// TestTwoNodes follows pods of each kind on two nodes. The steps depend on each other, because machines take long to
// boot.
func TestTwoNodes(t *testing.T) {
	c := kube.Shared(t)
	n := c.Namespace(t)
	n.ExpectRestarts() // of the pods that are on the node when it boots again
	for _, node := range c.Nodes {
		n.Apply(strings.ReplaceAll(client, "NODE", node.Name))
	}
	for _, k := range kinds {
		n.Apply(strings.NewReplacer("KIND", k.name, "WEB", k.web, "RESOURCES", k.resources).Replace(deployment))
	}
	t.Log("pods reach each other")
	checkSpread(t, c, n)
	checkReach(t, c, n)
	t.Log("a killed node loses its pods")
	checkKilled(t, c, n)
	t.Log("the node comes back")
	checkBack(t, c, n)
}

// checkSpread waits until each kind has a ready pod on each node, and checks that their addresses are of the node's
// range.
func checkSpread(t *testing.T, c *kube.Cluster, n *kube.Namespace) {
	t.Helper()
	for _, node := range c.Nodes {
		n.WaitReady("client-"+node.Name, kube.Timeout)
		for _, k := range kinds {
			pod := waitOn(t, n, k.name, node.Name, 1, k.boots)[0]
			var object corev1.Node
			if err := c.Get("/api/v1/nodes/"+node.Name, &object); err != nil {
				t.Fatal(err)
			}
			ip, err := netip.ParseAddr(pod.Status.PodIP)
			if err != nil || !netip.MustParsePrefix(object.Spec.PodCIDR).Contains(ip) {
				t.Errorf("address of %s on %s: got %q, want one of %s", pod.Name, node.Name, pod.Status.PodIP, object.Spec.PodCIDR)
			}
		}
	}
}

// A caller is a pod that can call others.
type caller struct{ pod, shell, get string }

// Scripts that send a GET request to $0, a host, at port $1. The machines' programs are static, so they cannot use the C
// library's resolver.
const (
	getFromContainer = `exec 3<>/dev/tcp/$0/$1 && printf 'GET / HTTP/1.0\r\nHost: %s\r\n\r\n' $0 >&3 && timeout 5 cat <&3`
	getFromMachine   = `case $0 in *.local) host=$(nslookup $0 | awk '/^Address/ {a = $NF} END {print a}');; *) host=$0;; esac
		printf 'GET / HTTP/1.0\r\nHost: %s\r\n\r\n' $0 | timeout 5 nc $host $1`
)

// checkReach calls each pod by its address, and each Service by its name and at every node's port, from a container and
// a machine on each node. Components have no network, so they only answer.
func checkReach(t *testing.T, c *kube.Cluster, n *kube.Namespace) {
	t.Helper()
	var callers []caller
	for _, node := range c.Nodes {
		machine := waitOn(t, n, "vm", node.Name, 1, kube.Timeout)[0]
		callers = append(callers, caller{"client-" + node.Name, "bash", getFromContainer}, caller{machine.Name, "sh", getFromMachine})
	}
	for _, k := range kinds {
		targets := []string{fmt.Sprintf("%s.%s.svc.cluster.local:8080", k.name, n.Name)}
		var service corev1.Service
		if err := n.Get("services/"+k.name, &service); err != nil {
			t.Fatal(err)
		}
		for _, node := range c.Nodes {
			pod := waitOn(t, n, k.name, node.Name, 1, kube.Timeout)[0]
			targets = append(targets, pod.Status.PodIP+":80", fmt.Sprintf("%s:%d", node.IP, service.Spec.Ports[0].NodePort))
		}
		for _, from := range callers {
			for _, target := range targets {
				n.Await(target+" from "+from.pod, kube.Timeout, func() error { return from.call(n, target, k.greeting) })
			}
		}
	}
}

// call sends a GET request from the pod, and returns an error if the answer does not contain text.
func (c caller) call(n *kube.Namespace, target, text string) error {
	host, port, _ := strings.Cut(target, ":")
	answer, err := n.TryKubectl("exec", c.pod, "--", c.shell, "-c", c.get, host, port)
	if err == nil && !strings.Contains(answer, text) {
		err = fmt.Errorf("got answer %q, want it to contain %q", answer, text)
	}
	return err
}

// waitOn waits until exactly the given number of an application's pods on a node are ready, and returns them.
func waitOn(t *testing.T, n *kube.Namespace, app, node string, count int, timeout time.Duration) (ready []corev1.Pod) {
	t.Helper()
	n.Await(fmt.Sprintf("%d ready pods of %s on %s", count, app, node), timeout, func() error {
		ready = slices.DeleteFunc(n.Pods("app="+app), func(p corev1.Pod) bool { return p.Spec.NodeName != node || !kube.Ready(&p) })
		if len(ready) != count {
			return fmt.Errorf("%d pods are ready: %s", len(ready), describe(n.Pods("app="+app)))
		}
		return nil
	})
	return ready
}

func describe(pods []corev1.Pod) string {
	var lines []string
	for i := range pods {
		lines = append(lines, pods[i].Spec.NodeName+": "+kube.Describe(&pods[i]))
	}
	return strings.Join(lines, "\n\t")
}

// checkKilled kills the second node. The Deployments replace its pods on the first node, and the Services answer from
// there.
func checkKilled(t *testing.T, c *kube.Cluster, n *kube.Namespace) {
	t.Helper()
	killed := c.Nodes[1]
	if err := killed.Kill(); err != nil {
		t.Fatal(err)
	}
	n.Await("the killed node is not ready", kube.Timeout, func() error {
		if killed.NodeReady() == nil {
			return errors.New("the node is ready")
		}
		return nil
	})
	for _, k := range kinds {
		waitOn(t, n, k.name, c.Name, 2, kube.Timeout+k.boots)
		client := caller{"client-" + c.Name, "bash", getFromContainer}
		n.Await("Service "+k.name, kube.Timeout, func() error {
			for range 10 { // more than enough to meet an endpoint on the killed node, if there is one
				if err := client.call(n, k.name+":8080", k.greeting); err != nil {
					return err
				}
			}
			return nil
		})
	}
}

// checkBack starts the killed node again. Nothing is left of the pods that it lost, and it runs new ones.
func checkBack(t *testing.T, c *kube.Cluster, n *kube.Namespace) {
	t.Helper()
	node := c.Nodes[1]
	if err := node.Boot(); err != nil {
		t.Fatal(err)
	}
	for _, k := range kinds {
		n.Await("the lost pod of "+k.name+" is gone", kube.Timeout, func() error {
			if pods := n.Pods("app=" + k.name); len(pods) != 2 {
				return errors.New(describe(pods))
			}
			return nil
		})
	}
	n.WaitReady("client-"+node.Name, kube.Timeout)
	// The kubelet removes the sandboxes of deleted pods once a minute.
	n.Await("only the client's pod and address are left", 2*kube.Timeout, func() error { return checkOnly(n, node) })
	// The only place for a replacement is the node without a pod.
	for _, k := range kinds {
		n.Kubectl("delete", "pod", waitOn(t, n, k.name, c.Name, 2, kube.Timeout)[0].Name, "--wait=false")
	}
	checkSpread(t, c, n)
	checkReach(t, c, n)
}

// checkOnly returns an error unless all pods of the node's daemon are the client's, and its address is the only one in
// use. The client's sandbox from before the boot remains, because the kubelet keeps a pod's last ended container.
func checkOnly(n *kube.Namespace, node *kube.Node) error {
	var client corev1.Pod
	if err := n.Get("pods/client-"+node.Name, &client); err != nil {
		return err
	}
	pods, err := node.Sandboxes()
	if err != nil {
		return err
	}
	if slices.ContainsFunc(pods, func(p kube.Sandbox) bool { return p.Metadata.Name != client.Name }) {
		return fmt.Errorf("the node has the pods %+v", pods)
	}
	leases, err := node.Run("sh", "-c", "ls -d /var/lib/cni/networks/cbr0/[0-9]*")
	if err == nil && path.Base(strings.TrimSpace(leases)) != client.Status.PodIP {
		err = fmt.Errorf("addresses in use: got %s, want %s", leases, client.Status.PodIP)
	}
	return err
}
