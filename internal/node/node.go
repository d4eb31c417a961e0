package node

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/keys"
	"github.com/tripod-run/tripod/internal/network"
	"github.com/tripod-run/tripod/internal/node/store"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// kindPod is the store's kind for pod records.
const kindPod = "pods"

// rollbackTimeout bounds the rollback of a failed order.
const rollbackTimeout = time.Minute

// closePatience is the time that Close waits for orders under way, once before it cancels them and once after.
const closePatience = 10 * time.Second

var errNodeClosed = fmt.Errorf("the node is shutting down: %w", errdefs.ErrUnavailable)

// Network is the node's interface to the pod network. *network.Manager implements it.
type Network interface {
	Setup(ctx context.Context, a network.Attachment) (*network.Result, error)
	Teardown(ctx context.Context, a network.Attachment) error
	Present(id string) bool
	GC(ctx context.Context, keep []string) error
	Status(ctx context.Context) error
	Dial(ctx context.Context, netns, network, address string) (net.Conn, error)
	Stats(netns string) ([]network.InterfaceStats, error)
	// CNIResult returns the result of the chain's last plugin, or nil if the pod is not attached.
	CNIResult(id string) (json.RawMessage, error)
	UpdatePodCIDR(cidr string) error
}

// Images is the node's interface to the image store. *image.Store implements it.
type Images interface {
	// Get finds an image by reference, digest or ID, or returns errdefs.ErrNotFound.
	Get(ctx context.Context, ref string) (image.Image, error)
}

// Config configures a Node. Claims, Hooks, Logger, ComponentPrefix and OperationTimeout are optional.
type Config struct {
	Store *store.Store
	// Backends maps RuntimeClass handlers to backends. Pods that name no handler get DefaultHandler.
	Backends       map[string]sandbox.Backend
	DefaultHandler string
	// Missing maps handlers that this node knows but does not offer to the reason. The default handler may be one of them:
	// pods that name no handler are then refused.
	Missing map[string]error
	// Aliases maps further names to handlers.
	Aliases map[string]string
	// ComponentHandler is the handler whose backend runs those containers in other handlers' pods that Claims selects by
	// configuration and image. If there is no such backend, the node refuses these containers. A nil Claims selects none.
	ComponentHandler string
	Claims           func(*runtimeapi.ContainerConfig, image.Image) bool
	// Routes assign pods to handlers by annotation, and reserve images for handlers.
	Routes  []Route
	Network Network
	Images  Images
	// UserRange holds the ranges for user namespaces of pods whose callers send none.
	UserRange sandbox.IDRange
	// ComponentPrefix is the prefix of the labels that name a component; the default is "vimana.host/".
	ComponentPrefix string
	// OperationTimeout bounds one order, even after its caller has gone away; the default is 5 minutes.
	OperationTimeout time.Duration
	// StatsInterval is how long lists of statistics share a measurement; 0 means that each list measures for itself.
	StatsInterval time.Duration
	// Hooks are the plugins that follow and change the life of pods; nil for none.
	Hooks  Hooks
	Logger *slog.Logger
}

// Node is the pod pool and its record. Its methods are safe for concurrent use.
type Node struct {
	Config
	log    *slog.Logger
	store  *store.Store
	pool   *pool
	index  *Index
	events *hub

	handlerErrors handlerErrors
	// recovering is held while the pods of one handler are compared with what its backend has found.
	recovering sync.Mutex
	leftovers  leftovers
	// silent holds the IDs of pods and containers whose last request for statistics is still unanswered.
	silent  sync.Map
	figures *figures

	inflight *inflight
	stop     context.CancelFunc
	kick     chan struct{}
	workers  sync.WaitGroup
}

type HandlerInfo struct {
	Name    string
	Default bool
	// AliasOf is the handler that Name is an alias for; empty if Name is itself a handler's name.
	AliasOf      string `json:",omitempty"`
	Capabilities sandbox.Capabilities
	// Err is the reason why the handler cannot run new pods; nil if it can.
	Err error
}

func (c *Config) setDefaults() error {
	c.ComponentPrefix = cmp.Or(c.ComponentPrefix, keys.Components)
	c.OperationTimeout = cmp.Or(c.OperationTimeout, 5*time.Minute)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Hooks == nil {
		c.Hooks = noHooks{}
	}
	if c.Backends[c.DefaultHandler] == nil && c.Missing[c.DefaultHandler] == nil {
		return fmt.Errorf("the default handler %q has no backend: %w", c.DefaultHandler, errdefs.ErrInvalidArgument)
	}
	if b := c.Backends[c.ComponentHandler]; b != nil && !b.Capabilities().ForeignPods {
		return fmt.Errorf("the handler %q has no backend for containers in other handlers' pods: %w", c.ComponentHandler,
			errdefs.ErrInvalidArgument)
	}
	for alias, handler := range c.Aliases {
		if c.Backends[handler] == nil || c.Backends[alias] != nil {
			return fmt.Errorf("alias %q of %q: the alias must not be a backend's name, and its target must be one: %w", alias, handler,
				errdefs.ErrInvalidArgument)
		}
	}
	return nil
}

// Handlers lists the handlers and aliases, sorted by name.
func (n *Node) Handlers() []HandlerInfo {
	var infos []HandlerInfo
	for name, b := range n.Backends {
		infos = append(infos, HandlerInfo{Name: name, Default: name == n.DefaultHandler, Capabilities: b.Capabilities(), Err: n.ready(name)})
	}
	for alias, handler := range n.Aliases {
		infos = append(infos, HandlerInfo{Name: alias, AliasOf: handler, Capabilities: n.Backends[handler].Capabilities(), Err: n.ready(handler)})
	}
	slices.SortFunc(infos, func(a, b HandlerInfo) int { return strings.Compare(a.Name, b.Name) })
	return infos
}

// Handler finds a handler by its name or an alias, whether it is ready or not; the empty name means the default handler. It
// returns the handler's own name. Errors: ErrInvalidArgument for an unknown name; ErrFailedPrecondition, with the reason, if
// the node knows the handler but does not offer it.
func (n *Node) Handler(name string) (string, sandbox.Capabilities, error) {
	handler := cmp.Or(name, n.DefaultHandler)
	handler = cmp.Or(n.Aliases[handler], handler)
	if b := n.Backends[handler]; b != nil {
		return handler, b.Capabilities(), nil
	}
	if why := n.Missing[handler]; why != nil {
		return "", sandbox.Capabilities{}, fmt.Errorf("no runtime handler %q on this node: %v: %w", handler, why, errdefs.ErrFailedPrecondition)
	}
	names := slices.AppendSeq(slices.Collect(maps.Keys(n.Backends)), maps.Keys(n.Aliases))
	slices.Sort(names)
	return "", sandbox.Capabilities{}, fmt.Errorf("no runtime for handler %q is configured, only for %q; "+
		"node.handler_aliases in the configuration adds names for them: %w", handler, names, errdefs.ErrInvalidArgument)
}

// ready returns nil if a handler can run new pods, or the reason why it cannot.
func (n *Node) ready(handler string) error {
	if err := n.handlerErrors.get(handler); err != nil {
		return err
	}
	if b, ok := n.Backends[handler].(sandbox.Readier); ok {
		return b.Ready()
	}
	return nil
}

// NetworkReady returns nil if new pods can get a network, or the reason why they cannot.
func (n *Node) NetworkReady(ctx context.Context) error { return n.Network.Status(ctx) }

// SetPodCIDR passes the node's pod range (CRI UpdateRuntimeConfig) to the network.
func (n *Node) SetPodCIDR(cidr string) error { return n.Network.UpdatePodCIDR(cidr) }

func (n *Node) Components() *Index { return n.index }

// Subscribe returns a subscription to all events from now on.
func (n *Node) Subscribe() *Subscription { return n.events.subscribe(false) }

// SubscribeRecent returns a subscription that begins with the latest events since the start of the daemon, at most 512.
func (n *Node) SubscribeRecent() *Subscription { return n.events.subscribe(true) }

// RecentEvents returns the events that SubscribeRecent begins with, the latest last.
func (n *Node) RecentEvents() []Event { return n.events.latest() }

// Pods lists the pods in order of creation.
func (n *Node) Pods() []*Pod {
	live := n.pool.all()
	pods := make([]*Pod, 0, len(live))
	for _, p := range live {
		if view := p.view.Load(); view != nil {
			pods = append(pods, view)
		}
	}
	return pods
}

// Pod finds a pod by its ID or a unique prefix of it. Errors: errdefs.ErrNotFound; ErrInvalidArgument for an ambiguous
// prefix.
func (n *Node) Pod(id string) (*Pod, error) {
	p, err := n.pool.pod(id)
	if err != nil {
		return nil, err
	}
	if view := p.view.Load(); view != nil {
		return view, nil
	}
	return nil, notFound("pod", id)
}

// Container finds a container and its pod by the container's ID or a unique prefix of it.
func (n *Node) Container(id string) (*Container, *Pod, error) {
	p, full, err := n.pool.container(id)
	if err != nil {
		return nil, nil, err
	}
	if view := p.view.Load(); view != nil {
		if c := view.Container(full); c != nil {
			return c, view, nil
		}
	}
	return nil, nil, notFound("container", id)
}

// Close stops the node's background work, refuses new orders and waits up to 10 s for those under way. It then cancels
// the remaining orders and waits up to 10 s more. Pods keep running; the next start resumes pending work. The store can
// be closed afterwards.
func (n *Node) Close() error {
	n.stop()
	ended := n.inflight.close(closePatience)
	n.workers.Wait()
	n.events.close()
	if !ended {
		return fmt.Errorf("orders are still under way %s after they were cancelled: %w", closePatience, errdefs.ErrUnavailable)
	}
	return nil
}

// orderPod finds the pod that an order is for, by its ID or a unique prefix. It fails if the pod's backend accepts no
// orders.
func (n *Node) orderPod(id string) (*livePod, error) {
	p, err := n.pool.pod(id)
	if err != nil {
		return nil, err
	}
	return p, n.acceptsOrders(p)
}

// orderContainer finds the container that an order is for, and returns its pod and its full ID. The ID can also be that
// of a unit pod.
func (n *Node) orderContainer(id string) (*livePod, string, error) {
	p, full, err := n.pool.target(id)
	if err != nil {
		return nil, "", err
	}
	return p, full, n.acceptsOrders(p)
}

func (n *Node) acceptsOrders(p *livePod) error {
	for _, handler := range p.rec.Load().handlers() {
		if err := n.handlerErrors.get(handler); err != nil {
			return notReady(handler, err)
		}
	}
	return nil
}

// order returns an order with the node's operation timeout.
func (n *Node) order(call Call) order {
	return order{call: call, limit: n.OperationTimeout, inflight: n.inflight, log: n.log}
}

// rollbackContext returns a context for a rollback, which outlives the failed order's context.
func rollbackContext(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
}

func hostNetwork(c *runtimeapi.PodSandboxConfig) bool {
	return c.GetLinux().GetSecurityContext().GetNamespaceOptions().GetNetwork() == runtimeapi.NamespaceMode_NODE
}
