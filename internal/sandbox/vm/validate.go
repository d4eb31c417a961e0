package vm

import (
	"fmt"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/annotations"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/validate"
)

// Validate implements sandbox.Backend.
func (b *Backend) Validate(p *sandbox.Pod, c *sandbox.Container) error {
	if !cgroup.ID().MatchString(p.ID) {
		return fmt.Errorf("pod ID %q is not 64 lower-case hex digits: %w", p.ID, errdefs.ErrInvalidArgument)
	}
	if err := b.cfg.Annotations.Check(p, c); err != nil {
		return err
	}
	if _, _, err := b.options(p); err != nil {
		return err
	}
	if c == nil {
		return validate.Pod(p.Config)
	}
	return validate.Container(p, c)
}

// options returns the settings in those of the pod's annotations that the node allows, and warnings.
func (b *Backend) options(p *sandbox.Pod) (annotations.Options, []string, error) {
	return annotations.Parse(b.cfg.Annotations.Pick(p.Config.GetAnnotations()))
}
