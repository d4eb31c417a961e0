package soak

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// pod is one pod as its clients know it. That of a worker is touched by this worker alone, and the model is exact; a
// shared one is touched by all, and what is known of it may be out of date.
type pod struct {
	shared bool
	name   string

	mu         sync.Mutex
	config     *runtimeapi.PodSandboxConfig
	id         string // empty while there is no sandbox
	stopped    bool
	containers []*container
	made       int // containers made so far, for their names
}

// container is one container as its clients know it.
type container struct {
	id     string
	kind   string
	pod    *pod
	config *runtimeapi.ContainerConfig
	log    string
	state  runtimeapi.ContainerState
	// ordered is set once somebody has stopped it: how it ends is no more its own.
	ordered bool
	// rotations counts the log files that were put aside, held by mu for one rotation.
	mu        sync.Mutex
	rotations int
	// ends tells that it ends by itself, lines the number of its last line then; printed counts lines that were ordered.
	ends           bool
	lines, printed int
}

// kinds are what the containers do. Lines of the log are counted from 1 by each start.
var kinds = map[string]string{
	"ticker":   `trap 'exit 0' TERM; i=0; while :; do i=$((i+1)); echo "line $i"; sleep 0.05 & wait $!; done`,
	"stubborn": `trap '' TERM; i=0; while :; do i=$((i+1)); echo "line $i"; sleep 0.3; done`,
	"short":    `echo "line 1"; echo "line 2"; exit 3`,
	"burst":    fmt.Sprintf(`i=0; while [ $i -lt %d ]; do i=$((i+1)); echo "line $i"; done`, burstLines),
	"orphans":  `echo "line 1"; sleep 3600 & sleep 3600 & exec sleep 0.2`,
	"oom":      `echo "line 1"; tail /dev/zero`,
	"missing":  "",
}

const burstLines = 3000

var kindNames = []string{"ticker", "ticker", "ticker", "stubborn", "short", "burst", "orphans", "oom", "missing"}

// newPod is a pod that is not there yet.
func (s *soak) newPod(name string, shared bool, rng *rand.Rand) *pod {
	p := &pod{name: name, shared: shared}
	s.renew(p, rng)
	return p
}

// renew makes the pod another one, as when a kubelet is given a new pod of the same name.
func (s *soak) renew(p *pod, rng *rand.Rand) {
	var opts []harness.PodOption
	switch rng.IntN(4) {
	case 0:
		opts = append(opts, harness.HostNetwork())
	case 1:
		opts = append(opts, harness.Namespaces(func(n *runtimeapi.NamespaceOption) { n.Pid = runtimeapi.NamespaceMode_POD }))
	}
	p.config, p.id, p.stopped, p.containers = harness.PodConfig(s.t, p.name, opts...), "", false, nil
	if err := os.MkdirAll(p.config.LogDirectory, 0o755); err != nil {
		s.t.Error(err)
	}
}

// newContainer draws the configuration of a container.
func (p *pod) newContainer(rng *rand.Rand) *container {
	p.made++
	kind := kindNames[rng.IntN(len(kindNames))]
	config := harness.ContainerConfig(fmt.Sprintf("%s-%d", kind, p.made), harness.Busybox, harness.Shell(kinds[kind]))
	config.Linux.SecurityContext.NamespaceOptions = p.config.Linux.SecurityContext.NamespaceOptions
	switch kind {
	case "missing":
		config.Command = []string{"/no/such/program"}
	case "oom":
		config.Linux.Resources = &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 24 << 20, MemorySwapLimitInBytes: 24 << 20}
	case "short":
		config.Annotations = map[string]string{"fake.tripod.dev/exit-after": "5ms", "fake.tripod.dev/exit-code": "3"}
	case "burst", "orphans":
		config.Annotations = map[string]string{"fake.tripod.dev/exit-after": "200ms"}
	case "stubborn":
		config.Annotations = map[string]string{"fake.tripod.dev/ignore-stop": "true"}
	}
	c := &container{kind: kind, pod: p, config: config, log: p.config.LogDirectory + "/" + config.LogPath}
	c.ends = !slices.Contains([]string{"ticker", "stubborn"}, kind)
	if kind == "burst" {
		c.lines = burstLines
	}
	return c
}

func (p *pod) add(c *container) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !slices.ContainsFunc(p.containers, func(o *container) bool { return o.id == c.id }) {
		p.containers = append(p.containers, c)
	}
}

func (p *pod) drop(c *container) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.containers = slices.DeleteFunc(p.containers, func(o *container) bool { return o == c })
}

// any draws one of the containers, nil when there is none.
func (p *pod) any(rng *rand.Rand) *container {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.containers) == 0 {
		return nil
	}
	return p.containers[rng.IntN(len(p.containers))]
}
