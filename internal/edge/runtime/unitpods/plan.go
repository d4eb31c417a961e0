package unitpods

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math"
	"path"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/wire"
	"github.com/tripod-run/tripod/internal/keys"
	"github.com/tripod-run/tripod/internal/lazyregexp"
)

const (
	// podNamespace is the namespace of the modules' pods.
	podNamespace = "edge"

	containerName = "module"
	logFile       = "module.log"

	cpuPeriod    = 100_000 // µs, the kernel's default
	minCPU       = 0.01    // the kernel's smallest quota, as a fraction of a period
	maxDeadline  = 10 * 365 * 24 * time.Hour
	minMemory    = 64 << 10 // a WebAssembly page, in bytes
	dirSeparator = "::"
)

// plan describes the pod for a module's data.
type plan struct {
	pod       *runtimeapi.PodSandboxConfig
	container *runtimeapi.ContainerConfig
	channels  []channel.Channel
	logDir    string
	deadline  time.Duration // 0: none
}

// plan makes the configurations of a module's pod and container, except the image.
func (r *Runtime) plan(data wire.ModuleData) (*plan, error) {
	switch kind := data.FileType(); kind {
	case "", "WA", "WASM":
	default:
		return nil, fmt.Errorf("file type %q: the runtime %s runs WebAssembly, which is of type WA: %w", kind, r.Name, errdefs.ErrInvalidArgument)
	}
	uuid := data.UUID()
	labels := map[string]string{keys.EdgeRuntime: r.UUID, keys.EdgeModule: uuid}
	p := &plan{logDir: filepath.Join(r.LogDir, key(uuid))}
	resources, err := p.resources(data.Resources())
	if err != nil {
		return nil, err
	}
	p.pod = &runtimeapi.PodSandboxConfig{
		Metadata:     &runtimeapi.PodSandboxMetadata{Name: podName(data.Name(), uuid), Namespace: podNamespace, Uid: uuid},
		LogDirectory: p.logDir, Labels: labels, Annotations: map[string]string{keys.EdgeRuntime: r.UUID, keys.EdgeModule: uuid},
		Linux: &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
			NamespaceOptions: &runtimeapi.NamespaceOption{Network: runtimeapi.NamespaceMode_NODE},
		}},
	}
	p.container = &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: containerName}, Command: data.Args(), LogPath: logFile, Labels: labels,
		Annotations: map[string]string{keys.EdgeModule: uuid}, Linux: &runtimeapi.LinuxContainerConfig{Resources: resources},
	}
	if p.deadline > 0 {
		p.container.Annotations[keys.EdgeDeadline] = time.Now().Add(p.deadline).Format(time.RFC3339Nano)
	}
	if p.container.Envs, err = environment(data.Env()); err != nil {
		return nil, err
	}
	if p.container.Mounts, err = r.mounts(data.Dirs()); err != nil {
		return nil, err
	}
	return p, p.setChannels(r.Topics, uuid, data.Channels())
}

// key returns the name of a module's files: the uuid if that is a plain name, otherwise a hash of the uuid.
func key(uuid string) string {
	if plainKey().MatchString(uuid) && uuid != positionsDir {
		return uuid
	}
	sum := sha256.Sum256([]byte(uuid))
	return hex.EncodeToString(sum[:])
}

var plainKey = lazyregexp.New(`^[A-Za-z0-9][-A-Za-z0-9]{0,63}$`)

// notInLabel matches characters that a DNS label cannot have.
var notInLabel = lazyregexp.New(`[^a-z0-9]+`)

// podName returns the module's name if it is a DNS label, otherwise a label made from the name and the start of the
// uuid.
func podName(name, uuid string) string {
	if len(validation.IsDNS1123Label(name)) == 0 {
		return name
	}
	clean := func(s string, most int) string {
		s = strings.Trim(notInLabel().ReplaceAllString(strings.ToLower(s), "-"), "-")
		return strings.Trim(s[:min(len(s), most)], "-")
	}
	stem, suffix := clean(name, validation.DNS1123LabelMaxLength-9), clean(uuid, 8)
	if stem == "" {
		stem = containerName
	}
	return strings.Trim(stem+"-"+suffix, "-")
}

func environment(env []string) ([]*runtimeapi.KeyValue, error) {
	var all []*runtimeapi.KeyValue
	for _, e := range env {
		name, value, ok := strings.Cut(e, "=")
		if !ok || name == "" {
			return nil, fmt.Errorf("env: %q is not NAME=value: %w", e, errdefs.ErrInvalidArgument)
		}
		all = append(all, &runtimeapi.KeyValue{Key: name, Value: []byte(value)})
	}
	return all, nil
}

// mounts returns the mounts for a module's directories. A directory is given as HOST::GUEST or, if it is mounted at the
// same path in the guest, as HOST.
func (r *Runtime) mounts(dirs []string) ([]*runtimeapi.Mount, error) {
	var mounts []*runtimeapi.Mount
	for _, dir := range dirs {
		host, guest, named := strings.Cut(dir, dirSeparator)
		if !named {
			guest = host
		}
		real, err := realDir(r.DirRoots, host)
		if err != nil {
			return nil, fmt.Errorf("dirs: %q: %w", dir, err)
		}
		guest = path.Join("/", guest)
		if guest == "/ch" || strings.HasPrefix(guest, "/ch/") {
			return nil, fmt.Errorf("dirs: %q: /ch is for the module's channels; choose another path with HOST::GUEST: %w", dir,
				errdefs.ErrInvalidArgument)
		}
		mounts = append(mounts, &runtimeapi.Mount{HostPath: real, ContainerPath: guest})
	}
	return mounts, nil
}

// setChannels puts the channels into an annotation of the container. It adds a number to a name that is already taken.
func (p *plan) setChannels(topics wire.Topics, uuid string, channels []channel.Channel) error {
	if len(channels) == 0 {
		return nil
	}
	taken := map[string]bool{}
	for _, c := range channels {
		name := c.Name
		for n := 2; taken[name]; n++ {
			name = fmt.Sprintf("%s-%d", c.Name, n)
		}
		taken[name] = true
		p.channels = append(p.channels, channel.Channel{Name: name, Topic: topics.Expand(c.Topic, uuid), Flags: c.Flags})
	}
	raw, err := json.Marshal(p.channels)
	if err != nil {
		return err
	}
	p.container.Annotations[keys.EdgeChannels] = string(raw)
	return channel.Validate(p.channels)
}

// resources parses "memory" (bytes, or text like "64Mi"), "cpu" (number of CPUs, or text like "500m") and "deadline"
// (seconds, or text like "90s"). Other fields belong to other runtimes.
func (p *plan) resources(asked wire.ModuleData) (*runtimeapi.LinuxContainerResources, error) {
	res := &runtimeapi.LinuxContainerResources{}
	if raw := asked["memory"]; given(raw) {
		q, err := quantity(raw)
		if err != nil || q.Value() < minMemory {
			return nil, badResource("memory", raw, "a number of bytes or text like \"64Mi\", at least 64Ki")
		}
		res.MemoryLimitInBytes = q.Value()
	}
	if raw := asked["cpu"]; given(raw) {
		q, err := quantity(raw)
		if err != nil || q.AsApproximateFloat64() < minCPU || q.AsApproximateFloat64() > math.MaxInt16 {
			return nil, badResource("cpu", raw, "a number of CPUs or text like \"500m\", at least 0.01")
		}
		res.CpuPeriod, res.CpuQuota = cpuPeriod, int64(q.AsApproximateFloat64()*cpuPeriod)
	}
	if raw := asked["deadline"]; given(raw) {
		d, err := duration(raw)
		if err != nil || d <= 0 || d > maxDeadline {
			return nil, badResource("deadline", raw, "a number of seconds or text like \"90s\"")
		}
		p.deadline = d
	}
	return res, nil
}

func given(raw json.RawMessage) bool { return len(raw) > 0 && string(raw) != "null" }

func badResource(name string, raw json.RawMessage, want string) error {
	return fmt.Errorf("resources: %s is %.60s, want %s: %w", name, raw, want, errdefs.ErrInvalidArgument)
}

// quantity parses a number or a Kubernetes quantity.
func quantity(raw json.RawMessage) (resource.Quantity, error) {
	var text string
	if json.Unmarshal(raw, &text) != nil {
		text = string(raw)
	}
	return resource.ParseQuantity(text)
}

func duration(raw json.RawMessage) (time.Duration, error) {
	var text string
	if json.Unmarshal(raw, &text) == nil {
		return time.ParseDuration(text)
	}
	var seconds float64
	if err := json.Unmarshal(raw, &seconds); err != nil || seconds > maxDeadline.Seconds() {
		return 0, errdefs.ErrInvalidArgument
	}
	return time.Duration(seconds * float64(time.Second)), nil
}
