package dialer

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/egress"
)

// Limits and defaults of resolv.conf(5).
const (
	maxServers      = 3
	maxSearches     = 32
	defaultNdots    = 1
	maxNdots        = 15
	defaultTimeout  = 5 * time.Second
	maxTimeout      = 30 * time.Second
	defaultAttempts = 2
	maxAttempts     = 5
)

// resolver resolves names by the pod's DNS configuration, in the pod's network namespace. Go's resolver does the work.
// It would read the configuration from the file /etc/resolv.conf, which the dialer does not have, so this type chooses
// the full names, the servers and the number of attempts.
type resolver struct {
	servers  []netip.AddrPort
	searches []string
	ndots    int
	timeout  time.Duration
	attempts int
	open     func(ctx context.Context, kind int, to netip.AddrPort) (*os.File, error)
}

// newResolver makes a resolver. Like libc, it ignores what it does not understand.
func newResolver(d egress.DNS, open func(context.Context, int, netip.AddrPort) (*os.File, error)) resolver {
	r := resolver{ndots: defaultNdots, timeout: defaultTimeout, attempts: defaultAttempts, open: open}
	for _, s := range d.Servers {
		if addr, err := netip.ParseAddr(s); err == nil && len(r.servers) < maxServers {
			r.servers = append(r.servers, netip.AddrPortFrom(addr.Unmap().WithZone(""), 53))
		}
	}
	for _, s := range d.Searches {
		if s = egress.Normalize(s); s != "" && len(r.searches) < maxSearches {
			r.searches = append(r.searches, s)
		}
	}
	for _, option := range d.Options {
		name, value, _ := strings.Cut(option, ":")
		n, err := strconv.Atoi(value)
		if err != nil || n < 0 {
			continue
		}
		switch name {
		case "ndots":
			r.ndots = min(n, maxNdots)
		case "timeout":
			r.timeout = min(max(time.Duration(n)*time.Second, time.Second), maxTimeout)
		case "attempts":
			r.attempts = min(max(n, 1), maxAttempts)
		}
	}
	return r
}

// isLocalhost reports whether a name always means the loopback addresses (RFC 6761, 6.3).
func isLocalhost(host string) bool {
	return host == "localhost" || strings.HasSuffix(host, ".localhost")
}

// candidates returns the full names that a name can stand for, in the order of resolv.conf(5). A name with a final dot
// is full.
func (r *resolver) candidates(host string) ([]string, error) {
	full := strings.HasSuffix(host, ".")
	host = egress.Normalize(host)
	if host == "" || len(host) > 253 {
		return nil, failure(egress.CodeInvalid, "%q is not a host name", host)
	}
	if full {
		return []string{host}, nil
	}
	var list []string
	for _, s := range r.searches {
		if full := host + "." + s; len(full) <= 253 {
			list = append(list, full)
		}
	}
	if strings.Count(host, ".") >= r.ndots {
		return slices.Insert(list, 0, host), nil
	}
	return append(list, host), nil
}

// lookup returns the addresses of the first name that has some.
func (r *resolver) lookup(ctx context.Context, names []string) (name string, addrs []netip.Addr, err error) {
	if len(r.servers) == 0 {
		return "", nil, failure(egress.CodeNameFailure, "the pod has no name servers")
	}
	var failed error
	for _, name := range names {
		addrs, err := r.ask(ctx, name)
		if err == nil {
			return name, addrs, nil
		}
		if e, ok := errors.AsType[*net.DNSError](err); (!ok || !e.IsNotFound) && failed == nil {
			failed = err
		}
		if ctx.Err() != nil {
			break
		}
	}
	e, ok := errors.AsType[*net.DNSError](failed)
	switch {
	case failed == nil:
		return "", nil, failure(egress.CodeNotFound, "the name %s has no addresses", names[len(names)-1])
	case ok && e.IsTimeout, errors.Is(failed, context.DeadlineExceeded):
		return "", nil, failure(egress.CodeNameTimeout, "resolve %s: no name server answered in time", names[0])
	}
	return "", nil, failure(egress.CodeNameFailure, "resolve %s: %v", names[0], failed)
}

// ask resolves a full name. It asks one server after the other, several times, until one gives an answer.
func (r *resolver) ask(ctx context.Context, name string) (addrs []netip.Addr, err error) {
	for range r.attempts {
		for _, server := range r.servers {
			if addrs, err = r.askServer(ctx, server, name); err == nil {
				return addrs, nil
			}
			if e, ok := errors.AsType[*net.DNSError](err); ok && e.IsNotFound || ctx.Err() != nil {
				return nil, err
			}
		}
	}
	return nil, err
}

func (r *resolver) askServer(ctx context.Context, server netip.AddrPort, name string) ([]netip.Addr, error) {
	ctx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	goes := net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		kind := unix.SOCK_DGRAM
		if strings.HasPrefix(network, "tcp") {
			kind = unix.SOCK_STREAM
		}
		socket, err := r.open(ctx, kind, server)
		if err != nil {
			return nil, err
		}
		defer socket.Close() // net.FileConn makes a copy
		return net.FileConn(socket)
	}}
	found, err := goes.LookupNetIP(ctx, "ip", name+".") // with the final dot, Go does not complete the name
	if err != nil {
		return nil, err
	}
	for i := range found {
		found[i] = found[i].Unmap()
	}
	return found, nil
}
