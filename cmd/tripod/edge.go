package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/edge/manager"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/runtime"
	"github.com/tripod-run/tripod/internal/edge/runtime/minimal"
	edgewasm "github.com/tripod-run/tripod/internal/edge/runtime/wasm"
	"github.com/tripod-run/tripod/internal/edge/wire"
	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/wasm/artifact"
)

// edgeFlush is how long the broker may take to take what the manager has to say when it stops.
const edgeFlush = 5 * time.Second

func edgeDir(c *config.Config) string    { return filepath.Join(c.Root, "edge") }
func edgeLogDir(c *config.Config) string { return filepath.Join(c.Root, "edge", "log") }

// openEdge begins when the node is there: first the broker, then the manager and its runtimes. They are closed the other way round.
func (p *parts) openEdge(c *config.Config, images *image.Store, log *slog.Logger) error {
	if !c.Edge.Enabled {
		return nil
	}
	log = log.With("part", "edge")
	if err := privateDir(edgeDir(c), log); err != nil {
		return err
	}
	id, err := identify(filepath.Join(edgeDir(c), "identity.json"), c.Edge)
	if err != nil {
		return err
	}
	client, err := p.openBroker(c, log)
	if err != nil {
		return err
	}
	runtimes, err := p.edgeRuntimes(c, id, images, log)
	if err != nil {
		return err
	}
	m, err := manager.Open(manager.Config{
		Root: c.Root, UUID: id.Manager, Name: edgeName(c), Topics: edgeTopics(c.Edge.Realm, c.Edge.Topics), MQTT: client, Dial: mqtt.New,
		Runtimes: runtimes, KeepAlive: time.Duration(c.Edge.KeepaliveInterval), Limits: manager.Limits(c.Edge.Limits), Log: log,
	})
	if err != nil {
		return fmt.Errorf("edge: %w", err)
	}
	p.opened(func() error {
		ctx, cancel := context.WithTimeout(context.Background(), edgeFlush)
		defer cancel()
		return m.Close(ctx)
	})
	if p.metrics != nil {
		p.metrics.Register(m)
	}
	log.Info("the edge front door is open", "broker", client.URL, "uuid", id.Manager, "runtimes", len(runtimes))
	return nil
}

// openBroker starts the embedded broker, where it is that; it returns how the manager reaches the broker.
func (p *parts) openBroker(c *config.Config, log *slog.Logger) (mqtt.Config, error) {
	e := c.Edge
	client, err := mqttConfig(mqttSettings{
		broker: e.Broker, user: e.User, passwordFile: e.PasswordFile, ca: e.CA, cert: e.Certificate, key: e.Key, protocol: e.Protocol,
	}, log)
	if err != nil {
		return client, err
	}
	client.QueueMessages, client.QueueTTL, client.MaxPacket = e.QueueMessages, time.Duration(e.QueueTTL), int64(e.MaxFrame)
	if e.Broker != config.EmbeddedBroker {
		return client, nil
	}
	b, err := newBroker(c.Broker, filepath.Join(edgeDir(c), "broker.db"), log.With("part", "broker"))
	if err != nil {
		return client, fmt.Errorf("edge: %w; [broker] says how the embedded one listens, edge.broker names another", err)
	}
	p.opened(func() error { return closeBroker(b) })
	if p.metrics != nil {
		p.metrics.Register(brokerFigures{b})
	}
	client.URL = b.URL()
	return client, nil
}

// edgeRuntimes are the built-in runtime and the configured programs.
func (p *parts) edgeRuntimes(c *config.Config, id edgeIdentity, images *image.Store, log *slog.Logger) ([]runtime.Runtime, error) {
	e := c.Edge
	var all []runtime.Runtime
	switch {
	case e.Wasm.Enabled && p.wasm == nil:
		log.Warn("the runtime tripod/wasm is not offered: the handler \"wasm\" is not", "name", e.Wasm.Name)
	case e.Wasm.Enabled:
		w, err := edgewasm.New(edgewasm.Config{
			Name: e.Wasm.Name, UUID: id.Runtimes[e.Wasm.Name], MaxModules: e.Wasm.MaxModules, Node: p.node, Images: artifact.Local{Store: images},
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
