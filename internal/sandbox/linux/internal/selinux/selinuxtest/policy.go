// Package selinuxtest has a fake of an SELinux policy, for kernels without SELinux. It must not be used outside tests.
package selinuxtest

import (
	"fmt"
	"slices"
	"strings"
	"sync"

	goselinux "github.com/opencontainers/selinux/go-selinux"

	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/selinux"
)

// MountOption is an option that every file system accepts. It stands for context=, which only SELinux accepts.
const MountOption = "dirsync"

// Policy has the labels of container-selinux and the types container_t, svirt_lxc_net_t and container_file_t. Levels
// are reserved in the library, as for a real kernel.
type Policy struct {
	mu      sync.Mutex
	mounted []string
}

// Labels implements selinux.Policy.
func (p *Policy) Labels(options []string) (selinux.Labels, error) {
	process := goselinux.Context{"user": "system_u", "role": "system_r", "type": "container_t"}
	mount := goselinux.Context{"user": "system_u", "role": "object_r", "type": "container_file_t"}
	for _, option := range options {
		key, value, _ := strings.Cut(option, ":")
		process[key] = value
		if key == "user" || key == "level" {
			mount[key] = value
		}
	}
	for n := 1; process["level"] == ""; n++ {
		level := fmt.Sprintf("s0:c0,c%d", n)
		if goselinux.ReserveLabelV2(goselinux.Context{"level": level}.Get()) == nil {
			process["level"], mount["level"] = level, level
		}
	}
	return selinux.Labels{Process: process.Get(), Mount: mount.Get()}, nil
}

// Check implements selinux.Policy.
func (p *Policy) Check(label string) error {
	c, err := goselinux.NewContext(label)
	if err == nil && !slices.Contains([]string{"container_t", "svirt_lxc_net_t", "container_file_t"}, c["type"]) {
		err = fmt.Errorf("invalid context")
	}
	return err
}

// MountOption implements selinux.Policy.
func (p *Policy) MountOption(label string) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mounted = append(p.mounted, label)
	return MountOption
}

// Mounted returns the labels of all mounts since the last call.
func (p *Policy) Mounted() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	mounted := slices.Compact(slices.Sorted(slices.Values(p.mounted)))
	p.mounted = nil
	return mounted
}
