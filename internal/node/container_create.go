package node

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/keys"
	"github.com/tripod-run/tripod/internal/sandbox"
)

var (
	failCreateIntent = failpoint.New("node.create-container.intent")
	failCreateEffect = failpoint.New("node.create-container.effect")
	failCreateCommit = failpoint.New("node.create-container.commit")
)

// restartCount is the annotation with the kubelet's restart counter, which sameParameters ignores.
const restartCount = "io.kubernetes.container.restartCount"

// CreateContainer prepares a container in a pod (CRI CreateContainer) and returns its ID. A repeated call with
// unchanged parameters returns the same ID and changes nothing. Errors: ErrNotFound (no such pod or image),
// ErrAlreadyExists (changed parameters), ErrFailedPrecondition (forbidden by the state table), ErrInvalidArgument,
// ErrNotImplemented.
func (n *Node) CreateContainer(ctx context.Context, podID string, config *runtimeapi.ContainerConfig) (string, error) {
	if config.GetMetadata() == nil || config.GetImage() == nil {
		return "", fmt.Errorf("the container has no metadata or no image: %w", errdefs.ErrInvalidArgument)
	}
	p, err := n.orderPod(podID)
	if err != nil {
		return "", err
	}
	var id string
	err = p.slotOf(containerKey(config.Metadata)).run(ctx, n.order(CreateContainer), func(ctx context.Context) (err error) {
		id, err = p.createContainer(ctx, config)
		return err
	})
	if err != nil {
		return "", err
	}
	return id, nil
}

// createContainer implements CreateContainer inside the container's slot.
func (p *livePod) createContainer(ctx context.Context, config *runtimeapi.ContainerConfig) (string, error) {
	rec := p.rec.Load()
	config = rec.withMappings(config)
	existing := rec.existing(config.Metadata)
	if err := rec.rejectSecond(existing, config.Metadata); err != nil {
		return "", err
	}
	state := rec.State
	switch {
	case rec.unit:
		state = rec.UnitState()
	case existing != nil && rec.State == Initiated:
		state = existing.State
	}
	replaced := rec.replacedBy(config.Metadata, state)
	switch verdict := Decide(rec.unit, state, CreateContainer); {
	case replaced != nil:
	case verdict == Idempotent && sameParameters(existing.requested(), config):
		return existing.ID, nil
	case verdict == Idempotent:
		return "", fmt.Errorf("CreateContainer: container %s of pod %s exists with other parameters: %w", existing.ID, p.id,
			errdefs.ErrAlreadyExists)
	case verdict == Refused:
		return "", refusal(rec.unit, p.id, state, CreateContainer)
	}
	if err := p.node.checkComponentLabels(rec, config); err != nil {
		return "", err
	}
	if err := p.node.checkImage(rec, config.Image); err != nil {
		return "", err
	}
	if err := rec.checkTarget(config); err != nil {
		return "", err
	}
	img, err := p.node.Images.Get(ctx, config.Image.GetImage())
	if err != nil {
		return "", fmt.Errorf("image of container %q: %w", config.Metadata.Name, err)
	}
	c := newContainer(rec, config, img)
	if c.Channels, err = channelsIn(config); err != nil {
		return "", err
	}
	if c.Handler, err = p.node.componentHandler(rec, config, img); err != nil {
		return "", err
	}
	return p.makeContainer(ctx, c, replaced)
}

// If the request is for a newer attempt of a unit pod's container, replacedBy returns the old container, which the new
// attempt replaces. Otherwise it returns nil. A kubelet restarts a container by requesting a newer attempt. Either the
// old container is Stopped, and the transition is Stopped → Removed → Created, as in the table; or it is Created and
// was never started.
func (p *Pod) replacedBy(m *runtimeapi.ContainerMetadata, s State) *Container {
	if !p.unit || (s != Created && s != Stopped) {
		return nil
	}
	if old := p.existing(m); m.GetAttempt() > old.Config.GetMetadata().GetAttempt() {
		return old
	}
	return nil
}

// rejectSecond rejects a second container (an init container, a sidecar, an ephemeral container) in a unit pod.
func (p *Pod) rejectSecond(existing *Container, m *runtimeapi.ContainerMetadata) error {
	if !p.unit || p.State != Initiated || existing == nil || existing.State == Removed {
		return nil
	}
	first := existing.Config.GetMetadata().GetName()
	if m.GetName() == first {
		return nil
	}
	return fmt.Errorf("container %q: a pod of runtime handler %q has one container, and this one has %q: "+
		"init containers, sidecars and containers for debugging need a pod of their own or a pod of Linux containers: %w",
		m.GetName(), p.Handler, first, errdefs.ErrNotImplemented)
}

// newContainer returns the initial record of a container.
func newContainer(p *Pod, config *runtimeapi.ContainerConfig, img image.Image) *Container {
	c := &Container{PodID: p.ID, Config: config, ImageID: img.ID, ImageRef: img.ID, CreatedAt: time.Now(), unit: p.unit}
	if p.unit {
		c.ID = p.attemptID(p.Attempts + 1)
	} else {
		c.ID = newID()
	}
	if len(img.RepoDigests) > 0 {
		c.ImageRef = img.RepoDigests[0]
	}
	return c
}

// makeContainer records the intent, prepares the container in the backend and commits Created. If the container
// replaces another one, makeContainer removes the old container only after the backend has accepted the new container.
func (p *livePod) makeContainer(ctx context.Context, c, replaced *Container) (string, error) {
	pod := p.rec.Load().sandboxPod()
	if err := p.backendOf(c).Validate(pod, c.sandboxContainer()); err != nil {
		return "", err
	}
	if err := p.node.store.Reserve(); err != nil {
		return "", err
	}
	if replaced != nil {
		intent := RemoveContainer
		if replaced.State == Stopped {
			intent = intentRetain
		}
		if err := p.removeStopped(ctx, replaced.ID, intent); err != nil {
			return "", err
		}
	}
	err := p.intend(func(next *Pod) error {
		if err := next.acceptsWork(CreateContainer); err != nil {
			return err
		}
		if next.unit { // drop the Removed container
			next.Containers = nil
			next.Attempts++
		}
		next.Containers = append(next.Containers, c)
		return nil
	})
	if err != nil {
		return "", err
	}
	if err := p.node.attempt(CreateContainer, func() error { return p.prepare(ctx, c) }); err != nil {
		ctx, cancel := rollbackContext(ctx)
		defer cancel()
		return "", errors.Join(err, p.rollBackContainer(ctx, c))
	}
	p.tell(ctx, c.ID, p.node.Hooks.CreatedContainer)
	return c.ID, failCreateCommit.Hit(ctx)
}

func (p *livePod) prepare(ctx context.Context, c *Container) error {
	if err := failCreateIntent.Hit(ctx); err != nil {
		return err
	}
	c = new(*c) // the record is immutable
	var resolved sandbox.Resolved
	err := p.step(ctx, "backend.create-container", func(ctx context.Context) (err error) {
		resolved, err = p.createInBackend(ctx, c)
		return err
	})
	if err != nil {
		return err
	}
	if err := failCreateEffect.Hit(ctx); err != nil {
		return err
	}
	return p.commit(func(next *Pod) error {
		made := next.find(c.ID)
		made.State, made.Resolved, made.Config, made.Request, made.Adjustment = Created, resolved, c.Config, c.Request, c.Adjustment
		return nil
	})
}

// rollBackContainer undoes a partial CreateContainer. If the rollback fails, the record stays, hidden from lists, so
// that the janitor can retry.
func (p *livePod) rollBackContainer(ctx context.Context, c *Container) error {
	err := p.node.attempt(CreateContainer, func() error {
		p.node.Hooks.RemoveContainer(ctx, p.rec.Load(), c)
		return p.removeInBackend(ctx, p.rec.Load(), c)
	})
	if err != nil {
		p.node.wakeJanitor()
		return fmt.Errorf("roll back container %s, to be retried: %w", c.ID, err)
	}
	return p.commit(func(next *Pod) error { next.drop(c.ID); return nil })
}

// existing returns the container with the given name and attempt or, in a unit pod, the only container. It returns nil
// if there is none.
func (p *Pod) existing(m *runtimeapi.ContainerMetadata) *Container {
	for _, c := range p.Containers {
		if p.unit || c.key() == containerKey(m) {
			return c
		}
	}
	return nil
}

// acceptsWork returns an error if the pod is stopping or stopped.
func (p *Pod) acceptsWork(call Call) error {
	if p.State == Initiated && p.Intent == "" {
		return nil
	}
	return refusal(p.unit, p.ID, Killed, call)
}

// sameParameters reports whether two requests ask for the same container, that is, whether their labels, annotations,
// environment, image, command, args, mounts and resources are equal. It ignores the kubelet's counters.
func sameParameters(a, b *runtimeapi.ContainerConfig) bool {
	return proto.Equal(parameters(a), parameters(b))
}

func parameters(c *runtimeapi.ContainerConfig) *runtimeapi.ContainerConfig {
	annotations := maps.Clone(c.GetAnnotations())
	delete(annotations, restartCount)
	resources := c.GetLinux().GetResources()
	if resources == nil {
		resources = &runtimeapi.LinuxContainerResources{}
	}
	return &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: c.GetMetadata().GetName()},
		Labels:   c.GetLabels(), Annotations: annotations, Envs: c.GetEnvs(), Image: &runtimeapi.ImageSpec{Image: c.GetImage().GetImage()},
		Command: c.GetCommand(), Args: c.GetArgs(), Mounts: c.GetMounts(),
		Linux: &runtimeapi.LinuxContainerConfig{Resources: resources},
	}
}

// checkComponentLabels rejects a container whose component labels differ from its pod's. A container without such
// labels inherits the pod's, because kubelets do not copy a pod's labels to its containers.
func (n *Node) checkComponentLabels(p *Pod, config *runtimeapi.ContainerConfig) error {
	if p.Component == "" {
		return nil
	}
	own, pods := prefixed(config.GetLabels(), n.ComponentPrefix), prefixed(p.Config.GetLabels(), n.ComponentPrefix)
	if len(own) == 0 || maps.Equal(own, pods) {
		return nil
	}
	return fmt.Errorf("labels below %q differ: the pod has %v, the container %v: %w", n.ComponentPrefix, pods, own, errdefs.ErrInvalidArgument)
}

func prefixed(labels map[string]string, prefix string) map[string]string {
	out := maps.Clone(labels)
	maps.DeleteFunc(out, func(k, _ string) bool { return !strings.HasPrefix(k, prefix) })
	return out
}

// channelsIn returns the channels in a container's annotations, which only the edge front door sets, possibly none. Errors are
// errdefs.ErrInvalidArgument and name the channel.
func channelsIn(config *runtimeapi.ContainerConfig) ([]channel.Channel, error) {
	text, ok := config.GetAnnotations()[keys.EdgeChannels]
	if !ok {
		return nil, nil
	}
	channels, err := channel.Parse(text)
	if err != nil {
		return nil, fmt.Errorf("annotation %s: %w", keys.EdgeChannels, err)
	}
	return channels, nil
}
