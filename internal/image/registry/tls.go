package registry

import (
	"context"
	"fmt"
	"net/http"
	"net/url"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/containerd/v2/core/remotes/docker/auth"
	"github.com/containerd/log"

	"github.com/tripod-run/tripod/internal/image/internal/failure"
)

// leavesTLS reports whether an answer over TLS refers to an address without it. The scheme of the request does not say whether
// TLS was used, because containerd falls back to http on loopback.
func leavesTLS(answer *http.Response, to *url.URL) bool {
	return answer != nil && answer.TLS != nil && to.Scheme != "https"
}

// leaveTLS is called when a registry with TLS refers to an address without it. It refuses that if the configuration does, and
// otherwise warns once for each host.
func (u *Hosts) leaveTLS(ctx context.Context, registry, what string, to *url.URL) error {
	if u.refuse {
		return fmt.Errorf("%s has TLS and names %s://%s for %s, which refuse_downgrades forbids: %w", registry, to.Scheme, to.Host, what,
			failure.ErrRedirect)
	}
	u.mu.Lock()
	known := u.plain[[2]string{registry, to.Host}]
	u.plain[[2]string{registry, to.Host}] = true
	u.mu.Unlock()
	if !known {
		log.G(ctx).WithField("registry", registry).WithField("host", to.Host).Warn("a registry with TLS names a host without TLS for " + what)
	}
	return nil
}

// isPlain reports whether a registry with TLS has named this address without it.
func (u *Hosts) isPlain(registry string, to *url.URL) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return to.Scheme != "https" && u.plain[[2]string{registry, to.Host}]
}

// checkUpload checks where an answer wants the blob that an upload begins with.
func (t registryTransport) checkUpload(resp *http.Response) (*http.Response, error) {
	to, err := resp.Location()
	if err != nil || resp.StatusCode >= http.StatusMultipleChoices || !leavesTLS(resp, to) { // checkRedirect looks at redirects
		return resp, nil //nolint:nilerr // most answers name no place
	}
	if err := t.used.leaveTLS(resp.Request.Context(), t.host, "uploads", to); err != nil {
		resp.Body.Close()
		return nil, err
	}
	return resp, nil
}

// tlsAuthorizer keeps logins from token servers without TLS that a registry with TLS names.
type tlsAuthorizer struct {
	docker.Authorizer
	headers bool // of hosts.toml, which token servers receive too
	used    *Hosts
}

// AddResponses implements docker.Authorizer.
func (a tlsAuthorizer) AddResponses(ctx context.Context, responses []*http.Response) error {
	answer := responses[len(responses)-1]
	for _, challenge := range auth.ParseAuthHeader(answer.Header) {
		realm, err := url.Parse(challenge.Parameters["realm"])
		if challenge.Scheme != auth.BearerAuth || err != nil || !leavesTLS(answer, realm) {
			continue
		}
		registry := answer.Request.URL.Host
		own, err := a.used.logins.find(registry)
		if err != nil {
			return err
		}
		if own != (login{}) || a.headers {
			return fmt.Errorf("%s has TLS and wants the login at %s://%s, which has none (set the address of the token server to https there): %w",
				registry, realm.Scheme, realm.Host, failure.ErrRedirect)
		}
		if err := a.used.leaveTLS(ctx, registry, "tokens", realm); err != nil {
			return err
		}
	}
	return a.Authorizer.AddResponses(ctx, responses)
}
