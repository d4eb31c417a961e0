package code

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/component/wit"
	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
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

// entry describes one file of code.
type entry struct {
	// Digest is the digest of the component. Engine is the fingerprint of the engine.
	Digest string `json:"digest"`
	Engine string `json:"engine"`
	// Size (in bytes) and SHA256 (in hexadecimal) describe the code.
	Size   int64  `json:"size"`
	SHA256 string `json:"sha256"`
	// Key is the fingerprint of the key that has signed the code; empty if this node has compiled it.
	Key string `json:"key,omitempty"`
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
		c.log.Info("compiled code taken from the image", "component", f.id.digest, "image", component.ImageID, "key", result.Key, "took", result.Took)
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

// keep stores code. If this fails, the code is used once, and the next start makes it again.
func (c *Cache) keep(ctx context.Context, e entry, code *os.File) error {
	if err := fpCompiled.Hit(ctx); err != nil {
		return err
	}
	if err := c.store(e, code); err != nil {
		c.log.Warn("store compiled code failed; the next start makes it again", "component", e.Digest, "err", err)
		c.drop(e)
	}
	return fpStored.Hit(ctx)
}

// EntryDir returns the directory of a component's code. The directory is named after the first half of the digest; the
// entry contains the whole digest.
func (c *Cache) EntryDir(digest string) string { return filepath.Join(c.cfg.Dir, shortName(digest)) }

// file returns the path of an entry's file.
func (c *Cache) file(e entry, kind string) string {
	sum := sha256.Sum256([]byte(e.Engine + e.Key))
	return filepath.Join(c.EntryDir(e.Digest), hex.EncodeToString(sum[:8])+kind)
}

// candidates returns what identifies the entries whose code can be used: that which was compiled here, and those with
// accepted signatures.
func candidates(engine string, component Source) []entry {
	list := []entry{{Digest: component.Wasm.Digest.String(), Engine: engine}}
	for _, key := range component.trust.signers() {
		list = append(list, entry{Digest: list[0].Digest, Engine: engine, Key: key})
	}
	return list
}

// read returns the entry with the digest, engine and key of the given one. It returns errdefs.ErrNotFound if there is none.
func (c *Cache) read(wanted entry) (e entry, err error) {
	if err := format.Read(c.file(wanted, ".json"), &e); err != nil {
		return entry{}, err
	}
	if e.Digest != wanted.Digest || e.Engine != wanted.Engine || e.Key != wanted.Key {
		return entry{}, fmt.Errorf("the entry is for %s with engine %s, signed by %q: %w", e.Digest, e.Engine, e.Key, errdefs.ErrDataLoss)
	}
	return e, nil
}

// store writes the code and then its entry, whose size and checksum it sets. It syncs neither, because the checksum detects
// Code damaged by a power loss.
func (c *Cache) store(e entry, code *os.File) error {
	if err := os.MkdirAll(c.EntryDir(e.Digest), 0o700); err != nil {
		return err
	}
	c.storing.Lock()
	defer c.storing.Unlock()
	path := c.file(e, ".code")
	tmp := path + ".new"
	out, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	sum := sha256.New()
	e.Size, err = io.Copy(io.MultiWriter(out, sum), io.NewSectionReader(code, 0, 1<<62))
	if err = errors.Join(err, out.Close()); err != nil {
		return errors.Join(err, ledger.RemoveFile(tmp))
	}
	if err := os.Rename(tmp, path); err != nil {
		return err
	}
	e.SHA256 = hex.EncodeToString(sum.Sum(nil))
	return format.Write(c.file(e, ".json"), e)
}

// drop deletes the files of the code and of its entry, even incomplete files.
func (c *Cache) drop(e entry) {
	c.storing.Lock()
	defer c.storing.Unlock()
	for _, kind := range []string{".json", ".json.new", ".code", ".code.new"} {
		_ = ledger.RemoveFile(c.file(e, kind))
	}
}

// stored returns the entry of the code for the component and the engine, or false if there is no code that can be used. It
// does not read the code, unlike verified.
func (c *Cache) stored(engine string, component Source) (entry, bool) {
	for _, wanted := range candidates(engine, component) {
		e, err := c.read(wanted)
		if err != nil {
			continue
		}
		if info, err := os.Lstat(c.file(e, ".code")); err == nil && info.Mode().IsRegular() && info.Size() == e.Size {
			return e, true
		}
	}
	return entry{}, false
}

// Has reports whether there is optimised code of a component.
func (c *Cache) Has(component Source) bool {
	engine, err := c.compiler.engine()
	if err != nil {
		return false
	}
	_, ok := c.stored(engine, component)
	return ok
}

// verified opens code after checking it against its entry. It returns errdefs.ErrNotFound if there is no code, or only such
// as was signed by keys that the node does not accept for the image. It returns ErrDataLoss if all code is damaged.
func (c *Cache) verified(engine string, component Source) (*os.File, error) {
	var errs []error
	for _, wanted := range candidates(engine, component) {
		code, err := c.openEntry(wanted)
		if err == nil {
			return code, nil
		}
		if !errdefs.IsNotFound(err) {
			errs = append(errs, err)
		}
	}
	if len(errs) == 0 {
		return nil, fmt.Errorf("code of %s: %w", component.Wasm.Digest, errdefs.ErrNotFound)
	}
	return nil, errors.Join(errs...)
}

// openEntry opens the code of an entry; see verified.
func (c *Cache) openEntry(wanted entry) (*os.File, error) {
	e, err := c.read(wanted)
	if err != nil {
		return nil, err
	}
	code, err := os.OpenFile(c.file(e, ".code"), os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, errdefs.ErrDataLoss)
	}
	sum := sha256.New()
	n, err := io.Copy(sum, code)
	if err == nil && (n != e.Size || hex.EncodeToString(sum.Sum(nil)) != e.SHA256) {
		err = fmt.Errorf("%s (%d bytes) does not match the size (%d) and checksum of its entry: %w", code.Name(), n, e.Size, errdefs.ErrDataLoss)
	}
	if err == nil {
		_, err = code.Seek(0, io.SeekStart)
	}
	if err != nil {
		code.Close()
		return nil, err
	}
	return code, nil
}

// Forget deletes a component's code from the disk after a worker has refused the code. Code of an image is not taken again.
func (c *Cache) Forget(component Source) {
	engine, err := c.compiler.engine()
	if err != nil {
		return
	}
	if e, ok := c.stored(engine, component); ok && e.Key != "" {
		c.layers.reject(component.id())
	}
	for _, e := range candidates(engine, component) {
		c.drop(e)
	}
}

// Evict deletes all code from the disk, except the code of components that are in the given set or are being compiled.
func (c *Cache) Evict(wanted map[string]bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	entries, err := os.ReadDir(c.cfg.Dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	keep := map[string]bool{}
	for digest := range wanted {
		keep[shortName(digest)] = true
	}
	for id := range c.flights {
		keep[shortName(id.digest)] = true
	}
	c.layers.evict(keep)
	maps.DeleteFunc(c.failed, func(digest string, _ failure) bool { return !keep[shortName(digest)] })
	for _, e := range entries {
		if !keep[e.Name()] {
			errs = append(errs, os.RemoveAll(filepath.Join(c.cfg.Dir, e.Name())))
		}
	}
	return errors.Join(errs...)
}
