package describe

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
	"github.com/tetratelabs/wazero/imports/wasi_snapshot_preview1"
	"github.com/tetratelabs/wazero/sys"

	"github.com/tripod-run/tripod/internal/component/protowit"
)

// Limits on the guest and its answer.
const (
	Timeout      = 2 * time.Minute // includes preparing the code: a second or two for 20 MB
	maxMemory    = 1 << 30         // bytes
	maxServices  = 1000
	warmTime     = 30 * time.Second
	maxFiles     = 8 << 20 // bytes of the FileDescriptorSet
	maxText      = 64 << 10
	keptOutput   = 2 << 10 // bytes of the guest's standard error that an error repeats
	wasmPageSize = 64 << 10
)

// Description says which services a guest serves.
type Description struct {
	Services []string // full names
	Files    []byte   // a serialized FileDescriptorSet, not validated
	// NoSnapshot is why nodes will initialize the guest for each request, or "". What a guest does with its mounts and its
	// environment is not known here.
	NoSnapshot string
	// NoWarmUp is why nodes will undo the guest's warm-up, or "".
	NoWarmUp string
}

// ErrNoExport is the error for a module that cannot describe itself.
var ErrNoExport = fmt.Errorf("the module does not export %s#%s: %w", protowit.DescriptorsInterface, protowit.Describe, errdefs.ErrNotFound)

// Run runs the guest's describe function. It returns ErrNoExport if there is none, context.DeadlineExceeded if the guest
// does not answer within Timeout, and errdefs.ErrInvalidArgument if the guest fails or its answer is invalid.
func Run(ctx context.Context, wasm []byte) (*Description, error) {
	return run(ctx, wasm, Timeout)
}

func run(parent context.Context, wasm []byte, timeout time.Duration) (*Description, error) {
	ctx, cancel := context.WithTimeoutCause(parent, timeout,
		fmt.Errorf("the guest did not describe its services within %v; does its main reach tripodgrpc.Serve?: %w", timeout,
			context.DeadlineExceeded))
	defer cancel()
	// The guest runs for milliseconds, so interpreting it is faster than compiling it.
	config := wazero.NewRuntimeConfigInterpreter().WithCloseOnContextDone(true).WithMemoryLimitPages(maxMemory / wasmPageSize)
	r := wazero.NewRuntimeWithConfig(ctx, config)
	defer r.Close(context.WithoutCancel(ctx))
	code, err := r.CompileModule(ctx, wasm)
	if err != nil {
		return nil, fmt.Errorf("not a valid module: %v: %w", err, errdefs.ErrInvalidArgument)
	}
	name := protowit.DescriptorsInterface + "#" + protowit.Describe
	if code.ExportedFunctions()[name] == nil {
		return nil, ErrNoExport
	}
	if err := imports(ctx, r, code); err != nil {
		return nil, err
	}
	output, seen := &tail{}, &seen{}
	m, err := r.InstantiateModule(ctx, code, wazero.NewModuleConfig().WithStartFunctions("_initialize").WithName("guest").
		WithStdout(output).WithStderr(output).WithWalltime(seen.walltime, sys.ClockResolution(time.Microsecond)).
		WithSysNanotime().WithNanosleep(sleep(ctx)).WithRandSource(seen))
	if err != nil {
		return nil, failed(ctx, "its initialization", err, output)
	}
	results, err := m.ExportedFunction(name).Call(ctx)
	if err != nil {
		return nil, failed(ctx, "it", err, output)
	}
	if len(results) != 1 || m.Memory() == nil {
		return nil, malformed("%s has the wrong type or there is no memory", name)
	}
	d, err := lift(m.Memory(), uint32(results[0]))
	if err != nil {
		return nil, err
	}
	const prepare, warm = protowit.SnapshotInterface + "#" + protowit.Prepare, protowit.WarmInterface + "#" + protowit.Warm
	if code.ExportedFunctions()[prepare] == nil {
		d.NoSnapshot = fmt.Sprintf("it does not export %s; for a server in Go, use a newer version of the SDK", prepare)
		return d, nil
	}
	if d.NoSnapshot, err = seen.readings(ctx, m, prepare, "initialization"); err != nil || d.NoSnapshot != "" {
		return d, err
	}
	if code.ExportedFunctions()[warm] == nil {
		return d, nil
	}
	within, end := context.WithTimeout(ctx, warmTime)
	defer end()
	if d.NoWarmUp, err = seen.readings(within, m, warm, "warm-up"); within.Err() != nil && parent.Err() == nil {
		return d, nil // interpreted, it takes many times as long as on a node
	}
	return d, err
}

// sleep returns a function that sleeps for nanoseconds, but not beyond ctx.
func sleep(ctx context.Context) sys.Nanosleep {
	return func(ns int64) {
		timer := time.NewTimer(time.Duration(ns))
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
		}
	}
}

// failed describes the end of a guest that did not answer.
func failed(ctx context.Context, what string, err error, output *tail) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	said := ""
	if text := strings.TrimSpace(output.String()); text != "" {
		said = "; it printed: " + text
	}
	if exit, ok := errors.AsType[*sys.ExitError](err); ok {
		return fmt.Errorf("describe the guest's services: %s exited with code %d%s: %w", what, exit.ExitCode(), said, errdefs.ErrInvalidArgument)
	}
	first, _, _ := strings.Cut(err.Error(), "\n")
	return fmt.Errorf("describe the guest's services: %s failed: %s%s: %w", what, first, said, errdefs.ErrInvalidArgument)
}

// imports provides preview 1, and all functions of tripod:grpc, which fail because there is no call.
func imports(ctx context.Context, r wazero.Runtime, code wazero.CompiledModule) error {
	wasi_snapshot_preview1.MustInstantiate(ctx, r)
	builders := make(map[string]wazero.HostModuleBuilder)
	for _, f := range code.ImportedFunctions() {
		module, name, _ := f.Import()
		if module == wasi_snapshot_preview1.ModuleName {
			continue
		}
		if builders[module] == nil {
			builders[module] = r.NewHostModuleBuilder(module)
		}
		refuse := api.GoFunc(func(context.Context, []uint64) {
			panic(fmt.Sprintf("%s#%s was called outside a gRPC call", module, name))
		})
		builders[module].NewFunctionBuilder().WithGoFunction(refuse, f.ParamTypes(), f.ResultTypes()).Export(name)
	}
	for module, b := range builders {
		if _, err := b.Instantiate(ctx); err != nil {
			return fmt.Errorf("import %s: %v: %w", module, err, errdefs.ErrInvalidArgument)
		}
	}
	return nil
}

// lift reads a result<description, string> by the canonical ABI: the case in a byte, and at offset 4 two lists, or a
// string.
func lift(m api.Memory, at uint32) (*Description, error) {
	which, ok := m.ReadByte(at)
	if !ok || at%4 != 0 || which > 1 {
		return nil, malformed("the result is not a result at %#x", at)
	}
	if which == 1 {
		text, err := list(m, at+4, 1, maxText)
		if err != nil {
			return nil, err
		}
		return nil, fmt.Errorf("the guest has no services: %s: %w", strings.ToValidUTF8(string(text), "?"), errdefs.ErrInvalidArgument)
	}
	names, err := list(m, at+4, 8, maxServices)
	if err != nil {
		return nil, err
	}
	files, err := list(m, at+12, 1, maxFiles)
	if err != nil {
		return nil, err
	}
	d := &Description{Files: bytes.Clone(files)}
	first, _ := m.ReadUint32Le(at + 4)
	for k := range len(names) / 8 {
		name, err := list(m, first+uint32(8*k), 1, maxText)
		if err != nil {
			return nil, err
		}
		d.Services = append(d.Services, string(name))
	}
	if len(d.Services) == 0 {
		return nil, malformed("it names no services")
	}
	return d, nil
}

// list returns the bytes of the list whose address and length are at an address.
func list(m api.Memory, at, elementSize, most uint32) ([]byte, error) {
	first, ok1 := m.ReadUint32Le(at)
	count, ok2 := m.ReadUint32Le(at + 4)
	if !ok1 || !ok2 {
		return nil, malformed("a list at %#x is out of bounds", at)
	}
	if count > most {
		return nil, malformed("a list of %d elements, limit %d", count, most)
	}
	b, ok := m.Read(first, count*elementSize)
	if !ok {
		return nil, malformed("a list of %d bytes at %#x is out of bounds", count*elementSize, first)
	}
	return b, nil
}

func malformed(format string, args ...any) error {
	return fmt.Errorf("the guest's description of its services is malformed: "+format+": %w", append(args, errdefs.ErrInvalidArgument)...)
}

// tail keeps the end of what is written to it.
type tail struct{ bytes.Buffer }

func (t *tail) Write(p []byte) (int, error) {
	n, err := t.Buffer.Write(p)
	if over := t.Len() - keptOutput; over > 0 {
		t.Next(over)
	}
	return n, err
}
