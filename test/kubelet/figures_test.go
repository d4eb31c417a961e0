package kubelet

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/tripod-run/tripod/test/harness/kube"
)

// TestFigures: the kubelet and metrics-server serve the figures of each kind of pod where the users of a cluster look for
// them. With the feature gate PodAndContainerStatsFromCRI, all of them come from the runtime.
func TestFigures(t *testing.T) {
	startMetricsServer := sync.OnceValue(func() error { return kube.Shared(t).StartMetricsServer(t) })
	forKinds(t, kinds, func(t *testing.T, k kind, n *kube.Namespace) {
		n.Apply(k.deployment(1))
		if err := startMetricsServer(); err != nil {
			t.Fatal(err)
		}
		pod := n.WaitPods("app=web", 1, k.boots)[0]
		for _, source := range []struct {
			name  string
			check func(*kube.Namespace, *corev1.Pod) error
		}{{"summary", checkSummary}, {"resource metrics", checkResourceMetrics}, {"cAdvisor's metrics", checkContainerMetrics},
			{"metrics-server", checkTop}} {
			n.Await(source.name+" of "+pod.Name, kube.Timeout, func() error { return source.check(n, &pod) })
		}
	})
}

// figures reads an endpoint of the kubelet.
func figures(c *kube.Cluster, endpoint string) (string, error) {
	return c.Kubectl("", "get", "--raw", "/api/v1/nodes/"+kube.NodeName+"/proxy/"+endpoint)
}

// checkSummary returns an error unless the summary has CPU, memory and network of the pod and of its container.
func checkSummary(n *kube.Namespace, pod *corev1.Pod) error {
	type usage struct {
		CPU    struct{ UsageCoreNanoSeconds uint64 }
		Memory struct{ WorkingSetBytes uint64 }
	}
	var summary struct {
		Pods []struct {
			usage
			PodRef     struct{ Name, Namespace string }
			Network    struct{ RxBytes, TxBytes uint64 }
			Containers []struct {
				usage
				Name string
			}
		}
	}
	if err := n.Cluster.Get("/api/v1/nodes/"+kube.NodeName+"/proxy/stats/summary", &summary); err != nil {
		return err
	}
	counted := func(u usage) bool { return u.CPU.UsageCoreNanoSeconds > 0 && u.Memory.WorkingSetBytes > 0 }
	for _, p := range summary.Pods {
		if p.PodRef.Name != pod.Name || p.PodRef.Namespace != n.Name {
			continue
		}
		if !counted(p.usage) || p.Network.RxBytes == 0 || p.Network.TxBytes == 0 || len(p.Containers) != 1 || !counted(p.Containers[0].usage) {
			return fmt.Errorf("got %+v, want CPU, memory and network of the pod, and CPU and memory of its container", p)
		}
		return nil
	}
	return errors.New("it does not have the pod")
}

// checkResourceMetrics returns an error unless /metrics/resource, which metrics-server and so `kubectl top` reads, has the
// pod and its container.
func checkResourceMetrics(n *kube.Namespace, pod *corev1.Pod) error {
	text, err := figures(n.Cluster, "metrics/resource")
	if err != nil {
		return err
	}
	of := []string{"namespace", n.Name, "pod", pod.Name}
	container := append(of, "container", "web")
	return errors.Join(
		above(text, 0, "container_cpu_usage_seconds_total", container...),
		above(text, 0, "container_memory_working_set_bytes", container...),
		above(text, float64(pod.CreationTimestamp.Unix()-1), "container_start_time_seconds", container...),
		above(text, 0, "pod_cpu_usage_seconds_total", of...),
		above(text, 0, "pod_memory_working_set_bytes", of...),
	)
}

// checkContainerMetrics returns an error unless /metrics/cadvisor has the pod's series with the labels that dashboards
// select. Their values are whole numbers, so few seconds of CPU time can be zero.
func checkContainerMetrics(n *kube.Namespace, pod *corev1.Pod) error {
	text, err := figures(n.Cluster, "metrics/cadvisor")
	if err != nil {
		return err
	}
	of := []string{"namespace", n.Name, "pod", pod.Name}
	container := append(of, "container", "web", "image", pod.Status.ContainerStatuses[0].Image)
	return errors.Join(
		above(text, -1, "container_cpu_usage_seconds_total", container...),
		above(text, 0, "container_memory_working_set_bytes", container...),
		above(text, float64(pod.CreationTimestamp.Unix()-1), "container_start_time_seconds", container...),
		above(text, 0, "container_spec_cpu_period", container...),
		above(text, 0, "container_network_receive_bytes_total", append(of, "interface", "eth0")...),
		above(text, 0, "container_network_transmit_bytes_total", append(of, "interface", "eth0")...),
	)
}

// checkTop returns an error unless metrics-server has CPU and memory of the node, the pod and its container, and
// `kubectl top` shows them.
func checkTop(n *kube.Namespace, pod *corev1.Pod) error {
	var node struct{ Usage corev1.ResourceList }
	if err := n.Cluster.Get("/apis/metrics.k8s.io/v1beta1/nodes/"+kube.NodeName, &node); err != nil {
		return err
	}
	var figures struct {
		Containers []struct {
			Name  string
			Usage corev1.ResourceList
		}
	}
	if err := n.Get("apis/metrics.k8s.io/v1beta1:pods/"+pod.Name, &figures); err != nil {
		return err
	}
	used := func(r corev1.ResourceList) bool { return r.Cpu().Sign() > 0 && r.Memory().Sign() > 0 }
	if c := figures.Containers; !used(node.Usage) || len(c) != 1 || c[0].Name != "web" || !used(c[0].Usage) {
		return fmt.Errorf("got %+v for the node and %+v for the pod, want CPU and memory of the node and of the container web", node, figures)
	}
	nodes, err1 := n.TryKubectl("top", "node", kube.NodeName)
	pods, err2 := n.TryKubectl("top", "pod", "--containers")
	return errors.Join(contains(nodes, err1, kube.NodeName), contains(pods, err2, pod.Name+"   web "))
}

// seriesPattern matches a line of Prometheus' text format: name, labels, value.
var seriesPattern = regexp.MustCompile(`(?m)^(\w+)(?:\{([^}]*)\})? (\S+)`)

// above returns an error unless a series with the name and the labels (name, value, ...) has a value above the limit.
func above(text string, limit float64, name string, labels ...string) error {
	want := fmt.Sprint(name, labels)
	for _, line := range seriesPattern.FindAllStringSubmatch(text, -1) {
		if line[1] != name || !hasLabels(line[2], labels) {
			continue
		}
		if value, err := strconv.ParseFloat(line[3], 64); err != nil || value <= limit {
			return fmt.Errorf("%s: got %s, want more than %v", want, line[3], limit)
		}
		return nil
	}
	return fmt.Errorf("%s is missing", want)
}

func hasLabels(have string, labels []string) bool {
	for i := 0; i < len(labels); i += 2 {
		if !strings.Contains(","+have+",", fmt.Sprintf(",%s=%q,", labels[i], labels[i+1])) {
			return false
		}
	}
	return true
}
