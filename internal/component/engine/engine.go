package engine

// #include "tw.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"sync/atomic"
	"syscall"
	"unsafe"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/wasmbin"
)

// wasmtimeVersion is that of the Go module which brings the library; a test compares it to go.mod.
const wasmtimeVersion = "39.0.1"

// codeVersion counts the changes to how we configure the compiler and to the form of code images.
const codeVersion = 2

// Defaults of Config.
const (
	defaultOverflow  = 1024
	defaultMaxMemory = 4 << 30
	defaultMaxTable  = 65536
)

// Engine compiles and runs guests. It is safe for concurrent use. It is never closed: a process has one.
type Engine struct {
	cfg Config
	// pooled has the pool; nil without. plain makes instances on demand: for compiling, and when the pool is full.
	pooled, plain *C.wasm_engine_t
	overflow      atomic.Int64 // instances outside of the pool
	passings      passings
}

// Fingerprint names the engine's version, its configuration and the target: what compiled code depends on. A cache of
// code images has it in its keys.
func Fingerprint() string {
	return fmt.Sprintf("wasmtime-%s+%d-%s-%s", wasmtimeVersion, codeVersion, runtime.GOOS, runtime.GOARCH)
}

// New makes an engine. It maps the pool's address space; that it cannot is errdefs.ErrResourceExhausted.
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
	if e.plain, err = e.open(0); err != nil {
		return nil, err
	}
	if cfg.Instances > 0 {
		if e.pooled, err = e.open(cfg.Instances); err != nil {
			return nil, err
		}
	}
	return e, nil
}

// open makes one of wasmtime's engines. Both have the same configuration but for the allocation, so that what one has
// compiled is code for the other.
func (e *Engine) open(slots int) (*C.wasm_engine_t, error) {
	c := C.wasm_config_new()
	C.wasmtime_config_strategy_set(c, C.TW_STRATEGY_CRANELIFT)
	C.wasmtime_config_cranelift_opt_level_set(c, C.TW_OPT_SPEED)
	C.wasmtime_config_parallel_compilation_set(c, true)
	C.wasmtime_config_native_unwind_info_set(c, false) // backtraces go by frame pointers
	C.wasmtime_config_epoch_interruption_set(c, true)
	C.wasmtime_config_wasm_component_model_set(c, true)
	// Shared memories could make a guest wait where no tick reaches it; the others have no limits of their own here.
	// (Several memories are what the engine's own adapters between modules of a component have; guests may not.)
	C.wasmtime_config_wasm_threads_set(c, false)
	C.wasmtime_config_wasm_gc_set(c, false)
	C.wasmtime_config_wasm_exceptions_set(c, false)
	C.wasmtime_config_wasm_stack_switching_set(c, false)
	C.wasmtime_config_wasm_function_references_set(c, false)
	C.wasmtime_config_wasm_memory64_set(c, false)
	if slots > 0 {
		e.pool(c, slots)
	}
	engine := C.wasm_engine_new_with_config(c)
	if engine == nil {
		return nil, fmt.Errorf("engine: no address space for a pool of %d instances: %w", slots, errdefs.ErrResourceExhausted)
	}
	demotes := C.tw_ticker(engine)
	if demotes < 0 {
		return nil, fmt.Errorf("engine: the ticker cannot be started: %w", syscall.Errno(-demotes))
	}
	if demotes == 0 && slots > 0 {
		e.cfg.Logger.Info("guests that compute for long stand back by sleeping when the processors are busy, " +
			"since this process may not take threads out of SCHED_IDLE again (RLIMIT_NICE of 20 would allow it)")
	}
	return engine, nil
}

// pool sizes the pooling allocator. A component has some core instances beside its main one.
func (e *Engine) pool(c *C.wasm_config_t, slots int) {
	const coreInstances = 4
	p := C.wasmtime_pooling_allocation_config_new()
	defer C.wasmtime_pooling_allocation_config_delete(p)
	n := C.uint32_t(slots)
	C.wasmtime_pooling_allocation_config_total_component_instances_set(p, n)
	C.wasmtime_pooling_allocation_config_total_core_instances_set(p, n*coreInstances)
	C.wasmtime_pooling_allocation_config_total_memories_set(p, n)
	C.wasmtime_pooling_allocation_config_total_tables_set(p, n*coreInstances)
	C.wasmtime_pooling_allocation_config_max_memory_size_set(p, C.size_t(e.cfg.MaxMemory))
	C.wasmtime_pooling_allocation_config_table_elements_set(p, C.size_t(e.cfg.MaxTableElements))
	C.wasmtime_pooling_allocation_config_max_tables_per_module_set(p, coreInstances)
	// What a used slot keeps for the next instance, cleared by hand rather than by the kernel.
	C.wasmtime_pooling_allocation_config_linear_memory_keep_resident_set(p, 128<<10)
	C.wasmtime_pooling_allocation_config_table_keep_resident_set(p, 4<<10)
	C.wasmtime_pooling_allocation_strategy_set(c, p)
}

// Compile makes the code image of a component or of a core module with _start. What is wrong with the guest is
// errdefs.ErrInvalidArgument and named: not WebAssembly, truncated, invalid, an import that nobody provides, a
// memory or table beyond the limits, nothing exported that could be served. It takes CPU and memory in proportion to
// the guest (10 s and 600 MB for 12 MB): run it in a child process with limits. ctx is looked at between steps only.
func (e *Engine) Compile(ctx context.Context, wasm []byte, opts CompileOptions) ([]byte, error) {
	bin, err := wasmbin.Parse(wasm)
	if err != nil {
		return nil, err
	}
	img := &image{}
	for _, m := range append(bin.Modules, bin.Nested...) {
		if err := declared(m, e.cfg); err != nil {
			return nil, err
		}
		img.MinMemory += minMemory(m)
		img.Memories += len(m.Memories)
	}
	if bin.Component {
		err = e.compileComponent(ctx, wasm, bin, opts, img)
	} else {
		err = e.compileCommand(ctx, bin, img)
	}
	if err != nil {
		return nil, err
	}
	return img.encode()
}

// compileCommand compiles a core module, which is a command of preview 1.
func (e *Engine) compileCommand(ctx context.Context, bin *wasmbin.Binary, img *image) error {
	m := bin.Modules[0]
	if m.Exports["_start"] != wasmbin.Func || !hasKey(m.Exports, "_start") {
		return invalid("the core module exports no _start: it is neither a component nor a WASI preview 1 command")
	}
	for _, i := range m.Imports {
		if i.Module != preview1 {
			return invalid("import %s.%s: nobody provides it (a core module gets %s only)", i.Module, i.Name, preview1)
		}
	}
	img.describeCore(m)
	img.World = WorldCommand
	for name, kind := range m.Exports {
		if kind == wasmbin.Func {
			img.Exports = append(img.Exports, Item{Name: name})
		}
	}
	for _, i := range m.Imports {
		img.Imports = append(img.Imports, Item{Interface: i.Module, Name: i.Name})
	}
	if err := e.compileModule(ctx, m.Code, img); err != nil {
		return err
	}
	return e.linkable(img)
}

func (e *Engine) compileModule(ctx context.Context, code []byte, img *image) (err error) {
	if err := ctx.Err(); err != nil {
		return err
	}
	var m *C.wasmtime_module_t
	if err := failure(C.wasmtime_module_new(e.plain, bytePtr(code), C.size_t(len(code)), &m)); err != nil {
		return invalid("%v", err)
	}
	defer C.wasmtime_module_delete(m)
	var v C.wasm_byte_vec_t
	if err := failure(C.wasmtime_module_serialize(m, &v)); err != nil {
		return fmt.Errorf("serialising the module: %w", err)
	}
	img.module = takeBytes(&v)
	return nil
}

// linkable links a command as Load will: imports of preview 1 that do not exist, or with other types, show here.
func (e *Engine) linkable(img *image) error {
	loading := *img
	c, err := e.load(&loading, Host{})
	if err == nil {
		c.Close()
	}
	return err
}

func (e *Engine) compileComponent(ctx context.Context, wasm []byte, bin *wasmbin.Binary, opts CompileOptions, img *image) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	var c *C.wasmtime_component_t
	if err := failure(C.wasmtime_component_new(e.plain, bytePtr(wasm), C.size_t(len(wasm)), &c)); err != nil {
		return invalid("%v", err)
	}
	defer C.wasmtime_component_delete(c)
	img.Component = true
	if err := inspect(e.plain, c, &img.inspection); err != nil {
		return err
	}
	if err := img.provided(opts.Provided); err != nil {
		return err
	}
	if img.World = worldOf(img.Exports); img.World == "" {
		return invalid("the component exports nothing that could be served: no function, wasi:http/incoming-handler or wasi:cli/run")
	}
	img.findCore(bin, opts.Provided)
	if img.CoreOdd != "" || opts.Both {
		var v C.wasm_byte_vec_t
		if err := failure(C.wasmtime_component_serialize(c, &v)); err != nil {
			return fmt.Errorf("serialising the component: %w", err)
		}
		img.component = takeBytes(&v)
	}
	if img.CoreOdd != "" {
		return nil
	}
	return e.compileModule(ctx, bin.Modules[0].Code, img)
}

func worldOf(exports []Item) (w World) {
	for _, i := range exports {
		switch track(i.Interface) {
		case httpHandler:
			return WorldHTTP
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

// failure turns the engine's error, which it frees, into one of ours.
func failure(err *C.wasmtime_error_t) error {
	if err == nil {
		return nil
	}
	return errors.New(taken(C.tw_error(err)))
}

func takeBytes(v *C.wasm_byte_vec_t) []byte {
	defer C.wasm_byte_vec_delete(v)
	return C.GoBytes(unsafe.Pointer(v.data), C.int(v.size))
}

func hasKey[K comparable, V any](m map[K]V, k K) bool {
	_, ok := m[k]
	return ok
}
