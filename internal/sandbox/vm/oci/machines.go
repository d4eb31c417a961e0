package oci

import (
	"context"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/resources"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/tap"
	"github.com/tripod-run/tripod/internal/sandbox/vm/templates"
)

// machines is what the backend needs of the backend for machines; *vm.Backend implements it.
type machines interface {
	// The machines are unit pods with one container each. Both have the ID of the pod whose containers run in the machine.
	sandbox.Backend
	sandbox.Dialer
	sandbox.Inspector
	sandbox.Readier
	sandbox.Updater
	// Driver, Definition and LastWords are for the backend, too.
	templates.Machines
	PodStats(ctx context.Context, p *sandbox.Pod) (*runtimeapi.LinuxPodSandboxStats, error)
	// Machine describes a machine. It returns errdefs.ErrFailedPrecondition if there is none with this ID.
	Machine(id string) (vm.Machine, error)
	// Requested returns how many CPUs a machine gets by its configuration, and whether an annotation fixes the number.
	Requested(p *sandbox.Pod, c *sandbox.Container) (cpus int, fixed bool, err error)
	// SetCPUs records that a guest has put so many CPUs online.
	SetCPUs(id string, cpus int) error
	// Agent returns the connection to the guest of a running machine.
	Agent(id string) (*agent.Agent, error)
	// Interfaces returns how the machine of a pod is connected to the pod's network.
	Interfaces(pod string) ([]tap.Interface, error)
	// Cgroups returns the tree with the machines' cgroups.
	Cgroups() resources.Cgroups
	// Close leaves the machines running.
	Close() error
}

var _ machines = (*vm.Backend)(nil)
