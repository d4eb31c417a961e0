package fake

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/stats"
)

// annotationPrefix is the prefix of the annotations that set how a fake pod or container behaves.
const annotationPrefix = "fake.tripod.dev/"

// steps maps each order to the fail point after its effect.
var steps = map[string]*failpoint.Point{
	"create-sandbox":   failpoint.New("fake.create-sandbox"),
	"stop-sandbox":     failpoint.New("fake.stop-sandbox"),
	"remove-sandbox":   failpoint.New("fake.remove-sandbox"),
	"create-container": failpoint.New("fake.create-container"),
	"start-container":  failpoint.New("fake.start-container"),
	"stop-container":   failpoint.New("fake.stop-container"),
	"remove-container": failpoint.New("fake.remove-container"),
	"update-container": failpoint.New("fake.update-container"),
}

// Config configures a Backend.
type Config struct {
	// Dir contains one directory per pod and must contain nothing else.
	Dir string
	// Capabilities are what the backend claims to support, such as unit pods.
	Capabilities sandbox.Capabilities
	Logger       *slog.Logger
}

// Backend is a sandbox.Backend, Execer, Updater and StatsProvider whose pods and containers are files.
type Backend struct {
	config Config

	mu      sync.Mutex
	sink    sandbox.Sink
	handles map[string]*handle
	exits   map[string]chan int32
}

var (
	_ sandbox.Backend       = (*Backend)(nil)
	_ sandbox.Execer        = (*Backend)(nil)
	_ sandbox.Updater       = (*Backend)(nil)
	_ sandbox.StatsProvider = (*Backend)(nil)
)

// New returns a backend with its files in config.Dir. New creates this directory if necessary.
func New(config Config) (*Backend, error) {
	if config.Logger == nil {
		config.Logger = slog.New(slog.DiscardHandler)
	}
	if err := os.MkdirAll(config.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("fake backend: %w", err)
	}
	return &Backend{config: config, handles: map[string]*handle{}, exits: map[string]chan int32{}}, nil
}

// Exit makes a running container exit by itself with the given code.
func (b *Backend) Exit(id string, code int32) { b.exitOrders(id) <- code }

func (b *Backend) exitOrders(id string) chan int32 {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.exits[id] == nil {
		b.exits[id] = make(chan int32)
	}
	return b.exits[id]
}

// Pods lists the pods that have files, for leak checks.
func (b *Backend) Pods() ([]string, error) {
	entries, err := os.ReadDir(b.config.Dir)
	var ids []string
	for _, e := range entries {
		ids = append(ids, e.Name())
	}
	return ids, err
}

// Capabilities returns the capabilities in the Config.
func (b *Backend) Capabilities() sandbox.Capabilities { return b.config.Capabilities }

// Validate checks only the annotation "validate". If the annotation is set, Validate returns errdefs.ErrInvalidArgument
// with the annotation's text.
func (b *Backend) Validate(p *sandbox.Pod, c *sandbox.Container) error {
	if why := behaviour(p, c, "validate"); why != "" {
		return fmt.Errorf("%s: %w", why, errdefs.ErrInvalidArgument)
	}
	return nil
}

// CreateSandbox writes the pod's directory.
func (b *Backend) CreateSandbox(ctx context.Context, p *sandbox.Pod) error {
	return b.act(ctx, p, nil, "create-sandbox", func() error {
		return write(b.sandboxFile(p.ID), sandboxState{ID: p.ID, Ready: true})
	})
}

// StopSandbox marks the sandbox as not ready.
func (b *Backend) StopSandbox(ctx context.Context, p *sandbox.Pod) error {
	return b.act(ctx, p, nil, "stop-sandbox", func() error {
		if _, err := os.Stat(b.sandboxFile(p.ID)); errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return write(b.sandboxFile(p.ID), sandboxState{ID: p.ID})
	})
}

// RemoveSandbox removes the pod's directory.
func (b *Backend) RemoveSandbox(ctx context.Context, p *sandbox.Pod) error {
	return b.act(ctx, p, nil, "remove-sandbox", func() error { return os.RemoveAll(b.podDir(p.ID)) })
}

// CreateContainer writes the container's file.
func (b *Backend) CreateContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) (sandbox.Resolved, error) {
	err := b.act(ctx, p, c, "create-container", func() error {
		return write(b.containerFile(p.ID, c.ID), containerState{State: sandbox.StateCreated})
	})
	return sandbox.Resolved{Mounts: c.Config.GetMounts(), StopSignal: runtimeapi.Signal_SIGNAL_SIGTERM}, err
}

// StartContainer marks the container as running.
func (b *Backend) StartContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) error {
	return b.act(ctx, p, c, "start-container", func() error {
		s := containerState{State: sandbox.StateRunning, StartedAt: time.Now()}
		if after, err := time.ParseDuration(behaviour(p, c, "exit-after")); err == nil {
			code, _ := strconv.ParseInt(behaviour(p, c, "exit-code"), 10, 32)
			s.EndsAt, s.EndsWith = s.StartedAt.Add(after), int32(code)
		}
		if err := errors.Join(makeLog(p, c), write(b.containerFile(p.ID, c.ID), s)); err != nil {
			return err
		}
		b.follow(p, c, s)
		return nil
	})
}

// makeLog creates the container's log file, which stays empty.
func makeLog(p *sandbox.Pod, c *sandbox.Container) error {
	dir, path := p.Config.GetLogDirectory(), c.Config.GetLogPath()
	if dir == "" || path == "" {
		return nil
	}
	log := filepath.Join(dir, path)
	if err := os.MkdirAll(filepath.Dir(log), 0o755); err != nil {
		return err
	}
	return os.WriteFile(log, nil, 0o600)
}

// follow watches a running container.
func (b *Backend) follow(p *sandbox.Pod, c *sandbox.Container, s containerState) {
	h := &handle{stop: make(chan stopOrder), ended: make(chan struct{})}
	b.mu.Lock()
	b.handles[c.ID] = h
	b.mu.Unlock()
	go b.watch(p, c, h, s)
}

// StopContainer ends the container with code 143. A container that ignores the order ends with code 137 after the grace
// period.
func (b *Backend) StopContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, grace time.Duration) error {
	return b.act(ctx, p, c, "stop-container", func() error {
		b.mu.Lock()
		h := b.handles[c.ID]
		b.mu.Unlock()
		if h == nil {
			return nil
		}
		timer := time.NewTimer(grace)
		defer timer.Stop()
		order := stopOrder{force: grace <= 0}
		for {
			select {
			case h.stop <- order:
			case <-h.ended:
				return nil
			}
			select {
			case <-h.ended:
				return nil
			case <-timer.C:
				order.force = true
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
	})
}

// RemoveContainer removes the container's file.
func (b *Backend) RemoveContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) error {
	if err := b.StopContainer(ctx, p, c, 0); err != nil {
		return err
	}
	return b.act(ctx, p, c, "remove-container", func() error {
		b.mu.Lock()
		delete(b.exits, c.ID)
		b.mu.Unlock()
		err := os.Remove(b.containerFile(p.ID, c.ID))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if b.config.Capabilities.ForeignPods && sandbox.IsForeign(p, c) && !b.hasContainers(p.ID) { // no RemoveSandbox follows
			return os.RemoveAll(b.podDir(p.ID))
		}
		return nil
	})
}

func (b *Backend) hasContainers(podID string) bool {
	entries, err := os.ReadDir(filepath.Dir(b.containerFile(podID, "c")))
	return err == nil && len(entries) > 0
}

// UpdateContainer does nothing. It returns errdefs.ErrNotFound if the container does not exist.
func (b *Backend) UpdateContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) error {
	return b.act(ctx, p, c, "update-container", func() error {
		s, err := b.readContainer(p.ID, c.ID)
		if err == nil && s.State == sandbox.StateAbsent {
			return fmt.Errorf("fake container %s: %w", c.ID, errdefs.ErrNotFound)
		}
		return err
	})
}

// Status reads the container's file.
func (b *Backend) Status(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) (sandbox.Status, error) {
	if err := b.step(ctx, p, c, "status"); err != nil {
		return sandbox.Status{}, err
	}
	s, err := b.readContainer(p.ID, c.ID)
	return s.status(), err
}

// ContainerStats returns the same figures for every container.
func (b *Backend) ContainerStats(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) (*runtimeapi.ContainerStats, error) {
	if err := b.step(ctx, p, c, "stats"); err != nil {
		return nil, err
	}
	at := time.Now().UnixNano()
	return &runtimeapi.ContainerStats{
		Cpu:    &runtimeapi.CpuUsage{Timestamp: at, UsageCoreNanoSeconds: &runtimeapi.UInt64Value{Value: 1}},
		Memory: &runtimeapi.MemoryUsage{Timestamp: at, WorkingSetBytes: &runtimeapi.UInt64Value{Value: 1}},
	}, nil
}

// ContainerSamples returns the figures of ContainerStats and their samples.
func (b *Backend) ContainerSamples(ctx context.Context, p *sandbox.Pod,
	c *sandbox.Container) (*runtimeapi.ContainerStats, stats.Samples, error) {
	figures, err := b.ContainerStats(ctx, p, c)
	if err != nil {
		return nil, nil, err
	}
	return figures, stats.Samples{{Family: stats.CPUUsage, Value: 1.5, Labels: []string{"total"}}, {Family: stats.MemoryWorkingSet, Value: 1}},
		nil
}

// PodStats returns the same figures for every pod.
func (b *Backend) PodStats(ctx context.Context, p *sandbox.Pod) (*runtimeapi.LinuxPodSandboxStats, error) {
	if err := b.step(ctx, p, nil, "stats"); err != nil {
		return nil, err
	}
	return &runtimeapi.LinuxPodSandboxStats{Process: &runtimeapi.ProcessUsage{ProcessCount: &runtimeapi.UInt64Value{Value: 1}}}, nil
}

// Recover continues to watch those known containers that run, and removes the pods that are not known.
func (b *Backend) Recover(_ context.Context, known []sandbox.Known, sink sandbox.Sink) (sandbox.Found, error) {
	b.mu.Lock()
	b.sink = sink
	b.mu.Unlock()
	found := sandbox.Found{Sandboxes: map[string]bool{}, Containers: map[string]sandbox.Status{}}
	keep := map[string]bool{}
	for _, k := range known {
		keep[k.Pod.ID] = true
		var s sandboxState
		if err := read(b.sandboxFile(k.Pod.ID), &s); err == nil && s.Ready {
			found.Sandboxes[k.Pod.ID] = true
		}
		for _, c := range k.Containers {
			state, err := b.readContainer(k.Pod.ID, c.ID)
			if err != nil {
				return found, err
			}
			found.Containers[c.ID] = state.status()
			if state.State == sandbox.StateRunning {
				b.follow(k.Pod, c, state)
			}
		}
	}
	ids, err := b.Pods()
	for _, id := range ids {
		if !keep[id] {
			err = errors.Join(err, os.RemoveAll(filepath.Join(b.config.Dir, id)))
		}
	}
	return found, err
}

// act executes an order. Annotations can make the order misbehave before its effect (step) and after its effect
// (step.done).
func (b *Backend) act(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, step string, effect func() error) error {
	if err := b.step(ctx, p, c, step); err != nil {
		return err
	}
	if err := effect(); err != nil {
		return err
	}
	if err := steps[step].Hit(ctx); err != nil {
		return err
	}
	return b.step(ctx, p, c, step+".done")
}

func (b *Backend) step(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, step string) error {
	return failpoint.Do(ctx, "fake."+step, behaviour(p, c, step))
}

// behaviour returns the value of an annotation. It looks at the container's annotations first, and then at the pod's.
func behaviour(p *sandbox.Pod, c *sandbox.Container, what string) string {
	if c != nil {
		if v, ok := c.Config.GetAnnotations()[annotationPrefix+what]; ok {
			return v
		}
	}
	return p.Config.GetAnnotations()[annotationPrefix+what]
}
