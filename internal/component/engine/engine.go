package engine

// #include "tw.h"
import "C"

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/wasmbin"
)

// codeVersion increases with every change to the compiler's configuration or to the format of the code image.
const codeVersion = 9

// Defaults of Config.
const (
	defaultOverflow  = 1024
	defaultMaxMemory = 4 << 30
	defaultMaxTable  = 65536
)

// Engine compiles and runs guests. It is safe for concurrent use. It is never closed, because a process has only one
// Engine.
type Engine struct {
	cfg Config
	engines
	pooled *C.wasm_engine_t // the engine with the pool, or nil
	// quick returns the engines for quick code, which has no pool.
	quick func() (engines, error)

	overflow   atomic.Int64 // instances outside the pool
	forwarders forwarders
}

// Fingerprint identifies everything that compiled code depends on: wasmtime with its version and features, the
// configuration of the engine and the target. Use it in the keys of a cache of code images.
func Fingerprint() string { return fingerprint() }

var fingerprint = sync.OnceValue(func() string {
	crate := sha256.Sum256([]byte(crateManifest + crateLock + crateSource))
	return fmt.Sprintf("wasmtime-%s+%d-%x-%s-%s", wasmtimeVersion(), codeVersion, crate[:4], runtime.GOOS, runtime.GOARCH)
})

// New makes an engine and maps the pool's address space. If there is no address space left, the error is
// errdefs.ErrResourceExhausted.
func New(cfg Config) (*Engine, error) {
	if cfg.Instances < 0 || cfg.Instances > 1<<20 || cfg.MaxMemory > 4<<30 {
		return nil, invalid("engine: %d instances (at most %d), %d bytes of memory (at most 4 GiB)",
			cfg.Instances, 1<<20, cfg.MaxMemory)
	}
	if cfg.Overflow == 0 {
		cfg.Overflow = defaultOverflow
	}
	if cfg.MaxMemory == 0 {
		cfg.MaxMemory = defaultMaxMemory
	}
	if cfg.MaxTableElements == 0 {
		cfg.MaxTableElements = defaultMaxTable
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	e := &Engine{cfg: cfg}
	var err error
	if e.engines, err = e.openBoth(false); err != nil {
		return nil, err
	}
	e.quick = sync.OnceValues(func() (engines, error) { return e.openBoth(true) })
	if cfg.Instances > 0 {
		if e.pooled, err = e.open(cfg.Instances, false, e.pool); err != nil {
			return nil, err
		}
		if err := openPagemap(cfg.Logger); err != nil {
			return nil, err
		}
	}
	return e, nil
}

// engines are those of one compiler. plain, which allocates instances on demand, is used for compiling and when the pool is
// full. detached runs guests whose memory is detached; their memories are those of memory.c.
type engines struct{ plain, detached *C.wasm_engine_t }

func (e *Engine) openBoth(quick bool) (both engines, err error) {
	if both.plain, err = e.open(0, quick, nil); err == nil {
		both.detached, err = e.open(0, quick, slots)
	}
	return both, err
}

// compiler returns the engine that compiles.
func (e *Engine) compiler() (*C.wasm_engine_t, error) {
	if !e.cfg.Quick {
		return e.plain, nil
	}
	q, err := e.quick()
	return q.plain, err
}

// open makes a wasmtime engine whose memories are allocated as allocate configures, for a number of instances if there is a
// pool. An engine can load what another engine of the same compiler has compiled, because they differ only in how they allocate.
func (e *Engine) open(instances int, quick bool, allocate func(*C.wasm_config_t)) (*C.wasm_engine_t, error) {
	c := C.wasm_config_new()
	if quick { // its frames are larger, and the limit is what wasmtime allows
		C.wasmtime_config_strategy_set(c, C.WASMTIME_STRATEGY_WINCH)
		C.wasmtime_config_max_wasm_stack_set(c, 2<<20)
	} else {
		C.wasmtime_config_strategy_set(c, C.WASMTIME_STRATEGY_CRANELIFT)
	}
	C.wasmtime_config_cranelift_opt_level_set(c, C.WASMTIME_OPT_LEVEL_SPEED)
	C.wasmtime_config_parallel_compilation_set(c, true)
	C.wasmtime_config_native_unwind_info_set(c, false) // backtraces use frame pointers
	C.wasmtime_config_epoch_interruption_set(c, true)
	C.tripod_config_proposals(c)
	if allocate != nil {
		allocate(c)
	}
	engine := C.wasm_engine_new_with_config(c)
	if engine == nil {
		return nil, fmt.Errorf("engine: no address space for a pool of %d instances: %w", instances, errdefs.ErrResourceExhausted)
	}
	canUndoIdle := C.tw_ticker(engine)
	if canUndoIdle < 0 {
		return nil, fmt.Errorf("engine: start the ticker: %w", syscall.Errno(-canUndoIdle))
	}
	if canUndoIdle == 0 && instances > 0 {
		e.cfg.Logger.Info("guests that compute for a long time yield by sleeping, because this process may not take threads " +
			"out of SCHED_IDLE (RLIMIT_NICE of 20 would allow it)")
	}
	return engine, nil
}

// pool configures the pooling allocator. Each component gets slots for its main core instance and for a few small core
// instances.
func (e *Engine) pool(c *C.wasm_config_t) {
	const coreInstances = 8
	p := C.wasmtime_pooling_allocation_config_new()
	defer C.wasmtime_pooling_allocation_config_delete(p)
	n := C.uint32_t(e.cfg.Instances)
	C.wasmtime_pooling_allocation_config_total_component_instances_set(p, n)
	C.wasmtime_pooling_allocation_config_total_core_instances_set(p, n*coreInstances)
	C.wasmtime_pooling_allocation_config_total_memories_set(p, n)
	C.wasmtime_pooling_allocation_config_total_tables_set(p, n*coreInstances)
	C.wasmtime_pooling_allocation_config_max_memory_size_set(p, C.size_t(e.cfg.MaxMemory))
	C.wasmtime_pooling_allocation_config_table_elements_set(p, C.size_t(e.cfg.MaxTableElements))
	C.wasmtime_pooling_allocation_config_max_tables_per_module_set(p, maxTables)
	C.wasmtime_pooling_allocation_config_max_core_instance_size_set(p, 2*maxInstanceSize) // ours is an estimate
	// A released slot keeps this much memory resident for its next instance. wasmtime, not the kernel, clears that
	// memory.
	C.wasmtime_pooling_allocation_config_linear_memory_keep_resident_set(p, 128<<10)
	C.wasmtime_pooling_allocation_config_table_keep_resident_set(p, 4<<10)
	C.wasmtime_pooling_allocation_strategy_set(c, p)
}

// Compile makes the code image of a component, or of a core module: a command with _start, or a server that exports
// tripod:grpc/handler by the canonical ABI. The error is errdefs.ErrInvalidArgument if the guest is not valid
// WebAssembly, needs an import that nothing provides, declares memory or tables beyond the limits, or exports nothing
// that can be served. Compile takes CPU and memory in proportion to the guest (12 s of CPU
// time and 500 MB for 12 MB), so run it in a child process with limits. It checks ctx only between steps.
func (e *Engine) Compile(ctx context.Context, wasm []byte, opts CompileOptions) ([]byte, error) {
	outline, err := wasmbin.Read(bytes.NewReader(wasm), int64(len(wasm)))
	if err == nil {
		err = outline.CheckWASI() // before the engine refuses functions that it does not know
	}
	if err != nil {
		return nil, err
	}
	bin, err := wasmbin.Parse(wasm)
	if err != nil {
		return nil, err
	}
	img := &image{quick: e.cfg.Quick}
	for _, m := range append(bin.Modules, bin.Nested...) {
		if err := checkDeclared(m, e.cfg); err != nil {
			return nil, err
		}
		img.MinMemory += minMemory(m)
		img.Memories += len(m.Memories)
		img.InstanceSize += instanceSize(m)
	}
	if bin.Component {
		err = e.compileComponent(ctx, wasm, bin, opts, img)
	} else {
		err = e.compileCore(ctx, bin.Modules[0], opts, img)
	}
	if err != nil {
		return nil, err
	}
	return img.encode()
}

// compileCore compiles a core module: a server, or a preview 1 command.
func (e *Engine) compileCore(ctx context.Context, m wasmbin.Module, opts CompileOptions, img *image) error {
	img.describeModule(m)
	handles := func(i Item) bool { return compatName(i.Interface) == rawHandler && i.Name == "handle" }
	switch {
	case slices.ContainsFunc(img.Exports, handles):
		img.World = WorldRaw
		return e.compileServer(ctx, m, opts, img)
	case m.HasExport("_start", wasmbin.Func):
		img.World, img.Start = WorldCommand, true
		return e.compileCommand(ctx, m, img)
	}
	return invalid("the core module exports neither _start nor %s.0: it is neither a component nor a WASI preview 1 command nor a gRPC server",
		rawHandler)
}

// compileCommand compiles a core module that is a preview 1 command.
func (e *Engine) compileCommand(ctx context.Context, m wasmbin.Module, img *image) error {
	for _, i := range m.Imports {
		if i.Module != preview1 {
			return invalid("import %s.%s: nothing provides it (a command that is a core module gets %s only)", i.Module, i.Name, preview1)
		}
	}
	if err := e.compileModule(ctx, m.Code, m, img); err != nil {
		return err
	}
	return e.tryLink(img, Host{}, nil)
}

// compileServer compiles a core module whose exports and imports follow the canonical ABI, as if it were the main module
// of a component. There is no component around it that could give types to its functions: only their core types are
// checked.
func (e *Engine) compileServer(ctx context.Context, m wasmbin.Module, opts CompileOptions, img *image) error {
	provided := func(iface string) bool {
		return slices.ContainsFunc(opts.ModuleHost.Funcs, func(f HostFunc) bool { return f.Interface == iface })
	}
	for _, i := range m.Imports {
		switch {
		case i.Kind != wasmbin.Func:
			return invalid("import %s.%s: a core module can import functions only", i.Module, i.Name)
		case i.Module != preview1 && !provided(i.Module):
			return invalid("import %s.%s: not supported in a core module", i.Module, i.Name)
		}
	}
	switch {
	case m.HasExport("_start", wasmbin.Func):
		return invalid("the core module exports %s.0, but also _start; build it as a library (a reactor)", rawHandler)
	case !m.HasExport("memory", wasmbin.Memory) || !m.HasExport("cabi_realloc", wasmbin.Func):
		return invalid("the core module does not export its memory and cabi_realloc, which the canonical ABI needs")
	}
	if err := e.compileModule(ctx, m.Code, m, img); err != nil {
		return err
	}
	exports := opts.ModuleExports
	if img.whyNoSnapshot() == "" {
		for _, sig := range []Signature{PrepareSignature(), WarmSignature()} {
			if img.exports(Item{Interface: sig.Interface, Name: sig.Name}.String()) {
				exports = append(slices.Clip(exports), sig)
			}
		}
	}
	return e.tryLink(img, opts.ModuleHost, exports)
}

// maxImports bounds the imports of a core module. The engine lists them again for each instance.
const maxImports = 4096

// compileModule compiles a core module, and its memory as another module if that is possible.
// The binary is that of the guest.
func (e *Engine) compileModule(ctx context.Context, binary []byte, m wasmbin.Module, img *image) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if n := len(m.Imports); n > maxImports {
		return invalid("a core module has %d imports, at most %d are supported", n, maxImports)
	}
	m.MergeData()
	img.Snapshot = snapshotInspection{Reason: wasmbin.WhyNoSnapshot(binary, img.exports)}
	m, err := e.detach(m, img)
	if err != nil {
		return err
	}
	img.InstanceSize = instanceSize(m)
	if err := checkInstanceSize("the guest's core modules together need", img.InstanceSize); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	compiler, err := e.compiler()
	if err != nil {
		return err
	}
	img.module, err = compiled(compiler, m.Code)
	return err
}

// compiled compiles a core module and returns the serialized code.
func compiled(engine *C.wasm_engine_t, code []byte) ([]byte, error) {
	m, err := newModule(engine, code)
	if err != nil {
		return nil, err
	}
	defer C.wasmtime_module_delete(m)
	return serialized(m)
}

func newModule(engine *C.wasm_engine_t, code []byte) (*C.wasmtime_module_t, error) {
	var m *C.wasmtime_module_t
	if err := failure(C.wasmtime_module_new(engine, bytePtr(code), C.size_t(len(code)), &m)); err != nil {
		return nil, invalid("%v", err)
	}
	return m, nil
}

func serialized(m *C.wasmtime_module_t) ([]byte, error) {
	var v C.wasm_byte_vec_t
	if err := failure(C.wasmtime_module_serialize(m, &v)); err != nil {
		return nil, fmt.Errorf("serialize the module: %w", err)
	}
	return takeBytes(&v), nil
}

func deserialized(engine *C.wasm_engine_t, code []byte) (*C.wasmtime_module_t, error) {
	var m *C.wasmtime_module_t
	if err := failure(C.wasmtime_module_deserialize(engine, bytePtr(code), C.size_t(len(code)), &m)); err != nil {
		return nil, stale(err.Error())
	}
	return m, nil
}

// tryLink links a core module as Load will and looks up its exports, to find functions that do not exist or have the
// wrong type.
func (e *Engine) tryLink(img *image, host Host, exports []Signature) error {
	loading := *img
	c, err := e.load(&loading, host)
	if err != nil {
		return err
	}
	defer c.Close()
	for _, sig := range exports {
		if _, err := c.Func(sig); err != nil {
			return err
		}
	}
	return nil
}

// compileComponent compiles either the whole component or, if it can take the core path, only its core modules. The
// component's types come from the engine, which tells them only of compiled components; if the core path is possible, its
// skeleton is compiled for them, because compiling everything twice would take twice as long.
func (e *Engine) compileComponent(ctx context.Context, wasm []byte, bin *wasmbin.Binary, opts CompileOptions, img *image) error {
	plan, err := planOf(wasm, opts.Provided)
	if err != nil {
		return err
	}
	if opts.ComponentPath {
		img.component, err = e.inspectComponent(ctx, wasm, bin, plan, opts, img)
		img.Plan, img.CoreOdd = nil, cmp.Or(img.CoreOdd, "the component path was chosen")
		return err
	}
	coreOnly := (plan.odd == "" || !opts.plan && coreImports(bin, opts.Provided) == "") && !opts.Both
	if coreOnly {
		skeleton, err := wasmbin.Skeleton(wasm)
		if err != nil {
			return err
		}
		if _, err := e.inspectComponent(ctx, skeleton, bin, plan, opts, img); err != nil {
			return err
		}
		coreOnly = img.CoreOdd == ""
	}
	if !coreOnly {
		if img.component, err = e.inspectComponent(ctx, wasm, bin, plan, opts, img); err != nil || img.CoreOdd != "" {
			return err
		}
	}
	if img.Plan == nil {
		return e.compileModule(ctx, wasm, bin.Modules[0], img)
	}
	return e.compileModule(ctx, wasm, plan.Module, img)
}

// inspectComponent compiles a component, or its skeleton, describes it in img, and returns the serialized code.
func (e *Engine) inspectComponent(ctx context.Context, wasm []byte, bin *wasmbin.Binary, plan planned, opts CompileOptions,
	img *image) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	compiler, err := e.compiler()
	if err != nil {
		return nil, err
	}
	var c *C.wasmtime_component_t
	if err := failure(C.wasmtime_component_new(compiler, bytePtr(wasm), C.size_t(len(wasm)), &c)); err != nil {
		return nil, invalid("%v", err)
	}
	defer C.wasmtime_component_delete(c)
	img.inspection = inspection{Component: true, MinMemory: img.MinMemory, Memories: img.Memories, InstanceSize: img.InstanceSize}
	if err := inspect(compiler, c, &img.inspection); err != nil {
		return nil, err
	}
	if err := img.checkImports(opts.Provided); err != nil {
		return nil, err
	}
	if img.World = worldOf(img.Exports); img.World == "" {
		return nil, invalid("the component exports nothing that could be served: no function, wasi:http/incoming-handler, wasi:messaging/incoming-handler or wasi:cli/run")
	}
	img.findCore(bin, plan, opts)
	var v C.wasm_byte_vec_t
	if err := failure(C.wasmtime_component_serialize(c, &v)); err != nil {
		return nil, fmt.Errorf("serialize the component: %w", err)
	}
	return takeBytes(&v), nil
}

func worldOf(exports []Item) (w World) {
	for _, i := range exports {
		switch compatName(i.Interface) {
		case httpHandler:
			return WorldHTTP
		case rawHandler:
			return WorldRaw
		case messageHandler:
			return WorldMessages
		case cliRun:
			w = WorldCommand
		default:
			if w == "" {
				w = WorldGRPC
			}
		}
	}
	return w
}

// failure converts a wasmtime error to a Go error, and frees the wasmtime error.
func failure(err *C.wasmtime_error_t) error {
	if err == nil {
		return nil
	}
	return errors.New(takeString(C.tw_error(err)))
}

func takeBytes(v *C.wasm_byte_vec_t) []byte {
	defer C.wasm_byte_vec_delete(v)
	return C.GoBytes(unsafe.Pointer(v.data), C.int(v.size))
}
