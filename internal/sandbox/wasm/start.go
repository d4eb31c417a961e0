package wasm

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/artifact"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/annotations"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workers"
	"github.com/tripod-run/tripod/internal/spans"
	"github.com/tripod-run/tripod/internal/stream"
)

var (
	fpLoaded  = failpoint.New("wasm.start-container.loaded")
	fpOpened  = failpoint.New("wasm.start-container.opened")
	fpIntent  = failpoint.New("wasm.start-container.intent")
	fpStarted = failpoint.New("wasm.start-container.started")
)

// cleanupTime is the time limit for the clean-up after a start whose context has ended. It is also the limit for
// replacing a changed certificate.
const cleanupTime = 30 * time.Second

// StartContainer implements sandbox.Backend. It returns once the server accepts requests or the command runs.
func (b *Backend) StartContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) error {
	h, err := b.ledger.Startable(p.ID, c.ID)
	if h == nil {
		return err
	}
	err = b.run(ctx, p, c, h)
	if errdefs.IsUnavailable(err) && ctx.Err() == nil {
		err = b.run(ctx, p, c, h) // the worker died or was ended as idle
	}
	if err != nil {
		return b.failStart(ctx, p, c, h, err)
	}
	return fpStarted.Hit(ctx)
}

// run starts the pod in its worker.
func (b *Backend) run(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, h *handle) error {
	w, err := b.workerFor(ctx, p, c)
	if err != nil {
		return err
	}
	s, _ := h.Snapshot()
	if err := b.forgetPrevious(ctx, h, s, w); err != nil {
		return err
	}
	o, err := b.optionsOf(p, c)
	if err != nil {
		return err
	}
	loaded, err := b.load(ctx, w, s.Artifact, s.Description, o.Code)
	if err != nil {
		return err
	}
	if err := fpLoaded.Hit(ctx); err != nil {
		return err
	}
	if err := checkModule(c.Config, loaded.World); err != nil {
		return err
	}
	spec, renewAt, err := b.spec(ctx, p, c, o, s, loaded)
	defer spec.CloseFiles()
	if err != nil {
		return err
	}
	dialer, err := b.openEgress(ctx, p, c, loaded, &spec)
	if err != nil {
		return err
	}
	if err := fpOpened.Hit(ctx); err != nil {
		return err
	}
	l := newLife(w, p, c)
	l.quick.Store(loaded.Quick)
	err = h.Begin(l, func(s *state) {
		s.Start()
		s.Services, s.RenewAt, s.Worker, s.Process, s.Dialer = servicesOf(loaded), renewAt, w.Name, w.Proc.ID, dialer
	})
	if err != nil {
		return fmt.Errorf("container %s: %w", h.ID, err)
	}
	var status workerapi.Status
	err = guard.Call(b.log, "StartContainer", func() (err error) {
		if err := fpIntent.Hit(ctx); err != nil {
			return err
		}
		ctx, end := spans.Start(ctx, "worker.start", spans.String("worker", w.Name))
		defer func() { end(err) }()
		status, err = w.Conn().Start(ctx, spec)
		if !errdefs.IsNotFound(err) {
			return err
		}
		w.ForgetCode(spec.Digest) // the worker has unloaded the code
		if _, err := b.load(ctx, w, s.Artifact, s.Description, o.Code); err != nil {
			return err
		}
		status, err = w.Conn().Start(ctx, spec)
		return err
	})
	if err != nil {
		undoBegin(h, l)
		return err
	}
	h.UpdateInMemory(l, func(s *state) { s.StartedAt = status.StartedAt })
	if loaded.Quick && b.cache.Has(b.cache.Source(ctx, s.Artifact)) { // it was made since the quick code was loaded
		go guard.Func(b.log, "optimised code", b.improve)()
	}
	b.followCertificate(h.ID, l)
	if why := loaded.OwnWorkerReason; why != "" {
		b.reportFallback(l, "it takes the component path, in a worker of its own: "+why)
	}
	if dialer != "" && !b.dialers.Alive(dialer) {
		b.reconnectSoon() // the dialer has ended before the worker had the pod
	}
	return nil
}

// workerFor returns the worker for a container, and starts the worker if needed.
func (b *Backend) workerFor(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) (*workers.Worker, error) {
	scope := b.scopeOf(p, c)
	if !workers.IsOwn(scope) {
		return b.keeper.Get(ctx, scope, nil)
	}
	own := b.keeper.Own(p, c)
	return b.keeper.Get(ctx, scope, &own)
}

// forgetPrevious removes the container from the worker of its previous run, unless that worker is the given one.
func (b *Backend) forgetPrevious(ctx context.Context, h *handle, s state, w *workers.Worker) error {
	if s.Worker == "" || s.Worker == w.Name {
		return nil // a worker can restart a container that it has run before
	}
	return b.removeFromWorker(ctx, s.Worker, h.ID)
}

// undoBegin resets the container to Created if its worker has refused the start, or has never received the order to
// start it. If the worker has died, undoBegin does nothing, because the container's exit is already recorded.
func undoBegin(h *handle, l *life) {
	h.End(l, func(s *state) { s.Phase, s.StartedAt, s.RenewAt = ledger.Created, time.Time{}, time.Time{} })
}

// failStart records a failed start as the container's exit, and removes the container from its worker, which may have
// received the order. If ctx has ended, the container stays created instead. The worker of a foreign container ends.
func (b *Backend) failStart(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, h *handle, cause error) error {
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
	defer cancel()
	s, _ := h.Snapshot()
	if sandbox.IsForeign(p, c) {
		defer b.endForeignWorker(c.ID)
	}
	err := b.removeFromWorker(undo, s.Worker, h.ID)
	if ctx.Err() == nil {
		err = errors.Join(err, h.Set(func(s *state) { s.FailStart(cause) }))
	}
	return errors.Join(fmt.Errorf("start container %s: %w", h.ID, cause), err)
}

// spec returns the pod's specification for the worker. The specification contains open files, which the caller must
// close even if spec returns an error.
func (b *Backend) spec(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, o annotations.Options, s state,
	loaded workerapi.Loaded) (spec workerapi.PodSpec, renewAt time.Time, err error) {
	spec = workerapi.PodSpec{
		ID: c.ID, Component: s.Component, Digest: loaded.Digest,
		Args: s.Artifact.Argv(c.Config.GetCommand(), c.Config.GetArgs()), Env: environment(s.Artifact, c.Config.GetEnvs()),
		Resources: resourcesOf(p, c), Limits: o.Limits, Holdings: b.cfg.Holdings,
		Stdin: c.Config.GetStdin(), StdinOnce: c.Config.GetStdinOnce(),
	}
	if spec.Log.File, err = stream.OpenLogFile(p.Config.GetLogDirectory(), c.Config.GetLogPath()); err != nil {
		return spec, renewAt, err
	}
	if spec.Mounts, err = openMounts(c.Config); err != nil {
		return spec, renewAt, err
	}
	chooseMounts(o, c.Config, spec.Mounts)
	if err := b.openStore(o, p, loaded, &spec); err != nil {
		return spec, renewAt, err
	}
	spec.Channels = c.Channels
	if !loaded.World.Serves() {
		return spec, renewAt, nil
	}
	if spec.CORS = o.CORS; spec.CORS.Origins == nil {
		spec.CORS.Origins = b.cfg.Origins
	}
	if spec.Ports, err = b.listen(ctx, p, c, o); err != nil {
		return spec, renewAt, err
	}
	spec.TLS, renewAt, err = b.identityOf(ctx, p, c, o, s.Component)
	return spec, renewAt, err
}

// servicesOf returns the services that the component's methods belong to.
func servicesOf(loaded workerapi.Loaded) []string {
	var services []string
	for _, procedure := range loaded.Procedures {
		service, _, _ := strings.Cut(strings.TrimPrefix(procedure, "/"), "/")
		services = append(services, service)
	}
	slices.Sort(services)
	return slices.Compact(services)
}

// servicesOf returns the full names of a container's gRPC services. It returns nil if the container is not running or
// serves none.
func (b *Backend) servicesOf(containerID string) []string {
	h, _, err := b.ledger.GetRun(containerID, containerID)
	if err != nil {
		return nil
	}
	s, _ := h.Snapshot()
	return s.Services
}

// environment returns the image's environment variables, overridden by the container's.
func environment(a *artifact.Artifact, envs []*runtimeapi.KeyValue) []string {
	env := append([]string(nil), a.Env...)
	for _, e := range envs {
		env = append(env, e.GetKey()+"="+string(e.GetValue()))
	}
	return lastWins(env)
}

// lastWins keeps only the last value of each variable, and puts it where the variable first occurred.
func lastWins(env []string) []string {
	at := map[string]int{}
	kept := env[:0]
	for _, e := range env {
		key, _, _ := strings.Cut(e, "=")
		if i, ok := at[key]; ok {
			kept[i] = e
			continue
		}
		at[key] = len(kept)
		kept = append(kept, e)
	}
	return kept
}

func resourcesOf(p *sandbox.Pod, c *sandbox.Container) workerapi.Resources {
	r := workerapi.Resources{MemoryBytes: max(workers.MemoryLimit(p, c), 0)}
	if res := sandbox.Resources(p, c); res.GetCpuQuota() > 0 {
		r.CPUQuota, r.CPUPeriod = res.GetCpuQuota(), res.GetCpuPeriod()
	}
	return r
}
