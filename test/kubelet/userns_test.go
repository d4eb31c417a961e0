package kubelet

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/harness/kube"
)

// mapped is a pod with a user namespace and volumes of several kinds.
const mapped = `
apiVersion: v1
kind: ConfigMap
metadata: {name: settings}
data: {color: blue}
---
apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  hostUsers: false
  terminationGracePeriodSeconds: 1
  containers:
  - name: c
    image: BUSYBOX
    command: [sh, -c, "date >>/data/starts; touch /memory/file; trap 'exit 3' TERM; sleep 3600 & wait"]
    readinessProbe: {periodSeconds: 1, exec: {command: [test, -e, /memory/file]}}
    volumeMounts:
    - {name: data, mountPath: /data}
    - {name: memory, mountPath: /memory}
    - {name: settings, mountPath: /settings}
    - {name: image, mountPath: /image}
  volumes:
  - {name: data, emptyDir: {}}
  - {name: memory, emptyDir: {medium: Memory}}
  - {name: settings, projected: {sources: [{configMap: {name: settings}}, {serviceAccountToken: {path: token}}]}}
  - {name: image, image: {reference: BUSYBOX}}
`

// TestUserNamespaces: pods with hostUsers: false are root for themselves and different, unprivileged users of the node.
// Their volumes belong to them, and a container that ends is restarted with the same users.
func TestUserNamespaces(t *testing.T) {
	forKinds(t, kinds[:1], func(t *testing.T, k kind, n *kube.Namespace) {
		n.ExpectRestarts()
		users := map[int]bool{}
		for _, name := range []string{"first", "second"} {
			n.Apply(k.fill(fmt.Sprintf(mapped, name)))
			n.WaitReady(name, k.boots)
			users[checkUsers(t, n, name)] = true
		}
		if len(users) != 2 {
			t.Errorf("first user of the two pods: got %v for both, want different users", users)
		}
		// fails if the kernel ends the shell, with the container, before it exits
		_, _ = n.TryKubectl("exec", "first", "--", "sh", "-c", "kill 1")
		n.WaitPod("first", "was restarted", kube.Timeout, func(p *corev1.Pod) bool {
			return kube.Ready(p) && p.Status.ContainerStatuses[0].RestartCount == 1
		})
		if again := checkUsers(t, n, "first"); !users[again] {
			t.Errorf("first user after the restart: got %d, want it among %v", again, users)
		}
		if starts := n.Kubectl("exec", "first", "--", "wc", "-l", "/data/starts"); !strings.HasPrefix(starts, "2 ") {
			t.Errorf("lines in the volume: got %q, want one for each of two starts", starts)
		}
	})
}

// checkUsers checks who the pod is for itself and on the node, and who owns its files. It returns the pod's first user.
func checkUsers(t *testing.T, n *kube.Namespace, name string) int {
	t.Helper()
	first := firstUser(t, n, name)
	owners := n.Kubectl("exec", name, "--", "stat", "-c", "%n %u:%g", "/", "/bin/sh", "/data/starts", "/memory/file", "/settings/color",
		"/settings/token", "/image/bin/sh", "/etc/hosts")
	for line := range strings.Lines(owners) {
		if !strings.HasSuffix(strings.TrimSpace(line), " 0:0") {
			t.Errorf("owner of a file in %s: got %q, want the pod's root", name, line)
		}
	}
	file := filepath.Join(n.Cluster.Dir, "kubelet/pods", string(n.Pod(name).UID), "volumes/kubernetes.io~empty-dir/data/starts")
	info, err := os.Stat(file)
	if err != nil {
		t.Fatal(err)
	}
	if uid := info.Sys().(*syscall.Stat_t).Uid; uid != 0 {
		t.Errorf("owner of a volume's file on the node: got %d, want the node's root, because volumes are mapped", uid)
	}
	return first
}

// firstUser checks the mapping of the pod's users, and returns the node's user that is the pod's root.
func firstUser(t *testing.T, n *kube.Namespace, name string) (first int) {
	t.Helper()
	var inside, count int
	text := n.Kubectl("exec", name, "--", "cat", "/proc/self/uid_map")
	if _, err := fmt.Sscan(text, &inside, &first, &count); err != nil || inside != 0 || first < 65536 || count != 65536 {
		t.Errorf("users of %s: got %q (%v), want 65536 users from 0, which are not the node's", name, text, err)
	}
	return first
}

// TestUserNamespacesOfUnits: components and machines accept hostUsers: false, which changes nothing for them.
func TestUserNamespacesOfUnits(t *testing.T) {
	forKinds(t, kinds[1:], func(t *testing.T, k kind, n *kube.Namespace) {
		n.Apply(k.fill(`
apiVersion: v1
kind: Pod
metadata: {name: web}
spec:
  runtimeClassName: RUNTIME
  hostUsers: false
  terminationGracePeriodSeconds: GRACE
  containers: [{name: web, image: WEB, resources: RESOURCES, readinessProbe: {httpGet: {port: 80}, periodSeconds: 1}}]
`))
		n.WaitReady("web", k.boots)
	})
}

// onHostNetwork is a pod with a user namespace on the node's network.
const onHostNetwork = `
apiVersion: v1
kind: Pod
metadata: {name: web}
spec:
  runtimeClassName: RUNTIME
  hostUsers: false
  hostNetwork: true
  terminationGracePeriodSeconds: GRACE
  containers: [{name: web, CONTAINER, resources: RESOURCES}]
`

// TestUserNamespacesOnHostNetwork: a pod can have both a user namespace and the node's network, which a cluster allows
// by a feature gate. Machines have a network of their own, so they are refused by name.
func TestUserNamespacesOnHostNetwork(t *testing.T) {
	containers := map[string]string{
		"linux": `image: BUSYBOX, command: [sh, -c, "echo mapped >/tmp/index.html; exec httpd -f -h /tmp -p 8181"], securityContext: {capabilities: {add: [NET_ADMIN]}}`,
		"wasm":  `image: ` + harness.CommandGo + `, args: [out, mapped, sleep, 1h]`,
		"vm":    `image: WEB`,
	}
	forKinds(t, kinds, func(t *testing.T, k kind, n *kube.Namespace) {
		n.Apply(k.fill(strings.Replace(onHostNetwork, "CONTAINER", containers[k.name], 1)))
		switch k.name {
		case "linux":
			checkMappedOnHostNetwork(t, n)
		case "wasm":
			if ip := n.WaitPhase("web", corev1.PodRunning, k.boots).Status.PodIP; ip != kube.NodeIP {
				t.Errorf("address of the pod: got %s, want the node's, %s", ip, kube.NodeIP)
			}
			n.WaitLog("mapped", k.boots, "web")
		case "vm":
			n.Await("the refusal is an event", kube.Timeout, func() error {
				events, err := n.TryKubectl("get", "events", "--output=jsonpath={.items[*].message}")
				return contains(events, err, "network")
			})
		}
	})
}

// checkMappedOnHostNetwork checks that the pod is an unprivileged user of the node, and serves on its network.
func checkMappedOnHostNetwork(t *testing.T, n *kube.Namespace) {
	t.Helper()
	n.WaitReady("web", kube.Timeout)
	firstUser(t, n, "web")
	own, err := os.Readlink("/proc/self/ns/net")
	if in := strings.TrimSpace(n.Kubectl("exec", "web", "--", "readlink", "/proc/self/ns/net")); err != nil || in != own {
		t.Errorf("network namespace: got %s, want the node's, %s (%v)", in, own, err)
	}
	n.Await("the pod answers at the node's address", kube.Timeout, func() error {
		answer, err := get("http://" + kube.NodeIP + ":8181/")
		return contains(answer, err, "mapped")
	})
	out, err := n.TryKubectl("exec", "web", "--", "ip", "link", "add", "test0", "type", "dummy")
	if err == nil || !strings.Contains(err.Error(), "Operation not permitted") {
		t.Errorf("change of the node's network by the pod's NET_ADMIN: got output %s and error %v, want a refusal", out, err)
	}
}
