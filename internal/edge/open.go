package edge

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/connlimit"
	"github.com/tripod-run/tripod/internal/edge/broker"
	"github.com/tripod-run/tripod/internal/edge/manager"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/runtime"
	"github.com/tripod-run/tripod/internal/edge/runtime/minimal"
	"github.com/tripod-run/tripod/internal/edge/runtime/unitpods"
	"github.com/tripod-run/tripod/internal/edge/wire"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/health"
)

// flushTimeout bounds the time that a closing manager or orchestrator waits for the broker to acknowledge its last
// messages.
const flushTimeout = 5 * time.Second

// CloseTimeout bounds Close of an Orchestrator, or of a Door without one.
const CloseTimeout = flushTimeout + brokerClose

// retryInterval is the time between attempts to open a front door that a disk fault keeps closed.
const retryInterval = 2 * time.Second

// Services are the parts of the process that the front door and the orchestrator use. The orchestrator uses only the
// first three fields.
type Services struct {
	// Connections holds the limiters of the embedded broker and of the orchestrator's REST interface. Both have the
	// limits in Limits, but the broker's limiter allows a quarter more connections.
	Connections *connlimit.Group
	Limits      connlimit.Config
	Logger      *slog.Logger

	// Node runs the modules' pods.
	Node unitpods.Node
	// Images is nil if the node does not offer the handler "wasm".
	Images unitpods.Images
	Health *health.Board
	// PrivateDir creates a directory if it is missing, and makes sure that only the daemon can access it.
	PrivateDir func(dir string) error
	// HoldDir does the same, and locks the directory for this process until the result is closed.
	HoldDir func(ctx context.Context, dir string) (io.Closer, error)
	// Register adds metrics; nil discards them.
	Register func(prometheus.Collector)

	// running is the daemon's embedded broker, for the orchestrator in the daemon; nil if there is none.
	running broker.Broker
}

// Door is the MQTT front door of a node.
type Door struct {
	config   *config.Config
	services Services
	log      *slog.Logger
	broker   broker.Broker    // nil unless embedded
	manager  *manager.Manager // nil while the door is closed
	life     context.Context
	stop     context.CancelFunc
	tasks    sync.WaitGroup
}

// Open opens the front door. If a disk fault makes the door's files unusable, the door stays closed, reports the
// problem to Health and tries again. The node works without the door. Any other failure is an error.
func Open(c *config.Config, s Services) (*Door, error) {
	d := &Door{config: c, services: s, log: s.Logger.With("part", "edge")}
	d.life, d.stop = context.WithCancel(context.Background())
	err := d.open()
	if err != nil && !health.DiskFault(err) {
		d.stop()
		return nil, err
	}
	d.report(err)
	if err != nil {
		d.tasks.Go(guard.Every(d.life, d.log, "edge front door", retryInterval, func() {
			if d.manager == nil {
				d.report(d.open())
			}
		}))
	}
	return d, nil
}

// report reports the result of open to the health board.
func (d *Door) report(err error) {
	d.services.Health.Report("edge front door", health.EdgeReady, health.DiskReason(err), err)
}

// open opens the parts: first the broker, then the runtimes and the manager. After an error, none of them is open. The
// orchestrator, if the daemon has one, then opens by itself.
func (d *Door) open() error {
	c := d.config
	dir := filepath.Join(c.Root, "edge")
	if err := d.services.PrivateDir(dir); err != nil {
		return err
	}
	id, err := identify(filepath.Join(dir, "identity.json"), c.Edge)
	if err != nil {
		return err
	}
	client, b, err := d.services.connect(c, brokerSettings{
		section: "edge", url: c.Edge.Broker, user: c.Edge.User, passwordFile: c.Edge.PasswordFile, ca: c.Edge.CA, cert: c.Edge.Certificate,
		key: c.Edge.Key, protocol: c.Edge.Protocol, store: filepath.Join(dir, "broker.db"),
	}, d.log)
	if err != nil {
		return err
	}
	m, err := d.openManager(id, client)
	if err != nil {
		return errors.Join(err, closeBroker(b))
	}
	d.broker, d.manager = b, m
	if c.Edge.Orchestrator {
		d.tasks.Go(guard.Loop(d.log, "orchestrator", d.orchestrate))
	}
	if register := d.services.Register; register != nil {
		if b != nil {
			register(brokerFigures{b})
		}
		register(m)
	}
	return nil
}

func (d *Door) openManager(id identity, client mqtt.Config) (*manager.Manager, error) {
	c := d.config
	client.QueueMessages, client.QueueTTL, client.MaxPacket = c.Edge.QueueMessages, time.Duration(c.Edge.QueueTTL), int64(c.Edge.MaxFrame)
	runtimes, err := d.runtimes(id)
	if err != nil {
		return nil, err
	}
	m, err := manager.Open(manager.Config{
		Root: c.Root, UUID: id.Manager, Name: managerName(c), Topics: topics(c.Edge.Realm, c.Edge.Topics), MQTT: client,
		Runtimes: runtimes, KeepAlive: time.Duration(c.Edge.KeepaliveInterval), Limits: manager.Limits(c.Edge.Limits), Log: d.log,
	})
	if err != nil {
		return nil, fmt.Errorf("edge: %w", err)
	}
	d.log.Info("the edge front door is open", "broker", client.URL, "uuid", id.Manager, "runtimes", len(runtimes))
	return m, nil
}

// Close closes the parts: the orchestrator, the manager, the broker. Modules keep running.
func (d *Door) Close() error {
	d.stop()
	d.tasks.Wait()
	if d.manager == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), flushTimeout)
	defer cancel()
	return errors.Join(d.manager.Close(ctx), closeBroker(d.broker))
}

// runtimes makes the built-in runtime and those of the configured programs.
func (d *Door) runtimes(id identity) ([]runtime.Runtime, error) {
	e := d.config.Edge
	var all []runtime.Runtime
	switch {
	case e.Wasm.Enabled && d.services.Images == nil:
		d.log.Warn("no runtime tripod/wasm: no handler \"wasm\"", "name", e.Wasm.Name)
	case e.Wasm.Enabled:
		w, err := unitpods.New(unitpods.Config{
			Name: e.Wasm.Name, UUID: id.Runtimes[e.Wasm.Name], MaxModules: e.Wasm.MaxModules, Node: d.services.Node, Images: d.services.Images,
			LogDir: filepath.Join(d.config.Root, "edge", "log"), ModuleRoots: e.ModuleRoots, DirRoots: e.DirRoots,
			Topics: topics(e.Realm, e.Topics), Logger: d.log,
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
			Index: i, Dir: e.SocketDir, Command: strings.Fields(r.Command), MaxFrame: e.MaxFrame, Log: d.log,
		})
		if err != nil {
			return nil, err
		}
		all = append(all, m)
	}
	if len(all) == 0 {
		d.log.Warn("no runtime: modules cannot run here")
	}
	return all, nil
}

// managerName returns the configured name of the manager, or the host name.
func managerName(c *config.Config) string {
	if c.Edge.Name != "" {
		return c.Edge.Name
	}
	host, err := os.Hostname()
	if err != nil {
		return "node"
	}
	return host
}

func topics(realm, form string) wire.Topics {
	return wire.Topics{Realm: realm, Nested: form == "nested"}
}
