package libvirt

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	golibvirt "github.com/digitalocean/go-libvirt"
)

const (
	// defaultSocket is where libvirtd listens, and its successor for QEMU alone.
	defaultSocket = "/run/libvirt/libvirt-sock"
	virtqemudSock = "/run/libvirt/virtqemud-sock"

	// helloTimeout bounds the set-up of a connection, for instance to a libvirtd that accepts and stays silent.
	helloTimeout = 15 * time.Second
	// waitTimeout is how long a call waits for a connection.
	waitTimeout = 5 * time.Second
	// recoverWait is the same for Recover, which the node repeats.
	recoverWait = 2 * time.Second
	// maxUnanswered bounds the calls without an answer, including those whose callers have given up.
	maxUnanswered = 256
	// libvirtd is pinged every pingInterval, and is unresponsive after pingTimeout without an answer.
	pingInterval, pingTimeout = 5 * time.Second, 15 * time.Second
	// retryMin and retryMax bound the time between attempts to connect.
	retryMin, retryMax = 50 * time.Millisecond, 2 * time.Second
)

// link is a connection to libvirtd that reconnects whenever it breaks.
type link struct {
	uri    golibvirt.ConnectURI
	socket string
	log    *slog.Logger
	// connected is called after each connect, in a goroutine of its own; event when the state of a domain changes.
	connected func(context.Context)
	event     func(domain string)

	unanswered atomic.Int32

	mu      sync.Mutex
	client  *golibvirt.Libvirt
	lastErr error
	silent  bool          // connected, but not answering
	changed chan struct{} // closed when client has changed
}

// newLink parses a URI of libvirt's, of which the path and the socket count: the daemon is one of this host.
func newLink(uri string, log *slog.Logger) (*link, error) {
	u, err := url.Parse(uri)
	if err != nil || u.Host != "" || (u.Scheme != "qemu" && u.Scheme != "qemu+unix") || u.Path != "/system" {
		return nil, fmt.Errorf("vm.libvirt_uri %q is not of the form qemu:///system or qemu:///system?socket=/path: %w", uri, errdefs.ErrInvalidArgument)
	}
	return &link{uri: golibvirt.QEMUSystem, socket: u.Query().Get("socket"), log: log, changed: make(chan struct{})}, nil
}

// connection is one connection to libvirtd. Its first failed read closes broken.
type connection struct {
	net.Conn
	opening sync.Mutex // held while the client is being set up, which does not lock what it writes then
	once    sync.Once
	broken  chan struct{}
}

func (w *connection) Read(b []byte) (int, error) {
	n, err := w.Conn.Read(b)
	if err != nil {
		w.once.Do(func() { close(w.broken) })
		w.Conn.Close()
		if w.opening.TryLock() { // else the client is still being set up, and learns of it
			w.opening.Unlock()
		}
	}
	return n, err
}

// Dial implements the socket.Dialer of go-libvirt: the connection is open already.
func (w *connection) Dial() (net.Conn, error) { return w, nil }

// dial connects to libvirtd's socket.
func (l *link) dial(ctx context.Context) (net.Conn, error) {
	candidates := []string{defaultSocket, virtqemudSock}
	if l.socket != "" {
		candidates = []string{l.socket}
	}
	var errs []error
	for _, path := range candidates {
		conn, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
		if err == nil {
			return conn, nil
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}

// open makes one connection and subscribes to what happens to domains.
func (l *link) open(ctx context.Context) (*golibvirt.Libvirt, *connection, <-chan golibvirt.DomainEventLifecycleMsg, error) {
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	conn, err := l.dial(ctx)
	if err != nil {
		return nil, nil, nil, err
	}
	w := &connection{Conn: conn, broken: make(chan struct{})}
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	client := golibvirt.NewWithDialer(w)
	if err := l.greet(client, w); err != nil {
		conn.Close()
		return nil, nil, nil, errors.Join(err, context.Cause(ctx))
	}
	events, err := client.LifecycleEvents(context.Background()) // ends with the connection
	if err != nil {
		conn.Close()
		return nil, nil, nil, errors.Join(err, context.Cause(ctx))
	}
	return client, w, events, nil
}

// greet opens libvirt's protocol. A connection that breaks meanwhile ends it.
func (l *link) greet(client *golibvirt.Libvirt, w *connection) error {
	done := make(chan error, 1)
	go func() {
		w.opening.Lock()
		defer w.opening.Unlock()
		done <- client.ConnectToURI(l.uri)
	}()
	select {
	case err := <-done:
		return err
	case <-w.broken:
		return fmt.Errorf("libvirtd hung up, or does not answer")
	}
}

// keep keeps the connection until ctx ends.
func (l *link) keep(ctx context.Context) {
	pause := retryMin
	for ctx.Err() == nil {
		client, conn, events, err := l.open(ctx)
		if err != nil {
			l.set(nil, err)
			select {
			case <-time.After(pause):
			case <-ctx.Done():
			}
			pause = min(2*pause, retryMax)
			continue
		}
		pause = retryMin
		l.set(client, nil)
		stop := context.AfterFunc(ctx, func() { conn.Close() })
		l.log.Info("Connected to libvirtd")
		looking := make(chan struct{})
		go func() { defer close(looking); l.connected(ctx) }()
		go l.ping(client, conn.broken)
		for e := range events { // until the connection has ended
			l.event(e.Dom.Name)
		}
		stop()
		conn.Close()
		l.set(nil, fmt.Errorf("the connection has broken"))
		if ctx.Err() == nil {
			l.log.Warn("the connection to libvirtd has broken")
		}
		<-looking
	}
}

func (l *link) set(client *golibvirt.Libvirt, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.client, l.lastErr, l.silent = client, err, false
	close(l.changed)
	l.changed = make(chan struct{})
}

// ping finds out whether libvirtd answers, until the connection is broken.
func (l *link) ping(client *golibvirt.Libvirt, broken <-chan struct{}) {
	for {
		select {
		case <-time.After(pingInterval):
		case <-broken:
			return
		}
		answered := make(chan struct{})
		go func() {
			defer close(answered)
			_, _ = client.ConnectGetLibVersion() // an error is an answer
		}()
		select {
		case <-answered:
			continue
		case <-broken:
			return
		case <-time.After(pingTimeout):
		}
		l.setSilent(client, true)
		l.log.Warn("libvirtd does not answer", "timeout", pingTimeout)
		select {
		case <-answered:
		case <-broken:
			return
		}
		l.setSilent(client, false)
		l.log.Info("libvirtd answers again")
	}
}

// setSilent notes whether libvirtd answers on the connection of client.
func (l *link) setSilent(client *golibvirt.Libvirt, silent bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.client == client {
		l.silent = silent
	}
}

// ready returns errdefs.ErrUnavailable unless libvirtd is connected and answers.
func (l *link) ready() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.client == nil && l.lastErr == nil:
		return fmt.Errorf("libvirtd is being connected to: %w", errdefs.ErrUnavailable)
	case l.client == nil:
		return fmt.Errorf("libvirtd cannot be reached: %w: %w", l.lastErr, errdefs.ErrUnavailable)
	case l.silent:
		return fmt.Errorf("libvirtd does not answer: %w", errdefs.ErrUnavailable)
	}
	return nil
}

// wait returns a client that is connected: errdefs.ErrUnavailable when there is none for a while.
func (l *link) wait(ctx context.Context) (*golibvirt.Libvirt, error) {
	timer := time.NewTimer(waitTimeout)
	defer timer.Stop()
	for {
		l.mu.Lock()
		client, changed, err := l.client, l.changed, l.lastErr
		l.mu.Unlock()
		if client != nil {
			return client, nil
		}
		select {
		case <-changed:
			continue
		case <-timer.C:
		case <-ctx.Done():
			err = errors.Join(err, context.Cause(ctx))
		}
		return nil, fmt.Errorf("libvirtd cannot be reached: %w: %w", err, errdefs.ErrUnavailable)
	}
}

// ask makes one call. libvirt's calls cannot be given up: one that is not answered until ctx ends is left to itself, and is
// errdefs.ErrUnavailable.
func ask[T any](ctx context.Context, l *link, what string, call func(*golibvirt.Libvirt) (T, error)) (T, error) {
	var none T
	client, err := l.wait(ctx)
	if err != nil {
		return none, fmt.Errorf("%s: %w", what, err)
	}
	if l.unanswered.Add(1) > maxUnanswered {
		l.unanswered.Add(-1)
		return none, fmt.Errorf("%s: libvirtd owes %d answers: %w", what, maxUnanswered, errdefs.ErrUnavailable)
	}
	type answer struct {
		value T
		err   error
	}
	answers := make(chan answer, 1)
	go func() {
		defer l.unanswered.Add(-1)
		value, err := call(client)
		answers <- answer{value, err}
	}()
	select {
	case a := <-answers:
		return a.value, classify(what, a.err)
	case <-ctx.Done():
		return none, fmt.Errorf("%s: libvirtd has not answered: %w: %w", what, context.Cause(ctx), errdefs.ErrUnavailable)
	}
}

// order is ask for calls without an answer.
func (l *link) order(ctx context.Context, what string, call func(*golibvirt.Libvirt) error) error {
	_, err := ask(ctx, l, what, func(c *golibvirt.Libvirt) (struct{}, error) { return struct{}{}, call(c) })
	return err
}

// undefine forgets a domain that does not run; one that is not there is fine.
func (l *link) undefine(ctx context.Context, domain golibvirt.Domain) error {
	const all = golibvirt.DomainUndefineManagedSave | golibvirt.DomainUndefineSnapshotsMetadata |
		golibvirt.DomainUndefineCheckpointsMetadata | golibvirt.DomainUndefineNvram
	err := l.order(ctx, "undefine domain "+domain.Name, func(c *golibvirt.Libvirt) error { return c.DomainUndefineFlags(domain, all) })
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

// destroy ends a domain; one that does not run, or is not there, is fine.
func (l *link) destroy(ctx context.Context, domain golibvirt.Domain) error {
	err := l.order(ctx, "destroy domain "+domain.Name, func(c *golibvirt.Libvirt) error {
		return c.DomainDestroyFlags(domain, golibvirt.DomainDestroyDefault)
	})
	if errdefs.IsNotFound(err) || errdefs.IsFailedPrecondition(err) {
		return nil
	}
	return err
}

// condition is what libvirt says of a domain.
type condition struct {
	state  golibvirt.DomainState
	reason int32
}

func (l *link) condition(ctx context.Context, domain golibvirt.Domain) (condition, error) {
	return ask(ctx, l, "state of domain "+domain.Name, func(c *golibvirt.Libvirt) (condition, error) {
		state, reason, err := c.DomainGetState(domain, 0)
		return condition{golibvirt.DomainState(state), reason}, err
	})
}

// active tells whether there is a hypervisor process.
func (c condition) active() bool {
	return c.state != golibvirt.DomainShutoff && c.state != golibvirt.DomainNostate
}
