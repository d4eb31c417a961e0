package requests

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/dataplane"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// HeaderComponent is the request header that names the requested component.
const HeaderComponent = "Component"

// Limits for the request bytes that follow the beginning of a response over HTTP/1.1 (dataplane.HalfDuplex).
const (
	maxAhead  = 4 << 20
	aheadTime = 30 * time.Second
)

// Components is the node's component map. *node.Index implements it.
type Components interface {
	// Running returns the running containers of a component. Neither the caller nor the implementation modifies the
	// slice.
	Running(component string) []string
	// All returns the whole map. Neither the caller nor the implementation modifies the map.
	All() map[string][]string
}

// Config configures a Router.
type Config struct {
	Components Components
	// Services returns the gRPC services (package.Service) of a running container. If Services is nil, a component's
	// only service is the server part of its name.
	Services func(container string) []string
	// Dial connects to the data socket of a container's worker.
	Dial   func(ctx context.Context, container string) (net.Conn, error)
	Logger *slog.Logger
}

// Router is the http.Handler of the node's own addresses.
type Router struct {
	Config
	proxy     *httputil.ReverseProxy
	transport *http.Transport
	load      load
	services  serviceCache
	ahead     *semaphore.Weighted // memory for the rests of half-duplex streams, in bytes
	turn      atomic.Uint64       // rotates between containers with equal load
}

// New makes a Router.
func New(c Config) *Router {
	c.Logger = cmp.Or(c.Logger, slog.Default())
	r := &Router{Config: c, ahead: semaphore.NewWeighted(dataplane.AheadMemory)}
	protocols := &http.Protocols{}
	protocols.SetUnencryptedHTTP2(true)
	r.transport = &http.Transport{
		Protocols:          protocols,
		DialContext:        r.dial, // each container has its own connections, even if containers share a worker
		IdleConnTimeout:    time.Minute,
		DisableCompression: true, // bodies are forwarded unchanged
	}
	buffers := &sync.Pool{New: func() any { return new([32 << 10]byte) }}
	r.proxy = &httputil.ReverseProxy{
		Rewrite:       rewrite,
		Transport:     r,
		FlushInterval: -1, // messages of streams are not delayed
		BufferPool:    bufferPool{buffers},
		ErrorLog:      slog.NewLogLogger(c.Logger.Handler(), slog.LevelDebug), // requests that clients abort
		ErrorHandler:  r.failed,
	}
	return r
}

// Close closes idle connections to workers.
func (r *Router) Close() { r.transport.CloseIdleConnections() }

type targetKey struct{}

// target is the destination of a request.
type target struct {
	component  string
	containers []string
	// byAuthority says that :authority names the component instead of a host.
	byAuthority bool
	// unread tells HalfDuplex that nobody will read the request any more. httputil.ReverseProxy hides the end of its
	// body from it.
	unread func()
}

// ServeHTTP implements http.Handler.
func (r *Router) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	guard.Handler(r.Logger, "route", http.HandlerFunc(r.serve)).ServeHTTP(w, req)
}

func (r *Router) serve(w http.ResponseWriter, req *http.Request) {
	t, err := r.resolve(req)
	if err != nil {
		refuse(w, req, err)
		return
	}
	w, req, done := dataplane.HalfDuplex(w, req, dataplane.Ahead{Bytes: maxAhead, Wait: aheadTime, Memory: r.ahead, Refuse: true})
	defer done()
	t.unread = done
	r.proxy.ServeHTTP(w, req.WithContext(context.WithValue(req.Context(), targetKey{}, t)))
}

// resolve returns the requested component and its running containers.
func (r *Router) resolve(req *http.Request) (*target, error) {
	t := &target{component: req.Header.Get(HeaderComponent)}
	if t.component == "" {
		t.component, t.byAuthority = componentOf(req.Host)
	}
	if t.component == "" {
		var err error
		if t.component, err = r.serving(req.URL.Path); err != nil {
			return nil, err
		}
	}
	if t.containers = r.Components.Running(t.component); len(t.containers) == 0 {
		return nil, &refusal{http.StatusServiceUnavailable, fmt.Sprintf("no container of component %q runs on this node", t.component)}
	}
	return t, nil
}

// componentOf returns the component that an authority names, and false if the authority is host:port. HTTP forbids an
// '@' in :authority and Host (RFC 9110, 4.2.4; RFC 9113, 8.3.1; RFC 9114, 4.3.1), so clients write %40.
func componentOf(authority string) (string, bool) {
	component := strings.ReplaceAll(authority, "%40", "@")
	if _, rest, ok := strings.Cut(component, ":"); !ok || !strings.Contains(rest, "@") {
		return "", false
	}
	return component, true
}

// serving returns the only component that serves the service in the given path. It returns a refusal if no component,
// or more than one, serves it.
func (r *Router) serving(path string) (string, error) {
	service, _, ok := strings.Cut(strings.TrimPrefix(path, "/"), "/")
	if !ok || service == "" {
		return "", &refusal{http.StatusNotFound,
			fmt.Sprintf("path %q names no service; name a component with the header %q", path, strings.ToLower(HeaderComponent))}
	}
	var found []string
	for component, containers := range r.Components.All() {
		if serverOf(component) == service || r.serves(containers, service) {
			found = append(found, component)
		}
	}
	switch len(found) {
	case 0:
		return "", &refusal{http.StatusNotFound, fmt.Sprintf("no component on this node serves %q", service)}
	case 1:
		return found[0], nil
	}
	slices.Sort(found)
	return "", &refusal{http.StatusConflict, fmt.Sprintf("several components serve %q; name one with the header %q: %s",
		service, strings.ToLower(HeaderComponent), strings.Join(found, ", "))}
}

// serverOf returns the server part of domain:server@version.
func serverOf(component string) string {
	_, rest, _ := strings.Cut(component, ":")
	server, _, _ := strings.Cut(rest, "@")
	return server
}

func (r *Router) serves(containers []string, service string) bool {
	return r.Services != nil && len(containers) > 0 && slices.Contains(r.services.of(containers[0], r.Services), service)
}

// rewrite turns the client's request into the request to the worker. RoundTrip adds the container's ID.
func rewrite(p *httputil.ProxyRequest) {
	p.SetXForwarded()
	t := p.In.Context().Value(targetKey{}).(*target)
	p.Out.URL.Scheme = "http"
	p.Out.Host = p.In.Host
	if t.byAuthority {
		p.Out.Host, _, _ = strings.Cut(t.component, ":")
	}
	p.Out.Header.Del(HeaderComponent)
	p.Out.Header.Set(workerapi.HeaderPeer, p.In.RemoteAddr)
}

// RoundTrip implements http.RoundTripper. It sends a request to the least loaded container. If that container cannot be
// reached, RoundTrip tries the next one.
func (r *Router) RoundTrip(req *http.Request) (*http.Response, error) {
	t := req.Context().Value(targetKey{}).(*target)
	containers := slices.Clone(t.containers)
	client := req.Body
	for {
		body := &retryBody{ReadCloser: client, unread: t.unread}
		if client != nil && client != http.NoBody {
			req.Body = body
		}
		container := r.pick(containers)
		response, err := r.send(req, container)
		if err == nil {
			body.markSent()
			return response, nil
		}
		containers = slices.DeleteFunc(containers, func(c string) bool { return c == container })
		if _, unreached := errors.AsType[*unreachedError](err); !unreached || body.read.Load() || len(containers) == 0 ||
			req.Context().Err() != nil {
			return nil, err
		}
		r.Logger.Debug("container not reached, trying another", "container", container, "err", err)
	}
}

// pick returns the container with the fewest requests in flight.
func (r *Router) pick(containers []string) string {
	start := int(r.turn.Add(1) % uint64(len(containers)))
	best, least := "", int64(0)
	for i := range containers {
		c := containers[(start+i)%len(containers)]
		if n := r.load.of(c); best == "" || n < least {
			best, least = c, n
		}
	}
	return best
}

func (r *Router) send(req *http.Request, container string) (*http.Response, error) {
	done := r.load.begin(container)
	req.URL.Host = hostOf(container)
	req.Header.Set(workerapi.HeaderContainer, container)
	response, err := r.transport.RoundTrip(req)
	if err != nil {
		done()
		return nil, err
	}
	response.Body = &countedBody{ReadCloser: response.Body, done: done}
	return response, nil
}

// failed answers a request after RoundTrip has failed.
func (r *Router) failed(w http.ResponseWriter, req *http.Request, err error) {
	if req.Context().Err() == nil {
		r.Logger.Warn("request failed", "component", req.Context().Value(targetKey{}).(*target).component, "err", err)
	}
	refuse(w, req, &refusal{http.StatusBadGateway, "the component could not be reached or aborted its response"})
}

// hostOf encodes a container ID as a host name, because IDs can have characters that are invalid in host names.
func hostOf(container string) string { return fmt.Sprintf("%x", container) }

// unreachedError means that no connection was made, so no part of the request was sent.
type unreachedError struct{ error }

func (e *unreachedError) Unwrap() error { return e.error }

func (r *Router) dial(ctx context.Context, _, address string) (net.Conn, error) {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	var container string
	if _, err := fmt.Sscanf(host, "%x", &container); err != nil {
		return nil, fmt.Errorf("address %q: %w", address, err)
	}
	conn, err := r.Dial(ctx, container)
	if err != nil {
		return nil, &unreachedError{fmt.Errorf("container %s: %w", container, err)}
	}
	return conn, nil
}
