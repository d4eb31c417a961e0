package registry

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"strings"

	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/containerd/v2/core/remotes/docker"
	dockerconfig "github.com/containerd/containerd/v2/core/remotes/docker/config"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"

	"github.com/tripod-run/tripod/internal/image/internal/failure"
)

// maxRedirects limits the redirects of one request.
const maxRedirects = 10

// MaxDocumentBytes is the default limit of documents in the image store, and the most that is read of a manifest whose type is not given.
const MaxDocumentBytes = 8 << 20

// Config configures access to registries. The image store derives it from its own.
type Config struct {
	// HostsDir are directories of hosts.toml files in containerd's certs.d layout; the first directory with an entry
	// for a host applies.
	HostsDir []string
	// DockerConfig is the path of a docker config.json whose "auths" apply to requests without a login of their own.
	DockerConfig string
	// PlainHTTP uses http instead of https for hosts without a hosts.toml.
	PlainHTTP bool
	// RefuseDowngrades refuses an upload or a token server without TLS to which a registry with TLS refers. Otherwise a
	// warning names the host. It receives no login in any case.
	RefuseDowngrades bool
}

// Resolver makes the resolver for one transfer: hosts and mirrors from hosts.toml, and logins for trusted hosts only.
func (r Config) Resolver(ctx context.Context, named reference.Named, auth *Auth) (remotes.Resolver, *Hosts, error) {
	registry := reference.Domain(named)
	logins, err := newLogins(auth, r.DockerConfig, registry, reference.Path(named))
	if err != nil {
		return nil, nil, err
	}
	for _, bad := range logins.bad {
		log.G(ctx).Warn(bad.Error())
	}
	used := &Hosts{logins: logins, refuse: r.RefuseDowngrades, served: map[digest.Digest]string{}, passed: map[string]bool{},
		plain: map[[2]string]bool{}, failed: map[[2]string]error{}}
	scheme := ""
	if r.PlainHTTP {
		scheme = "http"
	}
	configured := dockerconfig.ConfigureHosts(ctx, dockerconfig.HostOptions{
		HostDir:       r.hostDir,
		DefaultScheme: scheme,
		Credentials: func(host string) (string, string, error) {
			l, err := logins.find(host)
			logins.use(l != login{})
			return l.username, l.secret, err
		},
		UpdateClient: func(c *http.Client) error {
			c.CheckRedirect = CheckRedirect
			return nil
		},
	})
	hosts := func(namespace string) ([]docker.RegistryHost, error) {
		hosts, err := configured(namespace)
		if err != nil {
			return nil, fmt.Errorf("hosts of %s: %w", namespace, err)
		}
		if len(hosts) == 0 {
			return nil, fmt.Errorf("hosts.toml of %s allows no host: %w", namespace, errdefs.ErrFailedPrecondition)
		}
		// The last host is the registry itself, or the "server" of hosts.toml; the others are mirrors.
		logins.trust(namespace, hosts[len(hosts)-1].Host, auth)
		for i := range hosts {
			logins.use(hasOwnLogin(hosts[i]))
			client := *hosts[i].Client
			client.Transport = registryTransport{cmp.Or(client.Transport, http.DefaultTransport), hosts[i].Host, i < len(hosts)-1, used}
			hosts[i].Client = &client
			hosts[i].Authorizer = tlsAuthorizer{hosts[i].Authorizer, len(hosts[i].Header) > 0, used}
			own, err := logins.find(hosts[i].Host)
			if err != nil {
				return nil, err
			}
			if bearer := own.bearer; bearer != "" {
				hosts[i].Header = hosts[i].Header.Clone()
				if hosts[i].Header == nil {
					hosts[i].Header = http.Header{}
				}
				hosts[i].Header.Set("Authorization", "Bearer "+bearer)
				hosts[i].Authorizer = nil
				logins.use(true)
			}
		}
		return hosts, nil
	}
	resolver := docker.NewResolver(docker.ResolverOptions{Hosts: hosts, Headers: http.Header{"User-Agent": {"tripod"}}})
	return resolver, used, nil
}

// hasOwnLogin reports whether hosts.toml gives a host a header or a certificate of this node.
func hasOwnLogin(host docker.RegistryHost) bool {
	transport, ok := host.Client.Transport.(*http.Transport)
	return len(host.Header) > 0 || ok && transport.TLSClientConfig != nil && len(transport.TLSClientConfig.Certificates) > 0
}

// hostDir finds the directory with a registry host's hosts.toml.
func (r Config) hostDir(host string) (string, error) {
	for _, root := range r.HostsDir {
		dir, err := dockerconfig.HostDirFromRoot(root)(host)
		if err == nil || !errdefs.IsNotFound(err) {
			return dir, err
		}
	}
	return "", errdefs.ErrNotFound
}

// CheckRedirect refuses a redirect from a server with TLS to one without. If a request goes to another host, checkRedirect
// removes everything meant for the registry, because net/http passes most headers on to any host, and even passes logins on
// to other ports and subdomains of the same host.
func CheckRedirect(to *http.Request, via []*http.Request) error {
	if len(via) >= maxRedirects {
		return fmt.Errorf("more than %d redirects: %w", maxRedirects, failure.ErrRedirect)
	}
	if leavesTLS(to.Response, to.URL) {
		return fmt.Errorf("from https to %s://%s: %w", to.URL.Scheme, to.URL.Host, failure.ErrRedirect)
	}
	first := via[0]
	if first.URL.Scheme == to.URL.Scheme && strings.EqualFold(first.URL.Host, to.URL.Host) {
		return nil
	}
	if to.Method != http.MethodGet && to.Method != http.MethodHead {
		return fmt.Errorf("%s, which may carry a login, to %s: %w", to.Method, to.URL.Host, failure.ErrRedirect)
	}
	keepPublic(to.Header)
	return nil
}

// keepPublic removes every header that can be meant for the registry alone.
func keepPublic(h http.Header) {
	for name := range h {
		switch name {
		case "Accept", "Accept-Encoding", "Content-Type", "Range", "User-Agent":
		default:
			h.Del(name)
		}
	}
}
