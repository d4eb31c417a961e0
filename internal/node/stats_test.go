package node_test

import (
	"context"
	"runtime"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/test/fake"
)

// deaf is a backend that never returns one pod's statistics, even after its context ends.
type deaf struct {
	*fake.Backend
	name string
	free chan struct{}
}

func (d deaf) PodStats(ctx context.Context, p *sandbox.Pod) (*runtimeapi.LinuxPodSandboxStats, error) {
	if p.Config.Metadata.Name == d.name {
		<-d.free
	}
	return d.Backend.PodStats(ctx, p)
}

// TestN8UnresponsivePodDelaysStatsOnce: a list of statistics omits a hanging pod, and repeated requests cost neither
// time nor goroutines.
func TestN8UnresponsivePodDelaysStatsOnce(t *testing.T) {
	free := make(chan struct{})
	b := openWith(t, t.TempDir(), "linux", sandbox.Capabilities{}, func(f *fake.Backend) sandbox.Backend { return deaf{f, "sick", free} })
	b.run(t, "", podConfig("sick"))
	fine := b.run(t, "", podConfig("fine"))
	if got := b.PodsStats(t.Context(), b.Pods()); len(got) != 1 || got[0].Attributes.Id != fine {
		t.Errorf("PodsStats = %v, want pod %s alone", got, fine)
	}
	before := runtime.NumGoroutine()
	for range 100 {
		if got := b.PodsStats(t.Context(), b.Pods()); len(got) != 1 {
			t.Errorf("PodsStats = %d pods, want 1", len(got))
		}
	}
	if after := runtime.NumGoroutine(); after > before+5 {
		t.Errorf("got %d goroutines, want about %d", after, before)
	}
	close(free)
	eventually(t, "the pod that came back is measured again", func() bool { return len(b.PodsStats(t.Context(), b.Pods())) == 2 })
}
