package node

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/network"
	"github.com/tripod-run/tripod/internal/node/store"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// kindPod is the kind of the pods' records in the store.
const kindPod = "pods"

// rollbackTimeout bounds the undoing of what a failed order began.
const rollbackTimeout = time.Minute

// closePatience is how long Close waits for orders under way before it ends their contexts, and how long after that.
const closePatience = 10 * time.Second

var errNodeClosed = fmt.Errorf("the node is shutting down: %w", errdefs.ErrUnavailable)

// Network is what the node asks of the pods' network; *network.Manager is one.
type Network interface {
	Setup(ctx context.Context, a network.Attachment) (*network.Result, error)
	Teardown(ctx context.Context, a network.Attachment) error
	Present(id string) bool
	GC(ctx context.Context, keep []string) error
	Status(ctx context.Context) error
	Dial(ctx context.Context, netns, network, address string) (net.Conn, error)
	Stats(netns string) ([]network.InterfaceStats, error)
	// CNIResult is what the last plugin returned, nil when nothing of the pod is attached.
	CNIResult(id string) (json.RawMessage, error)
	UpdatePodCIDR(cidr string) error
}

// Images is what the node asks of the image store; *image.Store is one.
type Images interface {
	// Get finds the image that a reference, digest or ID names; errdefs.ErrNotFound.
	Get(ctx context.Context, ref string) (image.Image, error)
}

// Config is what a Node is made of. Everything but Logger, ComponentPrefix and OperationTimeout must be given.
type Config struct {
	Store *store.Store
	// Backends are by RuntimeClass handler; DefaultHandler is the one for pods that name none.
	Backends       map[string]sandbox.Backend
	DefaultHandler string
	// Aliases are further names of handlers: a pod that asks for one is a pod of the handler.
	Aliases map[string]string
	// Routes tell of pods and images that are for other handlers than the default one.
	Routes  []Route
	Network Network
	Images  Images
	// ComponentPrefix begins the labels that name a component; "vimana.host/" by default.
	ComponentPrefix string
	// OperationTimeout bounds one order's work, also when its caller has gone away; 5 minutes by default.
	OperationTimeout time.Duration
	Logger           *slog.Logger
}

// Node is the pod pool with its record. All its methods may be called from many goroutines.
type Node struct {
	Config
	log    *slog.Logger
	store  *store.Store
	pool   *pool
	index  *Index
	events *hub

	broken broken
	left   leftovers
	// silent holds the IDs of pods and containers whose backend has not come back with figures.
	silent sync.Map

	duty    *duty
	stop    context.CancelFunc
	kick    chan struct{}
	workers sync.WaitGroup
}

// HandlerInfo describes one RuntimeClass handler.
type HandlerInfo struct {
	Name    string
	Default bool
	// AliasOf is the handler that this is another name of; empty for a handler itself.
	AliasOf      string `json:",omitempty"`
	Capabilities sandbox.Capabilities
	// Err says why the handler's pods take no orders; nil when they do.
	Err error
}

func (c *Config) setDefaults() error {
	if c.ComponentPrefix == "" {
		c.ComponentPrefix = "vimana.host/"
	}
	if c.OperationTimeout == 0 {
		c.OperationTimeout = 5 * time.Minute
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Backends[c.DefaultHandler] == nil {
		return fmt.Errorf("the default handler %q has no backend: %w", c.DefaultHandler, errdefs.ErrInvalidArgument)
	}
	for alias, handler := range c.Aliases {
		if c.Backends[handler] == nil || c.Backends[alias] != nil {
			return fmt.Errorf("the alias %q of %q: the first must be no backend's name, the second one's: %w", alias, handler, errdefs.ErrInvalidArgument)
		}
	}
	return nil
}

// Handlers lists the handlers and their aliases by name.
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

// ready is nil when new pods of a handler can be made, else it says why not.
func (n *Node) ready(handler string) error {
	if err := n.broken.of(handler); err != nil {
		return err
	}
	if b, ok := n.Backends[handler].(sandbox.Readier); ok {
		return b.Ready()
	}
	return nil
}

// NetworkReady is nil when new pods can be given a network, else it says why not.
func (n *Node) NetworkReady(ctx context.Context) error { return n.Network.Status(ctx) }

// SetPodCIDR hands the node's pod range (CRI UpdateRuntimeConfig) to the network.
func (n *Node) SetPodCIDR(cidr string) error { return n.Network.UpdatePodCIDR(cidr) }

// Components is the pair of maps between components and the pods that run them.
func (n *Node) Components() *Index { return n.index }

// Subscribe listens to the transitions from now on.
func (n *Node) Subscribe() *Subscription { return n.events.subscribe() }

// Pods lists the pods in the order of their creation.
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

// Pod finds a pod by its ID or by an unambiguous prefix of it: errdefs.ErrNotFound, or ErrInvalidArgument for a
// prefix of several.
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

// Container finds a container and its pod by the container's ID or by an unambiguous prefix of it.
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

// Close ends the node's own work, which the next start takes up, takes no more orders, and lets those under way finish (they get
// 10 s, and as long again to wind up). Pods go on running. The store can be closed afterwards.
func (n *Node) Close() error {
	n.stop()
	ended := n.duty.close(closePatience)
	n.workers.Wait()
	n.events.close()
	if !ended {
		return fmt.Errorf("orders are still under way %s after they were given up: %w", closePatience, errdefs.ErrUnavailable)
	}
	return nil
}

// backend finds the backend of a handler, by an alias as well; the empty name is the default's.
func (n *Node) backend(handler string) (string, sandbox.Backend, error) {
	if handler == "" {
		handler = n.DefaultHandler
	}
	handler = cmp.Or(n.Aliases[handler], handler)
	b := n.Backends[handler]
	if b == nil {
		return "", nil, fmt.Errorf("no runtime handler %q on this node: %w", handler, errdefs.ErrInvalidArgument)
	}
	if err := n.broken.of(handler); err != nil {
		return "", nil, unrecovered(handler, err)
	}
	return handler, b, nil
}

// orderPod finds a pod for an order: by ID or unambiguous prefix, and only when its backend takes orders.
func (n *Node) orderPod(id string) (*livePod, error) {
	p, err := n.pool.pod(id)
	if err != nil {
		return nil, err
	}
	return p, n.takesOrders(p)
}

// orderContainer finds the pod and the full ID of a container, or of a unit pod, for an order.
func (n *Node) orderContainer(id string) (*livePod, string, error) {
	p, full, err := n.pool.target(id)
	if err != nil {
		return nil, "", err
	}
	return p, full, n.takesOrders(p)
}

func (n *Node) takesOrders(p *livePod) error {
	handler := p.rec.Load().Handler
	if err := n.broken.of(handler); err != nil {
		return unrecovered(handler, err)
	}
	return nil
}

// order is an order with the node's own limit.
func (n *Node) order(call Call) order {
	return order{call: call, limit: n.OperationTimeout, duty: n.duty, log: n.log}
}

// undo is a context for undoing what failed: it does not end with the order that failed.
func undo(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
}

// hostNetwork reports whether the pod asks for the node's own network namespace.
func hostNetwork(c *runtimeapi.PodSandboxConfig) bool {
	return c.GetLinux().GetSecurityContext().GetNamespaceOptions().GetNetwork() == runtimeapi.NamespaceMode_NODE
}
