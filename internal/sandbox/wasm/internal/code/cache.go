package code

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tripod-run/tripod/internal/component/wit"
	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/sandbox"
)

var (
	fpCompiled = failpoint.New("wasm.cache.compiled")
	fpStored   = failpoint.New("wasm.cache.stored")
)

// Cache stores compiled code under the digest of the component and the fingerprint of the engine:
//
//	<dir>/<half the digest of the component>/<hash of the fingerprint>.code    machine code
//	                                                        .json    entry with the checksum, written last
//
// Code from images has files of its own for each key that has signed it; their names are hashes of the fingerprints of the
// engine and of the key. So images whose repositories have other keys never use it.
//
// If code has no matching entry, the component is compiled again. If the disk is not writable, code stays in memory
// until it is loaded.
type Cache struct {
	// Improved is called when optimised code was made. It is set before the first compilation.
	Improved func()

	cfg      Config
	compiler *compiler
	log      *slog.Logger
	figures  figures
	layers   *layers
	// changed is called when a compilation of optimised code begins and when it ends.
	changed func(ctx context.Context, id codeID, c sandbox.Compilation)
	// compiling counts the flights. Those that only improve quick code end when life does.
	compiling sync.WaitGroup
	life      context.Context

	// storing is held while code and its entry are written, because flights for other keys can end with the same code.
	storing sync.Mutex

	mu      sync.Mutex
	flights map[codeID]*flight
	// failed holds the last failures by the digest of the component.
	failed map[string]failure
}

// failureMemory is how long a component that the compiler has refused is refused without another attempt.
const failureMemory = 10 * time.Minute

// failure is the end of a compilation without code.
type failure struct {
	err error
	at  time.Time
}

// final reports whether another attempt would end in the same way.
func (f failure) final() bool {
	_, refused := errors.AsType[refusal](f.err)
	return refused && time.Since(f.at) < failureMemory
}

// flight is a compilation that is queued or in progress. The field waiting is the number of callers. The compiler runs
// between the closing of compiling and that of done.
type flight struct {
	id        codeID
	waiting   int
	ticket    *ticket
	cancel    context.CancelCauseFunc
	compiling chan struct{}
	done      chan struct{}
	code      *os.File
	err       error
}

// New returns a cache, which creates its directory when it is needed. Compilations that only improve quick code end with ctx.
func New(ctx context.Context, cfg Config) *Cache {
	cfg.QuickAbove = cmp.Or(cfg.QuickAbove, QuickAbove)
	compiler := newCompiler(cfg)
	return &Cache{
		cfg: cfg, compiler: compiler, log: cfg.Logger, figures: newFigures(compiler.queue), layers: newLayers(cfg),
		changed: func(context.Context, codeID, sandbox.Compilation) {}, Improved: func() {}, life: ctx,
		flights: map[codeID]*flight{}, failed: map[string]failure{},
	}
}

// Wait waits until all compilations have ended.
func (c *Cache) Wait() { c.compiling.Wait() }

// Collectors returns the metrics of compilations and of layers with compiled code.
func (c *Cache) Collectors() []prometheus.Collector {
	return []prometheus.Collector{c.figures, c.layers.results}
}

// Mode says with which code a pod begins. By default a command waits for optimised code, because it is one instance until it
// ends, and instances keep the code with which they begin.
type Mode string

const (
	ModeAuto      Mode = "auto"
	ModeQuick     Mode = "quick"
	ModeOptimised Mode = "optimised"
)

// Waits reports whether a component of a world waits for optimised code.
func (m Mode) Waits(world wit.World) bool {
	return m == ModeOptimised || m == ModeAuto && world == wit.WorldCommand
}

// Open returns the verified code of a component, as a file at offset 0. It compiles the component if needed, unless its
// image has code that this node accepts. Concurrent callers whose images accept the same keys share one compilation, which is
// cancelled once every caller's context has ended. A component that the compiler has refused recently is refused with the
// same error.
//
// Unless the mode is to wait for optimised code, a large component is also compiled quickly, and open returns the code that is
// there first. The compilation of optimised code then goes on.
func (c *Cache) Open(ctx context.Context, component Source, mode Mode) (code *os.File, quick bool, err error) {
	engine, err := c.compiler.engine()
	if err != nil {
		return nil, false, err
	}
	digest := component.Wasm.Digest.String()
	if code, err := c.verified(engine, component); err == nil {
		return code, false, nil
	} else if !errdefs.IsNotFound(err) {
		c.log.Warn("compiled code is damaged; compiling again", "component", digest, "err", err)
	}
	if err := c.refused(digest); err != nil {
		return nil, false, err
	}
	join := c.optimised
	if c.cfg.Quick && component.Wasm.Size > c.cfg.QuickAbove && !mode.Waits(component.world(ctx)) {
		join = c.first
	}
	f := join(ctx, engine, component)
	defer c.leave(f)
	if err := f.wait(ctx); err != nil {
		return nil, false, err
	}
	code, err = f.open()
	return code, f.id.quick, err
}

// Open opens the code of a flight that has ended.
func (f *flight) open() (*os.File, error) {
	return os.Open(fmt.Sprintf("/proc/self/fd/%d", f.code.Fd())) // each caller gets its own file offset
}

// optimised joins the compilation of optimised code, for a pod that waits for it.
func (c *Cache) optimised(ctx context.Context, engine string, component Source) *flight {
	return c.join(ctx, engine, priorityPod, component, false)
}

// first compiles a component quickly and with optimisation, and returns the compilation that ends first. The quick code is kept
// until the other compilation has ended, which no pod waits for unless the quick compiler refuses the component.
func (c *Cache) first(ctx context.Context, engine string, component Source) *flight {
	join := func() (best, quick *flight) {
		return c.join(ctx, engine, PriorityPull, component, false), c.join(ctx, engine, priorityPod, component, true)
	}
	best, quick := join()
	join() // for the goroutine, which also keeps the quick code for others
	go guard.Func(c.log, "optimised code", func() {
		select {
		case <-best.done:
		case <-c.life.Done():
		}
		c.leave(best)
		c.leave(quick)
	})()
	select {
	case <-best.done:
	case <-quick.done:
	case <-ctx.Done():
	}
	if guard.IsClosed(best.done) || guard.IsClosed(quick.done) && quick.err != nil {
		defer c.leave(best)
		c.leave(quick)
		return c.optimised(ctx, engine, component) // the same one, or its result
	}
	c.leave(best)
	return quick
}

// refused returns the error of a recent compilation if another one would fail, too.
func (c *Cache) refused(digest string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if f := c.failed[digest]; f.final() {
		return f.err
	}
	return nil
}

// prepare queues the compilation of a component without code. The returned function waits for its end; it is nil if
// there is nothing to compile.
func (c *Cache) prepare(ctx context.Context, p priority, component Source) (func(context.Context) error, error) {
	engine, err := c.compiler.engine()
	if err != nil {
		return nil, err
	}
	if _, ok := c.stored(engine, component); ok || c.refused(component.Wasm.Digest.String()) != nil {
		return nil, nil
	}
	f := c.join(ctx, engine, p, component, false)
	return func(ctx context.Context) error {
		defer c.leave(f)
		return f.wait(ctx)
	}, nil
}

// wait waits for the end of the compilation and returns its error.
func (f *flight) wait(ctx context.Context) error {
	select {
	case <-f.done:
		return f.err
	case <-ctx.Done():
		return fmt.Errorf("wait for the compilation of %s: %w", f.id.digest, context.Cause(ctx))
	}
}

// join joins the component's compilation if one is queued or in progress, and queues one otherwise.
func (c *Cache) join(ctx context.Context, engine string, p priority, component Source, quick bool) *flight {
	c.mu.Lock()
	defer c.mu.Unlock()
	id := component.id()
	id.quick = quick
	f := c.flights[id]
	if f == nil {
		ctx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
		f = &flight{id: id, ticket: c.compiler.queue.enter(p), cancel: cancel, compiling: make(chan struct{}), done: make(chan struct{})}
		c.flights[id] = f
		c.compiling.Go(func() { c.fly(ctx, engine, f, component) })
	}
	f.ticket.raise(p)
	f.waiting++
	return f
}

// fly makes the code of a component, and records and reports the result. It takes the code from the image if this node
// accepts it, and otherwise waits until the compilation may begin.
func (c *Cache) fly(ctx context.Context, engine string, f *flight, component Source) {
	defer f.ticket.leave()
	began := time.Now()
	result := sandbox.Compilation{State: sandbox.CompilationDone}
	if !f.id.quick {
		_ = guard.Call(c.log, "code of an image", func() (err error) {
			f.code, result.Key, err = c.install(ctx, engine, component)
			return err // install has logged and counted it
		})
	}
	if f.code != nil {
		result.Took = time.Since(began)
		c.log.Info("compiled code taken from the image", "component", f.id.digest, "image", component.ImageID, "key", result.Key, "took",
			result.Took)
		c.land(ctx, f, result)
		return
	}
	if f.err = f.ticket.wait(ctx); f.err != nil {
		close(f.done)
		return
	}
	began = time.Now()
	close(f.compiling)
	if !f.id.quick {
		result.LayerRefused = c.layers.refusal(f.id)
		c.changed(ctx, f.id, sandbox.Compilation{State: sandbox.CompilationRunning, LayerRefused: result.LayerRefused})
	}
	f.err = guard.Call(c.log, "compilation", func() (err error) {
		f.code, err = c.make(ctx, engine, f, component)
		return err
	})
	result.Took = time.Since(began)
	if f.err != nil {
		result.State, result.Reason = sandbox.CompilationFailed, f.err.Error()
		c.log.Warn("component was not compiled", "component", f.id.digest, "quick", f.id.quick, "took", result.Took, "err", f.err)
	} else {
		c.log.Info("component compiled", "component", f.id.digest, "quick", f.id.quick, "took", result.Took)
	}
	c.figures.ended(ctx, result, f.id.quick)
	c.land(ctx, f, result)
}

// land records the result of a flight, wakes its callers and reports the result.
func (c *Cache) land(ctx context.Context, f *flight, result sandbox.Compilation) {
	if f.id.quick { // another compiler may accept what this one refuses
		close(f.done)
		return
	}
	c.remember(ctx, f.id.digest, f.err)
	close(f.done)
	c.changed(ctx, f.id, result)
	if f.err == nil {
		c.Improved()
	}
}

// remember records the result of a compilation. A cancelled one says nothing about the component.
func (c *Cache) remember(ctx context.Context, digest string, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.failed, digest)
	if err != nil && ctx.Err() == nil {
		c.failed[digest] = failure{err: err, at: time.Now()}
	}
}

// state returns the state of a component's code.
func (c *Cache) state(component Source) sandbox.Compilation {
	id := component.id()
	c.mu.Lock()
	f, failed := c.flights[id], c.failed[id.digest]
	flying := f != nil && !guard.IsClosed(f.done) // asked before stored: a flight that ends in between would leave nothing to report
	c.mu.Unlock()
	engine, err := c.compiler.engine()
	e, ok := c.stored(engine, component)
	switch {
	case flying && !guard.IsClosed(f.compiling):
		return sandbox.Compilation{State: sandbox.CompilationQueued}
	case flying:
		return sandbox.Compilation{State: sandbox.CompilationRunning, LayerRefused: c.layers.refusal(id)}
	case err == nil && ok:
		return sandbox.Compilation{State: sandbox.CompilationDone, Key: e.Key, LayerRefused: c.layers.refusal(id)}
	case failed.err != nil:
		return sandbox.Compilation{State: sandbox.CompilationFailed, Reason: failed.err.Error(), LayerRefused: c.layers.refusal(id)}
	default:
		return sandbox.Compilation{State: sandbox.CompilationNone}
	}
}

// leave removes a caller from a compilation. When the last caller leaves, the compilation is cancelled and its code is
// closed.
func (c *Cache) leave(f *flight) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if f.waiting--; f.waiting > 0 {
		return
	}
	delete(c.flights, f.id)
	f.cancel(errors.New("all callers have given up"))
	go func() {
		<-f.done
		if f.code != nil {
			f.code.Close()
		}
	}()
}

// make compiles a component and stores the code, unless it is quick. It returns the code even if storing fails.
func (c *Cache) make(ctx context.Context, engine string, f *flight, component Source) (*os.File, error) {
	in, err := component.OpenWasm(ctx, component.images)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	code, err := c.compiler.compile(ctx, in, f.id.quick, f.ticket)
	if err != nil || f.id.quick {
		return code, err
	}
	if err := c.keep(ctx, entry{Digest: component.Wasm.Digest.String(), Engine: engine}, code); err != nil {
		code.Close()
		return nil, err
	}
	return code, nil
}
