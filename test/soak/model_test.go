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

// pod is the model of a pod. A worker's own pod is used only by that worker, so its model is exact. A shared pod is
// used by all workers, so its model may be out of date.
type pod struct {
	shared bool
	name   string

	mu         sync.Mutex
	config     *runtimeapi.PodSandboxConfig
	id         string // empty while there is no sandbox
	stopped    bool
	containers []*container
	made       int // number of containers created so far, for their names
}

// container is the model of a container.
type container struct {
	id     string
	kind   string
	pod    *pod
	config *runtimeapi.ContainerConfig
	log    string
	state  runtimeapi.ContainerState
	// ordered is set once a client has stopped the container, so that its exit code is unknown.
	ordered bool
	// rotations counts the rotated log files. mu is held during a rotation.
	mu        sync.Mutex
	rotations int
	// ends means that the container ends by itself; lines is then the number of its last line. printed counts the lines
	// that calls have printed.
	ends           bool
	lines, printed int
}

// kinds maps a kind of container to its script. Each start numbers its log lines from 1.
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

// newPod returns the model of a pod that does not exist yet.
func (s *soak) newPod(name string, shared bool, rng *rand.Rand) *pod {
	p := &pod{name: name, shared: shared}
	s.renew(p, rng)
	return p
}

// renew replaces the pod with a new one of the same name.
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

// any returns a random container, or nil if the pod has none.
func (p *pod) any(rng *rand.Rand) *container {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.containers) == 0 {
		return nil
	}
	return p.containers[rng.IntN(len(p.containers))]
}
