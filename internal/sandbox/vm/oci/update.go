package oci

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/guestapi"
)

// UpdateContainer implements sandbox.Updater. It refuses a memory limit that the container could never reach.
func (o *Backend) UpdateContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) error {
	h, err := o.ledger.Get(p.ID, c.ID)
	if err != nil {
		return err
	}
	pod, err := o.running(p.ID)
	if err != nil {
		return err
	}
	s, _ := h.Snapshot()
	granted := grantedTo(c)
	if granted.Memory > s.Granted.Memory { // a limit may be too high from the beginning
		if err := o.checkMemory(p, c.ID, granted); err != nil {
			return fmt.Errorf("update container %s: %w", c.ID, err)
		}
	}
	changed := map[string]grant{c.ID: granted}
	if err := o.fit(ctx, pod, p, changed); err != nil {
		return fmt.Errorf("update container %s: %w", c.ID, err)
	}
	if err := o.place(pod, p, changed); err != nil {
		return err
	}
	config := proto.CloneOf(c.Config)
	config.LogPath, config.Mounts = c.ID+".log", nil
	guestResources(config.GetLinux().GetResources())
	inner := guestapi.Container{Container: sandbox.Container{ID: c.ID, ImageID: c.ImageID, Config: config, Adjustment: c.Adjustment}}
	if err := o.call(ctx, p.ID, guestapi.Request{Method: guestapi.MethodUpdate, Container: c.ID}, inner, nil); err != nil {
		return err
	}
	return h.Set(func(s *state) { s.Granted = granted })
}

// UpdateSandbox implements sandbox.PodUpdater. A machine that cannot have the memory gets the other resources.
func (o *Backend) UpdateSandbox(ctx context.Context, p *sandbox.Pod) error {
	pod, err := o.running(p.ID)
	if err != nil {
		return err
	}
	pod.sizing.Lock()
	defer pod.sizing.Unlock()
	kept := o.resize(ctx, pod, p, o.size(p, nil))
	if kept != nil && !errors.Is(kept, sandbox.ErrMemoryKept) {
		return kept
	}
	if err := o.place(pod, p, nil); err != nil {
		return err
	}
	return kept
}
