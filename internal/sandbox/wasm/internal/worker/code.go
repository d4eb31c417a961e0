package worker

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/tripod-run/tripod/internal/component/engine"
	"github.com/tripod-run/tripod/internal/component/protowit"
	"github.com/tripod-run/tripod/internal/component/wasi"
	"github.com/tripod-run/tripod/internal/component/wasihttp"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/dataplane"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// code is a loaded component with everything that its pods share.
type code struct {
	workerapi.Loaded
	engine *engine.Code
	refs   int // one for Worker.codes and one per pod; guarded by Worker.mu
	// optimised is set if the code is, or was replaced by code that is.
	optimised atomic.Bool

	// In the gRPC worlds:
	files   *protoregistry.Files
	methods []*dataplane.Method
	// In the gRPC world of typed functions:
	schema *protowit.Schema
	bound  map[*dataplane.Method]*boundMethod
	// In the HTTP world and the raw gRPC world:
	handle *engine.Func
	// prepare prepares an instance for a snapshot, and warm then does what a first request would do. They are nil if the
	// component cannot have a snapshot, or has no warm-up.
	prepare, warm *engine.Func
}

// boundMethod is a method of the schema with the guest function that implements it.
type boundMethod struct {
	*protowit.Method
	call *engine.Func
}

// CompileOptions returns what the compiler needs to know about the worker, to check a guest's imports and exports.
func CompileOptions() engine.CompileOptions {
	host := rawHost()
	return engine.CompileOptions{
		Provided: provided,
		ModuleHost: engine.Host{
			Funcs:     slices.DeleteFunc(host.Funcs, func(f engine.HostFunc) bool { return !moduleInterface(f.Interface) }),
			Resources: slices.DeleteFunc(host.Resources, func(r engine.HostResource) bool { return !moduleInterface(r.Interface) }),
		},
		ModuleExports: []engine.Signature{rawSignature()},
	}
}

// moduleInterface reports whether a core module that is a server can import an interface.
func moduleInterface(iface string) bool {
	return slices.Contains(protowit.ModuleInterfaces, iface) || slices.Contains(wasi.ModuleDrafts(), iface)
}

// provided reports whether the worker provides an interface to components. It accepts every interface in the namespace
// proto, because a service's stream interfaces are unknown until the descriptors are read.
func provided(iface string) bool {
	return strings.HasPrefix(iface, "proto:") || strings.HasPrefix(iface, hostPackage) ||
		strings.HasPrefix(iface, channelsInterface) || wasihttp.Provided(iface)
}

// loadCode loads a component from its compiled code, and checks the component against its descriptors.
func loadCode(e *engine.Engine, c workerapi.Code) (*code, error) {
	image, err := mapImage(c.Image.File)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Munmap(image) }() // Load copies what it needs
	inspected, err := engine.Inspect(image)
	if err != nil {
		return nil, err
	}
	loaded := &code{Loaded: workerapi.Loaded{Digest: c.Digest, World: inspected.World}}
	var host engine.Host
	switch inspected.World {
	case engine.WorldGRPC:
		if loaded.schema, err = parseSchema(c); err != nil {
			return nil, err
		}
		loaded.files = loaded.schema.Files
		host = grpcHost(loaded.schema)
	case engine.WorldRaw:
		if err = loaded.parseServices(c); err != nil {
			return nil, err
		}
		host = rawHost()
	case engine.WorldHTTP:
		host = wasihttp.Host()
	case engine.WorldCommand, engine.WorldMessages:
		host = channelHost()
	}
	if loaded.engine, err = e.Load(image, host); err != nil {
		return nil, err
	}
	if err := loaded.bind(); err != nil {
		loaded.engine.Close()
		return nil, err
	}
	if loaded.engine.Path() == engine.PathComponent {
		// With PathComponent, the engine decodes the values that a guest passes to the host, and only afterwards can
		// the host check their size. So a guest could make the worker use too much memory.
		loaded.OwnWorkerReason = loaded.engine.WhyComponent()
	}
	loaded.Exports, loaded.Imports = names(loaded.engine.Exports()), names(loaded.engine.Imports())
	return loaded, nil
}

func parseSchema(c workerapi.Code) (*protowit.Schema, error) {
	switch {
	case len(c.Descriptors) > 0:
		return protowit.Parse(c.Descriptors, c.Services...)
	case len(c.Metadata) > 0:
		return protowit.ParseMetadata(c.Metadata, c.Services...)
	}
	return nil, fmt.Errorf("the component exports gRPC services, but its image has no protobuf descriptors: %w", errdefs.ErrInvalidArgument)
}

// parseServices sets the methods of a component in the raw world.
func (c *code) parseServices(from workerapi.Code) error {
	if len(from.Descriptors) == 0 {
		return fmt.Errorf("the component exports %s, but its image has no protobuf descriptors: %w", protowit.HandlerInterface,
			errdefs.ErrInvalidArgument)
	}
	files, services, err := protowit.ParseServices(from.Descriptors, from.Services...)
	if err != nil {
		return err
	}
	c.files = files
	for _, s := range services {
		for _, m := range dataplane.Methods(s) {
			c.methods = append(c.methods, m)
			c.Procedures = append(c.Procedures, m.Procedure)
		}
	}
	return nil
}

// mapImage maps a code file into memory for loading, to keep large files off the Go heap.
func mapImage(file *os.File) ([]byte, error) {
	if file == nil {
		return nil, fmt.Errorf("load: no code file was passed: %w", errdefs.ErrInvalidArgument)
	}
	info, err := file.Stat()
	if err != nil {
		return nil, fmt.Errorf("load: %w", err)
	}
	if !info.Mode().IsRegular() || info.Size() == 0 {
		return nil, fmt.Errorf("load: the code is empty or not a regular file: %w", errdefs.ErrInvalidArgument)
	}
	image, err := unix.Mmap(int(file.Fd()), 0, int(info.Size()), unix.PROT_READ, unix.MAP_PRIVATE)
	if err != nil {
		return nil, fmt.Errorf("load: %w", err)
	}
	return image, nil
}

// bind looks up the guest functions that the worker calls, and checks their types.
func (c *code) bind() (err error) {
	if c.engine.WhyNoSnapshot() == "" {
		if c.prepare, err = c.engine.Func(engine.PrepareSignature()); err != nil && !errdefs.IsNotFound(err) {
			return err
		}
		if c.warm, err = c.engine.Func(engine.WarmSignature()); err != nil && !errdefs.IsNotFound(err) {
			return err
		}
	}
	switch c.World {
	case engine.WorldHTTP:
		c.handle, err = c.engine.Func(wasihttp.Signature())
	case engine.WorldRaw:
		c.handle, err = c.engine.Func(rawSignature())
	case engine.WorldMessages:
		i := wasi.MessageHandler()
		c.handle, err = c.engine.Func(engine.Signature{Interface: i.Name, Name: i.Funcs[0].Name, Params: i.Funcs[0].Params,
			Result: i.Funcs[0].Result})
	case engine.WorldGRPC:
		c.bound = make(map[*dataplane.Method]*boundMethod, len(c.schema.Methods))
		for _, m := range c.schema.Methods {
			fn, err := c.engine.Func(engine.Signature{Interface: m.Interface, Name: m.Function, Params: m.Params, Result: m.Result})
			if errdefs.IsNotFound(err) {
				return fmt.Errorf("the descriptors have the method %s, but the component does not export %s#%s: %w",
					m.Procedure, m.Interface, m.Function, errdefs.ErrInvalidArgument)
			}
			if err != nil {
				return fmt.Errorf("method %s: %w", m.Procedure, err)
			}
			method := &dataplane.Method{Procedure: m.Procedure, Desc: m.Desc}
			c.methods = append(c.methods, method)
			c.bound[method] = &boundMethod{m, fn}
			c.Procedures = append(c.Procedures, m.Procedure)
		}
	}
	return err
}

// services returns the full names of the gRPC services.
func (c *code) services() []string {
	var list []string
	for _, m := range c.methods {
		if name := string(m.Desc.Parent().FullName()); !slices.Contains(list, name) {
			list = append(list, name)
		}
	}
	return list
}

func names(items []engine.Item) []string {
	list := make([]string, len(items))
	for i, item := range items {
		list[i] = item.String()
	}
	return list
}

// Load implements workerapi.Handler. Loads run one at a time, to bound their memory use and to load each digest only
// once.
func (w *Worker) Load(_ context.Context, c workerapi.Code) (workerapi.Loaded, error) {
	defer c.Image.Close()
	w.loading.Lock()
	defer w.loading.Unlock()
	w.mu.Lock()
	known := w.codes[c.Digest]
	w.mu.Unlock()
	if known != nil {
		return known.improve(c)
	}
	if c.Digest == "" {
		return workerapi.Loaded{}, fmt.Errorf("load: no digest: %w", errdefs.ErrInvalidArgument)
	}
	loaded, err := loadCode(w.engine, c)
	if err != nil {
		return workerapi.Loaded{}, err
	}
	loaded.refs = 1
	loaded.optimised.Store(!c.Quick)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.codes[c.Digest] = loaded
	return loaded.described(), nil
}

// described returns the answer of Load.
func (c *code) described() workerapi.Loaded {
	l := c.Loaded
	l.Quick = !c.optimised.Load()
	return l
}

// improve replaces code that is not optimised by code that is.
func (c *code) improve(by workerapi.Code) (workerapi.Loaded, error) {
	if by.Quick || c.optimised.Load() {
		return c.described(), nil
	}
	image, err := mapImage(by.Image.File)
	if err != nil {
		return workerapi.Loaded{}, err
	}
	defer func() { _ = unix.Munmap(image) }()
	if err := c.engine.Replace(image); err != nil {
		return workerapi.Loaded{}, err
	}
	c.optimised.Store(true)
	return c.described(), nil
}

// Unload implements workerapi.Handler.
func (w *Worker) Unload(_ context.Context, digest string) error {
	w.mu.Lock()
	c := w.codes[digest]
	delete(w.codes, digest)
	w.mu.Unlock()
	if c != nil {
		w.releaseCode(c)
	}
	return nil
}

// acquireCode returns the code for a digest and adds a reference, which releaseCode drops.
func (w *Worker) acquireCode(digest string) (*code, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	c := w.codes[digest]
	if c == nil {
		return nil, fmt.Errorf("code %s is not loaded: %w", digest, errdefs.ErrNotFound)
	}
	c.refs++
	return c, nil
}

func (w *Worker) releaseCode(c *code) {
	w.mu.Lock()
	c.refs--
	last := c.refs == 0
	w.mu.Unlock()
	if last {
		c.engine.Close()
	}
}
