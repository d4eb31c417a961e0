package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/edge/broker"
	"github.com/tripod-run/tripod/internal/edge/manager"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/runtime"
	"github.com/tripod-run/tripod/internal/edge/runtime/minimal"
	"github.com/tripod-run/tripod/internal/edge/runtime/unitpods"
	"github.com/tripod-run/tripod/internal/edge/wire"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/health"
	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/sandbox/wasm"
)

// edgeFlush is how long the broker may take to take what the manager has to say when it stops.
const edgeFlush = 5 * time.Second

func edgeDir(c *config.Config) string    { return filepath.Join(c.Root, "edge") }
func edgeLogDir(c *config.Config) string { return filepath.Join(c.Root, "edge", "log") }

// edgeRetry is how often an edge front door is tried to be opened that a disk fault keeps closed.
const edgeRetry = 2 * time.Second

// openEdge opens the edge front door. One whose files cannot be used stays closed until they can: the node serves without it.
func (p *parts) openEdge(c *config.Config, images *image.Store, log *slog.Logger) error {
	if !c.Edge.Enabled {
		return nil
	}
	log = log.With("part", "edge")
	door, err := p.tryEdge(c, images, log)
	if err != nil && !health.DiskFault(err) {
		return err
	}
	p.health.Report("edge front door", health.EdgeReady, health.DiskReason(err), err)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	p.opened(func() error {
		cancel()
		wg.Wait()
		return door.close()
	})
	if err == nil {
		return nil
	}
	wg.Go(guard.Every(ctx, log, "edge front door", edgeRetry, func() {
		if door.closers != nil {
			return
		}
		var err error
		door, err = p.tryEdge(c, images, log)
		p.health.Report("edge front door", health.EdgeReady, health.DiskReason(err), err)
	}))
	return nil
}

// tryEdge gives the door's parts, to be closed; after an error nothing is open.
func (p *parts) tryEdge(c *config.Config, images *image.Store, log *slog.Logger) (*parts, error) {
	door := &parts{node: p.node, wasm: p.wasm, connections: p.connections, observers: p.observers}
	figures, err := door.makeEdge(c, images, log)
	if err != nil {
		return &parts{}, errors.Join(err, door.close())
	}
	if p.metrics != nil {
		for _, f := range figures {
			p.metrics.Register(f)
		}
	}
	return door, nil
}

// makeEdge begins when the node is there: first the broker, then the manager and its runtimes. They are closed the other way round.
func (p *parts) makeEdge(c *config.Config, images *image.Store, log *slog.Logger) (figures []prometheus.Collector, err error) {
	if err := privateDir(edgeDir(c), log); err != nil {
		return nil, err
	}
	id, err := identify(filepath.Join(edgeDir(c), "identity.json"), c.Edge)
	if err != nil {
		return nil, err
	}
	client, b, err := p.openBroker(c, log)
	if err != nil {
		return nil, err
	}
	if b != nil {
		figures = append(figures, brokerFigures{b})
	}
	runtimes, err := p.edgeRuntimes(c, id, images, log)
	if err != nil {
		return nil, err
	}
	m, err := manager.Open(manager.Config{
		Root: c.Root, UUID: id.Manager, Name: edgeName(c), Topics: edgeTopics(c.Edge.Realm, c.Edge.Topics), MQTT: client, Dial: mqtt.New,
		Runtimes: runtimes, KeepAlive: time.Duration(c.Edge.KeepaliveInterval), Limits: manager.Limits(c.Edge.Limits), Log: log,
	})
	if err != nil {
		return nil, fmt.Errorf("edge: %w", err)
	}
	p.opened(func() error {
		ctx, cancel := context.WithTimeout(context.Background(), edgeFlush)
		defer cancel()
		return m.Close(ctx)
	})
	log.Info("the edge front door is open", "broker", client.URL, "uuid", id.Manager, "runtimes", len(runtimes))
	return append(figures, m), nil
}

// openBroker starts the embedded broker, where it is that; it returns how the manager reaches the broker.
func (p *parts) openBroker(c *config.Config, log *slog.Logger) (mqtt.Config, broker.Broker, error) {
	e := c.Edge
	client, err := mqttConfig(mqttSettings{
		broker: e.Broker, user: e.User, passwordFile: e.PasswordFile, ca: e.CA, cert: e.Certificate, key: e.Key, protocol: e.Protocol,
	}, log)
	if err != nil {
		return client, nil, err
	}
	client.QueueMessages, client.QueueTTL, client.MaxPacket = e.QueueMessages, time.Duration(e.QueueTTL), int64(e.MaxFrame)
	if e.Broker != config.EmbeddedBroker {
		return client, nil, nil
	}
	b, err := newBroker(c, filepath.Join(edgeDir(c), "broker.db"), p.connections, log.With("part", "broker"))
	if err != nil {
		return client, nil, fmt.Errorf("edge: %w; [broker] says how the embedded one listens, edge.broker names another", err)
	}
	p.opened(func() error { return closeBroker(b) })
	client.URL = b.URL()
	return client, b, nil
}

// edgeRuntimes are the built-in runtime and the configured programs.
func (p *parts) edgeRuntimes(c *config.Config, id edgeIdentity, images *image.Store, log *slog.Logger) ([]runtime.Runtime, error) {
	e := c.Edge
	var all []runtime.Runtime
	switch {
	case e.Wasm.Enabled && p.wasm == nil:
		log.Warn("the runtime tripod/wasm is not offered: the handler \"wasm\" is not", "name", e.Wasm.Name)
	case e.Wasm.Enabled:
		w, err := unitpods.New(unitpods.Config{
			Name: e.Wasm.Name, UUID: id.Runtimes[e.Wasm.Name], MaxModules: e.Wasm.MaxModules, Node: p.node, Images: wasm.Images{Store: images},
			LogDir: edgeLogDir(c), ModuleRoots: e.ModuleRoots, DirRoots: e.DirRoots, Topics: edgeTopics(e.Realm, e.Topics), Logger: log,
		})
		if err != nil {
			return nil, err
		}
		all = append(all, w)
	}
	for i, r := range e.Runtimes {
		if len(r.APIs) == 0 {
			r.APIs = []string{"wasm", "wasi"}
		}
		m, err := minimal.New(minimal.Config{
			Info:  runtime.Info{Type: r.Type, Name: r.Name, UUID: id.Runtimes[r.Name], APIs: r.APIs, MaxModules: r.MaxModules},
			Index: i, Dir: e.SocketDir, Command: strings.Fields(r.Command), MaxFrame: e.MaxFrame, Log: log,
		})
		if err != nil {
			return nil, err
		}
		all = append(all, m)
	}
	if len(all) == 0 {
		log.Warn("there is no runtime: no module can run here")
	}
	return all, nil
}

func edgeName(c *config.Config) string {
	if c.Edge.Name != "" {
		return c.Edge.Name
	}
	host, err := os.Hostname()
	if err != nil {
		return "node"
	}
	return host
}

func edgeTopics(realm, form string) wire.Topics {
	return wire.Topics{Realm: realm, Nested: form == "nested"}
}

// mqttSettings are what [edge] and [orchestrator] say about the broker.
type mqttSettings struct {
	broker, user, passwordFile, ca, cert, key string
	protocol                                  int
}

// mqttConfig reads the password; the URL of an embedded broker is known when that runs.
func mqttConfig(s mqttSettings, log *slog.Logger) (mqtt.Config, error) {
	m := mqtt.Config{
		URL: s.broker, Protocol: s.protocol, Username: s.user, TLS: mqtt.TLS{CA: s.ca, Cert: s.cert, Key: s.key},
		SessionExpiry: time.Hour, Log: log,
	}
	if s.passwordFile == "" {
		return m, nil
	}
	password, err := os.ReadFile(s.passwordFile)
	if err != nil {
		return m, fmt.Errorf("the password at the broker: %w", err)
	}
	m.Password = strings.TrimRight(string(password), "\r\n")
	return m, nil
}
