package share

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"time"

	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/image/internal/failure"
	"github.com/tripod-run/tripod/internal/tlsfile"
)

const (
	// peerTimeout limits a connection to a peer, and the look-up of its name. A peer that is slower is not used.
	peerTimeout = 2 * time.Second
	// peerGrace is how much slower than the fastest peer another one can answer, so that dead peers do not delay pulls.
	peerGrace = 100 * time.Millisecond
	// peerAnswer limits the time until a peer begins to answer.
	peerAnswer = 10 * time.Second
	// maxPeers limits the peers that one pull uses.
	maxPeers = 16
)

// PeerConfig are the nodes from which a pull may take images.
type Peers struct {
	hosts []peerHost
}

type peerHost struct {
	url    *url.URL
	client *http.Client
}

// NewPeers checks the URLs of mirrors, http://HOST:PORT or https://HOST:PORT. A name stands for all of its addresses. ca is a
// file with the authorities of the mirrors' certificates, "" for those of the system, and own is shown to mirrors that ask.
func NewPeers(hosts []string, ca string, own tlsfile.Pair) (*Peers, error) {
	config, err := own.Client(ca)
	if err != nil {
		return nil, fmt.Errorf("image peers: %w", err)
	}
	p := &Peers{}
	for _, address := range hosts {
		u, err := url.Parse(address)
		if err != nil || u.Port() == "" || u.Scheme != "http" && u.Scheme != "https" {
			return nil, fmt.Errorf("image peers: %q is not http://HOST:PORT or https://HOST:PORT: %w", address, errdefs.ErrInvalidArgument)
		}
		config := config.Clone()
		config.ServerName = u.Hostname()
		p.hosts = append(p.hosts, peerHost{u, &http.Client{
			Transport: &http.Transport{
				DialContext: (&net.Dialer{Timeout: peerTimeout}).DialContext, TLSHandshakeTimeout: peerTimeout,
				ResponseHeaderTimeout: peerAnswer, TLSClientConfig: config, IdleConnTimeout: peerAnswer,
			},
			CheckRedirect: func(*http.Request, []*http.Request) error { return failure.ErrRedirect },
		}})
	}
	return p, nil
}

// Resolver returns a resolver for the peers that answer now, or nil if none does.
func (p *Peers) Resolver(ctx context.Context) remotes.Resolver {
	ctx, cancel := context.WithTimeout(ctx, peerTimeout)
	defer cancel()
	candidates := gather(p.hosts, func(h peerHost) []docker.RegistryHost { return h.addresses(ctx) })
	rand.Shuffle(len(candidates), func(i, j int) { candidates[i], candidates[j] = candidates[j], candidates[i] })
	hosts := gather(candidates[:min(len(candidates), maxPeers)], func(h docker.RegistryHost) []docker.RegistryHost {
		if !isMirror(ctx, h) {
			return nil
		}
		return []docker.RegistryHost{h}
	})
	if len(hosts) == 0 {
		return nil
	}
	return docker.NewResolver(docker.ResolverOptions{
		Hosts:   func(string) ([]docker.RegistryHost, error) { return hosts, nil },
		Headers: http.Header{"User-Agent": {"tripod"}},
	})
}

// addresses returns the peers at all addresses of a name.
func (h peerHost) addresses(ctx context.Context) []docker.RegistryHost {
	found, err := net.DefaultResolver.LookupHost(ctx, h.url.Hostname())
	if err != nil {
		return nil // the name of a headless Service without pods has no address
	}
	all := make([]docker.RegistryHost, len(found))
	for i, address := range found {
		all[i] = docker.RegistryHost{
			Client: h.client, Scheme: h.url.Scheme, Host: net.JoinHostPort(address, h.url.Port()), Path: "/v2",
			Capabilities: docker.HostCapabilityPull | docker.HostCapabilityResolve,
		}
	}
	return all
}

// gather asks about all candidates at the same time, and returns what it found until peerGrace after the first result,
// the fastest first.
func gather[C, R any](candidates []C, ask func(C) []R) (all []R) {
	answers := make(chan []R, len(candidates))
	for _, c := range candidates {
		go func() { answers <- ask(c) }()
	}
	var late <-chan time.Time
	for range candidates {
		select {
		case found := <-answers:
			all = append(all, found...)
		case <-late:
			return all
		}
		if late == nil && len(all) > 0 {
			late = time.After(peerGrace)
		}
	}
	return all
}

// isMirror reports whether a host answers as the distribution API asks.
func isMirror(ctx context.Context, host docker.RegistryHost) bool {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, host.Scheme+"://"+host.Host+host.Path+"/", nil)
	if err != nil {
		return false
	}
	resp, err := host.Client.Do(req)
	if err != nil {
		return false
	}
	resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}
