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
	// defaultSocket is libvirtd's socket; virtqemudSock is the socket of its successor for QEMU.
	defaultSocket = "/run/libvirt/libvirt-sock"
	virtqemudSock = "/run/libvirt/virtqemud-sock"

	// helloTimeout bounds the setup of a connection, because a libvirtd may accept the connection but never answer.
	helloTimeout = 15 * time.Second
	// waitTimeout bounds a call's wait for a connection.
	waitTimeout = 5 * time.Second
	// recoverWait replaces waitTimeout in Recover. It is shorter, because the node calls Recover again.
	recoverWait = 2 * time.Second
	// maxUnanswered limits the number of calls that libvirtd has not answered yet, including those whose callers have
	// given up.
	maxUnanswered = 256
	// The link pings libvirtd every pingInterval. If a ping is not answered within pingTimeout, libvirtd is
	// unresponsive.
	pingInterval, pingTimeout = 5 * time.Second, 15 * time.Second
	// retryMin and retryMax bound the time between attempts to connect.
	retryMin, retryMax = 50 * time.Millisecond, 2 * time.Second
)

// link is a connection to libvirtd that reconnects when it breaks.
type link struct {
	uri    golibvirt.ConnectURI
	socket string
	log    *slog.Logger
	// connected is called in a new goroutine each time the link has connected. event is called each time a domain's
	// state changes.
	connected func(context.Context)
	event     func(domain string)

	unanswered atomic.Int32

	mu           sync.Mutex
	client       *golibvirt.Libvirt
	lastErr      error
	unresponsive bool          // connected, but not answering
	changed      chan struct{} // closed when client has changed
}

// newLink returns a link to the libvirtd at the given URI. That libvirtd must be on this host. The link is not
// connected yet.
func newLink(uri string, log *slog.Logger) (*link, error) {
	u, err := url.Parse(uri)
	if err != nil || u.Host != "" || (u.Scheme != "qemu" && u.Scheme != "qemu+unix") || u.Path != "/system" {
		return nil, fmt.Errorf("vm.libvirt_uri %q is neither qemu:///system nor qemu:///system?socket=/path: %w", uri, errdefs.ErrInvalidArgument)
	}
	return &link{uri: golibvirt.QEMUSystem, socket: u.Query().Get("socket"), log: log, changed: make(chan struct{})}, nil
}

// connection is one connection to libvirtd. When a read fails for the first time, the channel broken is closed.
type connection struct {
	net.Conn
	opening sync.Mutex // held during the client's setup, which writes without a lock
	once    sync.Once
	broken  chan struct{}
}

func (w *connection) Read(b []byte) (int, error) {
	n, err := w.Conn.Read(b)
	if err != nil {
		w.once.Do(func() { close(w.broken) })
		w.Conn.Close()
		if w.opening.TryLock() { // the writes of a finished setup become visible here; a running setup sees the error itself
			w.opening.Unlock()
		}
	}
	return n, err
}

// Dial implements go-libvirt's socket.Dialer. It returns the open connection.
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

// open connects once and subscribes to the domains' lifecycle events.
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
	if err := l.handshake(client, w); err != nil {
		conn.Close()
		return nil, nil, nil, errors.Join(err, context.Cause(ctx))
	}
	events, err := client.LifecycleEvents(context.Background()) // the events end with the connection
	if err != nil {
		conn.Close()
		return nil, nil, nil, errors.Join(err, context.Cause(ctx))
	}
	return client, w, events, nil
}

// handshake starts libvirt's protocol. It returns early if the connection breaks.
func (l *link) handshake(client *golibvirt.Libvirt, w *connection) error {
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
		return fmt.Errorf("libvirtd closed the connection or did not answer")
	}
}

// maintain connects, and connects again when the connection breaks, until ctx ends.
func (l *link) maintain(ctx context.Context) {
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
		l.log.Info("connected to libvirtd")
		refreshed := make(chan struct{})
		go func() { defer close(refreshed); l.connected(ctx) }()
		go l.ping(client, conn.broken)
		for e := range events { // until the connection has ended
			l.event(e.Dom.Name)
		}
		stop()
		conn.Close()
		l.set(nil, errors.New("the connection broke"))
		if ctx.Err() == nil {
			l.log.Warn("connection to libvirtd broke")
		}
		<-refreshed
	}
}

func (l *link) set(client *golibvirt.Libvirt, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.client, l.lastErr, l.unresponsive = client, err, false
	close(l.changed)
	l.changed = make(chan struct{})
}

// ping checks regularly whether libvirtd answers, until the connection breaks.
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
			_, _ = client.ConnectGetLibVersion() // an error is an answer too
		}()
		select {
		case <-answered:
			continue
		case <-broken:
			return
		case <-time.After(pingTimeout):
		}
		l.setUnresponsive(client, true)
		l.log.Warn("libvirtd does not answer", "timeout", pingTimeout)
		select {
		case <-answered:
		case <-broken:
			return
		}
		l.setUnresponsive(client, false)
		l.log.Info("libvirtd answers again")
	}
}

// setUnresponsive records whether libvirtd answers on client's connection.
func (l *link) setUnresponsive(client *golibvirt.Libvirt, unresponsive bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.client == client {
		l.unresponsive = unresponsive
	}
}

// ready returns errdefs.ErrUnavailable unless libvirtd is connected and answers.
func (l *link) ready() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.client == nil && l.lastErr == nil:
		return fmt.Errorf("still connecting to libvirtd: %w", errdefs.ErrUnavailable)
	case l.client == nil:
		return fmt.Errorf("libvirtd cannot be reached: %w: %w", l.lastErr, errdefs.ErrUnavailable)
	case l.unresponsive:
		return fmt.Errorf("libvirtd does not answer: %w", errdefs.ErrUnavailable)
	}
	return nil
}

// awaitClient returns the connected client. It waits at most waitTimeout, and then returns errdefs.ErrUnavailable.
func (l *link) awaitClient(ctx context.Context) (*golibvirt.Libvirt, error) {
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

// ask makes one call to libvirtd. If ctx ends before the answer, ask returns errdefs.ErrUnavailable. The call then
// continues in the background, because it cannot be canceled.
func ask[T any](ctx context.Context, l *link, what string, call func(*golibvirt.Libvirt) (T, error)) (T, error) {
	var none T
	client, err := l.awaitClient(ctx)
	if err != nil {
		return none, fmt.Errorf("%s: %w", what, err)
	}
	if l.unanswered.Add(1) > maxUnanswered {
		l.unanswered.Add(-1)
		return none, fmt.Errorf("%s: libvirtd has not answered %d calls: %w", what, maxUnanswered, errdefs.ErrUnavailable)
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

// do is like ask, for calls without a result.
func (l *link) do(ctx context.Context, what string, call func(*golibvirt.Libvirt) error) error {
	_, err := ask(ctx, l, what, func(c *golibvirt.Libvirt) (struct{}, error) { return struct{}{}, call(c) })
	return err
}

// undefine undefines a domain that is not running. It returns nil for a domain that does not exist.
func (l *link) undefine(ctx context.Context, domain golibvirt.Domain) error {
	const all = golibvirt.DomainUndefineManagedSave | golibvirt.DomainUndefineSnapshotsMetadata |
		golibvirt.DomainUndefineCheckpointsMetadata | golibvirt.DomainUndefineNvram
	err := l.do(ctx, "undefine domain "+domain.Name, func(c *golibvirt.Libvirt) error { return c.DomainUndefineFlags(domain, all) })
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

// destroy destroys a domain. It returns nil for a domain that is not running or does not exist.
func (l *link) destroy(ctx context.Context, domain golibvirt.Domain) error {
	err := l.do(ctx, "destroy domain "+domain.Name, func(c *golibvirt.Libvirt) error {
		return c.DomainDestroyFlags(domain, golibvirt.DomainDestroyDefault)
	})
	if errdefs.IsNotFound(err) || errdefs.IsFailedPrecondition(err) {
		return nil
	}
	return err
}

// domainStatus is a domain's state and libvirt's reason for the state.
type domainStatus struct {
	state  golibvirt.DomainState
	reason int32
}

func (l *link) domainStatus(ctx context.Context, domain golibvirt.Domain) (domainStatus, error) {
	return ask(ctx, l, "query the state of domain "+domain.Name, func(c *golibvirt.Libvirt) (domainStatus, error) {
		state, reason, err := c.DomainGetState(domain, 0)
		return domainStatus{golibvirt.DomainState(state), reason}, err
	})
}

// active reports whether the domain has a hypervisor process.
func (c domainStatus) active() bool {
	return c.state != golibvirt.DomainShutoff && c.state != golibvirt.DomainNostate
}
