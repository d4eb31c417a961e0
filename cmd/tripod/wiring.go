package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/connlimit"
	"github.com/tripod-run/tripod/internal/cri"
	"github.com/tripod-run/tripod/internal/edge"
	"github.com/tripod-run/tripod/internal/health"
	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/network"
	"github.com/tripod-run/tripod/internal/node"
	"github.com/tripod-run/tripod/internal/node/store"
	"github.com/tripod-run/tripod/internal/nri"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/linux"
	"github.com/tripod-run/tripod/internal/sandbox/vm"
	"github.com/tripod-run/tripod/internal/sandbox/vm/oci"
	"github.com/tripod-run/tripod/internal/sandbox/wasm"
	"github.com/tripod-run/tripod/internal/stream"
)

// Paths that the parts use. They depend only on the configuration.
func recordFile(c *config.Config) string  { return filepath.Join(c.Root, "record.db") }
func imageDir(c *config.Config) string    { return filepath.Join(c.Root, "image") }
func networkDir(c *config.Config) string  { return filepath.Join(c.Root, "network") }
func linuxRoot(c *config.Config) string   { return filepath.Join(c.Root, "linux") }
func linuxRunDir(c *config.Config) string { return filepath.Join(c.State, "linux") }
func wasmRoot(c *config.Config) string    { return filepath.Join(c.Root, "wasm") }
func wasmRunDir(c *config.Config) string  { return filepath.Join(c.State, "wasm") }

// podTraces returns the directories that contain an entry for each pod until the next boot.
func podTraces(c *config.Config) []string {
	return append(fakeTraces(c), c.Network.NetnsDir, filepath.Join(linuxRunDir(c), "pods"), filepath.Join(wasmRunDir(c), "pods"),
		filepath.Join(vmRunDir(c), "pods"))
}

// parts holds the parts of a running node.
type parts struct {
	node    *node.Node
	streams *stream.Dispatcher
	server  *cri.Server
	linux   *linux.Backend // nil without the handler "linux"
	wasm    *wasm.Backend  // nil without the handler "wasm"
	vm      *vm.Backend    // nil without the handler "vm"
	oci     *oci.Backend   // nil without the handler "vm-oci"
	plugins *nri.Plugins
	network *network.Manager
	health  *health.Board
	// missing are the handlers that the node knows but does not offer, with the reasons.
	missing map[string]error
	closers []func() error // in order of opening
	// connections limits the connections to addresses that users other than root can reach.
	connections *connlimit.Group
	observers
}

// openParts opens the store, the images, the network and the backends and recovers the node. If a part fails, the parts
// opened before it are closed.
func openParts(ctx context.Context, c *config.Config, log *slog.Logger) (_ *parts, err error) {
	p := &parts{
		health:      health.NewBoard(log.With("part", "health")),
		missing:     map[string]error{},
		connections: connlimit.NewGroup(log.With("part", "connections")),
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
		}
	}()
	record, err := store.Open(recordFile(c))
	if errdefs.IsDataLoss(err) {
		return nil, fmt.Errorf("%w; nothing was changed. Restore a copy of the file and start again. To give up its pods, "+
			"drain and reboot the node, then remove the file", err)
	}
	if err != nil {
		return nil, err
	}
	p.opened(record.Close)
	if err := record.Claim(c.Root, c.State); err != nil {
		return nil, err
	}
	if err := record.Check(); err != nil {
		return nil, fmt.Errorf("the record %s is damaged: %w; nothing was changed; `tripod diag` shows what is readable", recordFile(c), err)
	}
	if err := record.KeepDrafts(filepath.Join(c.State, "record")); err != nil {
		return nil, err
	}
	images, err := openImages(ctx, c, log)
	if err != nil {
		return nil, err
	}
	p.opened(images.Close)
	networks, err := network.New(networkConfig(c, log))
	if err != nil {
		return nil, err
	}
	p.network = networks
	p.opened(networks.Close)
	if err := p.openTracing(ctx, c, log); err != nil {
		return nil, err
	}
	backends, err := p.openBackends(ctx, c, images, networks, log)
	if err != nil {
		return nil, err
	}
	if err := p.openNode(ctx, c, node.Config{
		Store: record, Backends: backends, DefaultHandler: c.Node.DefaultHandler, Missing: p.missing, Aliases: aliases(c, backends),
		ComponentHandler: "wasm", Claims: wasm.Claims, Routes: vmRoutes(c), Network: networks, Images: images,
		ComponentPrefix: c.Node.ComponentLabelPrefix, OperationTimeout: time.Duration(c.Node.OperationTimeout),
		StatsInterval: time.Duration(c.Node.StatsInterval),
		UserRange:     sandbox.IDRange{First: c.Userns.Range.First, Length: c.Userns.Range.Count},
		Logger:        log.With("part", "node"),
	}, images, log); err != nil {
		return p, err
	}
	networks.OnRestored(p.node.NetworkRestored)
	p.watchHealth(record, images, log)
	if err := p.openMirror(ctx, c, images); err != nil {
		return p, err
	}
	return p, p.openEdge(c, images, log)
}

// openMirror serves images to peers, if configured.
func (p *parts) openMirror(ctx context.Context, c *config.Config, images *image.Store) error {
	m := c.Image.Mirror
	if m.Address == "" {
		return nil
	}
	mirror, err := images.ServeMirror(ctx, image.MirrorConfig{
		Address: m.Address, Certificate: m.Certificate, Key: m.Key, ClientCA: m.ClientCA, Repositories: m.Repositories, Private: m.Private,
		Transfers: m.MaxTransfers, BytesPerSecond: m.BytesPerSecond, Limiter: p.connections.Limiter("image mirror", limits(c.Connections)),
	})
	if err != nil {
		return err
	}
	p.opened(mirror.Close)
	return nil
}

// openEdge opens the MQTT front door, if it is enabled.
func (p *parts) openEdge(c *config.Config, images *image.Store, log *slog.Logger) error {
	if !c.Edge.Enabled {
		return nil
	}
	s := edge.Services{
		Connections: p.connections, Limits: limits(c.Connections), Logger: log, Node: p.node, Health: p.health,
		PrivateDir: func(dir string) error { return privateDir(dir, rootMode, log) },
		HoldDir:    func(ctx context.Context, dir string) (io.Closer, error) { return holdDirectory(ctx, dir, log) },
	}
	if p.wasm != nil {
		s.Images = wasm.Images{Store: images}
	}
	if p.metrics != nil {
		s.Register = p.metrics.Register
	}
	door, err := edge.Open(c, s)
	if err != nil {
		return err
	}
	p.opened(door.Close)
	return nil
}

func (p *parts) openNode(ctx context.Context, c *config.Config, nc node.Config, images *image.Store, log *slog.Logger) (err error) {
	p.plugins = nri.New(nriConfig(c, log))
	if c.NRI.Enabled {
		nc.Hooks = p.plugins
	}
	if p.node, err = node.Open(ctx, nc); err != nil {
		return fmt.Errorf("recover the node: %w", err)
	}
	p.opened(p.node.Close)
	if c.NRI.Enabled { // without plugins, the node still serves
		p.health.Report("node plugins", health.NRIReady, "NRINotReady", p.plugins.Start(p.node))
		p.opened(p.plugins.Close)
	}
	if err := p.openMetrics(ctx, c, log); err != nil {
		return err
	}
	if err := p.openRouter(ctx, c, log); err != nil {
		return err
	}
	if err := p.openStreams(ctx, c, log); err != nil {
		return err
	}
	front := cri.Config{
		Node: p.node, Images: images, Streams: p.streams, Version: version,
		CgroupDriver: cgroupDriver(c), Plugins: p.plugins.Names, Health: p.health, Logger: log.With("part", "cri"),
	}
	if p.wasm != nil {
		front.Compilation = p.wasm.Compilation
		front.ImportModule = wasm.Images{Store: images}.ImportModule
	}
	p.server = cri.New(front)
	if len(c.Delegates) == 0 {
		return nil
	}
	stop, err := p.server.Delegate(delegates(c), nc.Store)
	if err != nil {
		return err
	}
	p.opened(stop)
	return nil
}

// delegates returns the CRI endpoints behind this node.
func delegates(c *config.Config) []cri.Delegate {
	var all []cri.Delegate
	for _, d := range c.Delegates {
		all = append(all, cri.Delegate{
			Name: d.Name, Runtime: d.Endpoint, Images: d.ImageEndpoint, Handlers: d.Handlers, Annotations: d.Annotations,
			ImagePrefixes: d.ImagePrefixes, Timeout: time.Duration(d.Timeout), SnapshotMaxAge: time.Duration(d.SnapshotMaxAge),
		})
	}
	return all
}

func (p *parts) opened(closer func() error) { p.closers = append(p.closers, closer) }

// close closes the parts in reverse order. Pods keep running.
func (p *parts) close() error {
	var errs []error
	for i := len(p.closers) - 1; i >= 0; i-- {
		errs = append(errs, p.closers[i]())
	}
	p.closers = nil
	return errors.Join(errs...)
}

func openImages(ctx context.Context, c *config.Config, log *slog.Logger) (*image.Store, error) {
	return image.Open(ctx, image.Config{
		Root: imageDir(c), ContainersDir: c.Image.ContainersDir, HostsDir: c.Image.HostsDirs, PinnedImages: c.Image.Pinned,
		MaxConcurrentDownloads: c.Image.MaxConcurrentDownloads, RangesPerBlob: c.Image.RangesPerBlob,
		ProgressTimeout: time.Duration(c.Image.PullProgressTimeout),
		DockerConfig:    c.Image.DockerConfig, RefuseDowngrades: c.Image.RefuseDowngrades, SignaturePolicy: c.Image.SignaturePolicy,
		RegistriesDir: c.Image.RegistriesDir,
		Peers:         image.Peers(c.Image.Peers), DerivedDirs: []string{wasm.CodeDir(wasmRoot(c))},
		Translation: image.Translation{Prefix: c.VM.ImagePrefix, Dir: c.VM.TranslationsDir}, Logger: log.With("part", "image"),
	})
}

func networkConfig(c *config.Config, log *slog.Logger) network.Config {
	d := c.Network.Default
	return network.Config{
		ConfDir: c.Network.ConfDir, BinDirs: c.Network.BinDirs, CacheDir: networkDir(c), NetnsDir: c.Network.NetnsDir,
		Default:       network.DefaultNetwork{Off: !d.Enabled, Bridge: d.Bridge, SubnetV4: d.SubnetV4, SubnetV6: d.SubnetV6, MTU: d.MTU},
		PluginTimeout: time.Duration(c.Network.PluginTimeout), Executables: !c.Network.InProcess, IsBackendLink: vm.IsTap,
		Logger: log.With("part", "network"),
	}
}

// checkForwarding returns the check of the firewall for pods of the configured network.
func checkForwarding(c *config.Config) func(context.Context) error {
	return func(ctx context.Context) error {
		return network.CheckForwarding(ctx, networkConfig(c, slog.New(slog.DiscardHandler)))
	}
}

func nriConfig(c *config.Config, log *slog.Logger) nri.Config {
	socket := c.NRI.Socket
	if c.NRI.DisableConnections {
		socket = ""
	}
	return nri.Config{
		Socket: socket, PluginPath: c.NRI.PluginPath, ConfigPath: c.NRI.PluginConfigPath, Version: version,
		RegistrationTimeout: time.Duration(c.NRI.RegistrationTimeout), SynchronizationTimeout: time.Duration(c.NRI.SynchronizationTimeout),
		RequestTimeout: time.Duration(c.NRI.RequestTimeout), Logger: log.With("part", "nri"),
	}
}

func linuxConfig(c *config.Config) linux.Config {
	return linux.Config{
		Root: linuxRoot(c), RunDir: linuxRunDir(c), Runtime: c.Linux.Runtime, Conmon: c.Linux.Conmon, Catatonit: c.Linux.Catatonit,
		CgroupDriver: cgroupDriver(c), CgroupParent: c.Linux.CgroupParent, LogSizeMax: c.Log.ContainerSizeMax,
		Annotations: c.Handlers.Linux.AllowedAnnotations, CDIDirs: c.CDI.SpecDirs,
	}
}

func wasmConfig(c *config.Config) wasm.Config {
	return wasm.Config{
		Root: wasmRoot(c), RunDir: wasmRunDir(c), Program: c.Wasm.Program, Workers: wasm.WorkerMode(c.Wasm.Worker),
		UID: c.Wasm.User, GID: c.Wasm.User, CgroupDriver: cgroupDriver(c), CgroupParent: c.Linux.CgroupParent,
		LabelPrefix: c.Node.ComponentLabelPrefix,
		Annotations: c.Handlers.Wasm.AllowedAnnotations,
		LogSizeMax:  c.Log.ContainerSizeMax, Instances: c.Wasm.Instances, MaxMemory: c.Wasm.MaxMemory, Concurrency: c.Wasm.MaxConcurrency,
		Connections: limits(c.Connections),
		Holdings: wasm.Holdings{Files: c.Wasm.MaxFiles, Handles: c.Wasm.MaxHandles, HostBytes: c.Wasm.MaxHostBytes,
			Sockets: c.Wasm.MaxSockets},
		Pairs:          wasm.Pairs{Bytes: c.Wasm.KeyvalueBytes, Keys: c.Wasm.KeyvalueKeys},
		CompileTimeout: time.Duration(c.Wasm.CompileTimeout), CompileMemory: c.Wasm.CompileMemory, Origins: c.Wasm.CORSOrigins,
		CompileParallel: c.Wasm.CompileParallel, QuickCode: c.Wasm.QuickCode, CompiledLayers: compiledLayers(c),
		LogLevel: c.Log.Level,
	}
}

func compiledLayers(c *config.Config) (rules []wasm.CompiledLayers) {
	for _, l := range c.Wasm.CompiledLayers {
		rules = append(rules, wasm.CompiledLayers(l))
	}
	return rules
}

// openWasm opens the backend for components. It returns nil if no program for the backend is configured and none is
// found.
func (p *parts) openWasm(ctx context.Context, c *config.Config, images *image.Store, networks *network.Manager,
	log *slog.Logger) (*wasm.Backend, error) {
	w, err := wasm.Open(ctx, wasmConfig(c), wasm.Services{
		Images: wasm.Images{Store: images}, Network: networks, Spans: p.spans(), Logger: log.With("part", "wasm"),
	})
	if errdefs.IsNotFound(err) {
		log.Warn("no handler \"wasm\"", "reason", err)
		p.missing["wasm"] = err
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%w (see `tripod check`)", err)
	}
	p.opened(w.Close)
	p.wasm = w
	return w, nil
}

// openRouter serves components at the node's own addresses, if configured.
func (p *parts) openRouter(ctx context.Context, c *config.Config, log *slog.Logger) error {
	if c.Route.Address == "" && c.Route.CleartextAddress == "" {
		return nil
	}
	log = log.With("part", "route")
	if p.wasm == nil {
		log.Warn("requests are not routed: no handler \"wasm\"")
		return nil
	}
	stop, err := p.wasm.Route(ctx, p.node.Components(), wasm.RouteConfig{
		Address: c.Route.Address, Cleartext: c.Route.CleartextAddress, Certificate: c.Route.Certificate, Key: c.Route.Key,
		ClientCA: c.Route.ClientCA,
		Group:    p.connections, Connections: limits(c.Connections), Logger: log,
	})
	if err != nil {
		return err
	}
	p.opened(func() error { stop(); return nil })
	return nil
}

// openBackends opens the backends. The keys of the result are RuntimeClass handlers.
func (p *parts) openBackends(ctx context.Context, c *config.Config, images *image.Store, networks *network.Manager,
	log *slog.Logger) (map[string]sandbox.Backend, error) {
	backends := map[string]sandbox.Backend{}
	if c.Backends.Linux {
		l, err := p.openLinux(ctx, c, images, log)
		if err != nil {
			return nil, err
		}
		if l != nil {
			backends["linux"] = l
		}
	}
	if c.Backends.Wasm {
		w, err := p.openWasm(ctx, c, images, networks, log)
		if err != nil {
			return nil, err
		}
		if w != nil {
			backends["wasm"] = w
		}
	}
	if c.Backends.VM {
		m, err := p.openVM(ctx, c, images, log.With("part", "vm"))
		if err != nil {
			return nil, err
		}
		if m != nil {
			backends["vm"], p.vm = m, m
		}
		o, err := p.openOCI(ctx, c, images, log.With("part", "vm-oci"))
		if err != nil {
			return nil, err
		}
		if o != nil {
			backends["vm-oci"], p.oci = o, o
		}
	}
	if c.Backends.Fake {
		if err := openFake(c, backends, log); err != nil {
			return nil, err
		}
	}
	return backends, p.checkHandlers(c, backends)
}

// openLinux opens the backend for OCI containers. It returns nil if no OCI runtime is installed and the configuration names
// none: the node then serves its other handlers.
func (p *parts) openLinux(ctx context.Context, c *config.Config, images *image.Store, log *slog.Logger) (*linux.Backend, error) {
	l, err := linux.Open(ctx, linuxConfig(c), linux.Services{Images: images, Logger: log.With("part", "linux")})
	if errdefs.IsNotFound(err) {
		p.missing["linux"] = err
		p.health.Report("linux containers", health.HandlersReady, health.NotInstalled,
			fmt.Errorf("not available: %w; install it and restart the daemon, or set backends.linux to false", err))
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%w (see `tripod check`)", err)
	}
	p.opened(l.Close)
	p.linux = l
	return l, nil
}

// checkHandlers completes the reasons for missing handlers, and refuses a configuration whose default handler is missing.
// The default of node.default_handler may be missing on a node that has another handler, because nobody has chosen it.
func (p *parts) checkHandlers(c *config.Config, backends map[string]sandbox.Backend) error {
	for _, h := range []struct {
		handler, backend string
		enabled          bool
	}{{"linux", "linux", c.Backends.Linux}, {"wasm", "wasm", c.Backends.Wasm}, {"vm", "vm", c.Backends.VM}, {"vm-oci", "vm", c.Backends.VM}} {
		if !h.enabled {
			p.missing[h.handler] = fmt.Errorf("backends.%s is off", h.backend)
		}
	}
	why := p.missing[c.Node.DefaultHandler]
	for alias, handler := range c.Node.HandlerAliases {
		if err := p.missing[handler]; err != nil {
			p.missing[alias] = err
		}
	}
	switch {
	case backends[c.Node.DefaultHandler] != nil:
		return nil
	case len(backends) == 0 && why != nil:
		return fmt.Errorf("no handler is available: %w (see `tripod check`)", why)
	case len(backends) > 0 && why != nil && c.Node.DefaultHandler == config.Default().Node.DefaultHandler:
		return nil
	}
	return fmt.Errorf("node.default_handler: no enabled backend serves the handler %q", c.Node.DefaultHandler)
}

// aliases returns the configured aliases whose handlers are available.
func aliases(c *config.Config, backends map[string]sandbox.Backend) map[string]string {
	offered := maps.Clone(c.Node.HandlerAliases)
	maps.DeleteFunc(offered, func(_, handler string) bool { return backends[handler] == nil })
	return offered
}

// cgroupDriver resolves "auto". If systemd manages the host and cgroup v2 is in use, the driver is systemd, because
// systemd then owns the hierarchy, and a second manager would conflict with systemd. Otherwise the driver is cgroupfs.
func cgroupDriver(c *config.Config) string {
	if c.Linux.CgroupDriver != "auto" {
		return c.Linux.CgroupDriver
	}
	var fs unix.Statfs_t
	v2 := unix.Statfs("/sys/fs/cgroup", &fs) == nil && fs.Type == unix.CGROUP2_SUPER_MAGIC
	if v2 && unix.Access("/run/systemd/system", unix.F_OK) == nil {
		return "systemd"
	}
	return "cgroupfs"
}
