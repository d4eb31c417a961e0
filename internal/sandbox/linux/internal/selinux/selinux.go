// Package selinux assigns SELinux labels to pods and containers, and changes the labels of volumes.
//
// All containers have the same type, so the policy keeps pods apart by their levels: each pod gets two categories that no
// other pod has. The library opencontainers/selinux draws them; Pool remembers which pods use them. The package must not
// decide what a label applies to; see package spec and the backend. Begin reading with Pool.
package selinux

import (
	"errors"
	"fmt"
	"sync"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/selinux/go-selinux"
	"github.com/opencontainers/selinux/go-selinux/label"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Labels are the labels of a pod or container: of its processes, and of the files that only it may use. Both are "" if
// no label applies.
type Labels struct {
	Process string `json:"process,omitempty"`
	Mount   string `json:"mount,omitempty"`
}

// Policy is the policy that the kernel enforces. Kernel implements it; tests have a fake.
type Policy interface {
	// Labels returns the labels of containers, changed by options of the form "type:container_t". If no option has a
	// level, it reserves an unused one. The labels are empty if the policy does not define any for containers.
	Labels(options []string) (Labels, error)
	// Check returns an error unless the policy allows this combination of user, role, type and level.
	Check(label string) error
	// MountOption returns the option of mount(2) that gives all files of a file system the label.
	MountOption(label string) string
}

// Kernel is the policy of this node's kernel.
type Kernel struct{}

// Labels implements Policy.
func (Kernel) Labels(options []string) (Labels, error) {
	process, mount, err := label.InitLabels(options)
	return Labels{process, mount}, err
}

// Check implements Policy.
func (Kernel) Check(label string) error { return selinux.SecurityCheckContext(label) }

// MountOption implements Policy.
func (Kernel) MountOption(mountLabel string) string { return label.FormatMountLabel("", mountLabel) }

// Enabled reports whether the kernel has a policy.
func Enabled() bool { return selinux.GetEnabled() }

// Pool assigns labels. It keeps a level reserved until the last pod that uses it is released. A nil Pool assigns no
// labels: the kernel has no SELinux.
type Pool struct {
	policy Policy

	mu   sync.Mutex
	pods map[string]map[string]bool // the IDs of the pods that use a level
}

// NewPool returns a pool without pods. It returns an error if the policy has no labels for containers.
func NewPool(policy Policy) (*Pool, error) {
	l, err := policy.Labels(nil)
	if err != nil {
		return nil, fmt.Errorf("find the SELinux labels of containers: %w", err)
	}
	if l.Process == "" || l.Mount == "" {
		return nil, fmt.Errorf("the SELinux policy has no labels for containers (contexts/lxc_contexts): %w", errdefs.ErrNotFound)
	}
	selinux.ReleaseLabel(l.Process)
	return &Pool{policy: policy, pods: map[string]map[string]bool{}}, nil
}

// Pod returns the labels of a new pod. Without a requested level, the pod gets a level that no other pod uses.
func (p *Pool) Pod(id string, o *runtimeapi.SELinuxOption) (Labels, error) {
	if p == nil {
		return Labels{}, nil
	}
	return p.assign(id, options(o))
}

// Container returns the labels of a container: its pod's, changed by the container's own options.
func (p *Pool) Container(podID string, pod Labels, o *runtimeapi.SELinuxOption) (Labels, error) {
	own := options(o)
	if p == nil || len(own) == 0 {
		return pod, nil
	}
	inherited, err := selinux.DupSecOpt(pod.Process)
	if err != nil {
		return Labels{}, fmt.Errorf("the pod's SELinux label %q: %w", pod.Process, err)
	}
	return p.assign(podID, append(inherited, own...))
}

func (p *Pool) assign(podID string, options []string) (Labels, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	l, err := p.policy.Labels(options)
	if err != nil {
		return Labels{}, fmt.Errorf("SELinux labels: %w", err)
	}
	for _, label := range []string{l.Process, l.Mount} {
		if err := p.policy.Check(label); err != nil {
			p.dropUnused(levelOf(l.Process))
			return Labels{}, fmt.Errorf("linux.security_context.selinux_options: the policy of this node does not allow the label %q (%w): %w",
				label, err, errdefs.ErrInvalidArgument)
		}
	}
	p.hold(podID, l)
	return l, nil
}

// Hold reserves the level of labels that were assigned before the daemon started.
func (p *Pool) Hold(podID string, l Labels) {
	if p == nil || levelOf(l.Process) == "" {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hold(podID, l)
}

func (p *Pool) hold(podID string, l Labels) {
	_ = selinux.ReserveLabelV2(l.Process) // fails if the level is reserved already
	level := levelOf(l.Process)
	if p.pods[level] == nil {
		p.pods[level] = map[string]bool{}
	}
	p.pods[level][podID] = true
}

// Release gives back the levels of a pod and its containers. Levels that other pods use too stay reserved.
func (p *Pool) Release(podID string) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for level, pods := range p.pods {
		if pods[podID] {
			delete(pods, podID)
			p.dropUnused(level)
		}
	}
}

// dropUnused ends the reservation of a level that no pod uses.
func (p *Pool) dropUnused(level string) {
	if len(p.pods[level]) == 0 {
		delete(p.pods, level)
		selinux.ReleaseLabel(selinux.Context{"level": level}.Get())
	}
}

// MountOption returns the option that mounts a file system with the label, or "" without a label.
func (p *Pool) MountOption(label string) string {
	if p == nil || label == "" {
		return ""
	}
	return p.policy.MountOption(label)
}

// Relabel changes the label of a file or of a whole directory. It leaves files whose labels the file system determines.
// The library refuses directories of the system, such as /etc and /usr.
func Relabel(path, label string) error {
	if err := selinux.Chcon(path, label, true); err != nil && !errors.Is(err, unix.ENOTSUP) {
		return fmt.Errorf("change the SELinux label: %w", err)
	}
	return nil
}

// options returns a request in the library's form.
func options(o *runtimeapi.SELinuxOption) (list []string) {
	for _, field := range []struct{ name, value string }{
		{"user", o.GetUser()}, {"role", o.GetRole()}, {"type", o.GetType()}, {"level", canonical(o.GetLevel())},
	} {
		if field.value != "" {
			list = append(list, field.name+":"+field.value)
		}
	}
	return list
}

// canonical returns a level with its categories in order, as the library draws and compares them. It leaves an invalid
// level to Policy.Check.
func canonical(level string) string {
	if ordered, err := selinux.CalculateGlbLub(level, level); err == nil {
		return ordered
	}
	return level
}

func levelOf(label string) string {
	c, err := selinux.NewContext(label)
	if err != nil {
		return ""
	}
	return c["level"]
}
