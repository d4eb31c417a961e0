package metrics

import (
	"slices"
	"strings"
	"testing"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// TestSampledCalls: of the calls without a traceparent, those that change something are sampled, and no others.
func TestSampledCalls(t *testing.T) {
	var sampled []string
	for _, service := range []grpc.ServiceDesc{runtimeapi.RuntimeService_ServiceDesc, runtimeapi.ImageService_ServiceDesc} {
		var methods []string
		for _, m := range service.Methods {
			methods = append(methods, m.MethodName)
		}
		for _, s := range service.Streams {
			methods = append(methods, s.StreamName)
		}
		for _, method := range methods {
			result := asked{}.ShouldSample(sdktrace.SamplingParameters{ParentContext: t.Context(), Name: service.ServiceName + "/" + method})
			if result.Decision == sdktrace.RecordAndSample {
				sampled = append(sampled, method)
			}
		}
	}
	slices.Sort(sampled)
	const want = "Attach CheckpointContainer CheckpointPod CreateContainer Exec ExecSync PortForward PullImage RemoveContainer RemoveImage RemovePodSandbox " +
		"ReopenContainerLog RestorePod RunPodSandbox StartContainer StopContainer StopPodSandbox UpdateContainerResources UpdatePodSandboxResources UpdateRuntimeConfig"
	if got := strings.Join(sampled, " "); got != want {
		t.Errorf("sampled:\n%s\nwant:\n%s", got, want)
	}
}
