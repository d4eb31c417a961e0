package vm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/tap"
)

var (
	fpPodRecorded = failpoint.New("vm.create-sandbox.recorded")
	fpPodPlaced   = failpoint.New("vm.create-sandbox.cgroup")
	fpPodWired    = failpoint.New("vm.create-sandbox.wired")
	fpPodMade     = failpoint.New("vm.create-sandbox.made")
	fpPodUnwired  = failpoint.New("vm.stop-sandbox.unwired")
	fpPodReleased = failpoint.New("vm.stop-sandbox.released")
	fpPodRemoved  = failpoint.New("vm.remove-sandbox.removed")
)

// pod is one sandbox: its state, which is also on disk, and the responder that serves the guest its addresses.
type pod struct {
	state podState

	mu        sync.Mutex
	responder io.Closer
}

// closeResponder closes the responder, if it is open.
func (p *pod) closeResponder() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.responder != nil {
		p.responder.Close()
		p.responder = nil
	}
}

// CreateSandbox implements sandbox.Backend. It makes the pod's user and cgroup and, if the pod has a network, its taps, and
// starts the responder.
func (b *Backend) CreateSandbox(ctx context.Context, p *sandbox.Pod) error {
	_, warnings, err := b.options(p)
	if err != nil {
		return err
	}
	for _, w := range warnings {
		b.log.Warn("pod annotations", "pod", p.ID, "warning", w)
	}
	sb, err := b.admit(p, warnings)
	if err != nil {
		return err
	}
	if err := fpPodRecorded.Hit(ctx); err != nil {
		return err
	}
	if err := b.cgroups.Create(sb.state.Cgroup); err != nil {
		return err
	}
	if err := fpPodPlaced.Hit(ctx); err != nil {
		return err
	}
	if p.Netns != "" {
		if err := b.connect(ctx, sb, p); err != nil {
			return err
		}
	}
	sb.state.Made = true
	if err := format.Write(b.cfg.podFile(p.ID), sb.state); err != nil {
		return fmt.Errorf("vm pod: %w", err)
	}
	return fpPodMade.Hit(ctx)
}

// connect connects the pod's machine to the pod's network.
func (b *Backend) connect(ctx context.Context, sb *pod, p *sandbox.Pod) error {
	uid := sb.state.UID
	interfaces, err := b.cfg.Network.Wire(ctx, p.Netns, tap.Options{Record: b.cfg.tapsFile(p.ID), UID: uid, GID: uid})
	if err != nil {
		return fmt.Errorf("connect the machine to the pod's network: %w", err)
	}
	if err := fpPodWired.Hit(ctx); err != nil {
		return err
	}
	return b.serve(ctx, sb, p, interfaces)
}

// admit assigns a user to the pod and writes the pod's state file, before anything else that belongs to the pod exists.
func (b *Backend) admit(p *sandbox.Pod, warnings []string) (*pod, error) {
	if err := os.MkdirAll(b.cfg.podDir(p.ID), 0o700); err != nil {
		return nil, sandbox.DiskError(fmt.Errorf("vm pod: %w", err))
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	uid, err := b.takeUser(p.ID)
	if err != nil {
		return nil, err
	}
	sb := &pod{state: podState{ID: p.ID, UID: uid, Netns: p.Netns, Cgroup: b.cgroupOf(p), Warnings: warnings}}
	if err := format.Write(b.cfg.podFile(p.ID), sb.state); err != nil {
		return nil, fmt.Errorf("vm pod: %w", err)
	}
	b.sandboxes[p.ID] = sb
	return sb, nil
}

// serve starts the responder that serves the guest its addresses.
func (b *Backend) serve(ctx context.Context, sb *pod, p *sandbox.Pod, interfaces []tap.Interface) error {
	dns, notice, err := p.DNS()
	if err != nil {
		return err
	}
	if notice != "" {
		b.log.Warn(notice, "pod", p.ID)
	}
	responder, err := b.cfg.Network.Serve(ctx, p.Netns, interfaces, tap.Config{
		Servers: dns.GetServers(), Searches: dns.GetSearches(), Hostname: hostname(p), Logger: b.log.With("pod", p.ID),
	})
	if err != nil {
		return fmt.Errorf("serve addresses to the guest: %w", err)
	}
	sb.mu.Lock()
	defer sb.mu.Unlock()
	if sb.responder != nil { // from an earlier attempt
		sb.responder.Close()
	}
	sb.responder = responder
	return nil
}

// hostname returns the guest's host name: the pod's host name or, if that is empty, the pod's name.
func hostname(p *sandbox.Pod) string {
	if name := p.Config.GetHostname(); name != "" {
		return name
	}
	return p.Config.GetMetadata().GetName()
}

// StopSandbox implements sandbox.Backend. The machine has already ended. StopSandbox restores the pod's network and
// releases the image. It also removes the pod's cgroup, because a kubelet is about to remove the parent cgroup.
func (b *Backend) StopSandbox(ctx context.Context, p *sandbox.Pod) error {
	return b.releaseSandbox(ctx, b.podState(p))
}

// podState returns the pod's state. If the state file is missing, as after a reboot, podState derives the state from
// the configuration.
func (b *Backend) podState(p *sandbox.Pod) podState {
	if sb, err := b.sandbox(p.ID); err == nil {
		return sb.state
	}
	return podState{ID: p.ID, Netns: p.Netns, Cgroup: b.cgroupOf(p)}
}

func (b *Backend) releaseSandbox(ctx context.Context, s podState) error {
	b.mu.Lock()
	sb := b.sandboxes[s.ID]
	b.mu.Unlock()
	if sb != nil {
		sb.closeResponder()
	}
	if err := b.cfg.Network.Unwire(ctx, s.Netns, b.cfg.tapsFile(s.ID)); err != nil {
		return fmt.Errorf("disconnect the machine from the pod's network: %w", err)
	}
	if err := fpPodUnwired.Hit(ctx); err != nil {
		return err
	}
	if err := b.removeCgroup(ctx, s.ID, s.Cgroup); err != nil {
		return err
	}
	if err := b.cfg.Images.CloseDisk(ctx, s.ID); err != nil {
		return fmt.Errorf("release the machine's image: %w", err)
	}
	return fpPodReleased.Hit(ctx)
}

// sandbox returns a pod from memory or from disk. It returns errdefs.ErrNotFound if the pod is missing.
func (b *Backend) sandbox(id string) (*pod, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if sb := b.sandboxes[id]; sb != nil {
		return sb, nil
	}
	sb := &pod{}
	if err := format.Read(b.cfg.podFile(id), &sb.state); err != nil {
		return nil, err
	}
	b.sandboxes[id] = sb
	return sb, nil
}

// RemoveSandbox implements sandbox.Backend.
func (b *Backend) RemoveSandbox(ctx context.Context, p *sandbox.Pod) error {
	return b.removeSandbox(ctx, b.podState(p))
}

// removeSandbox removes every trace of a pod, even if the pod is not in memory.
func (b *Backend) removeSandbox(ctx context.Context, s podState) error {
	id := s.ID
	if err := b.removeContainer(ctx, id); err != nil {
		return err
	}
	if err := b.releaseSandbox(ctx, s); err != nil {
		return err
	}
	if err := errors.Join(os.RemoveAll(b.cfg.diskDir(id)), os.RemoveAll(b.cfg.podDir(id))); err != nil {
		return fmt.Errorf("vm pod: %w", err)
	}
	if err := fpPodRemoved.Hit(ctx); err != nil {
		return err
	}
	b.mu.Lock()
	delete(b.sandboxes, id)
	b.mu.Unlock()
	b.sampler.Forget(id)
	b.sampler.Forget("pod " + id)
	return nil
}
