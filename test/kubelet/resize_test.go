package kubelet

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/tripod-run/tripod/test/harness/kube"
)

// sized is a pod whose container has limits.
const sized = `
apiVersion: v1
kind: Pod
metadata: {name: sized}
spec:
  runtimeClassName: RUNTIME
  terminationGracePeriodSeconds: GRACE
  containers:
  - name: web
    image: WEB
    readinessProbe: {httpGet: {port: 80}, periodSeconds: 1, timeoutSeconds: 20}
    resizePolicy: [{resourceName: memory, restartPolicy: POLICY}]
    resources: {requests: {cpu: 50m, memory: 64Mi}, limits: {cpu: 400m, memory: %s}}
`

// size is the limits of a container.
type size struct{ cpu, memory string }

// TestResize: a running container gets less and more CPU and memory, and is not restarted.
func TestResize(t *testing.T) {
	forKinds(t, kinds, func(t *testing.T, k kind, n *kube.Namespace) {
		n.Apply(strings.Replace(k.fill(fmt.Sprintf(sized, "160Mi")), "POLICY", "NotRequired", 1))
		n.WaitReady("sized", k.boots)
		checkUnit(t, k, n, size{"400m", "160Mi"})
		if k.exec {
			n.Await("exec in the pod", k.boots, func() error { // a machine's agent starts after its web server
				_, err := n.TryKubectl("exec", "sized", "--", "true")
				return err
			})
		}
		sizes := []size{{"300m", "128Mi"}, {"500m", "160Mi"}}
		if k.name != "vm" { // a disk machine has no more than at its start
			sizes = append(sizes, size{"1500m", "400Mi"})
		}
		for _, to := range sizes {
			resize(n, to)
			n.WaitPod("sized", "has the size "+fmt.Sprint(to), kube.Timeout, to.reached)
			checkMemory(t, k, n, to)
			checkUnit(t, k, n, to)
		}
	})
}

// resize changes the limits of the pod "sized".
func resize(n *kube.Namespace, to size) {
	n.Kubectl("patch", "pod", "sized", "--subresource", "resize", "--patch",
		fmt.Sprintf(`{"spec": {"containers": [{"name": "web", "resources": {"limits": {"cpu": %q, "memory": %q}}}]}}`, to.cpu, to.memory))
}

// reached reports whether the runtime has reported the size, and the kubelet has completed the resize.
func (s size) reached(p *corev1.Pod) bool {
	if len(p.Status.ContainerStatuses) == 0 || p.Status.ContainerStatuses[0].Resources == nil {
		return false
	}
	limits := p.Status.ContainerStatuses[0].Resources.Limits
	return limits.Cpu().String() == s.cpu && limits.Memory().String() == s.memory && resizeCondition(p) == nil
}

// resizeCondition returns the condition of a pod whose resize is not complete.
func resizeCondition(p *corev1.Pod) *corev1.PodCondition {
	i := slices.IndexFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodResizeInProgress || c.Type == corev1.PodResizePending
	})
	if i < 0 {
		return nil
	}
	return &p.Status.Conditions[i]
}

// checkMemory checks the memory that the container sees: the limit of its cgroup, or the memory of the machine, which is
// less than its size because the kernel takes a part.
func checkMemory(t *testing.T, k kind, n *kube.Namespace, want size) {
	t.Helper()
	switch k.name {
	case "linux":
		limit := n.Kubectl("exec", "sized", "--", "sh", "-c", "cat /sys/fs/cgroup/memory/memory.limit_in_bytes || cat /sys/fs/cgroup/memory.max")
		if bytes := quantity(want.memory); strings.TrimSpace(limit) != fmt.Sprint(bytes) {
			t.Errorf("limit of the container's cgroup: got %s, want %d", limit, bytes)
		}
	case "vm":
		var kib int64
		n.Await("the machine has the memory "+want.memory, kube.Timeout, func() error {
			text, err := n.TryKubectl("exec", "sized", "--", "grep", "MemTotal", "/proc/meminfo")
			if err != nil {
				return err
			}
			if _, err := fmt.Sscanf(text, "MemTotal: %d kB", &kib); err != nil {
				return err
			}
			if bytes := quantity(want.memory); kib<<10 > bytes || kib<<10 < bytes-48<<20 {
				return fmt.Errorf("got %d KiB, want up to 48 MiB less than %s", kib, want.memory)
			}
			return nil
		})
	}
}

func quantity(text string) int64 {
	q := resource.MustParse(text)
	return q.Value()
}

// TestResizeRefused: a size that a pod cannot have is refused with the reason, the pod keeps running with its old one, and
// the next size is applied.
func TestResizeRefused(t *testing.T) {
	reasons := map[string]string{"linux": "usage", "wasm": "usage", "vm": "was started with"}
	forKinds(t, kinds, func(t *testing.T, k kind, n *kube.Namespace) {
		n.Apply(strings.Replace(k.fill(fmt.Sprintf(sized, "128Mi")), "POLICY", "NotRequired", 1))
		n.WaitReady("sized", k.boots)
		impossible := size{"400m", "1Ki"}
		if k.name == "vm" {
			impossible.memory = "192Mi"
		}
		n.Kubectl("patch", "pod", "sized", "--subresource", "resize", "--patch",
			`{"spec": {"containers": [{"name": "web", "resources": {"requests": {"memory": "1Ki"}}}]}}`)
		resize(n, impossible)
		pod := n.WaitPod("sized", "was not resized", kube.Timeout, func(p *corev1.Pod) bool {
			c := resizeCondition(p)
			return c != nil && c.Reason == corev1.PodReasonError
		})
		if c := resizeCondition(pod); !strings.Contains(c.Message, reasons[k.name]) {
			t.Errorf("reason: got %q, want it to contain %q", c.Message, reasons[k.name])
		}
		next := size{"300m", "128Mi"}
		resize(n, next)
		n.WaitPod("sized", "has the next size", kube.Timeout, next.reached)
	})
}

// TestResizeByRestart: a container whose policy demands a restart is restarted once, with its new size. A machine gets
// more memory in this way.
func TestResizeByRestart(t *testing.T) {
	forKinds(t, kinds, func(t *testing.T, k kind, n *kube.Namespace) {
		n.ExpectRestarts()
		n.Apply(strings.Replace(k.fill(fmt.Sprintf(sized, "128Mi")), "POLICY", "RestartContainer", 1))
		n.WaitReady("sized", k.boots)
		to := size{"400m", "160Mi"}
		resize(n, to)
		n.WaitPod("sized", "was restarted with its new size", kube.Timeout+k.boots, func(p *corev1.Pod) bool {
			return kube.Ready(p) && to.reached(p) && p.Status.ContainerStatuses[0].RestartCount == 1
		})
	})
}

// TestResizePod: a limit of the whole pod changes in place.
func TestResizePod(t *testing.T) {
	forKinds(t, kinds[:2], func(t *testing.T, k kind, n *kube.Namespace) {
		n.Apply(k.fill(`
apiVersion: v1
kind: Pod
metadata: {name: sized}
spec:
  runtimeClassName: RUNTIME
  terminationGracePeriodSeconds: GRACE
  resources: {requests: {cpu: 50m, memory: 64Mi}, limits: {cpu: 400m, memory: 128Mi}}
  containers: [{name: web, image: WEB, readinessProbe: {httpGet: {port: 80}, periodSeconds: 1, timeoutSeconds: 20}}]
`))
		n.WaitReady("sized", k.boots)
		for _, to := range []size{{"500m", "192Mi"}, {"300m", "96Mi"}} {
			n.Kubectl("patch", "pod", "sized", "--subresource", "resize", "--patch",
				fmt.Sprintf(`{"spec": {"resources": {"limits": {"cpu": %q, "memory": %q}}}}`, to.cpu, to.memory))
			n.WaitPod("sized", "has the size "+fmt.Sprint(to), kube.Timeout, func(p *corev1.Pod) bool {
				r := p.Status.Resources
				if r == nil || resizeCondition(p) != nil {
					return false
				}
				memory := resource.MustParse(to.memory)
				memory.Add(*p.Spec.Overhead.Memory()) // the kubelet reports the limits of the pod's cgroup
				return r.Limits.Cpu().String() == to.cpu && r.Limits.Memory().Cmp(memory) == 0
			})
			checkMemory(t, k, n, to)
		}
	})
}
