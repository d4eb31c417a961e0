package cri

import (
	"errors"
	"io"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// TestPodMetrics: every metric has a descriptor with as many labels, values are whole numbers, and the stream has what
// the list has.
func TestPodMetrics(t *testing.T) {
	d := open(t)
	pod := d.pod(t, "p")
	container := d.running(t, pod, "c")
	d.container(t, pod, "created")
	descriptors, err := d.ListMetricDescriptors(t.Context(), &runtimeapi.ListMetricDescriptorsRequest{})
	must(t, err)
	keys := map[string][]string{}
	for _, m := range descriptors.GetDescriptors() {
		keys[m.Name] = m.LabelKeys
	}
	list, err := d.ListPodSandboxMetrics(t.Context(), &runtimeapi.ListPodSandboxMetricsRequest{})
	must(t, err)
	if len(list.GetPodMetrics()) != 1 || len(list.PodMetrics[0].ContainerMetrics) != 1 {
		t.Fatalf("ListPodSandboxMetrics = %v, want one pod with its running container", list)
	}
	wantEqual(t, "pod", list.PodMetrics[0].PodSandboxId, pod)
	wantEqual(t, "container", list.PodMetrics[0].ContainerMetrics[0].ContainerId, container)
	seen := map[string]*runtimeapi.Metric{}
	for _, m := range list.PodMetrics[0].ContainerMetrics[0].Metrics {
		seen[m.Name] = m
		if len(m.LabelValues) != len(keys[m.Name]) || m.Timestamp == 0 {
			t.Errorf("metric %v, want the labels %v and a time", m, keys[m.Name])
		}
	}
	cpu := seen["container_cpu_usage_seconds_total"]
	if cpu.GetValue().GetValue() != 1 || cpu.GetMetricType() != runtimeapi.MetricType_COUNTER {
		t.Errorf("CPU time = %v, want a counter of whole seconds", cpu)
	}
	for i, want := range []string{"p", "default", "c", container} {
		if cpu.LabelValues[i] != want {
			t.Errorf("labels = %v, want %s at %d, as in %v", cpu.LabelValues, want, i, keys[cpu.Name])
		}
	}
	wantEqual(t, "pods in the stream", len(streamedMetrics(t, d)), 1)
}

func streamedMetrics(t *testing.T, d *door) (pods []*runtimeapi.PodSandboxMetrics) {
	t.Helper()
	stream, err := d.StreamPodSandboxMetrics(t.Context(), &runtimeapi.StreamPodSandboxMetricsRequest{})
	must(t, err)
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return pods
		}
		must(t, err)
		pods = append(pods, m.PodSandboxMetrics...)
	}
}
