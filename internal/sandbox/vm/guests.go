package vm

import (
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/console"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/resources"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/tap"
)

// This file has what the backend offers to those who make machines for other purposes than a pod's own: templates, and a backend
// whose containers run in the machines. The ID of a machine is that of its pod and container.

// Machine is a machine as far as others may know it.
type Machine struct {
	Definition machine.Definition
	// CPUs is how many the machine has, with those that were added to the definition's.
	CPUs      int
	StartedAt time.Time
	Running   bool
}

// Machine describes a machine. It returns errdefs.ErrFailedPrecondition if there is none with this ID.
func (b *Backend) Machine(id string) (Machine, error) {
	h, err := b.ledger.Get(id, id)
	if err != nil {
		return Machine{}, err
	}
	s, l := h.Snapshot()
	return Machine{Definition: s.Definition, CPUs: s.cpus(), StartedAt: s.StartedAt, Running: l != nil}, nil
}

// Definition returns the definition of a machine, or nil if there is none with this ID.
func (b *Backend) Definition(id string) (*machine.Definition, error) {
	h, err := b.ledger.Find(id, id)
	if h == nil {
		return nil, err
	}
	s, _ := h.Snapshot()
	return &s.Definition, nil
}

// SetCPUs records that the guest of a running machine has put so many CPUs online.
func (b *Backend) SetCPUs(id string, cpus int) error {
	h, err := b.ledger.Get(id, id)
	if err != nil {
		return err
	}
	return h.Set(func(s *state) { s.CPUs = cpus })
}

// Requested returns how many CPUs a machine gets by its annotations and resources. They are fixed if an annotation says how many.
func (b *Backend) Requested(p *sandbox.Pod, c *sandbox.Container) (cpus int, fixed bool, err error) {
	options, _, err := b.options(p)
	return b.cpus(options, sandbox.Resources(p, c)), options.VCPUsSet, err
}

// Agent returns the connection to the agent in the guest of a running machine. It returns errdefs.ErrUnavailable if the machine
// has just been started.
func (b *Backend) Agent(id string) (*agent.Agent, error) {
	_, l, err := b.ledger.GetRun(id, id)
	if err != nil {
		return nil, fmt.Errorf("the pod's machine: %w", err)
	}
	if a := l.agent.Load(); a != nil {
		return a, nil
	}
	return nil, fmt.Errorf("the pod's machine has just been started: %w", errdefs.ErrUnavailable)
}

// Interfaces returns how the machine of a pod is connected to the pod's network.
func (b *Backend) Interfaces(pod string) ([]tap.Interface, error) {
	return b.cfg.Network.Read(b.cfg.tapsFile(pod))
}

// Driver returns the driver that runs the machines. Close closes it.
func (b *Backend) Driver() machine.Driver { return b.cfg.Driver }

// Cgroups returns the tree with the machines' cgroups.
func (b *Backend) Cgroups() resources.Cgroups { return b.cgroups }

// LastWords returns the end of what the guest of a machine has written to its console, for an error message.
func (b *Backend) LastWords(id string) string { return console.LastWords(b.cfg.serialLog(id)) }

// Collector returns the metrics of the templates.
func (b *Backend) Collector() prometheus.Collector { return b.templates }
