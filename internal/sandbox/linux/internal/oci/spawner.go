package oci

import (
	"context"
	"fmt"
	"maps"
	"os/exec"
	"path/filepath"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/process"
)

// Spawner starts the conmons of all pods in one cgroup of their own. A conmon must not be killed because of its pod's
// limits, and must not end with the daemon's service.
//
// On cgroup v1, moving a process takes an RCU grace period (over 1 ms) for each hierarchy. To avoid this, one thread
// moves itself into the cgroup once and starts all conmons. It keeps the daemon's share of CPU time: the conmons and the
// OCI runtimes that they start would otherwise divide the share of one cgroup, however many containers start. On v2,
// clone3(2) starts a process directly in the cgroup.
type Spawner struct {
	cgroups cgroup.Tree
	jobs    chan func()
	// closed ends the thread.
	closed chan struct{}
}

// conmonCgroup is the name of the conmons' cgroup, which is one of the helpers'.
const conmonCgroup = cgroup.Mark + "conmon"

// NewSpawner makes the cgroup, below that of the helpers in the tree.
func NewSpawner(ctx context.Context, g cgroup.Tree) (*Spawner, error) {
	s := &Spawner{cgroups: g, jobs: make(chan func()), closed: make(chan struct{})}
	dir, err := s.place(ctx)
	if err != nil {
		return nil, err
	}
	if g.V2 {
		return s, nil
	}
	ready := make(chan error)
	go process.OnOwnThread(func() { s.loop(func() error { return withoutCPU(g).Enter(dir) }, ready) })
	if err := <-ready; err != nil {
		s.Close()
		return nil, fmt.Errorf("enter the monitors' cgroup: %w", err)
	}
	return s, nil
}

// place makes the monitors' cgroup, which goes when somebody stops the helpers' unit, and returns its path.
func (s *Spawner) place(ctx context.Context) (string, error) {
	helpers, err := s.cgroups.Helpers(ctx)
	if err == nil {
		helpers = filepath.Join(helpers, conmonCgroup)
		err = s.cgroups.Create(helpers)
	}
	if err != nil {
		return "", fmt.Errorf("the monitors: %w", err)
	}
	return helpers, nil
}

// loop runs jobs in the cgroup until the spawner is closed.
func (s *Spawner) loop(enter func() error, ready chan<- error) {
	ready <- enter()
	for {
		select {
		case job := <-s.jobs:
			job()
		case <-s.closed:
			return
		}
	}
}

// Close ends the thread. Starts then fail with errdefs.ErrUnavailable.
func (s *Spawner) Close() { close(s.closed) }

// Start starts cmd in the cgroup. Calls whose clients have gone can still be here when the daemon ends.
func (s *Spawner) start(cmd *exec.Cmd) error {
	if s.cgroups.V2 {
		return s.startIn(cmd)
	}
	done := make(chan error, 1)
	select {
	case s.jobs <- func() { done <- cmd.Start() }:
		return <-done
	case <-s.closed:
		return errStopping
	}
}

var errStopping = fmt.Errorf("the daemon is stopping: %w", errdefs.ErrUnavailable)

// startIn implements start on v2.
func (s *Spawner) startIn(cmd *exec.Cmd) error {
	select {
	case <-s.closed:
		return errStopping
	default:
	}
	dir, err := s.place(context.Background())
	if err != nil {
		return err
	}
	return s.cgroups.Start(cmd, dir, nil)
}

// withoutCPU leaves out the v1 hierarchy that divides CPU time.
func withoutCPU(g cgroup.Tree) cgroup.Tree {
	if !g.V2 {
		g.Roots = maps.Clone(g.Roots)
		delete(g.Roots, g.Hierarchy("cpu"))
	}
	return g
}
